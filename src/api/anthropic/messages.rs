//! Anthropic's messages and content blocks as the messages that chat templates know.

use crate::chat::messages::CallArguments;
use crate::checks::{object, shown, string, wrong_type};
use pagetide_base::error::ApiError;
use serde_json::{Map, Value, json};

/// Adds the messages to `written`. True where the last one is the beginning of the answer. `system_first`: the template
/// takes a system message in the first place alone, and the texts of all others join it.
pub fn messages(given: Vec<Value>, written: &mut Vec<Value>, system_first: bool) -> Result<bool, ApiError> {
    let mut system = Vec::new();
    let mut conversation = BlockConversation { written, arguments: CallArguments::default(), open: None, calls: false };
    let last = given.len().saturating_sub(1);
    let mut ends_with_assistant = false;
    for (i, message) in given.into_iter().enumerate() {
        let path = format!("messages[{i}]");
        object(&path, &message)?;
        let Value::Object(mut message) = message else { continue };
        let content = message.remove("content");
        let role = string(&path, &message, "role")?;
        ends_with_assistant = role == "assistant";
        match role {
            "user" => conversation.message(&path, TurnRole::User, content)?,
            "assistant" => conversation.message(&path, TurnRole::Assistant, content)?,
            "system" => {
                let content = text_blocks(&format!("{path}.content"), content.as_ref())?.into_content();
                if system_first {
                    system.push(content);
                    continue;
                }
                conversation.open = None;
                conversation.add(json!({"role": "system", "content": content}));
            }
            role => {
                let message =
                    format!("{path}.role must be one of user, assistant, system, got {}", shown(&role.into()));
                return Err(ApiError::invalid(format!("{path}.role"), message));
            }
        }
    }
    let ends_in_calls = conversation.calls;
    complete_turns(written)?;
    if !system.is_empty() {
        join_system(written, system);
    }
    if ends_in_calls {
        let path = format!("messages[{last}].content");
        let message = format!("{path}: tool_use has to be followed by its tool_result in a message of role user");
        return Err(ApiError::invalid(path, message));
    }
    Ok(ends_with_assistant)
}

/// Puts the contents behind that of the first message, which is a system message then.
fn join_system(written: &mut Vec<Value>, contents: Vec<Value>) {
    let has_system = written.first().is_some_and(|message| message["role"] == "system");
    let first = has_system.then(|| written.remove(0)["content"].take());
    let contents: Vec<Value> = first.into_iter().chain(contents).collect();
    let content: Value = match contents.iter().map(Value::as_str).collect::<Option<String>>() {
        Some(text) => text.into(),
        None => contents.into_iter().flat_map(into_parts).collect(),
    };
    written.insert(0, json!({"role": "system", "content": content}));
}

/// A content as parts.
fn into_parts(content: Value) -> Vec<Value> {
    match content {
        Value::Array(parts) => parts,
        text => vec![json!({"type": "text", "text": text})],
    }
}

/// Turns of calls alone have an empty text. Turns of thinking alone say nothing.
fn complete_turns(written: &mut [Value]) -> Result<(), ApiError> {
    for message in written {
        if message["content"].is_null() {
            if message.get("tool_calls").is_none() {
                let what = "messages: a turn of the assistant has thinking, but neither text nor tool_use";
                return Err(ApiError::invalid("messages", what));
            }
            message["content"] = "".into();
        }
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum TurnRole {
    User,
    Assistant,
}

impl TurnRole {
    fn name(self) -> &'static str {
        match self {
            TurnRole::User => "user",
            TurnRole::Assistant => "assistant",
        }
    }
}

struct BlockConversation<'a> {
    written: &'a mut Vec<Value>,
    arguments: CallArguments,
    /// The role of the last message, where what follows of the same role joins it: consecutive messages of one role
    /// are one turn.
    open: Option<TurnRole>,
    /// The last message has calls.
    calls: bool,
}

