//! Errors in llama.cpp's format.

use pagetide_base::error::ApiError;
use serde_json::{Value, json};

/// `{"error": {"code": …, "message": …, "type": …}}`. llama.cpp has no field for the request's id.
pub fn error_body(error: &ApiError, _request_id: &str) -> Value {
    let mut message = error.with_param();
    if is_of_context(error) {
        // Clients look for these words.
        message = format!("the request exceeds the available context size: {message}");
    }
    let mut body = json!({"error": {"code": error.status, "message": message, "type": kind(error)}});
    if let Some(context) = &error.context {
        body["error"]["n_prompt_tokens"] = context.prompt_tokens.into();
        body["error"]["n_ctx"] = context.max_tokens.into();
    }
    body
}

fn is_of_context(error: &ApiError) -> bool {
    error.code == Some("context_length_exceeded")
}

/// llama.cpp's name for an error. It has none for limits of rates.
fn kind(error: &ApiError) -> &'static str {
    match error.status {
        _ if is_of_context(error) => "exceed_context_size_error",
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        429 => "rate_limit_error",
        501 => "not_supported_error",
        503 => "unavailable_error",
        500.. => "server_error",
        _ => "invalid_request_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_llama_cpps_names() {
        for (error, code, kind) in [
            (ApiError::invalid("n_predict", "is wrong"), 400, "invalid_request_error"),
            (ApiError::context_length("prompt", "too long"), 400, "exceed_context_size_error"),
            (ApiError::unauthorized(), 401, "authentication_error"),
            (ApiError::not_found("/x"), 404, "not_found_error"),
            (ApiError::not_implemented(None, "no"), 501, "not_supported_error"),
            (ApiError::draining(), 503, "unavailable_error"),
            (ApiError::engine("it broke"), 500, "server_error"),
        ] {
            let body = error_body(&error, "");
            assert_eq!((&body["error"]["code"], &body["error"]["type"]), (&json!(code), &json!(kind)), "{error}");
        }
        let body = error_body(&ApiError::invalid("n_predict", "is wrong"), "");
        assert_eq!(body["error"]["message"], "n_predict: is wrong", "the field is named");
        assert_eq!(body["error"].get("n_ctx"), None);
        let body = error_body(&ApiError::context_length("prompt", "too long").with_context(300, 256), "");
        assert_eq!((&body["error"]["n_prompt_tokens"], &body["error"]["n_ctx"]), (&json!(300), &json!(256)));
    }
}
