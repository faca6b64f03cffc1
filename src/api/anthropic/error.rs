//! Errors in Anthropic's format.

use pagetide_base::error::ApiError;
use serde_json::{Value, json};

/// `{"type": "error", "error": {"type": …, "message": …}, "request_id": …}`
pub fn error_body(error: &ApiError, request_id: &str) -> Value {
    let mut body = error_event(error);
    body["request_id"] = request_id.into();
    body
}

/// The same in a stream, without the request's id.
pub fn error_event(error: &ApiError) -> Value {
    json!({"type": "error", "error": {"type": kind(error.status), "message": error.with_param()}})
}

/// Anthropic's name for a status.
fn kind(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | 529 => "overloaded_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_names_the_field_once() {
        for (error, kind, message) in [
            (ApiError::invalid("max_tokens", "max_tokens is wrong"), "invalid_request_error", "max_tokens is wrong"),
            (ApiError::invalid("messages", "too long"), "invalid_request_error", "messages: too long"),
            (ApiError::engine("it broke"), "api_error", "it broke"),
            (
                ApiError::overloaded(1, 2),
                "rate_limit_error",
                "the server already holds 1 requests, its limit; try again in 2 s",
            ),
        ] {
            let expected = json!({"type": "error", "error": {"type": kind, "message": message}});
            assert_eq!(error_event(&error), expected);
        }
        assert_eq!(error_event(&ApiError::draining())["error"]["type"], "overloaded_error");
        assert_eq!(error_event(&ApiError::not_found("/"))["error"]["type"], "not_found_error");
        assert_eq!(error_event(&ApiError::unauthorized())["error"]["type"], "authentication_error");
        assert_eq!(error_event(&ApiError::body_too_large(1))["error"]["type"], "request_too_large");
        assert_eq!(error_event(&ApiError::method_not_allowed("GET", "POST"))["error"]["type"], "invalid_request_error");
    }
}
