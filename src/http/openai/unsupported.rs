//! Fields of OpenAI and vLLM that change what is generated and that this server does not have. Ignoring them would
//! give a wrong answer with status 200, so they are refused where they ask for something.

use crate::error::ApiError;
use serde_json::Value;

/// Fields that may be given only as null, false, or empty, and what to do instead.
pub const REFUSED: &[(&str, &str)] = &[
    ("audio", LEAVE_OUT),
    ("function_call", "OpenAI has replaced it: use tool_choice"),
    ("functions", "OpenAI has replaced it: use tools"),
    ("logprob_token_ids", LEAVE_OUT),
    ("prompt_embeds", LEAVE_OUT),
    ("return_tokens_as_token_ids", "return_token_ids gives the ids beside the texts"),
    ("suffix", LEAVE_OUT),
];
const LEAVE_OUT: &str = "leave it out";

/// Refuses each of these fields that asks for something.
pub fn refuse(body: &Value) -> Result<(), ApiError> {
    match REFUSED.iter().find(|(name, _)| body.get(*name).is_some_and(asks_for_something)) {
        Some((name, instead)) => Err(ApiError::invalid(*name, format!("{name} is not supported; {instead}"))),
        None => Ok(()),
    }
}

fn asks_for_something(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        Value::Bool(true) | Value::Number(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_would_change_the_answer_is_refused_by_name() {
        for (name, value) in [
            ("functions", json!([{"name": "f"}])),
            ("function_call", json!("auto")),
            ("suffix", json!("end")),
            ("audio", json!({"voice": "a"})),
        ] {
            let error = refuse(&json!({ name: value })).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(name));
        }
    }

    #[test]
    fn what_asks_for_nothing_is_not() {
        for body in [json!({"functions": null, "suffix": ""}), json!({"functions": [], "audio": {}}), json!({})] {
            assert_eq!(refuse(&body), Ok(()), "{body}");
        }
    }
}
