//! Errors in Ollama's format.

use pagetide_base::error::ApiError;
use serde_json::{Value, json};

/// `{"error": …}`, in streams too.
pub fn error_line(error: &ApiError) -> Value {
    json!({ "error": error.with_param() })
}

pub fn error_body(error: &ApiError, _request_id: &str) -> Value {
    error_line(error)
}
