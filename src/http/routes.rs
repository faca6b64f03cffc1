//! The paths that are served, and the handlers of those that belong to no surface.

use crate::admin::Admin;
use crate::answer_format::AnswerFormat;
use crate::auth::{AllKeys, Keys, Watcher};
use crate::body::Body;
use crate::error::{HttpError, error_response};
use crate::paths::{ApiPath, MatchedPath, also_for_admin, for_admin, for_all, for_watchers, get, post};
use crate::root_path::RootPath;
use crate::surfaces::{ApiSurface, SURFACES, llama_cpp, openai, sglang, vllm};
use crate::{admin, console, openapi};
use actix_web::http::Method;
use actix_web::http::header::{ALLOW, ContentType, HeaderMap};
use actix_web::web::{self, Data, ServiceConfig};
use actix_web::{HttpRequest, HttpResponse, Resource, guard};
use pagetide_actors::live_settings::LiveSettings;
use pagetide_actors::phase::Phase;
use pagetide_actors::runtime::RuntimeHandle;
use pagetide_api::body::ParsedBody;
use pagetide_api::body::fields::AnyFields;
use pagetide_api::openapi::answers::Status;
use pagetide_api::openapi::{Operation, PathAccess, Tag};
use pagetide_api::sglang::describe;
use pagetide_base::error::ApiError;
use pagetide_config::{Dialect, Surface};
use pagetide_metrics as metrics;
use serde_json::{Value, json};
use std::future::ready;
use std::sync::{Arc, OnceLock};

/// The paths that belong to no surface: they are always served. The methods of one path stand together.
static SERVER_PATHS: [ApiPath; 13] = [
    for_all(get("/", || web::to(console::page), console::describe_page)),
    for_watchers(get("/console/events", || web::to(console::events), console::describe_events)),
    for_all(get("/console/{file}", || web::to(console::file), console::describe_file)),
    for_all(get("/health", || web::to(health), describe_health)),
    for_all(get("/ready", || web::to(is_ready), describe_ready)),
    for_watchers(get("/metrics", || web::to(prometheus), describe_metrics)),
    also_for_admin(get("/server_info", || web::to(sglang::server_info_with_config), describe::server_info_with_config)),
    for_admin(get("/admin/config", || web::to(config), admin::describe_config)),
    for_admin(post("/admin/config", || web::to(change_config), admin::describe_change)),
    for_admin(post("/admin/debug/fail_step", || web::to(fail_step), admin::describe_failure)),
    for_admin(post("/admin/recording", || web::to(record), admin::describe_recording)),
    for_all(get("/openapi.json", || web::to(openapi_json), describe_openapi)),
    for_all(get("/docs", || web::to(docs), describe_docs)),
];

/// Where llama.cpp's clients look for the Unix time of the start.
const PROCESS_START_TIME: &str = "Process-Start-Time-Unix";

/// Every path of these surfaces and of the server, in the order of the API's description.
pub fn paths_of(surfaces: &[Surface]) -> impl Iterator<Item = &'static ApiPath> {
    enabled(surfaces).flat_map(paths_in).chain(&SERVER_PATHS)
}

fn paths_in(surface: &'static ApiSurface) -> impl Iterator<Item = &'static ApiPath> {
    surface.tables.iter().copied().flatten()
}

fn enabled(surfaces: &[Surface]) -> impl Iterator<Item = &'static ApiSurface> {
    SURFACES.iter().filter(|surface| surfaces.contains(&surface.surface))
}

/// Every path that this program can serve.
fn all_paths() -> impl Iterator<Item = &'static ApiPath> {
    SURFACES.iter().flat_map(paths_in).chain(&SERVER_PATHS)
}

/// The clients that may use a path. A path that does not exist is like most that do.
pub fn access_to(path: &str) -> PathAccess {
    let known = all_paths().find(|known| known.path == path).map(|known| known.access);
    known.unwrap_or(if console::is_file(path) { PathAccess::Open } else { PathAccess::Key })
}

/// The format that a request's surface has for errors. `None`: OpenAI's.
pub fn format_of(
    surfaces: &[Surface],
    dialect: Dialect,
    path: &str,
    headers: &HeaderMap,
) -> Option<&'static AnswerFormat> {
    let mut spoken = enabled(surfaces).filter_map(|surface| surface.format.as_ref());
    let spoken = spoken.find(|spoken| (spoken.is_spoken)(path, headers)).map(|spoken| spoken.format);
    // vLLM has this path of Cohere's among its own.
    let spoken = spoken.filter(|_| dialect != Dialect::Vllm || path != "/v2/embed");
    spoken.or(match dialect {
        Dialect::OpenAi => None,
        Dialect::Vllm => Some(&vllm::FORMAT),
        Dialect::LlamaCpp => Some(&llama_cpp::FORMAT),
    })
}

