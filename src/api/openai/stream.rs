//! A chat's or completion's answer as chunks.

use super::Endpoint;
use super::error::ErrorAnswer;
use super::response::OpenAiAnswer;
use crate::delta::Delta;
use crate::events::{WriteEvents, write_done};
use crate::fold::AnswerFold;
use crate::model_info::ModelInfo;
use crate::request::{ApiRequest, StreamOptions};
use crate::usage::Usage;
use pagetide_base::error::ApiError;

pub struct Chunks {
    answer: OpenAiAnswer,
    options: StreamOptions,
    /// Whether a choice's first chunk has been written.
    begun: Vec<bool>,
}

impl Chunks {
    pub fn new(endpoint: Endpoint, request: &ApiRequest, model: &ModelInfo) -> Self {
        let answer = OpenAiAnswer::new(endpoint, request, model);
        Self { answer, options: request.stream.unwrap_or_default(), begun: Vec::new() }
    }

    fn event(&self, out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>, &OpenAiAnswer)) {
        out.extend_from_slice(b"data: ");
        write(out, &self.answer);
        out.extend_from_slice(b"\n\n");
    }
}

impl WriteEvents for Chunks {
    fn begin(&mut self, _: &mut Vec<u8>, answers: &AnswerFold) {
        self.begun = vec![false; answers.num_choices()];
    }

    fn delta(&mut self, out: &mut Vec<u8>, delta: Delta, answers: &AnswerFold) {
        let usage = match self.options {
            StreamOptions { include_usage: false, .. } => None,
            StreamOptions { continuous_usage_stats: false, .. } => Some(None),
            StreamOptions { .. } => Some(Some(answers.choice_usage(delta.choice))),
        };
        let first = !std::mem::replace(&mut self.begun[delta.choice as usize], true);
        if first && self.answer.has_role() {
            let usage = usage.map(|usage| usage.map(Usage::of_prompt));
            self.event(out, |out, answer| answer.write_role(out, delta.choice, answers, usage));
        }
        if self.answer.is_silent(&delta) {
            return;
        }
        self.event(out, |out, answer| answer.write_delta(out, &delta, first, answers, usage));
    }

    fn error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        let body = serde_json::json!(ErrorAnswer::from(error));
        self.event(out, |out, _| out.extend_from_slice(body.to_string().as_bytes()));
    }

    fn end(&mut self, out: &mut Vec<u8>, answers: &AnswerFold) {
        if self.options.include_usage {
            self.event(out, |out, answer| answer.write_usage(out, answers));
        }
        write_done(out);
    }
}
