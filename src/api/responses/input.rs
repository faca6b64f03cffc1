//! `input` as the messages that chat templates know.

use super::namespaces::flat_name;
use crate::chat::messages::CallArguments;
use crate::checks::{object, optional_string, shown, string, wrong_type};
use pagetide_base::error::ApiError;
use serde_json::{Map, Value, json};

const ROLES: [&str; 4] = ["user", "assistant", "system", "developer"];

/// The conversation, `instructions` first.
pub fn messages(input: Value, instructions: Option<&str>) -> Result<Vec<Value>, ApiError> {
    let (messages, arguments) = (Vec::new(), CallArguments::default());
    let mut conversation = ItemConversation { messages, arguments, reasoning: String::new(), turn: false };
    if let Some(text) = instructions {
        conversation.messages.push(json!({"role": "system", "content": text}));
    }
    match input {
        Value::String(text) => conversation.messages.push(json!({"role": "user", "content": text})),
        Value::Array(items) if items.is_empty() => {
            return Err(ApiError::invalid("input", "input must have at least one item"));
        }
        Value::Array(items) => {
            for (i, item) in items.into_iter().enumerate() {
                conversation.item(&format!("input[{i}]"), item)?;
            }
        }
        other => return Err(wrong_type("input", "a string or an array of items", Some(&other))),
    }
    if conversation.messages.is_empty() {
        return Err(ApiError::invalid("input", "input must have at least one message"));
    }
    Ok(conversation.messages)
}

struct ItemConversation {
    messages: Vec<Value>,
    arguments: CallArguments,
    /// Of a reasoning item that belongs to the assistant's next item.
    reasoning: String,
    /// The last message is an assistant's and has no content after its calls: a call joins it.
    turn: bool,
}

impl ItemConversation {
    fn item(&mut self, path: &str, item: Value) -> Result<(), ApiError> {
        object(path, &item)?;
        let Value::Object(item) = item else { return Ok(()) };
        // Messages may leave their type out.
        match optional_string(path, &item, "type")? {
            Some("message") => self.message(path, item),
            None if item.contains_key("role") => self.message(path, item),
            Some("function_call") => self.call(path, &item),
            Some("function_call_output") => self.call_output(path, item),
            Some("reasoning") => self.reasoning(path, &item),
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

    fn message(&mut self, path: &str, mut item: Map<String, Value>) -> Result<(), ApiError> {
        let content = item.remove("content");
        let role = string(path, &item, "role")?;
        if !ROLES.contains(&role) {
            let message = format!("{path}.role must be one of {}, got {}", ROLES.join(", "), shown(&role.into()));
            return Err(ApiError::invalid(format!("{path}.role"), message));
        }
        let content = match self::content(&format!("{path}.content"), content)? {
            ItemContent::Text(text) => Value::from(text),
            ItemContent::Parts(texts) => texts.into_iter().map(|text| json!({"type": "text", "text": text})).collect(),
        };
        // Templates of open models know only the older word for developer.
        let shown_role = if role == "developer" { "system" } else { role };
        let mut message = json!({"role": shown_role, "content": content});
        if role == "assistant" {
            self.take_reasoning(&mut message);
        }
        self.turn = role == "assistant";
        self.reasoning.clear();
        self.messages.push(message);
        Ok(())
    }

    fn call(&mut self, path: &str, item: &Map<String, Value>) -> Result<(), ApiError> {
        let (id, name) = (string(path, item, "call_id")?, string(path, item, "name")?);
        let name = flat_name(optional_string(path, item, "namespace")?, name);
        let arguments = string(path, item, "arguments")?;
        let arguments = self.arguments.read(&format!("{path}.arguments"), arguments)?;
        let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        if !self.turn {
            let mut message = json!({"role": "assistant", "content": ""});
            self.take_reasoning(&mut message);
            self.messages.push(message);
            self.turn = true;
        }
        let message = self.messages.last_mut().expect("a turn has a message");
        match &mut message["tool_calls"] {
            Value::Array(calls) => calls.push(call),
            none => *none = json!([call]),
        }
        Ok(())
    }

    fn call_output(&mut self, path: &str, mut item: Map<String, Value>) -> Result<(), ApiError> {
        let output = item.remove("output");
        let id = string(path, &item, "call_id")?;
        // Templates show a tool's result as it is.
        let content = match content(&format!("{path}.output"), output)? {
            ItemContent::Text(text) => text,
            ItemContent::Parts(texts) => texts.join("\n"),
        };
        self.turn = false;
        self.reasoning.clear();
        self.messages.push(json!({"role": "tool", "tool_call_id": id, "content": content}));
        Ok(())
    }

    /// Its text, or the summary where there is no text. Encrypted reasoning cannot be read here.
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

/// A text or the texts of parts.
enum ItemContent {
    Text(String),
    Parts(Vec<String>),
}

fn content(path: &str, content: Option<Value>) -> Result<ItemContent, ApiError> {
    match content {
        Some(Value::String(text)) => Ok(ItemContent::Text(text)),
        Some(Value::Array(parts)) => {
            let texts = parts.iter().enumerate().map(|(i, part)| part_text(&format!("{path}[{i}]"), part));
            texts.collect::<Result<_, _>>().map(ItemContent::Parts)
        }
        other => Err(wrong_type(path, "a string or an array of content parts", other.as_ref())),
    }
}

fn part_text(path: &str, part: &Value) -> Result<String, ApiError> {
    let part = object(path, part)?;
    match string(path, part, "type")? {
        "input_text" | "output_text" | "text" => string(path, part, "text").map(str::to_owned),
        "refusal" => string(path, part, "refusal").map(str::to_owned),
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
        messages(input, instructions).map(Value::Array)
    }

    #[test]
    fn items_become_messages() {
        let call = |id: &str, name: &str, arguments: &str| json!({"type": "function_call", "call_id": id, "name": name, "arguments": arguments});
        let chat_call = |id: &str, name: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
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
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": [text("text", "a"), text("text", "b")]},
                    {"role": "assistant", "content": [text("text", "c"), text("text", "no")]},
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
                     "tool_calls": [chat_call("c1", "f", json!({})), chat_call("c2", "g", json!({"x": 1}))]},
                    {"role": "tool", "tool_call_id": "c1", "content": "1"},
                    {"role": "tool", "tool_call_id": "c2", "content": "2"},
                    {"role": "assistant", "content": "", "reasoning_content": "again",
                     "tool_calls": [chat_call("c3", "f", json!({}))]},
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
