//! A completion as llama.cpp's events, which have no names and no last `[DONE]`.

use super::answer::{ChoiceFacts, NativeAnswer};
use super::error::error_body;
use crate::delta::{Delta, ProgressNotice};
use crate::events::WriteEvents;
use crate::fold::AnswerFold;
use pagetide_base::error::ApiError;
use serde::Serialize;

pub struct CompletionEvents {
    answer: NativeAnswer,
    choices: Vec<ChoiceProgress>,
}

#[derive(Clone, Default)]
struct ChoiceProgress {
    has_new_line: bool,
}

impl CompletionEvents {
    pub fn new(answer: NativeAnswer) -> Self {
        Self { answer, choices: Vec::new() }
    }
}

impl WriteEvents for CompletionEvents {
    fn begin(&mut self, _: &mut Vec<u8>, answers: &AnswerFold) {
        self.choices = vec![ChoiceProgress::default(); answers.num_choices()];
    }

    fn delta(&mut self, out: &mut Vec<u8>, delta: Delta, answers: &AnswerFold) {
        let facts = ChoiceFacts::new(answers, delta.choice);
        let choice = &mut self.choices[delta.choice as usize];
        choice.has_new_line |= delta.text.contains('\n');
        if !delta.text.is_empty() || !delta.tokens.is_empty() {
            write(out, &self.answer.part(&delta, &facts));
        }
        if delta.finish.is_some() {
            write(out, &self.answer.last_part(&delta, &facts, choice.has_new_line));
        }
    }

    fn progress(&mut self, out: &mut Vec<u8>, notice: ProgressNotice, _: &AnswerFold) {
        write(out, &self.answer.progress(notice));
    }

    fn error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        write(out, &error_body(error, ""));
    }

    fn end(&mut self, _: &mut Vec<u8>, _: &AnswerFold) {}
}

fn write(out: &mut Vec<u8>, event: &impl Serialize) {
    out.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut *out, event).expect("an event has only string keys and plain values");
    out.extend_from_slice(b"\n\n");
}
