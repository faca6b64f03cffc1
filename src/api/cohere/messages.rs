//! Cohere's messages as the messages that chat templates know.

use crate::checks::{object, one_of, string, wrong_type};
use crate::openai::chat::checked_messages;
use pagetide_base::error::ApiError;
use serde_json::{Value, json};

/// The messages as the template is given them. Content blocks of Cohere's own become text and reasoning; the rest has
/// the form of OpenAI's messages, and is checked as theirs.
pub fn messages(given: Vec<Value>) -> Result<Vec<Value>, ApiError> {
    let translated = given.into_iter().enumerate().map(|(i, message)| translated(&format!("messages[{i}]"), message));
    checked_messages(translated.collect::<Result<_, ApiError>>()?)
}

const ROLES: [&str; 4] = ["user", "assistant", "system", "tool"];

fn translated(path: &str, mut message: Value) -> Result<Value, ApiError> {
    one_of(&format!("{path}.role"), message.get("role").and_then(Value::as_str), &ROLES)?;
    let path = format!("{path}.content");
    let Some(Value::Array(blocks)) = message.get_mut("content") else { return Ok(message) };
    let blocks = std::mem::take(blocks);
    let (mut parts, mut thinking) = (Vec::with_capacity(blocks.len()), String::new());
    for (i, block) in blocks.into_iter().enumerate() {
        let path = format!("{path}[{i}]");
        match block.get("type").and_then(Value::as_str) {
            Some("thinking") => thinking.push_str(string(&path, object(&path, &block)?, "thinking")?),
            Some("document") => parts.push(json!({"type": "text", "text": document(&path, &block)?.to_string()})),
            _ => parts.push(block),
        }
    }
    if !thinking.is_empty() {
        message["reasoning_content"] = thinking.into();
    }
    message["content"] = parts.into();
    Ok(message)
}

/// The data of a block of type document.
fn document<'a>(path: &str, block: &'a Value) -> Result<&'a Value, ApiError> {
    let param = format!("{path}.document.data");
    let data = block.get("document").and_then(|document| document.get("data"));
    data.filter(|data| data.is_object() || data.is_string()).ok_or_else(|| wrong_type(&param, "an object", data))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_become_messages() {
        let given = json!([
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "tool_plan": "I look.", "content": [{"type": "thinking", "thinking": "hm"}],
             "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "document", "document": {"data": {"b": 2}}}]},
        ]);
        let Value::Array(given) = given else { unreachable!("it is an array") };
        let written = messages(given).unwrap();
        assert_eq!(written[0]["content"], json!([{"type": "text", "text": "q"}]));
        assert_eq!((&written[1]["reasoning_content"], &written[1]["tool_plan"]), (&json!("hm"), &json!("I look.")));
        assert_eq!(written[1]["tool_calls"][0]["function"]["arguments"], json!({"a": 1}));
        assert_eq!(written[2]["content"], "{\"b\":2}");
    }

    #[test]
    fn a_wrong_block_is_refused_where_it_is_wrong() {
        for (block, param) in [
            (json!({"type": "image_url", "image_url": {}}), "messages[0].content[0].type"),
            (json!({"type": "thinking"}), "messages[0].content[0].thinking"),
            (json!({"type": "document", "document": {}}), "messages[0].content[0].document.data"),
        ] {
            let error = messages(vec![json!({"role": "user", "content": [block]})]).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{error}");
        }
    }
}
