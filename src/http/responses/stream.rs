//! The answer as Responses' events.

use super::answer::{ItemWriter, OutputItem, Response};
use crate::error::ApiError;
use crate::http::generation::{Delta, Generation};
use crate::http::items::{Change, Item};
use crate::http::stream::{WriteEvents, write_named_event};
use serde_json::{Value, json};

pub struct Events {
    response: Response,
    next: u64,
}

impl Events {
    pub fn new(response: Response) -> Self {
        Self { response, next: 0 }
    }

    fn lifecycle(&mut self, out: &mut Vec<u8>, kind: &str, response: Value) {
        write(out, &mut self.next, kind, json!({ "response": response }));
    }
}

impl WriteEvents for Events {
    fn begin(&mut self, out: &mut Vec<u8>, _: &Generation) {
        let response = self.response.in_progress();
        self.lifecycle(out, "response.created", response.clone());
        self.lifecycle(out, "response.in_progress", response);
    }

    fn delta(&mut self, out: &mut Vec<u8>, delta: Delta, _: &Generation) {
        let next = &mut self.next;
        self.response.push(delta, |writer, at, change, status| {
            for (kind, event) in item_events(writer, at, change, status) {
                write(out, next, kind, event);
            }
        });
    }

    fn error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        let response = self.response.failed(error);
        self.lifecycle(out, "response.failed", response);
    }

    fn end(&mut self, out: &mut Vec<u8>, generation: &Generation) {
        let kind = if self.response.is_incomplete() { "response.incomplete" } else { "response.completed" };
        let response = self.response.ended(generation.usage());
        self.lifecycle(out, kind, response);
    }
}

/// Adds `event` with its type and number.
fn write(out: &mut Vec<u8>, next: &mut u64, kind: &str, mut event: Value) {
    event["type"] = kind.into();
    event["sequence_number"] = (*next).into();
    *next += 1;
    write_named_event(out, kind, &event);
}

/// What a change of an item is in events, in their order.
fn item_events(
    writer: &ItemWriter,
    at: &OutputItem<'_>,
    change: Change<'_>,
    status: &str,
) -> Vec<(&'static str, Value)> {
    // Of the item, or of its one part.
    let of_item = || json!({"output_index": at.index, "item": writer.item(at, status)});
    let within = |more: Value| {
        let mut event = json!({"item_id": at.id, "output_index": at.index});
        if !matches!(at.item, Item::Call { .. }) {
            event["content_index"] = 0.into();
        }
        if let (Value::Object(event), Value::Object(more)) = (&mut event, more) {
            event.extend(more);
        }
        event
    };
    let part = || within(json!({"part": writer.part(at.item)}));
    let has_parts = !matches!(at.item, Item::Call { .. });
    let mut events = Vec::new();
    match (&change, at.item) {
        (Change::Begin, _) => {
            events.push(("response.output_item.added", of_item()));
            if has_parts {
                events.push(("response.content_part.added", part()));
            }
        }
        (Change::More(more, _), Item::Reasoning { .. }) => {
            events.push(("response.reasoning_text.delta", within(json!({ "delta": more }))));
        }
        (Change::More(more, positions), Item::Text { .. }) => {
            let event = within(json!({"delta": more, "logprobs": writer.logprobs(positions)}));
            events.push(("response.output_text.delta", event));
        }
        (Change::More(more, _), Item::Call { .. }) => {
            events.push(("response.function_call_arguments.delta", within(json!({ "delta": more }))));
        }
        (Change::End { .. }, item) => {
            events.push(match item {
                Item::Reasoning { text } => ("response.reasoning_text.done", within(json!({ "text": text }))),
                Item::Text { text, positions } => {
                    let event = within(json!({"text": text, "logprobs": writer.logprobs(positions)}));
                    ("response.output_text.done", event)
                }
                Item::Call { name, arguments, .. } => {
                    let event = within(json!({"name": name, "arguments": arguments}));
                    ("response.function_call_arguments.done", event)
                }
            });
            if has_parts {
                events.push(("response.content_part.done", part()));
            }
            events.push(("response.output_item.done", of_item()));
        }
    }
    events
}
