//! Errors in OpenAI's shape: `{"error": {"message": …, "type": …, "param": …, "code": …}}`.

use pagetide_base::error::ApiError;
use serde::Serialize;
use utoipa::ToSchema;

/// The body of an error.
#[derive(Serialize, ToSchema)]
pub struct ErrorAnswer<'a> {
    error: ErrorObject<'a>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = ApiError)]
struct ErrorObject<'a> {
    /// The problem, with the value given and the allowed range.
    message: &'a str,
    r#type: &'static str,
    /// The field at fault, as a path: `messages[0].content`.
    param: Option<&'a str>,
    code: Option<&'static str>,
}

impl<'a> From<&'a ApiError> for ErrorAnswer<'a> {
    fn from(error: &'a ApiError) -> Self {
        let ApiError { message, kind, param, code, .. } = error;
        Self { error: ErrorObject { message, r#type: kind, param: param.as_deref(), code: *code } }
    }
}
