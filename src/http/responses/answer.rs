//! The response object, whole or in the making.

use super::request::Settings;
use crate::actors::runtime::ModelInfo;
use crate::error::ApiError;
use crate::http::generation::{Delta, Position};
use crate::http::items::{Change, Item, Items};
use crate::http::openai::Request;
use crate::http::openai::logprobs::{ChatPosition, chat_positions};
use crate::http::openai::response::{Usage, random_hex, unix_time_s};
use crate::text::tokenizer::Tokenizer;
use serde_json::{Value, json};
use std::sync::Arc;

pub struct Response {
    id: String,
    created_s: u64,
    model: String,
    settings: Settings,
    items: Items,
    /// Of the items, in their order.
    ids: Vec<String>,
    writer: ItemWriter,
    /// The last item was cut off by `max_output_tokens`.
    incomplete: bool,
}

/// An output item and what it is called.
pub struct OutputItem<'a> {
    pub index: usize,
    pub id: &'a str,
    pub item: &'a Item,
}

impl Response {
    pub fn new(settings: Settings, chat: &Request, model: &ModelInfo) -> Self {
        Self {
            id: format!("resp_{}", random_hex()),
            created_s: unix_time_s(),
            model: model.served_name.clone(),
            settings,
            items: Items::default(),
            ids: Vec::new(),
            writer: ItemWriter { tokenizer: Arc::clone(&model.tokenizer), logprobs: chat.answer.logprobs },
            incomplete: false,
        }
    }

    /// Takes what the answer gained. `tell` hears of every change of an item, with the status it has after that.
    pub fn push(&mut self, delta: Delta, mut tell: impl FnMut(&ItemWriter, &OutputItem<'_>, Change<'_>, &'static str)) {
        let finish = delta.finish.as_ref().map(|finish| finish.reason);
        self.incomplete = finish == Some("length");
        let Self { items, ids, writer, incomplete, .. } = self;
        let mut changed = |index: usize, item: &Item, change: Change<'_>| {
            let status = match change {
                Change::Begin => {
                    ids.push(new_item_id(item));
                    "in_progress"
                }
                Change::More(..) => "in_progress",
                Change::End { last } => item_status(last && *incomplete),
            };
            tell(writer, &OutputItem { index, id: &ids[index], item }, change, status);
        };
        items.push(delta, &mut changed);
        if finish.is_some() {
            // A message without text where the model said nothing: clients look into the first item.
            items.close(true, &mut changed);
        }
    }

    /// Before the first item.
    pub fn in_progress(&self) -> Value {
        self.object("in_progress", &[], Value::Null, Value::Null)
    }

    /// When all is said. `usage`: of the request.
    pub fn ended(&self, usage: Usage) -> Value {
        let status = item_status(self.incomplete);
        self.object(status, &self.output(status), Value::Null, Self::usage(usage))
    }

    /// After the engine's error.
    pub fn failed(&self, error: &ApiError) -> Value {
        let error = json!({"code": "server_error", "message": error.message});
        self.object("failed", &self.output("incomplete"), error, Value::Null)
    }

    pub fn is_incomplete(&self) -> bool {
        self.incomplete
    }

    /// The items, the last of which has `status`.
    fn output(&self, status: &str) -> Vec<Value> {
        let items = self.items.list();
        let outputs = items.iter().zip(&self.ids).enumerate().map(|(index, (item, id))| {
            let status = if index + 1 == items.len() { status } else { "completed" };
            self.writer.item(&OutputItem { index, id, item }, status)
        });
        outputs.collect()
    }

    fn usage(usage: Usage) -> Value {
        usage.with_kv_in(json!({
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                // Of a price list: caching costs nothing here.
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }))
    }

    fn object(&self, status: &str, output: &[Value], error: Value, usage: Value) -> Value {
        let settings = &self.settings;
        let ended = matches!(status, "completed" | "incomplete");
        let incomplete_details =
            if status == "incomplete" { json!({"reason": "max_output_tokens"}) } else { Value::Null };
        json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created_s,
            "completed_at": ended.then(unix_time_s),
            "status": status,
            "background": false,
            "error": error,
            "incomplete_details": incomplete_details,
            "instructions": settings.instructions,
            "max_output_tokens": settings.max_output_tokens,
            "max_tool_calls": settings.max_tool_calls,
            "metadata": settings.metadata,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": settings.parallel_tool_calls,
            "previous_response_id": null,
            "prompt_cache_key": settings.prompt_cache_key,
            "reasoning": settings.reasoning,
            "safety_identifier": settings.safety_identifier,
            "service_tier": "default",
            "store": false,
            "temperature": settings.temperature,
            "text": settings.text,
            "tool_choice": settings.tool_choice,
            "tools": settings.tools,
            "top_logprobs": settings.top_logprobs,
            "top_p": settings.top_p,
            "truncation": settings.truncation,
            "usage": usage,
            "user": settings.user,
        })
    }
}

fn item_status(incomplete: bool) -> &'static str {
    if incomplete { "incomplete" } else { "completed" }
}

fn new_item_id(item: &Item) -> String {
    let prefix = match item {
        Item::Reasoning { .. } => "rs",
        Item::Text { .. } => "msg",
        Item::Call { .. } => "fc",
    };
    format!("{prefix}_{}", random_hex())
}

/// How items are written.
pub struct ItemWriter {
    tokenizer: Arc<Tokenizer>,
    /// Most likely tokens reported with each token of a text.
    logprobs: Option<u32>,
}

impl ItemWriter {
    /// The item as it stands. One that has just begun has no parts.
    pub fn item(&self, OutputItem { id, item, .. }: &OutputItem<'_>, status: &str) -> Value {
        let parts = || if status == "in_progress" { json!([]) } else { json!([self.part(item)]) };
        match item {
            Item::Reasoning { .. } => {
                json!({"id": id, "type": "reasoning", "summary": [], "content": parts(), "status": status})
            }
            Item::Text { .. } => {
                json!({"id": id, "type": "message", "role": "assistant", "content": parts(), "status": status})
            }
            Item::Call { id: call_id, name, arguments } => json!({
                "id": id, "type": "function_call", "call_id": call_id, "name": name, "arguments": arguments,
                "status": status,
            }),
        }
    }

    /// The content part of an item that has one.
    pub fn part(&self, item: &Item) -> Value {
        match item {
            Item::Reasoning { text } => json!({"type": "reasoning_text", "text": text}),
            Item::Text { text, positions } => json!({
                "type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs(positions),
            }),
            Item::Call { .. } => Value::Null,
        }
    }

    pub fn logprobs(&self, positions: &[Position]) -> Vec<ChatPosition> {
        self.logprobs.map(|num_top| chat_positions(&self.tokenizer, positions, num_top)).unwrap_or_default()
    }
}
