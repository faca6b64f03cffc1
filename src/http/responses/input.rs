//! `input` as chat messages.

use crate::error::ApiError;
use crate::http::openai::shown;
use crate::http::translate::{FieldNames, object, optional_string, string, wrong_type};
use serde_json::{Map, Value, json};

const ROLES: [&str; 4] = ["user", "assistant", "system", "developer"];

/// The conversation, `instructions` first. `names` learns which message came from where.
pub fn messages(input: &Value, instructions: Option<&str>, names: &mut FieldNames) -> Result<Vec<Value>, ApiError> {
    let mut conversation = Conversation { messages: Vec::new(), names, reasoning: String::new(), turn: false };
    if let Some(text) = instructions {
        conversation.add("instructions", "content", json!({"role": "system", "content": text}));
        conversation.names.name("messages[0].content", "instructions");
    }
    match input {
        Value::String(text) => {
            conversation.add("input", "content", json!({"role": "user", "content": text}));
            let chat = format!("messages[{}].content", conversation.messages.len() - 1);
            conversation.names.name(chat, "input");
        }
        Value::Array(items) if items.is_empty() => {
            return Err(ApiError::invalid("input", "input must have at least one item"));
        }
        Value::Array(items) => {
            for (i, item) in items.iter().enumerate() {
                conversation.item(&format!("input[{i}]"), item)?;
            }
        }
        other => return Err(wrong_type("input", "a string or an array of items", Some(other))),
    }
    Ok(conversation.messages)
}

struct Conversation<'a> {
    messages: Vec<Value>,
    names: &'a mut FieldNames,
    /// Of a reasoning item that belongs to the assistant's next item.
    reasoning: String,
    /// The last message is an assistant's and has no content after its calls: a call joins it.
    turn: bool,
}

