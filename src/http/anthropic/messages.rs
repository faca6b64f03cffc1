//! Anthropic's messages and content blocks as chat messages.

use crate::error::ApiError;
use crate::http::openai::shown;
use crate::http::translate::{FieldNames, object, string, wrong_type};
use serde_json::{Map, Value, json};

/// Adds the messages to `written`; `names` learns which came from where. True where the last one is the beginning of
/// the answer.
pub fn messages(given: &[Value], written: &mut Vec<Value>, names: &mut FieldNames) -> Result<bool, ApiError> {
    let mut conversation = Conversation { written, names, open: None, calls: false };
    let mut last_role = "";
    for (i, message) in given.iter().enumerate() {
        let path = format!("messages[{i}]");
        let message = object(&path, message)?;
        last_role = string(&path, message, "role")?;
        match last_role {
            "user" | "assistant" => conversation.message(&path, last_role, message.get("content"))?,
            "system" => {
                let content = text_blocks(&format!("{path}.content"), message.get("content"))?;
                conversation.open = None;
                conversation.add(&path, json!({"role": "system", "content": content}));
            }
            role => {
                let message =
                    format!("{path}.role must be one of user, assistant, system, got {}", shown(&role.into()));
                return Err(ApiError::invalid(format!("{path}.role"), message));
            }
        }
    }
    if conversation.calls {
        let path = format!("messages[{}].content", given.len() - 1);
        let message = format!("{path}: tool_use has to be followed by its tool_result in a message of role user");
        return Err(ApiError::invalid(path, message));
    }
    Ok(last_role == "assistant")
}

struct Conversation<'a> {
    written: &'a mut Vec<Value>,
    names: &'a mut FieldNames,
    /// The role of the last message, where what follows of the same role joins it: consecutive messages of one role
    /// are one turn.
    open: Option<&'static str>,
    /// The last message has calls.
    calls: bool,
}

