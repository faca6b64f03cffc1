//! The page and its files, which are in the program.

use super::enabled::check_enabled;
use crate::error::HttpError;
use actix_web::http::StatusCode;
use actix_web::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, ETAG, IF_NONE_MATCH, REFERRER_POLICY};
use actix_web::http::header::{X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS};
use actix_web::web::{Data, Path};
use actix_web::{HttpRequest, HttpResponse};
use pagetide_actors::live_settings::LiveSettings;
use pagetide_base::error::ApiError;
use std::sync::LazyLock;

struct File {
    name: &'static str,
    media: &'static str,
    text: &'static str,
}

macro_rules! files {
    ($($name:literal: $media:literal;)+) => {
        &[$(File { name: $name, media: $media, text: include_str!($name) }),+]
    };
}

static FILES: &[File] = files! {
    "style.css": "text/css; charset=utf-8";
    "icon.svg": "image/svg+xml";
    "app.js": "text/javascript; charset=utf-8";
    "api.js": "text/javascript; charset=utf-8";
    "blocks.js": "text/javascript; charset=utf-8";
    "chat.js": "text/javascript; charset=utf-8";
    "colours.js": "text/javascript; charset=utf-8";
    "dom.js": "text/javascript; charset=utf-8";
    "engine.js": "text/javascript; charset=utf-8";
    "load.js": "text/javascript; charset=utf-8";
    "markdown.js": "text/javascript; charset=utf-8";
    "memory.js": "text/javascript; charset=utf-8";
    "requests.js": "text/javascript; charset=utf-8";
    "sparks.js": "text/javascript; charset=utf-8";
    "store.js": "text/javascript; charset=utf-8";
};

static PAGE: File = File { name: "", media: "text/html; charset=utf-8", text: include_str!("index.html") };

/// The page loads nothing from elsewhere, runs nothing but its own files, and cannot be framed.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// An ETag that changes when any of the files changes.
static TAG: LazyLock<String> = LazyLock::new(|| {
    let mut hasher = blake3::Hasher::new();
    for file in FILES.iter().chain([&PAGE]) {
        hasher.update(file.text.as_bytes());
    }
    format!("\"{}\"", &hasher.finalize().to_hex()[..16])
});

/// Whether it is the path of a file.
pub fn is_file(path: &str) -> bool {
    path.strip_prefix("/console/").is_some_and(|name| FILES.iter().any(|file| file.name == name))
}

pub async fn page(request: HttpRequest, live_settings: Data<LiveSettings>) -> Result<HttpResponse, HttpError> {
    check_enabled(&live_settings.console().await, request.path())?;
    Ok(answer(&request, &PAGE))
}

pub async fn file(
    request: HttpRequest,
    name: Path<String>,
    live_settings: Data<LiveSettings>,
) -> Result<HttpResponse, HttpError> {
    check_enabled(&live_settings.console().await, request.path())?;
    let file = FILES.iter().find(|file| file.name == *name).ok_or_else(|| ApiError::not_found(request.path()))?;
    Ok(answer(&request, file))
}

/// Browsers ask each time whether their copy is still current.
fn answer(request: &HttpRequest, file: &File) -> HttpResponse {
    let is_known = request.headers().get(IF_NONE_MATCH).is_some_and(|tag| tag.as_bytes() == TAG.as_bytes());
    let mut response = HttpResponse::build(if is_known { StatusCode::NOT_MODIFIED } else { StatusCode::OK });
    response
        .insert_header((CACHE_CONTROL, "no-cache"))
        .insert_header((ETAG, TAG.as_str()))
        .insert_header((CONTENT_SECURITY_POLICY, POLICY))
        .insert_header((X_CONTENT_TYPE_OPTIONS, "nosniff"))
        .insert_header((X_FRAME_OPTIONS, "DENY"))
        .insert_header((REFERRER_POLICY, "no-referrer"));
    if is_known { response.finish() } else { response.content_type(file.media).body(file.text) }
}