impl Conversation<'_> {
    /// `field`: what the client calls the content.
    fn add(&mut self, path: &str, field: &str, message: Value) {
        let chat = format!("messages[{}]", self.messages.len());
        self.names.name(format!("{chat}.content"), format!("{path}.{field}"));
        self.names.name(chat, path);
        self.messages.push(message);
    }

    fn item(&mut self, path: &str, item: &Value) -> Result<(), ApiError> {
        let item = object(path, item)?;
        // Messages may leave their type out.
        match optional_string(path, item, "type")? {
            Some("message") => self.message(path, item),
            None if item.contains_key("role") => self.message(path, item),
            Some("function_call") => self.call(path, item),
            Some("function_call_output") => self.call_output(path, item),
            Some("reasoning") => self.reasoning(path, item),
            Some("item_reference") => {
                let message = format!("{path}: item references are not supported: this server stores nothing");
                Err(ApiError::invalid(format!("{path}.type"), message))
            }
            None => Err(ApiError::invalid(path, format!("{path} must have a type or a role"))),
            Some(kind) => {
                let message = format!("{path}: items of type {kind:?} are not supported");
                Err(ApiError::invalid(format!("{path}.type"), message))
            }
        }
    }

    fn message(&mut self, path: &str, item: &Map<String, Value>) -> Result<(), ApiError> {
        let role = string(path, item, "role")?;
        if !ROLES.contains(&role) {
            let message = format!("{path}.role must be one of {}, got {}", ROLES.join(", "), shown(&role.into()));
            return Err(ApiError::invalid(format!("{path}.role"), message));
        }
        let content = content(&format!("{path}.content"), item.get("content"))?;
        let mut message = json!({"role": role, "content": content});
        if role == "assistant" {
            self.take_reasoning(&mut message);
        }
        self.turn = role == "assistant";
        self.reasoning.clear();
        self.add(path, "content", message);
        Ok(())
    }

    fn call(&mut self, path: &str, item: &Map<String, Value>) -> Result<(), ApiError> {
        let (id, name) = (string(path, item, "call_id")?, string(path, item, "name")?);
        let arguments = string(path, item, "arguments")?;
        let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        if !self.turn {
            let mut message = json!({"role": "assistant", "content": null});
            self.take_reasoning(&mut message);
            self.add(path, "content", message);
            self.turn = true;
        }
        let index = self.messages.len() - 1;
        let calls = &mut self.messages[index]["tool_calls"];
        if calls.is_null() {
            *calls = json!([]);
        }
        let calls = calls.as_array_mut().expect("it has just been made one");
        let chat = format!("messages[{index}].tool_calls[{}]", calls.len());
        calls.push(call);
        self.names.name(format!("{chat}.id"), format!("{path}.call_id"));
        self.names.name(format!("{chat}.function"), path);
        self.names.name(chat, path);
        Ok(())
    }

    fn call_output(&mut self, path: &str, item: &Map<String, Value>) -> Result<(), ApiError> {
        let id = string(path, item, "call_id")?;
        let content = content(&format!("{path}.output"), item.get("output"))?;
        self.turn = false;
        self.reasoning.clear();
        self.names.name(format!("messages[{}].tool_call_id", self.messages.len()), format!("{path}.call_id"));
        self.add(path, "output", json!({"role": "tool", "tool_call_id": id, "content": content}));
        Ok(())
    }

    /// Its text, or the summary where there is no text. What is encrypted nobody here can read.
    fn reasoning(&mut self, path: &str, item: &Map<String, Value>) -> Result<(), ApiError> {
        let mut texts = Vec::new();
        for field in ["content", "summary"] {
            let parts = match item.get(field) {
                None | Some(Value::Null) => continue,
                Some(Value::Array(parts)) => parts,
                Some(other) => return Err(wrong_type(&format!("{path}.{field}"), "an array", Some(other))),
            };
            for (i, part) in parts.iter().enumerate() {
                let path = format!("{path}.{field}[{i}]");
                texts.push(string(&path, object(&path, part)?, "text")?);
            }
            if !texts.is_empty() {
                break;
            }
        }
        self.turn = false;
        self.reasoning = texts.join("\n");
        Ok(())
    }

    fn take_reasoning(&mut self, message: &mut Value) {
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = std::mem::take(&mut self.reasoning).into();
        }
    }
}

/// A text or text parts, as chat has them.
fn content(path: &str, content: Option<&Value>) -> Result<Value, ApiError> {
    match content {
        Some(Value::String(text)) => Ok(text.as_str().into()),
        Some(Value::Array(parts)) => {
            parts.iter().enumerate().map(|(i, part)| content_part(&format!("{path}[{i}]"), part)).collect()
        }
        other => Err(wrong_type(path, "a string or an array of content parts", other)),
    }
}