/// Whether a path is for the operator. If `server.admin_listen` is set, it is found only there.
pub fn is_private(path: &str) -> bool {
    path == "/metrics" || path.starts_with("/admin/")
}

/// Whether a path is found at `server.admin_listen` as well.
pub fn is_open_to_all_ports(path: &str) -> bool {
    path == "/health" || path == "/ready"
}

/// The path of a request that matched a pattern of the router.
pub fn matched_path(pattern: Option<&str>) -> MatchedPath {
    let is_matched = |path: &&ApiPath| {
        pattern.is_some_and(|pattern| pattern == path.pattern || openai::without_prefix(path.pattern) == Some(pattern))
    };
    match all_paths().find(is_matched) {
        Some(path) => MatchedPath { name: path.path, access: path.access },
        None => MatchedPath { name: "other", access: PathAccess::Key },
    }
}

/// Adds the paths of these surfaces and of the server.
pub fn configure(config: &mut ServiceConfig, surfaces: &[Surface], dialect: Dialect) {
    let tables = enabled(surfaces).flat_map(|surface| surface.tables).copied().chain([&SERVER_PATHS as &[ApiPath]]);
    let paths = tables.flat_map(|paths| paths.chunk_by(|one, other| one.pattern == other.pattern));
    let mut paths: Vec<&[ApiPath]> = paths.collect();
    // The first that matches is taken: /v1/responses/render goes before /v1/responses/{id}.
    paths.sort_by_key(|methods| methods[0].pattern.contains('{'));
    for methods in paths {
        let pattern = methods[0].pattern;
        config.service(resource(pattern, methods));
        if let Some(short) = openai::without_prefix(pattern) {
            let speaks_llama_cpp = dialect == Dialect::LlamaCpp && surfaces.contains(&Surface::LlamaCpp);
            let own = if speaks_llama_cpp { llama_cpp::in_place_of(short) } else { None };
            config.service(resource(short, own.unwrap_or(methods)));
        }
    }
    config.default_service(web::to(not_found));
}

/// One path with its methods, where HEAD goes with GET. Other methods are answered with 405.
fn resource(pattern: &'static str, methods: &'static [ApiPath]) -> Resource {
    let mut resource = web::resource(pattern);
    let mut allowed = Vec::new();
    for path in methods {
        let method = path.verb.method();
        let head = if method == Method::GET { Method::HEAD } else { method.clone() };
        allowed.push(path.verb.method());
        if head != method {
            allowed.push(head.clone());
        }
        let guard = guard::Any(guard::Method(method)).or(guard::Method(head));
        resource = resource.route((path.handler)().guard(guard));
    }
    if pattern == openai::STORED_RESPONSE {
        // A POST asks for a path that OpenAI has there and this server does not, such as compact.
        return resource.default_service(web::to(not_found));
    }
    let allowed = allowed.iter().map(Method::as_str).collect::<Vec<_>>().join(", ");
    resource.default_service(web::to(move |request: HttpRequest| {
        let error = ApiError::method_not_allowed(request.method().as_str(), &allowed);
        let mut response = error_response(error);
        if let Ok(value) = allowed.parse() {
            response.headers_mut().insert(ALLOW, value);
        }
        ready(response)
    }))
}

fn describe_health() -> Operation {
    Operation::new(Tag::Server, "health", "The process lives and answers").answers::<Status>("It does.")
}

fn describe_ready() -> Operation {
    Operation::new(Tag::Server, "ready", "Requests are admitted").fails(&[503]).answers::<Status>("They are.")
}

fn describe_metrics() -> Operation {
    Operation::new(Tag::Server, "metrics", "Prometheus metrics")
        .about(
            "404 where metrics.enabled is false (501 in the dialect llama.cpp). Where server.api_keys or server.metrics_key is set, this path wants \
             server.metrics_key or server.admin_key.",
        )
        .fails(&[403, 404, 501])
        .answers_text("text/plain", "The metrics.")
}

fn describe_openapi() -> Operation {
    Operation::new(Tag::Server, "openapi", "This description").answers_json("An OpenAPI document.")
}

