//! Errors in vLLM's format: OpenAI's shape, where `type` is a name of Python's and `code` the status.

use pagetide_base::error::{ApiError, Violation};
use serde::Serialize;
use serde_json::{Value, json};
use std::borrow::Cow;
use utoipa::ToSchema;

/// The body of an error.
#[derive(Serialize, ToSchema)]
pub struct VllmError<'a> {
    error: VllmErrorObject<'a>,
}

#[derive(Serialize, ToSchema)]
struct VllmErrorObject<'a> {
    /// The problem, with the value given and the allowed range. Some problems with values are named as pydantic does:
    /// (literal_error), (greater_than_equal), (less_than_equal).
    message: Cow<'a, str>,
    /// BadRequestError, NotFoundError, ….
    r#type: &'static str,
    /// The field at fault, as a path: `messages[0].content`.
    param: Option<&'a str>,
    /// The status.
    code: u16,
}

pub fn error_body(error: &ApiError, _: &str) -> Value {
    let ApiError { message, param, status, .. } = error;
    let message = match error.violation {
        None => Cow::Borrowed(message.as_str()),
        Some(violation) => Cow::Owned(format!("{message} ({})", pydantics_name(violation))),
    };
    json!(VllmError {
        error: VllmErrorObject { message, r#type: kind(*status), param: param.as_deref(), code: *status }
    })
}

/// vLLM's clients look for these names in messages, which are pydantic's there.
fn pydantics_name(violation: Violation) -> &'static str {
    match violation {
        Violation::BelowMinimum => "greater_than_equal",
        Violation::AboveMaximum => "less_than_equal",
        Violation::UnknownWord => "literal_error",
    }
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
        let unknown = ApiError::invalid("task", "task is wrong").with_violation(Violation::UnknownWord);
        assert_eq!(error_body(&unknown, "")["error"]["message"], "task is wrong (literal_error)");
        assert_eq!(error_body(&ApiError::engine("it broke"), "")["error"]["type"], "InternalServerError");
    }
}