fn content_part(path: &str, part: &Value) -> Result<Value, ApiError> {
    let part = object(path, part)?;
    match string(path, part, "type")? {
        "input_text" | "output_text" | "text" => Ok(json!({"type": "text", "text": string(path, part, "text")?})),
        "refusal" => Ok(json!({"type": "refusal", "refusal": string(path, part, "refusal")?})),
        kind => {
            let message = format!("{path}: a part of type {kind:?} is not supported, this model reads text only");
            Err(ApiError::invalid(format!("{path}.type"), message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(input: Value, instructions: Option<&str>) -> Result<Value, ApiError> {
        messages(&input, instructions, &mut FieldNames::default()).map(Value::Array)
    }

    #[test]
    fn items_become_messages() {
        let call = |id: &str, name: &str, arguments: &str| json!({"type": "function_call", "call_id": id, "name": name, "arguments": arguments});
        let chat_call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        let text = |kind: &str, text: &str| json!({"type": kind, "text": text});
        for (input, expected) in [
            (json!("hi"), json!([{"role": "user", "content": "hi"}])),
            (
                json!([
                    {"role": "developer", "content": "Be brief."},
                    {"type": "message", "role": "user", "content": [text("input_text", "a"), text("input_text", "b")]},
                    {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
                     "content": [{"type": "output_text", "text": "c", "annotations": []},
                                 {"type": "refusal", "refusal": "no"}]},
                ]),
                json!([
                    {"role": "developer", "content": "Be brief."},
                    {"role": "user", "content": [text("text", "a"), text("text", "b")]},
                    {"role": "assistant", "content": [text("text", "c"), {"type": "refusal", "refusal": "no"}]},
                ]),
            ),
            // A turn with reasoning, text and two calls is one message; what follows the calls' outputs another.
            (
                json!([
                    {"role": "user", "content": "q"},
                    {"type": "reasoning", "id": "rs_1", "summary": [text("summary_text", "short")],
                     "content": [text("reasoning_text", "think")]},
                    {"role": "assistant", "content": "t"},
                    call("c1", "f", "{}"),
                    call("c2", "g", "{\"x\": 1}"),
                    {"type": "function_call_output", "call_id": "c1", "output": "1"},
                    {"type": "function_call_output", "call_id": "c2", "output": [text("input_text", "2")]},
                    {"type": "reasoning", "id": "rs_2", "summary": [text("summary_text", "again")]},
                    call("c3", "f", "{}"),
                    {"role": "assistant", "content": "after"},
                ]),
                json!([
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": "t", "reasoning_content": "think",
                     "tool_calls": [chat_call("c1", "f", "{}"), chat_call("c2", "g", "{\"x\": 1}")]},
                    {"role": "tool", "tool_call_id": "c1", "content": "1"},
                    {"role": "tool", "tool_call_id": "c2", "content": [text("text", "2")]},
                    {"role": "assistant", "content": null, "reasoning_content": "again",
                     "tool_calls": [chat_call("c3", "f", "{}")]},
                    {"role": "assistant", "content": "after"},
                ]),
            ),
            // Reasoning that nothing of the assistant's follows belongs to nothing.
            (
                json!([{"type": "reasoning", "summary": [], "content": [text("reasoning_text", "x")]},
                       {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]),
                json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]),
            ),
        ] {
            assert_eq!(translated(input.clone(), None).unwrap(), expected, "{input}");
        }
        let expected = json!([{"role": "system", "content": "Rules."}, {"role": "user", "content": "hi"}]);
        assert_eq!(translated(json!("hi"), Some("Rules.")).unwrap(), expected);
    }

    #[test]
    fn a_wrong_item_is_refused_where_it_is_wrong() {
        for (input, param) in [
            (json!(7), "input"),
            (json!([]), "input"),
            (json!(["a"]), "input[0]"),
            (json!([{"content": "a"}]), "input[0]"),
            (json!([{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]), "input[1].role"),
            (json!([{"role": "user"}]), "input[0].content"),
            (json!([{"role": "user", "content": 3}]), "input[0].content"),
            (json!([{"role": "user", "content": [{"type": "input_text"}]}]), "input[0].content[0].text"),
            (json!([{"role": "user", "content": [{"type": "input_image"}]}]), "input[0].content[0].type"),
            (json!([{"type": "function_call", "name": "f", "arguments": "{}"}]), "input[0].call_id"),
            (json!([{"type": "function_call", "call_id": "c", "arguments": "{}"}]), "input[0].name"),
            (json!([{"type": "function_call", "call_id": "c", "name": "f"}]), "input[0].arguments"),
            (json!([{"type": "function_call_output", "call_id": "c"}]), "input[0].output"),
            (json!([{"type": "reasoning", "summary": "s"}]), "input[0].summary"),
            (json!([{"type": "item_reference", "id": "msg_1"}]), "input[0].type"),
            (json!([{"type": "web_search_call"}]), "input[0].type"),
            (json!([{"type": 3}]), "input[0].type"),
        ] {
            let error = translated(input.clone(), None).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{input}: {error}");
        }
    }
}
