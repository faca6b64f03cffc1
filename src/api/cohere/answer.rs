//! Answers of chat, whole and as events.

use crate::delta::{Delta, Finish, Position, StopReason};
use crate::events::{WriteEvents, write_done, write_named_event};
use crate::fold::AnswerFold;
use crate::id::random_hex;
use crate::items::{AnswerItem, AnswerItems, ItemChange};
use crate::model_info::ModelInfo;
use crate::openai::logprobs::json_logprob;
use crate::usage::Usage;
use pagetide_base::error::ApiError;
use pagetide_text::tokenizer::Tokenizer;
use serde_json::{Value, json};
use std::sync::Arc;

/// An answer in the making.
pub struct CohereAnswer {
    id: String,
    tokenizer: Arc<Tokenizer>,
    items: AnswerItems,
    finish: Option<Finish>,
    /// Whether a stream's first event has been written.
    begun: bool,
}

impl CohereAnswer {
    pub fn new(model: &ModelInfo) -> Self {
        Self {
            id: random_hex(),
            tokenizer: Arc::clone(&model.tokenizer),
            items: AnswerItems::default(),
            finish: None,
            begun: false,
        }
    }

    /// Takes what the answer gained and tells what that does to which item.
    pub fn push(&mut self, mut delta: Delta, mut tell: impl FnMut(usize, &AnswerItem, ItemChange<'_>)) {
        let finish = delta.finish.take();
        self.items.push(delta, &mut tell);
        if finish.is_some() {
            self.items.close(true, &mut tell);
            self.finish = finish;
        }
    }

    /// When all is said.
    pub fn whole(&self, usage: Usage) -> Value {
        let (mut content, mut calls, mut logprobs) = (Vec::new(), Vec::new(), Vec::new());
        for item in self.items.list() {
            match item {
                AnswerItem::Reasoning { text } => content.push(json!({"type": "thinking", "thinking": text})),
                AnswerItem::Text { text, positions } => {
                    content.push(json!({"type": "text", "text": text}));
                    logprobs.extend(positions.iter().filter_map(|at| self.logprob(std::slice::from_ref(at))));
                }
                AnswerItem::Call { id, name, arguments } => calls.push(call(id, name, arguments)),
            }
        }
        if content.is_empty() && calls.is_empty() {
            content.push(json!({"type": "text", "text": ""}));
        }
        let mut message = json!({"role": "assistant"});
        if !content.is_empty() {
            message["content"] = content.into();
        }
        if !calls.is_empty() {
            message["tool_calls"] = calls.into();
        }
        let mut answer = json!({
            "id": self.id,
            "finish_reason": self.finish_reason(),
            "message": message,
            "usage": told_usage(usage),
        });
        if !logprobs.is_empty() {
            answer["logprobs"] = logprobs.into();
        }
        answer
    }

    fn finish_reason(&self) -> &'static str {
        let calls = || self.items.list().iter().any(|item| matches!(item, AnswerItem::Call { .. }));
        match &self.finish {
            Some(finish) if finish.reason == "length" => "MAX_TOKENS",
            Some(Finish { stop_reason: Some(StopReason::Text(_)), .. }) => "STOP_SEQUENCE",
            _ if calls() => "TOOL_CALL",
            _ => "COMPLETE",
        }
    }

    /// The log-probabilities of tokens; `None` where they have none.
    fn logprob(&self, positions: &[Position]) -> Option<Value> {
        let known: Vec<_> = positions.iter().filter_map(|at| Some(&at.logprobs.as_ref()?.chosen)).collect();
        let text: String = known.iter().map(|of| self.tokenizer.token_text(of.token)).collect();
        let ids: Vec<u32> = known.iter().map(|of| of.token).collect();
        let logprobs: Vec<f64> = known.iter().map(|of| json_logprob(of)).collect();
        (!known.is_empty()).then(|| json!({"text": text, "token_ids": ids, "logprobs": logprobs}))
    }
}

fn call(id: &str, name: &str, arguments: &str) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

