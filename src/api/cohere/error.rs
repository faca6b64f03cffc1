//! Errors in Cohere's format.

use pagetide_base::error::ApiError;
use serde_json::{Value, json};

pub fn error_body(error: &ApiError, request_id: &str) -> Value {
    json!({"id": request_id, "message": error.with_param()})
}
