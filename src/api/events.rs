//! Answers as streams of events: what every API's writer does.

use crate::delta::{Delta, PauseNotice, ProgressNotice};
use crate::fold::AnswerFold;
use pagetide_base::error::ApiError;
use serde::Serialize;

/// How an API writes the events of one answer.
pub trait WriteEvents: Unpin + 'static {
    /// How often log-probabilities are in the answer, where they are kept to its end; 0 where they are not kept.
    const LOGPROBS_COPIES: usize = 0;
    const CONTENT_TYPE: &'static str = "text/event-stream; charset=utf-8";

    /// The request has been accepted.
    fn begin(&mut self, _out: &mut Vec<u8>, _answers: &AnswerFold) {}
    fn delta(&mut self, out: &mut Vec<u8>, delta: Delta, answers: &AnswerFold);
    /// Memory pressure has paused a choice, or it goes on. Formats that have no comments leave it out.
    fn pause(&mut self, out: &mut Vec<u8>, pause: PauseNotice, num_choices: usize) {
        write_pause(out, pause, num_choices);
    }
    /// More of a prompt is computed. Formats that cannot say so leave it out.
    fn progress(&mut self, _out: &mut Vec<u8>, _notice: ProgressNotice, _answers: &AnswerFold) {}
    /// The request failed; nothing follows.
    fn error(&mut self, out: &mut Vec<u8>, error: &ApiError);
    /// Every choice is complete; nothing follows.
    fn end(&mut self, out: &mut Vec<u8>, answers: &AnswerFold);
}

/// Adds an event that has a name.
pub fn write_named_event(out: &mut Vec<u8>, name: &str, data: &impl Serialize) {
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"\ndata: ");
    serde_json::to_writer(&mut *out, data).expect("an event has only string keys and plain values");
    out.extend_from_slice(b"\n\n");
}

/// Adds an event without a name.
pub fn write_event(out: &mut Vec<u8>, data: &impl Serialize) {
    out.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut *out, data).expect("an event has only string keys and plain values");
    out.extend_from_slice(b"\n\n");
}

/// Adds the event that some APIs end a stream with.
pub fn write_done(out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: [DONE]\n\n");
}

/// Adds a comment, which clients that know nothing of pauses skip.
fn write_pause(out: &mut Vec<u8>, PauseNotice { choice, after }: PauseNotice, num_choices: usize) {
    let mut comment = String::from(": ");
    if num_choices > 1 {
        comment.push_str(&format!("choice {choice} "));
    }
    match after {
        None => comment.push_str("paused"),
        Some(after) => comment.push_str(&format!("resumed after {} ms", after.as_millis())),
    }
    out.extend_from_slice(comment.as_bytes());
    out.extend_from_slice(b"\n\n");
}
