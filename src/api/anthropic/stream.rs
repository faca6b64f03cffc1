//! The answer as Anthropic's events.

use super::answer::{Message, empty_block};
use super::error::error_body;
use crate::api::delta::Delta;
use crate::api::events::{WriteEvents, write_named_event};
use crate::api::fold::AnswerFold;
use crate::api::items::{Change, Item};
use crate::error::ApiError;
use serde_json::{Value, json};

pub struct Events {
    message: Message,
    begun: bool,
}

impl Events {
    pub fn new(message: Message) -> Self {
        Self { message, begun: false }
    }
}

impl WriteEvents for Events {
    fn delta(&mut self, out: &mut Vec<u8>, delta: Delta, answers: &AnswerFold) {
        // Not before the first token: only then is known how much of the prompt came from the cache.
        if !std::mem::replace(&mut self.begun, true) {
            let message = self.message.begun(answers.usage());
            write(out, "message_start", json!({ "message": message }));
        }
        self.message.push(delta, |index, item, change| block_event(out, index, item, change));
    }

    fn error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        write(out, "error", error_body(error));
    }

    fn end(&mut self, out: &mut Vec<u8>, answers: &AnswerFold) {
        let (stop_reason, stop_sequence) = self.message.stop();
        let delta = json!({"stop_reason": stop_reason, "stop_sequence": stop_sequence});
        let usage = Message::usage(answers.usage());
        write(out, "message_delta", json!({"delta": delta, "usage": usage}));
        write(out, "message_stop", json!({}));
    }
}

fn block_event(out: &mut Vec<u8>, index: usize, item: &Item, change: Change<'_>) {
    match change {
        Change::Begin => {
            write(out, "content_block_start", json!({"index": index, "content_block": empty_block(item)}));
        }
        Change::More(more, _) => {
            let delta = match item {
                Item::Reasoning { .. } => json!({"type": "thinking_delta", "thinking": more}),
                Item::Text { .. } => json!({"type": "text_delta", "text": more}),
                Item::Call { .. } => json!({"type": "input_json_delta", "partial_json": more}),
            };
            write(out, "content_block_delta", json!({"index": index, "delta": delta}));
        }
        Change::End { .. } => write(out, "content_block_stop", json!({ "index": index })),
    }
}

fn write(out: &mut Vec<u8>, kind: &str, mut event: Value) {
    event["type"] = kind.into();
    write_named_event(out, kind, &event);
}
