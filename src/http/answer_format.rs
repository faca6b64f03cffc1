//! How a surface writes what every request can be answered with, wherever in the server the answer arose.

use actix_web::body::{BoxBody, MessageBody};
use actix_web::dev::ServiceResponse;
use actix_web::http::header::{CONTENT_ENCODING, HeaderName, HeaderValue};
use pagetide_base::error::ApiError;
use serde_json::Value;

/// Errors and headers of a surface that does not write them as OpenAI does.
pub struct AnswerFormat {
    /// The body of an error, given the request's id.
    pub error_body: fn(&ApiError, &str) -> Value,
    /// Where its clients look for the request's id, beside `x-request-id`.
    pub id_header: Option<HeaderName>,
}

impl AnswerFormat {
    /// The answer with the headers of this format, and with its error, if it has one, in this format.
    pub fn apply(&self, mut answer: ServiceResponse<BoxBody>, request_id: &HeaderValue) -> ServiceResponse<BoxBody> {
        if let Some(header) = &self.id_header {
            answer.headers_mut().insert(header.clone(), request_id.clone());
        }
        let body = |error: &ApiError| (self.error_body)(error, request_id.to_str().unwrap_or_default());
        let Some(body) = answer.response().extensions().get::<ApiError>().map(body) else { return answer };
        // The new body is not compressed, whatever the one was that it replaces.
        answer.headers_mut().remove(CONTENT_ENCODING);
        answer.map_body(|_, _| body.to_string().boxed())
    }
}
