//! Answers to requests about logits, and what was sampled, until it is asked for.

use crate::backend::{LogitsRequest, LogitsResult, LogitsWant, MAX_STEPS_IN_FLIGHT};
use crate::ids::TokenId;
use crate::sampling::sampler::{History, Sampler};
use std::collections::VecDeque;

#[derive(Default)]
pub(super) struct Sampling {
    sampler: Sampler,
    /// Of the step under way, in the order of its requests.
    results: Vec<LogitsResult>,
    /// Of steps that were ended and not finished.
    ended: VecDeque<Vec<LogitsResult>>,
    /// What each request of the step before sampled.
    tokens: Vec<Option<TokenId>>,
    /// A row that is still needed after it was sampled from, which changes it.
    row: Vec<f32>,
    /// An output with the token that its owner did not know yet.
    output: Vec<TokenId>,
}

impl Sampling {
    /// The token that request `place` of the step before sampled.
    pub fn token(&self, place: u32) -> TokenId {
        self.tokens[place as usize].expect("only a request that samples is a source of tokens")
    }

    /// `logits: [_, vocab_size]` are changed.
    pub fn sample(&mut self, logits: &mut [f32], vocab_size: usize, requests: &[LogitsRequest<'_>]) {
        for (i, request) in requests.iter().enumerate() {
            let row = &mut logits[request.row * vocab_size..][..vocab_size];
            if requests[i + 1..].iter().any(|later| later.row == request.row) {
                let mut copy = std::mem::take(&mut self.row);
                copy.clear();
                copy.extend_from_slice(row);
                self.answer(&mut copy, &request.want);
                self.row = copy;
            } else {
                self.answer(row, &request.want);
            }
        }
    }

    fn answer(&mut self, row: &mut [f32], want: &LogitsWant<'_>) {
        let result = match *want {
            LogitsWant::Sample { params, limits, prompt, output, pending: None, draw } => {
                LogitsResult::Sampled(self.sampler.sample(row, params, limits, History { prompt, output }, draw))
            }
            LogitsWant::Sample { params, limits, prompt, output, pending: Some(place), draw } => {
                let last = self.token(place);
                self.output.clear();
                self.output.extend_from_slice(output);
                self.output.push(last);
                let history = History { prompt, output: &self.output };
                LogitsResult::Sampled(self.sampler.sample(row, params, limits, history, draw))
            }
            LogitsWant::PromptLogprobs { target, num_top } => {
                LogitsResult::PromptLogprobs(self.sampler.prompt_logprobs(row, target, num_top))
            }
        };
        self.results.push(result);
    }

    /// Adds rows to the step's results.
    pub fn add_rows(&mut self, rows: Vec<f32>) {
        self.results.push(LogitsResult::Rows(rows));
    }

    pub fn end_step(&mut self) {
        assert!(self.ended.len() < MAX_STEPS_IN_FLIGHT, "more than {MAX_STEPS_IN_FLIGHT} steps in flight");
        let results = std::mem::take(&mut self.results);
        self.tokens.clear();
        self.tokens.extend(results.iter().map(|result| match result {
            LogitsResult::Sampled(sampled) => Some(sampled.token),
            LogitsResult::PromptLogprobs(_) | LogitsResult::Rows(_) => None,
        }));
        self.ended.push_back(results);
    }

    pub fn finish_step(&mut self) -> Vec<LogitsResult> {
        self.ended.pop_front().expect("a step was ended that is not finished")
    }
}