impl Conversation<'_> {
    fn add(&mut self, path: &str, message: Value) {
        self.names.name(format!("messages[{}]", self.written.len()), path);
        self.written.push(message);
        self.calls = false;
    }

    fn message(&mut self, path: &str, role: &str, content: Option<&Value>) -> Result<(), ApiError> {
        let path = format!("{path}.content");
        match content {
            Some(Value::String(text)) => {
                self.text(&path, role, text);
                Ok(())
            }
            Some(Value::Array(blocks)) => {
                blocks.iter().enumerate().try_for_each(|(i, block)| self.block(&format!("{path}[{i}]"), role, block))
            }
            other => Err(wrong_type(&path, "a string or an array of content blocks", other)),
        }
    }

    fn block(&mut self, path: &str, role: &str, block: &Value) -> Result<(), ApiError> {
        let block = object(path, block)?;
        match (string(path, block, "type")?, role) {
            ("text", _) => {
                self.text(path, role, string(path, block, "text")?);
                Ok(())
            }
            ("thinking", "assistant") => {
                let thinking = string(path, block, "thinking")?;
                let message = self.turn(path, role);
                match message.get_mut("reasoning_content") {
                    Some(Value::String(before)) => before.push_str(thinking),
                    _ => message["reasoning_content"] = thinking.into(),
                }
                Ok(())
            }
            // Nobody here can read it.
            ("redacted_thinking", "assistant") => Ok(()),
            ("tool_use", "assistant") => self.tool_use(path, block),
            ("tool_result", "user") => self.tool_result(path, block),
            (kind @ ("thinking" | "redacted_thinking" | "tool_use" | "tool_result"), _) => {
                let message = format!("{path}: a block of type {kind:?} is not allowed in a message of role {role:?}");
                Err(ApiError::invalid(format!("{path}.type"), message))
            }
            (kind, _) => Err(unreadable(path, kind)),
        }
    }

    fn text(&mut self, path: &str, role: &str, text: &str) {
        let index = self.written.len() - usize::from(self.open == Some(static_role(role)));
        let message = self.turn(path, role);
        if message["content"].is_null() {
            message["content"] = json!([]);
        }
        let parts = message["content"].as_array_mut().expect("a turn's content is an array or null");
        let part = parts.len();
        parts.push(json!({"type": "text", "text": text}));
        self.names.name(format!("messages[{index}].content[{part}]"), path);
    }

    fn tool_use(&mut self, path: &str, block: &Map<String, Value>) -> Result<(), ApiError> {
        let (id, name) = (string(path, block, "id")?, string(path, block, "name")?);
        let input = block.get("input").filter(|input| input.is_object());
        let input = input.ok_or_else(|| wrong_type(&format!("{path}.input"), "an object", block.get("input")))?;
        let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": input.to_string()}});
        let message = self.turn(path, "assistant");
        if !message["tool_calls"].is_array() {
            message["tool_calls"] = json!([]);
        }
        let calls = message["tool_calls"].as_array_mut().expect("it has just been made one");
        let call_index = calls.len();
        calls.push(call);
        self.calls = true;
        let chat = format!("messages[{}].tool_calls[{call_index}]", self.written.len() - 1);
        self.names.name(format!("{chat}.function.arguments"), format!("{path}.input"));
        self.names.name(format!("{chat}.function"), path);
        self.names.name(chat, path);
        Ok(())
    }

    fn tool_result(&mut self, path: &str, block: &Map<String, Value>) -> Result<(), ApiError> {
        let id = string(path, block, "tool_use_id")?;
        let content = match block.get("content") {
            None | Some(Value::Null) => "".into(),
            content => text_blocks(&format!("{path}.content"), content)?,
        };
        match block.get("is_error") {
            // Chat templates have no place for it; the content says what went wrong.
            None | Some(Value::Null | Value::Bool(_)) => {}
            other => return Err(wrong_type(&format!("{path}.is_error"), "a boolean", other)),
        }
        self.open = None;
        self.add(path, json!({"role": "tool", "tool_call_id": id, "content": content}));
        Ok(())
    }

    /// The message that blocks of `role` go into now, a new one where the last is somebody else's.
    fn turn(&mut self, path: &str, role: &str) -> &mut Value {
        let role = static_role(role);
        if self.open != Some(role) {
            self.add(path, json!({"role": role, "content": null}));
            self.open = Some(role);
        }
        self.written.last_mut().expect("a turn is open")
    }
}

fn static_role(role: &str) -> &'static str {
    if role == "assistant" { "assistant" } else { "user" }
}

/// A text or text blocks, as chat's content.
pub fn text_blocks(path: &str, content: Option<&Value>) -> Result<Value, ApiError> {
    match content {
        Some(Value::String(text)) => Ok(text.as_str().into()),
        Some(Value::Array(blocks)) => blocks
            .iter()
            .enumerate()
            .map(|(i, block)| {
                let path = format!("{path}[{i}]");
                let block = object(&path, block)?;
                match string(&path, block, "type")? {
                    "text" => Ok(json!({"type": "text", "text": string(&path, block, "text")?})),
                    kind => Err(unreadable(&path, kind)),
                }
            })
            .collect(),
        other => Err(wrong_type(path, "a string or an array of text blocks", other)),
    }
}

