//! The answer as Responses' events.

use super::LOGPROBS_COPIES;
use super::answer::{ItemJson, ItemWriter, LogprobsJson, OutputItem, PartJson, Response, ResponseJson};
use crate::delta::{Delta, ProgressNotice};
use crate::events::{WriteEvents, write_named_event};
use crate::fold::AnswerFold;
use crate::items::{AnswerItem, ItemChange};
use crate::timings::{PromptProgress, Timings};
use pagetide_base::error::ApiError;
use serde::Serialize;

pub struct ResponseEvents {
    response: Response,
    next: u64,
}

impl ResponseEvents {
    pub fn new(response: Response) -> Self {
        Self { response, next: 0 }
    }
}

#[derive(Serialize)]
struct Lifecycle<'a> {
    response: ResponseJson<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_progress: Option<PromptProgress>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<Timings>,
}

impl<'a> Lifecycle<'a> {
    fn of(response: ResponseJson<'a>) -> Self {
        Self { response, prompt_progress: None, timings: None }
    }
}

impl WriteEvents for ResponseEvents {
    const LOGPROBS_COPIES: usize = LOGPROBS_COPIES;

    fn begin(&mut self, out: &mut Vec<u8>, _: &AnswerFold) {
        for kind in ["response.created", "response.in_progress"] {
            write(out, &mut self.next, kind, Lifecycle::of(self.response.in_progress()));
        }
    }

    fn progress(
        &mut self,
        out: &mut Vec<u8>,
        ProgressNotice { progress, timings, .. }: ProgressNotice,
        _: &AnswerFold,
    ) {
        let response = self.response.in_progress();
        let event = Lifecycle { response, prompt_progress: Some(progress), timings };
        write(out, &mut self.next, "response.in_progress", event);
    }

    fn delta(&mut self, out: &mut Vec<u8>, delta: Delta, answers: &AnswerFold) {
        let (next, timings) = (&mut self.next, answers.part_timings(delta.choice));
        self.response.push(delta, |writer, at, change, status| {
            for (kind, event) in item_events(writer, at, change, status, timings) {
                write(out, next, kind, event);
            }
        });
    }

    fn error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        write(out, &mut self.next, "response.failed", Lifecycle::of(self.response.failed(error)));
    }

    fn end(&mut self, out: &mut Vec<u8>, answers: &AnswerFold) {
        self.response.asked(answers.prompt_tokens(0));
        let kind = if self.response.is_incomplete() { "response.incomplete" } else { "response.completed" };
        let response = self.response.ended(answers.usage());
        write(out, &mut self.next, kind, Lifecycle { timings: answers.timings(0), ..Lifecycle::of(response) });
    }
}

/// Adds `event` with its type and number.
fn write(out: &mut Vec<u8>, next: &mut u64, kind: &'static str, event: impl Serialize) {
    #[derive(Serialize)]
    struct Numbered<E> {
        #[serde(flatten)]
        event: E,
        r#type: &'static str,
        sequence_number: u64,
    }
    write_named_event(out, kind, &Numbered { event, r#type: kind, sequence_number: *next });
    *next += 1;
}

/// An event about an item.
#[derive(Serialize)]
#[serde(untagged)]
enum ItemEvent<'a> {
    Whole {
        output_index: usize,
        item: ItemJson<'a>,
    },
    Within {
        item_id: &'a str,
        output_index: usize,
        /// Of an item that has parts: it has one.
        #[serde(skip_serializing_if = "Option::is_none")]
        content_index: Option<usize>,
        #[serde(flatten)]
        what: Within<'a>,
    },
}

/// What an event says of an item's inside.
#[derive(Serialize)]
#[serde(untagged)]
enum Within<'a> {
    Part {
        part: Option<PartJson<'a>>,
    },
    TextDelta {
        delta: &'a str,
        logprobs: LogprobsJson<'a>,
        #[serde(skip_serializing_if = "Option::is_none")]
        timings: Option<Timings>,
    },
    Delta {
        delta: &'a str,
    },
    Text {
        text: &'a str,
        logprobs: LogprobsJson<'a>,
    },
    Reasoning {
        text: &'a str,
    },
    Call {
        name: &'a str,
        arguments: &'a str,
    },
}

/// What a change of an item is in events, in their order.
fn item_events<'a>(
    writer: &'a ItemWriter,
    at: &OutputItem<'a>,
    change: ItemChange<'a>,
    status: &'static str,
    timings: Option<Timings>,
) -> Vec<(&'static str, ItemEvent<'a>)> {
    let item = at.item;
    let has_parts = !matches!(item, AnswerItem::Call { .. });
    let of_item = || ItemEvent::Whole { output_index: at.index, item: writer.item(at, status) };
    let within = |what| {
        let content_index = has_parts.then_some(0);
        ItemEvent::Within { item_id: at.id, output_index: at.index, content_index, what }
    };
    let part = || within(Within::Part { part: writer.part(item) });
    let mut events = Vec::new();
    match (change, item) {
        (ItemChange::Begin, _) => {
            events.push(("response.output_item.added", of_item()));
            if has_parts {
                events.push(("response.content_part.added", part()));
            }
        }
        (ItemChange::More(delta, _), AnswerItem::Reasoning { .. }) => {
            events.push(("response.reasoning_text.delta", within(Within::Delta { delta })));
        }
        (ItemChange::More(delta, positions), AnswerItem::Text { .. }) => {
            let delta = Within::TextDelta { delta, logprobs: writer.logprobs(positions), timings };
            events.push(("response.output_text.delta", within(delta)));
        }
        (ItemChange::More(delta, _), AnswerItem::Call { .. }) => {
            events.push(("response.function_call_arguments.delta", within(Within::Delta { delta })));
        }
        (ItemChange::End { .. }, _) => {
            events.push(match item {
                AnswerItem::Reasoning { text } => ("response.reasoning_text.done", within(Within::Reasoning { text })),
                AnswerItem::Text { text, positions } => {
                    let text = Within::Text { text, logprobs: writer.logprobs(positions) };
                    ("response.output_text.done", within(text))
                }
                AnswerItem::Call { name, arguments, .. } => (
                    "response.function_call_arguments.done",
                    within(Within::Call { name: writer.function_name(name), arguments }),
                ),
            });
            if has_parts {
                events.push(("response.content_part.done", part()));
            }
            events.push(("response.output_item.done", of_item()));
        }
    }
    events
}
