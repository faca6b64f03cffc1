//! Fields of OpenAI and vLLM that change what is generated and that this server does not have. Ignoring them would
//! give a wrong answer with status 200, so they are refused where they ask for something.

use super::Endpoint;
use crate::error::ApiError;
use serde_json::Value;

/// Fields that may be given only as null, false, or empty.
const REFUSED: &[&str] = &[
    "audio",
    "chat_template",
    "function_call",
    "functions",
    "logprob_token_ids",
    "prompt_embeds",
    "suffix",
    "truncate_prompt_tokens",
];

pub fn refuse(endpoint: Endpoint, body: &Value) -> Result<(), ApiError> {
    refuse_fields(REFUSED, body)?;
    if endpoint == Endpoint::Chat { refuse_tools(body) } else { Ok(()) }
}

/// Refuses each of these fields that asks for something.
pub fn refuse_fields(names: &[&str], body: &Value) -> Result<(), ApiError> {
    match names.iter().find(|name| body.get(**name).is_some_and(asks_for_something)) {
        Some(name) => Err(not_supported(name, "leave it out")),
        None => Ok(()),
    }
}

fn refuse_tools(body: &Value) -> Result<(), ApiError> {
    let choice = body.get("tool_choice").filter(|choice| !choice.is_null());
    match choice {
        Some(Value::String(none)) if none == "none" => Ok(()),
        Some(_) => Err(not_supported("tool_choice", "only \"none\" is")),
        None if body.get("tools").is_some_and(asks_for_something) => {
            Err(not_supported("tools", "only together with tool_choice: \"none\" are they accepted"))
        }
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

fn not_supported(name: &str, instead: &str) -> ApiError {
    ApiError::invalid(name, format!("{name} is not supported yet; {instead}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refused(endpoint: Endpoint, body: Value) -> Option<String> {
        refuse(endpoint, &body).err().and_then(|error| error.param)
    }

    #[test]
    fn what_would_change_the_answer_is_refused_by_name() {
        for (body, param) in [
            (json!({"tools": [{"type": "function"}]}), "tools"),
            (json!({"tool_choice": "auto"}), "tool_choice"),
            (json!({"tool_choice": {"type": "function"}}), "tool_choice"),
        ] {
            assert_eq!(refused(Endpoint::Chat, body).as_deref(), Some(param));
        }
    }

    #[test]
    fn what_asks_for_nothing_is_not() {
        for body in [
            json!({"tools": [], "functions": null, "suffix": ""}),
            json!({"tools": [{"type": "function"}], "tool_choice": "none"}),
        ] {
            assert_eq!(refused(Endpoint::Chat, body), None);
        }
    }
}