fn unreadable(path: &str, kind: &str) -> ApiError {
    let message = format!("{path}: a block of type {kind:?} is not supported, this model reads text only");
    ApiError::invalid(format!("{path}.type"), message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(given: Value) -> Result<(Value, bool), ApiError> {
        let mut written = Vec::new();
        let continues = messages(given.as_array().unwrap(), &mut written, &mut FieldNames::default())?;
        Ok((written.into(), continues))
    }

    #[test]
    fn blocks_become_messages() {
        let text = |text: &str| json!({"type": "text", "text": text});
        let tool_use = |id: &str, input: Value| json!({"type": "tool_use", "id": id, "name": "f", "input": input});
        let call = |id: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}});
        for (given, expected, continues) in [
            (json!([{"role": "user", "content": "hi"}]), json!([{"role": "user", "content": [text("hi")]}]), false),
            // A turn of thinking, text and calls is one message; results are messages of their own, before the text.
            (
                json!([
                    {"role": "user", "content": [{"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}}]},
                    {"role": "assistant", "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "redacted_thinking", "data": "x"},
                        text("t"), tool_use("c1", json!({"x": 1})), tool_use("c2", json!({})),
                    ]},
                    {"role": "user", "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": "1"},
                        {"type": "tool_result", "tool_use_id": "c2", "content": [text("2")], "is_error": true},
                        {"type": "tool_result", "tool_use_id": "c3"},
                        text("and?"),
                    ]},
                ]),
                json!([
                    {"role": "user", "content": [text("q")]},
                    {"role": "assistant", "content": [text("t")], "reasoning_content": "hm",
                     "tool_calls": [call("c1", "{\"x\":1}"), call("c2", "{}")]},
                    {"role": "tool", "tool_call_id": "c1", "content": "1"},
                    {"role": "tool", "tool_call_id": "c2", "content": [text("2")]},
                    {"role": "tool", "tool_call_id": "c3", "content": ""},
                    {"role": "user", "content": [text("and?")]},
                ]),
                false,
            ),
            // Messages of one role are one turn.
            (
                json!([{"role": "user", "content": "a"}, {"role": "user", "content": [text("b")]},
                       {"role": "system", "content": "c"}, {"role": "user", "content": "d"},
                       {"role": "assistant", "content": "The answer"}]),
                json!([{"role": "user", "content": [text("a"), text("b")]}, {"role": "system", "content": "c"},
                       {"role": "user", "content": [text("d")]},
                       {"role": "assistant", "content": [text("The answer")]}]),
                true,
            ),
            (
                json!([{"role": "assistant", "content": [tool_use("c", json!({}))]}, {"role": "user", "content": "a"}]),
                json!([{"role": "assistant", "content": null, "tool_calls": [call("c", "{}")]},
                       {"role": "user", "content": [text("a")]}]),
                false,
            ),
        ] {
            assert_eq!(translated(given.clone()).unwrap(), (expected, continues), "{given}");
        }
    }

    #[test]
    fn a_wrong_block_is_refused_where_it_is_wrong() {
        let user = |block: Value| json!([{"role": "user", "content": "a"}, {"role": "user", "content": [block]}]);
        let assistant = |block: Value| json!([{"role": "assistant", "content": [block]}]);
        for (given, param) in [
            (json!(["a"]), "messages[0]"),
            (json!([{"content": "a"}]), "messages[0].role"),
            (json!([{"role": "tool", "content": "a"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": null}]), "messages[0].content"),
            (user(json!("text")), "messages[1].content[0]"),
            (user(json!({"text": "a"})), "messages[1].content[0].type"),
            (user(json!({"type": "text"})), "messages[1].content[0].text"),
            (user(json!({"type": "image", "source": {}})), "messages[1].content[0].type"),
            (user(json!({"type": "document"})), "messages[1].content[0].type"),
            (user(json!({"type": "tool_use"})), "messages[1].content[0].type"),
            (user(json!({"type": "tool_result", "content": "a"})), "messages[1].content[0].tool_use_id"),
            (
                user(json!({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]})),
                "messages[1].content[0].content[0].type",
            ),
            (
                user(json!({"type": "tool_result", "tool_use_id": "c", "is_error": "yes"})),
                "messages[1].content[0].is_error",
            ),
            (assistant(json!({"type": "tool_use", "name": "f", "input": {}})), "messages[0].content[0].id"),
            (assistant(json!({"type": "tool_use", "id": "c", "input": {}})), "messages[0].content[0].name"),
            (assistant(json!({"type": "tool_use", "id": "c", "name": "f"})), "messages[0].content[0].input"),
            (assistant(json!({"type": "tool_result", "tool_use_id": "c"})), "messages[0].content[0].type"),
            (assistant(json!({"type": "thinking"})), "messages[0].content[0].thinking"),
            (assistant(json!({"type": "tool_use", "id": "c", "name": "f", "input": {}})), "messages[0].content"),
        ] {
            let error = translated(given.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{given}: {error}");
        }
    }
}
