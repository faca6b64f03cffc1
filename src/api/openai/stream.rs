//! A chat's or completion's answer as chunks.

use super::Endpoint;
use super::response::OpenAiAnswer;
use crate::delta::{Delta, ProgressNotice};
use crate::events::{WriteEvents, write_done};
use crate::fold::AnswerFold;
use crate::model_info::ModelInfo;
use crate::request::{ApiRequest, StreamOptions};
use crate::usage::Usage;
use pagetide_base::error::ApiError;

pub struct Chunks {
    answer: OpenAiAnswer,
    options: StreamOptions,
    choices: Vec<ChunkProgress>,
}

#[derive(Clone, Copy, Default)]
struct ChunkProgress {
    /// Its first chunk has been written.
    begun: bool,
    has_new_line: bool,
}

impl Chunks {
    pub fn new(endpoint: Endpoint, request: &ApiRequest, model: &ModelInfo) -> Self {
        let answer = OpenAiAnswer::new(endpoint, request, model);
        Self { answer, options: request.stream.unwrap_or_default(), choices: Vec::new() }
    }

    fn event(&self, out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>, &OpenAiAnswer)) {
        out.extend_from_slice(b"data: ");
        write(out, &self.answer);
        out.extend_from_slice(b"\n\n");
    }
}

impl WriteEvents for Chunks {
    fn begin(&mut self, _: &mut Vec<u8>, answers: &AnswerFold) {
        self.choices = vec![ChunkProgress::default(); answers.num_choices()];
    }

    fn delta(&mut self, out: &mut Vec<u8>, delta: Delta, answers: &AnswerFold) {
        let usage = match self.options {
            StreamOptions { include_usage: false, .. } => None,
            StreamOptions { continuous_usage_stats: false, .. } => Some(None),
            StreamOptions { .. } => Some(Some(answers.choice_usage(delta.choice))),
        };
        let choice = &mut self.choices[delta.choice as usize];
        let first = !std::mem::replace(&mut choice.begun, true);
        choice.has_new_line |= delta.text.contains('\n');
        let has_new_line = choice.has_new_line;
        if first && self.answer.has_role() {
            let usage = usage.map(|usage| usage.map(Usage::of_prompt));
            self.event(out, |out, answer| answer.write_role(out, delta.choice, answers, usage));
        }
        if self.answer.is_silent(&delta) {
            return;
        }
        self.event(out, |out, answer| answer.write_delta(out, &delta, first, has_new_line, answers, usage));
    }

    fn progress(&mut self, out: &mut Vec<u8>, notice: ProgressNotice, _: &AnswerFold) {
        self.event(out, |out, answer| answer.write_progress(out, notice));
    }

    fn error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        let body = self.answer.error_body(error);
        self.event(out, |out, _| out.extend_from_slice(body.to_string().as_bytes()));
    }

    fn end(&mut self, out: &mut Vec<u8>, answers: &AnswerFold) {
        if self.options.include_usage {
            self.event(out, |out, answer| answer.write_usage(out, answers));
        }
        write_done(out);
    }
}