impl BlockConversation<'_> {
    fn add(&mut self, message: Value) {
        self.written.push(message);
        self.calls = false;
    }

    fn message(&mut self, path: &str, role: TurnRole, content: Option<Value>) -> Result<(), ApiError> {
        let path = format!("{path}.content");
        match content {
            Some(Value::String(text)) => {
                self.text(role, text);
                Ok(())
            }
            Some(Value::Array(blocks)) => blocks
                .into_iter()
                .enumerate()
                .try_for_each(|(i, block)| self.block(&format!("{path}[{i}]"), role, block)),
            other => Err(wrong_type(&path, "a string or an array of content blocks", other.as_ref())),
        }
    }

    fn block(&mut self, path: &str, role: TurnRole, block: Value) -> Result<(), ApiError> {
        object(path, &block)?;
        let Value::Object(mut block) = block else { return Ok(()) };
        match (string(path, &block, "type")?, role) {
            ("text", _) => {
                string(path, &block, "text")?;
                if let Some(Value::String(text)) = block.remove("text") {
                    self.text(role, text);
                }
                Ok(())
            }
            ("thinking", TurnRole::Assistant) => {
                let thinking = string(path, &block, "thinking")?;
                let message = self.turn(role);
                match message.get_mut("reasoning_content") {
                    Some(Value::String(before)) => before.push_str(thinking),
                    _ => message["reasoning_content"] = thinking.into(),
                }
                Ok(())
            }
            // It cannot be read here.
            ("redacted_thinking", TurnRole::Assistant) => Ok(()),
            ("tool_use", TurnRole::Assistant) => self.tool_use(path, block),
            ("tool_result", TurnRole::User) => self.tool_result(path, &block),
            (kind @ ("thinking" | "redacted_thinking" | "tool_use" | "tool_result"), _) => {
                let role = role.name();
                let message = format!("{path}: a block of type {kind:?} is not allowed in a message of role {role:?}");
                Err(ApiError::invalid(format!("{path}.type"), message))
            }
            (kind, _) => Err(unreadable(path, kind)),
        }
    }

    fn text(&mut self, role: TurnRole, text: String) {
        let part = json!({"type": "text", "text": text});
        let message = self.turn(role);
        match &mut message["content"] {
            Value::Array(parts) => parts.push(part),
            none => *none = json!([part]),
        }
    }

    fn tool_use(&mut self, path: &str, mut block: Map<String, Value>) -> Result<(), ApiError> {
        let input = block.remove("input");
        let (id, name) = (string(path, &block, "id")?, string(path, &block, "name")?);
        let param = format!("{path}.input");
        let Some(Value::Object(input)) = input else { return Err(wrong_type(&param, "an object", input.as_ref())) };
        self.arguments.count(&param, &input)?;
        let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": input}});
        let message = self.turn(TurnRole::Assistant);
        match &mut message["tool_calls"] {
            Value::Array(calls) => calls.push(call),
            none => *none = json!([call]),
        }
        self.calls = true;
        Ok(())
    }

    fn tool_result(&mut self, path: &str, block: &Map<String, Value>) -> Result<(), ApiError> {
        let id = string(path, block, "tool_use_id")?;
        // Templates show a tool's result as it is.
        let content = match block.get("content") {
            None | Some(Value::Null) => String::new(),
            content => text_blocks(&format!("{path}.content"), content)?.into_text(),
        };
        match block.get("is_error") {
            // Chat templates have no place for it; the content says what went wrong.
            None | Some(Value::Null | Value::Bool(_)) => {}
            other => return Err(wrong_type(&format!("{path}.is_error"), "a boolean", other)),
        }
        self.open = None;
        self.add(json!({"role": "tool", "tool_call_id": id, "content": content}));
        Ok(())
    }

    /// The message that blocks of `role` go into: the last one, or a new one if the last has another role.
    fn turn(&mut self, role: TurnRole) -> &mut Value {
        if self.open != Some(role) {
            self.add(json!({"role": role.name(), "content": null}));
            self.open = Some(role);
        }
        self.written.last_mut().expect("a turn is open")
    }
}

/// A text, or the texts of blocks.
pub enum Texts {
    One(String),
    Blocks(Vec<String>),
}

impl Texts {
    /// As a message's content.
    pub fn into_content(self) -> Value {
        match self {
            Texts::One(text) => text.into(),
            Texts::Blocks(texts) => texts.into_iter().map(|text| json!({"type": "text", "text": text})).collect(),
        }
    }

    pub fn into_text(self) -> String {
        match self {
            Texts::One(text) => text,
            Texts::Blocks(texts) => texts.join("\n"),
        }
    }
}

/// A text or text blocks.
pub fn text_blocks(path: &str, content: Option<&Value>) -> Result<Texts, ApiError> {
    let text = |(i, block): (usize, &Value)| {
        let path = format!("{path}[{i}]");
        let block = object(&path, block)?;
        match string(&path, block, "type")? {
            "text" => string(&path, block, "text").map(str::to_owned),
            kind => Err(unreadable(&path, kind)),
        }
    };
    match content {
        Some(Value::String(text)) => Ok(Texts::One(text.clone())),
        Some(Value::Array(blocks)) => blocks.iter().enumerate().map(text).collect::<Result<_, _>>().map(Texts::Blocks),
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
        let continues = messages(given.as_array().unwrap().clone(), &mut written, false)?;
        Ok((written.into(), continues))
    }

    #[test]
    fn system_messages_join_the_first_where_the_template_wants_it() {
        let text = |text: &str| json!({"type": "text", "text": text});
        let given = |late: Value| {
            vec![
                json!({"role": "user", "content": "a"}),
                json!({"role": "system", "content": late}),
                json!({"role": "user", "content": "b"}),
            ]
        };
        let user = json!({"role": "user", "content": [text("a"), text("b")]});
        let first = || vec![json!({"role": "system", "content": "Rules."})];
        for (mut written, late, system) in [
            (first(), json!("More."), json!("Rules.More.")),
            (first(), json!([text("More.")]), json!([text("Rules."), text("More.")])),
            (vec![], json!("More."), json!("More.")),
        ] {
            messages(given(late), &mut written, true).unwrap();
            assert_eq!(written, [json!({"role": "system", "content": system}), user.clone()]);
        }
    }

    #[test]
    fn blocks_become_messages() {
        let text = |text: &str| json!({"type": "text", "text": text});
        let tool_use = |id: &str, input: Value| json!({"type": "tool_use", "id": id, "name": "f", "input": input});
        let call = |id: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}});
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
                     "tool_calls": [call("c1", json!({"x": 1})), call("c2", json!({}))]},
                    {"role": "tool", "tool_call_id": "c1", "content": "1"},
                    {"role": "tool", "tool_call_id": "c2", "content": "2"},
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
                json!([{"role": "assistant", "content": "", "tool_calls": [call("c", json!({}))]},
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
