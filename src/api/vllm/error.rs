//! Errors in vLLM's format: OpenAI's shape, where `type` is a name of Python's and `code` the status.

use pagetide_base::error::ApiError;
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

/// The body of an error.
#[derive(Serialize, ToSchema)]
pub struct VllmError<'a> {
    error: VllmErrorObject<'a>,
}

#[derive(Serialize, ToSchema)]
struct VllmErrorObject<'a> {
    /// The problem, with the value given and the allowed range.
    message: &'a str,
    /// BadRequestError, NotFoundError, ….
    r#type: &'static str,
    /// The field at fault, as a path: `messages[0].content`.
    param: Option<&'a str>,
    /// The status.
    code: u16,
}

pub fn error_body(error: &ApiError, _: &str) -> Value {
    let ApiError { message, param, status, .. } = error;
    json!(VllmError {
        error: VllmErrorObject { message, r#type: kind(*status), param: param.as_deref(), code: *status }
    })
}

/// vLLM's name for a status.
fn kind(status: u16) -> &'static str {
    match status {
        401 => "AuthenticationError",
        403 => "PermissionDeniedError",
        404 => "NotFoundError",
        429 => "RateLimitError",
        501 => "NotImplementedError",
        503 => "ServiceUnavailableError",
        500.. => "InternalServerError",
        _ => "BadRequestError",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_vllms_type_and_its_status_as_code() {
        let expected = json!({"message": "task is wrong", "type": "BadRequestError", "param": "task", "code": 400});
        assert_eq!(error_body(&ApiError::invalid("task", "task is wrong"), ""), json!({ "error": expected }));
        assert_eq!(error_body(&ApiError::unauthorized(), "")["error"]["type"], "AuthenticationError");
        assert_eq!(error_body(&ApiError::engine("it broke"), "")["error"]["type"], "InternalServerError");
    }
}
