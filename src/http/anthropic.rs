//! Anthropic's Messages over HTTP.

use crate::error::HttpError;
use crate::stream::EventBody;
use actix_web::HttpResponse;
use actix_web::body::{BoxBody, MessageBody};
use actix_web::dev::ServiceResponse;
use actix_web::http::header::{CONTENT_ENCODING, HeaderMap, HeaderName, HeaderValue};
use pagetide_actors::generation::Generation;
use pagetide_actors::runtime::RuntimeHandle;
use pagetide_api::anthropic::answer::MessageAnswer;
use pagetide_api::anthropic::error::error_body;
use pagetide_api::anthropic::stream::MessageEvents;
use pagetide_api::request::ApiRequest;
use pagetide_base::error::ApiError;

/// The header that every request of Anthropic's clients has.
const VERSION: &str = "anthropic-version";
/// Where Anthropic's clients look for the request's id.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

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

/// Answers a request that came to `/v1/messages`.
pub async fn create(handle: &RuntimeHandle, mut request: ApiRequest) -> Result<HttpResponse, HttpError> {
    let mut message = MessageAnswer::new(handle.model());
    if request.stream.is_some() {
        return Ok(EventBody::start(handle, request, MessageEvents::new(message)).await?.into_response());
    }
    let mut generation = Generation::start(handle, &mut request).await?;
    generation.finish(|delta| message.push(delta, |_, _, _| {})).await?;
    Ok(HttpResponse::Ok().json(message.whole(generation.answers().usage())))
}

/// An answer with its error, if it has one, in Anthropic's format, wherever the error arose.
pub fn in_its_format(mut answer: ServiceResponse<BoxBody>, request_id: &HeaderValue) -> ServiceResponse<BoxBody> {
    answer.headers_mut().insert(REQUEST_ID, request_id.clone());
    let error = answer.response().extensions().get::<ApiError>().map(error_body);
    let Some(mut body) = error else { return answer };
    body["request_id"] = request_id.to_str().unwrap_or_default().into();
    // The new body is not compressed, whatever the one was that it replaces.
    answer.headers_mut().remove(CONTENT_ENCODING);
    answer.map_body(|_, _| body.to_string().boxed())
}
