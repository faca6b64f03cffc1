//! Anthropic's Messages.

use crate::answer_format::AnswerFormat;
use crate::body::Body;
use crate::error::HttpError;
use crate::paths::{ApiPath, post};
use crate::serving::{SubmittingHandle, convert, parse};
use crate::stream::EventBody;
use actix_web::http::header::{HeaderMap, HeaderName};
use actix_web::{HttpRequest, HttpResponse, web};
use pagetide_actors::answers::whole_message;
use pagetide_api::anthropic::answer::MessageAnswer;
use pagetide_api::anthropic::error::error_body;
use pagetide_api::anthropic::stream::MessageEvents;
use pagetide_api::anthropic::{self as api, describe};

/// The header that every request of Anthropic's clients has.
const VERSION: &str = "anthropic-version";
/// Where Anthropic's clients look for the request's id.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

pub static PATHS: [ApiPath; 2] = [
    post("/v1/messages", || web::to(create), describe::create),
    post("/v1/messages/count_tokens", || web::to(count_tokens), describe::count_tokens),
];

pub static FORMAT: AnswerFormat = AnswerFormat { error_body, id_header: Some(REQUEST_ID) };

/// Whether a request speaks Anthropic's API, so that errors are told in its format.
pub fn is_spoken(path: &str, headers: &HeaderMap) -> bool {
    let below = path.strip_prefix("/v1/messages");
    below.is_some_and(|rest| rest.is_empty() || rest.starts_with('/')) || asks_for_models(path, headers)
}

fn asks_for_models(path: &str, headers: &HeaderMap) -> bool {
    (path == "/v1/models" || path.starts_with("/v1/models/")) && has_version(headers)
}

/// Paths that both APIs have are answered in this one's shape.
pub fn has_version(headers: &HeaderMap) -> bool {
    headers.contains_key(VERSION)
}

async fn create(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    let request = parse(&handle, body, api::request::message).await?;
    if request.stream.is_some() {
        let message = MessageAnswer::new(&request, handle.model());
        return Ok(EventBody::start(&handle, request, MessageEvents::new(message)).await?.into_response());
    }
    Ok(HttpResponse::Ok().json(whole_message(&handle, request).await?))
}

async fn count_tokens(handle: SubmittingHandle, request: HttpRequest, body: Body) -> Result<HttpResponse, HttpError> {
    convert(&handle, &request, body, api::count_tokens).await
}