fn describe_docs() -> Operation {
    Operation::new(Tag::Server, "docs", "This description as a page").answers_text("text/html", "The page.")
}

/// The process lives and answers.
async fn health() -> HttpResponse {
    HttpResponse::Ok().json(json!({"status": "ok"}))
}

/// The model is loaded (before that nothing is answered) and requests are admitted and read.
async fn is_ready(handle: Data<RuntimeHandle>) -> Result<HttpResponse, HttpError> {
    if handle.phase().get() != Phase::Serving {
        return Err(ApiError::draining().into());
    }
    if handle.text().is_stuck() {
        return Err(ApiError::intake_stuck().into());
    }
    Ok(HttpResponse::Ok().json(json!({"status": "ready"})))
}

async fn prometheus(_: Watcher, handle: Data<RuntimeHandle>, request: HttpRequest) -> Result<HttpResponse, HttpError> {
    handle.text().report();
    let page = metrics::render().ok_or_else(|| match handle.model().speaks_llama_cpp() {
        true => ApiError::not_implemented(None, "this server exports no metrics (metrics.enabled is false)"),
        false => ApiError::not_found(request.path()),
    })?;
    let mut answer = HttpResponse::Ok();
    answer.content_type("text/plain; version=0.0.4; charset=utf-8");
    if let Some(start) = metrics::llama_cpp::start_unix_s() {
        answer.insert_header((PROCESS_START_TIME, start.to_string()));
    }
    Ok(answer.body(page))
}

async fn config(_: Admin, live_settings: Data<LiveSettings>) -> Result<HttpResponse, HttpError> {
    Ok(HttpResponse::Ok().json(admin::config(&live_settings).await?))
}

async fn change_config(
    _: Admin,
    handle: Data<RuntimeHandle>,
    live_settings: Data<LiveSettings>,
    body: Body,
) -> Result<HttpResponse, HttpError> {
    let settings = body.parse(&handle, |ParsedBody { body: AnyFields(settings), problems }, _| {
        problems.check()?;
        Ok(Value::Object(settings))
    });
    let settings = settings.await?;
    Ok(HttpResponse::Ok().json(admin::change(&live_settings, &settings).await?))
}

async fn record(_: Admin, live_settings: Data<LiveSettings>) -> Result<HttpResponse, HttpError> {
    Ok(HttpResponse::Ok().json(admin::RecordingWritten::from(live_settings.recordings().write().await?)))
}

async fn fail_step(
    _: Admin,
    handle: Data<RuntimeHandle>,
    live_settings: Data<LiveSettings>,
) -> Result<HttpResponse, HttpError> {
    if !handle.model().server.get().debug_endpoints {
        return Err(ApiError::debug_closed().into());
    }
    live_settings.fail_next_step().await?;
    Ok(HttpResponse::Ok().json(json!({"status": "the next step fails"})))
}

/// The API's description, which depends on the keys that there are: they can change. Each form is made when it is first
/// asked for.
pub struct Descriptions {
    surfaces: Arc<[Surface]>,
    root_path: RootPath,
    dialect: Dialect,
    /// By whether paths for clients and paths for watchers need a key.
    texts: [OnceLock<String>; 4],
}

impl Descriptions {
    pub fn new(surfaces: Arc<[Surface]>, root_path: RootPath, dialect: Dialect) -> Self {
        Self { surfaces, root_path, dialect, texts: Default::default() }
    }

    fn text(&self, keys: &AllKeys) -> &str {
        let needs_key = |access: PathAccess| usize::from(keys.access(access) != PathAccess::Open);
        let text = &self.texts[2 * needs_key(PathAccess::Key) + needs_key(PathAccess::Watcher)];
        let access = |access| keys.access(access);
        let document = || openapi::document(paths_of(&self.surfaces), self.root_path.url(), self.dialect, access);
        text.get_or_init(|| document().to_string())
    }
}

async fn openapi_json(descriptions: Data<Descriptions>, request: HttpRequest) -> HttpResponse {
    let keys: &Keys = request.app_data().expect("every app is made with keys");
    HttpResponse::Ok().insert_header(ContentType::json()).body(descriptions.text(&keys.get()).to_owned())
}

async fn docs() -> HttpResponse {
    HttpResponse::Ok().insert_header(ContentType::html()).body(openapi::PAGE)
}

async fn not_found(request: HttpRequest) -> HttpResponse {
    error_response(ApiError::not_found(request.path()))
}
