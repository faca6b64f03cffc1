//! The message that answers, whole or in the making.

use crate::delta::{Delta, Finish, StopReason};
use crate::items::{AnswerItem, AnswerItems, ItemChange};
use crate::model_info::ModelInfo;
use crate::request::ApiRequest;
use crate::usage::Usage;
use serde_json::{Map, Value, json};

pub struct MessageAnswer {
    id: String,
    model: String,
    items: AnswerItems,
    finish: Option<Finish>,
}

impl MessageAnswer {
    pub fn new(request: &ApiRequest, model: &ModelInfo) -> Self {
        let id = format!("msg_{}", request.id);
        Self { id, model: model.served_name.clone(), items: AnswerItems::default(), finish: None }
    }

    /// Takes what the answer gained and tells what that does to which content block.
    pub fn push(&mut self, mut delta: Delta, mut tell: impl FnMut(usize, &AnswerItem, ItemChange<'_>)) {
        let finish = delta.finish.take();
        self.items.push(delta, &mut tell);
        if finish.is_some() {
            self.items.close(false, &mut tell);
            self.finish = finish;
        }
    }

    /// Before the first block.
    pub fn begun(&self, usage: Usage) -> Value {
        self.object(&[], Value::Null, Value::Null, Self::usage(usage.of_prompt()))
    }

    /// When all is said.
    pub fn whole(&self, usage: Usage) -> Value {
        let blocks: Vec<Value> = self.items.list().iter().map(block).collect();
        let (stop_reason, stop_sequence) = self.stop();
        self.object(&blocks, stop_reason.into(), stop_sequence.into(), Self::usage(usage))
    }

    /// Why it ended, and the stop sequence that ended it.
    pub fn stop(&self) -> (&'static str, Option<&str>) {
        let Some(finish) = &self.finish else { return ("end_turn", None) };
        let calls = || self.items.list().iter().any(|item| matches!(item, AnswerItem::Call { .. }));
        match (finish.reason, &finish.stop_reason) {
            ("length", _) => ("max_tokens", None),
            (_, Some(StopReason::Text(text))) => ("stop_sequence", Some(text)),
            // A call that was asked for by name ends as text does.
            ("tool_calls", _) => ("tool_use", None),
            _ if calls() => ("tool_use", None),
            _ => ("end_turn", None),
        }
    }

    /// `input_tokens` are those that had to be computed; the others are counted apart.
    pub fn usage(usage: Usage) -> Value {
        let cached = usage.prompt_tokens_details.cached_tokens;
        usage.with_kv_in(json!({
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.completion_tokens_details.reasoning_tokens},
        }))
    }

    fn object(&self, content: &[Value], stop_reason: Value, stop_sequence: Value, usage: Value) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        })
    }
}

/// A whole content block. The input of a call that `max_tokens` cut off is no JSON; it is left out, and the message's
/// `stop_reason` says why.
fn block(item: &AnswerItem) -> Value {
    match item {
        // A signature lets a server check that the thinking is its own. This server does not check it.
        AnswerItem::Reasoning { text } => json!({"type": "thinking", "thinking": text, "signature": ""}),
        AnswerItem::Text { text, .. } => json!({"type": "text", "text": text}),
        AnswerItem::Call { id, name, arguments } => {
            let input: Map<String, Value> = serde_json::from_str(arguments).unwrap_or_default();
            json!({"type": "tool_use", "id": id, "name": name, "input": input})
        }
    }
}

/// A content block before its first delta.
pub fn empty_block(item: &AnswerItem) -> Value {
    match item {
        AnswerItem::Reasoning { .. } => json!({"type": "thinking", "thinking": "", "signature": ""}),
        AnswerItem::Text { .. } => json!({"type": "text", "text": ""}),
        AnswerItem::Call { id, name, .. } => json!({"type": "tool_use", "id": id, "name": name, "input": {}}),
    }
}
