//! The answer as Anthropic's events.

use super::answer::{MessageAnswer, empty_block};
use super::error::error_event;
use crate::delta::Delta;
use crate::events::{WriteEvents, write_named_event};
use crate::fold::AnswerFold;
use crate::items::{AnswerItem, ItemChange};
use pagetide_base::error::ApiError;
use serde_json::{Value, json};

pub struct MessageEvents {
    message: MessageAnswer,
    begun: bool,
}

impl MessageEvents {
    pub fn new(message: MessageAnswer) -> Self {
        Self { message, begun: false }
    }
}

impl WriteEvents for MessageEvents {
    fn delta(&mut self, out: &mut Vec<u8>, delta: Delta, answers: &AnswerFold) {
        // Not before the first token: only then is known how much of the prompt came from the cache.
        if !std::mem::replace(&mut self.begun, true) {
            let message = self.message.begun(answers.usage());
            write(out, "message_start", json!({ "message": message }));
        }
        self.message.push(delta, |index, item, change| block_event(out, index, item, change));
    }

    fn error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        write(out, "error", error_event(error));
    }

    fn end(&mut self, out: &mut Vec<u8>, answers: &AnswerFold) {
        let (stop_reason, stop_sequence) = self.message.stop();
        let delta = json!({"stop_reason": stop_reason, "stop_sequence": stop_sequence});
        let usage = MessageAnswer::usage(answers.usage());
        write(out, "message_delta", json!({"delta": delta, "usage": usage}));
        write(out, "message_stop", json!({}));
    }
}

fn block_event(out: &mut Vec<u8>, index: usize, item: &AnswerItem, change: ItemChange<'_>) {
    match change {
        ItemChange::Begin => {
            write(out, "content_block_start", json!({"index": index, "content_block": empty_block(item)}));
        }
        ItemChange::More(more, _) => {
            let delta = match item {
                AnswerItem::Reasoning { .. } => json!({"type": "thinking_delta", "thinking": more}),
                AnswerItem::Text { .. } => json!({"type": "text_delta", "text": more}),
                AnswerItem::Call { .. } => json!({"type": "input_json_delta", "partial_json": more}),
            };
            write(out, "content_block_delta", json!({"index": index, "delta": delta}));
        }
        ItemChange::End { .. } => write(out, "content_block_stop", json!({ "index": index })),
    }
}

fn write(out: &mut Vec<u8>, kind: &str, mut event: Value) {
    event["type"] = kind.into();
    write_named_event(out, kind, &event);
}
