//! Fields of OpenAI and vLLM that change what is generated and that this server does not have. Ignoring them would
//! give a wrong answer with status 200, so they are refused where they ask for something.

use crate::body::refused::RefusedTable;
use serde_json::Value;

/// Chat's and completions' fields that may be given only as null, false, or empty.
#[derive(Debug, Default)]
pub struct UnsupportedFields;

const LEAVE_OUT: &str = "leave it out";

impl RefusedTable for UnsupportedFields {
    /// Each with what to do instead.
    const FIELDS: &'static [(&'static str, &'static str)] = &[
        ("audio", LEAVE_OUT),
        ("function_call", "OpenAI has replaced it: use tool_choice"),
        ("functions", "OpenAI has replaced it: use tools"),
        ("logprob_token_ids", LEAVE_OUT),
        ("prompt_embeds", LEAVE_OUT),
        ("return_tokens_as_token_ids", "return_token_ids gives the ids beside the texts"),
        ("suffix", LEAVE_OUT),
    ];

    fn asks(value: &Value) -> bool {
        asks_for_something(value)
    }

    fn message(name: &str, instead: &str) -> String {
        format!("{name} is not supported; {instead}")
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
    use crate::body::read_value;
    use crate::body::refused::Refused;
    use pagetide_base::error::ApiError;
    use serde_json::json;

    fn refuse(body: &Value) -> Result<(), ApiError> {
        read_value::<Refused<UnsupportedFields>>(body)?.body.check()
    }

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