fn told_usage(usage: Usage) -> Value {
    let tokens = json!({"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens});
    let cached = usage.prompt_tokens_details.cached_tokens;
    usage.with_kv_in(json!({"billed_units": tokens, "tokens": tokens, "cached_tokens": cached}))
}

impl WriteEvents for CohereAnswer {
    fn delta(&mut self, out: &mut Vec<u8>, delta: Delta, _: &AnswerFold) {
        if !std::mem::replace(&mut self.begun, true) {
            let message =
                json!({"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []});
            write(out, "message-start", json!({"id": self.id, "delta": {"message": message}}));
        }
        let mut events = Vec::new();
        self.push(delta, |index, item, change| events.push(Change::new(index, item, change)));
        for change in events {
            change.write(out, self);
        }
    }

    fn error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        let delta = json!({"finish_reason": "ERROR", "error": error.with_param()});
        write(out, "message-end", json!({"id": self.id, "delta": delta}));
        write_done(out);
    }

    fn end(&mut self, out: &mut Vec<u8>, answers: &AnswerFold) {
        let delta = json!({"finish_reason": self.finish_reason(), "usage": told_usage(answers.usage())});
        write(out, "message-end", json!({"id": self.id, "delta": delta}));
        write_done(out);
    }
}

/// What happened to an item, to be written when the answer has taken all of a delta.
struct Change {
    index: usize,
    kind: ChangedItem,
    what: WhatChanged,
}

enum ChangedItem {
    Thinking,
    Text,
    Call { id: String, name: String },
}

enum WhatChanged {
    Begun,
    More(String, Vec<Position>),
    Ended,
}

impl Change {
    fn new(index: usize, item: &AnswerItem, change: ItemChange<'_>) -> Self {
        let kind = match item {
            AnswerItem::Reasoning { .. } => ChangedItem::Thinking,
            AnswerItem::Text { .. } => ChangedItem::Text,
            AnswerItem::Call { id, name, .. } => ChangedItem::Call { id: id.clone(), name: name.clone() },
        };
        let what = match change {
            ItemChange::Begin => WhatChanged::Begun,
            ItemChange::More(more, positions) => WhatChanged::More(more.to_owned(), positions.to_vec()),
            ItemChange::End { .. } => WhatChanged::Ended,
        };
        Self { index, kind, what }
    }

    /// Content and calls are numbered apart.
    fn write(self, out: &mut Vec<u8>, answer: &CohereAnswer) {
        let is_call = |item: &AnswerItem| matches!(item, AnswerItem::Call { .. });
        let before = &answer.items.list()[..self.index];
        let wants_call = matches!(self.kind, ChangedItem::Call { .. });
        let index = before.iter().filter(|item| is_call(item) == wants_call).count();
        let (kind, mut event) = match (&self.kind, self.what) {
            (ChangedItem::Call { id, name }, WhatChanged::Begun) => {
                ("tool-call-start", message(json!({"tool_calls": call(id, name, "")})))
            }
            (ChangedItem::Call { .. }, WhatChanged::More(more, _)) => {
                ("tool-call-delta", message(json!({"tool_calls": {"function": {"arguments": more}}})))
            }
            (ChangedItem::Call { .. }, WhatChanged::Ended) => ("tool-call-end", json!({})),
            (ChangedItem::Thinking, WhatChanged::Begun) => {
                ("content-start", message(json!({"content": {"type": "thinking", "thinking": ""}})))
            }
            (ChangedItem::Thinking, WhatChanged::More(more, _)) => {
                ("content-delta", message(json!({"content": {"thinking": more}})))
            }
            (ChangedItem::Text, WhatChanged::Begun) => {
                ("content-start", message(json!({"content": {"type": "text", "text": ""}})))
            }
            (ChangedItem::Text, WhatChanged::More(more, positions)) => {
                let mut event = message(json!({"content": {"text": more}}));
                if let Some(logprobs) = answer.logprob(&positions) {
                    event["logprobs"] = logprobs;
                }
                ("content-delta", event)
            }
            (_, WhatChanged::Ended) => ("content-end", json!({})),
        };
        event["index"] = index.into();
        write(out, kind, event);
    }
}

fn message(message: Value) -> Value {
    json!({"delta": {"message": message}})
}

fn write(out: &mut Vec<u8>, kind: &str, mut event: Value) {
    event["type"] = kind.into();
    write_named_event(out, kind, &event);
}
