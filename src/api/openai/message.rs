//! A chat's message and its deltas, made of the pieces that the output was read as.

use pagetide_text::chat_output::ChatPiece;
use serde::Serialize;
use std::borrow::Cow;

/// `choices[].message`
#[derive(Debug, Serialize)]
pub struct ChatMessage<'a> {
    role: &'static str,
    /// Null where the model only reasoned or called tools.
    content: Option<Cow<'a, str>>,
    refusal: Option<&'a str>,
    /// DeepSeek's name for reasoning, which most clients know. Null where there is none.
    reasoning_content: Option<Cow<'a, str>>,
    reasoning: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ChatToolCall<'a>>,
}

/// `choices[].delta`
#[derive(Debug, Default, Serialize)]
pub struct ChatMessageDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    /// `Some(None)` is null.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<Option<Cow<'a, str>>>,
    #[serde(flatten)]
    reasoning: ReasoningTexts<'a>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ChatToolCallDelta<'a>>,
}

/// Two names for the same: DeepSeek's, which most clients know, and vLLM's newer one.
#[derive(Debug, Default, Serialize)]
struct ReasoningTexts<'a> {
    /// `Some(None)`: null.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<Option<Cow<'a, str>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<Cow<'a, str>>,
}

#[derive(Debug, Serialize)]
struct ChatToolCall<'a> {
    id: &'a str,
    r#type: &'static str,
    function: MessageFunction<'a>,
}

#[derive(Debug, Serialize)]
struct ChatToolCallDelta<'a> {
    index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: MessageFunction<'a>,
}

#[derive(Debug, Default, Serialize)]
struct MessageFunction<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: Cow<'a, str>,
}

impl<'a> ChatMessage<'a> {
    /// Of all pieces of a choice.
    pub fn new(pieces: &'a [ChatPiece]) -> Self {
        let (content, reasoning) = (content(pieces), ReasoningTexts::new(pieces));
        let calls = calls(pieces).into_iter().map(|call| ChatToolCall {
            // A call begins before its arguments.
            id: call.id.unwrap_or_default(),
            r#type: "function",
            function: call.function,
        });
        let tool_calls: Vec<ChatToolCall<'_>> = calls.collect();
        let is_all = reasoning.reasoning.is_none() && tool_calls.is_empty();
        let content = content.or_else(|| is_all.then_some(Cow::Borrowed("")));
        let ReasoningTexts { reasoning_content, reasoning } = reasoning;
        let reasoning_content = reasoning_content.flatten();
        Self { role: "assistant", content, refusal: None, reasoning_content, reasoning, tool_calls }
    }
}

impl<'a> ChatMessageDelta<'a> {
    /// Before all others of a choice. Its content is empty at OpenAI, and null in llama.cpp.
    pub fn begin(is_llama_cpp: bool) -> Self {
        let content = (!is_llama_cpp).then_some("".into());
        Self { role: Some("assistant"), content: Some(content), ..Self::default() }
    }

    /// The same, which says whose message it is.
    pub fn with_role(self) -> Self {
        Self { role: Some("assistant"), ..self }
    }

    /// Of the pieces of a delta.
    pub fn new(pieces: &'a [ChatPiece]) -> Self {
        let content = content(pieces).map(Some);
        Self { role: None, content, reasoning: ReasoningTexts::new(pieces), tool_calls: calls(pieces) }
    }

    /// Says that it has no reasoning, where it has none: SGLang's clients read the field in every chunk.
    pub fn saying_no_reasoning(mut self) -> Self {
        self.reasoning.reasoning_content.get_or_insert(None);
        self
    }
}

impl<'a> ReasoningTexts<'a> {
    fn new(pieces: &'a [ChatPiece]) -> Self {
        let text = joined(pieces.iter().filter_map(|piece| match piece {
            ChatPiece::Reasoning(text) => Some(text.as_str()),
            _ => None,
        }));
        Self { reasoning_content: text.clone().map(Some), reasoning: text }
    }
}

fn content(pieces: &[ChatPiece]) -> Option<Cow<'_, str>> {
    joined(pieces.iter().filter_map(|piece| match piece {
        ChatPiece::Content(text) => Some(text.as_str()),
        _ => None,
    }))
}

/// `None`: there are no texts.
fn joined<'a>(mut texts: impl Iterator<Item = &'a str>) -> Option<Cow<'a, str>> {
    let first = Cow::Borrowed(texts.next()?);
    Some(texts.fold(first, |text, more| text + more))
}

/// One for each call that the pieces are about.
fn calls(pieces: &[ChatPiece]) -> Vec<ChatToolCallDelta<'_>> {
    let mut calls: Vec<ChatToolCallDelta<'_>> = Vec::new();
    for piece in pieces {
        match piece {
            ChatPiece::ToolCall { index, id, name } => calls.push(ChatToolCallDelta {
                index: *index,
                id: Some(id),
                r#type: Some("function"),
                function: MessageFunction { name: Some(name), arguments: "".into() },
            }),
            ChatPiece::ToolArguments { index, json } => match calls.last_mut().filter(|call| call.index == *index) {
                Some(call) => call.function.arguments += json.as_str(),
                None => {
                    let function = MessageFunction { name: None, arguments: json.into() };
                    calls.push(ChatToolCallDelta { index: *index, id: None, r#type: None, function });
                }
            },
            ChatPiece::Reasoning(_) | ChatPiece::Content(_) => {}
        }
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn message(pieces: &[ChatPiece]) -> Value {
        serde_json::to_value(ChatMessage::new(pieces)).unwrap()
    }

    fn delta(pieces: &[ChatPiece]) -> Value {
        serde_json::to_value(ChatMessageDelta::new(pieces)).unwrap()
    }

    #[test]
    fn pieces_become_a_message() {
        let content = |text: &str| ChatPiece::Content(text.into());
        let begin = |index: u32| ChatPiece::ToolCall { index, id: format!("id{index}"), name: format!("f{index}") };
        let arguments = |index: u32, json: &str| ChatPiece::ToolArguments { index, json: json.into() };
        let plain = json!({
            "role": "assistant", "content": "", "refusal": null, "reasoning_content": null, "reasoning": null,
        });
        assert_eq!(message(&[]), plain);
        let pieces =
            [ChatPiece::Reasoning("r".into()), begin(0), arguments(0, "{"), content("a"), begin(1), content("b")];
        let call = |index: u32, arguments: &str| {
            json!({"id": format!("id{index}"), "type": "function",
                   "function": {"name": format!("f{index}"), "arguments": arguments}})
        };
        assert_eq!(
            message(&pieces),
            json!({"role": "assistant", "content": "ab", "refusal": null, "reasoning_content": "r", "reasoning": "r",
                   "tool_calls": [call(0, "{"), call(1, "")]})
        );
        assert_eq!(message(&pieces[..3])["content"], Value::Null);
        assert_eq!(message(&pieces[..1])["content"], Value::Null);

        assert_eq!(delta(&[]), json!({}));
        assert_eq!(delta(&[content("")]), json!({"content": ""}));
        assert_eq!(
            delta(&[arguments(0, "}"), begin(1), arguments(1, "{")]),
            json!({"tool_calls": [
                {"index": 0, "function": {"arguments": "}"}},
                {"index": 1, "id": "id1", "type": "function", "function": {"name": "f1", "arguments": "{"}},
            ]})
        );
    }
}
