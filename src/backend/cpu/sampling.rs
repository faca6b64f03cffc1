//! Answers requests about logits, and keeps the results until they are asked for.

use super::team::Team;
use crate::{LogitsRequest, LogitsResult, LogitsWant, MAX_STEPS_IN_FLIGHT};
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::sampler::{History, Sampler};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(super) struct CpuSampling {
    /// One for each member of the team.
    workers: Vec<Mutex<Worker>>,
    /// Results of the current step, in the order of its requests.
    results: Vec<LogitsResult>,
    /// Results of steps that were ended but not finished.
    ended: VecDeque<Vec<LogitsResult>>,
    /// The token that each request of the previous step sampled.
    tokens: Vec<Option<TokenId>>,
}

/// The sampler and buffers of a member of the team.
#[derive(Default)]
struct Worker {
    sampler: Sampler,
    /// A copy of a row of logits that is needed again: sampling changes the row.
    row: Vec<f32>,
    /// An output, completed with the token that the host did not know yet.
    output: Vec<TokenId>,
}

impl CpuSampling {
    pub fn new(num_members: usize) -> Self {
        let workers = (0..num_members).map(|_| Mutex::default()).collect();
        Self { workers, results: Vec::new(), ended: VecDeque::new(), tokens: Vec::new() }
    }

    /// The token that request `place` of the previous step sampled.
    pub fn token(&self, place: u32) -> TokenId {
        self.tokens[place as usize].expect("only a request that samples is a source of tokens")
    }

    /// Answers requests. `logits: [_, vocab_size]` are changed. Requests for the same row are neighbours.
    pub fn sample(&mut self, team: &Team, logits: &mut [f32], vocab_size: usize, requests: &[LogitsRequest<'_>]) {
        assert!(requests.is_sorted_by_key(|request| request.row), "requests in the order of their rows");
        let mut rows = logits.chunks_exact_mut(vocab_size).enumerate();
        let of_rows = requests.chunk_by(|a, b| a.row == b.row).map(|requests| {
            let row = rows.find(|(row, _)| *row == requests[0].row).expect("a request for a row that does not exist").1;
            Mutex::new((requests, row, Vec::with_capacity(requests.len())))
        });
        let of_rows: Vec<_> = of_rows.collect();
        team.for_each_member(of_rows.len(), |member, task| {
            // Neither lock is ever contended.
            let (mut worker, mut of_row) = (lock(&self.workers[member]), lock(&of_rows[task]));
            let (requests, row, results) = &mut *of_row;
            for (i, request) in requests.iter().enumerate() {
                let result = if i + 1 < requests.len() {
                    let mut copy = std::mem::take(&mut worker.row);
                    copy.clear();
                    copy.extend_from_slice(row);
                    let result = self.answer(&mut worker, &mut copy, &request.want);
                    worker.row = copy;
                    result
                } else {
                    self.answer(&mut worker, row, &request.want)
                };
                results.push(result);
            }
        });
        for of_row in of_rows {
            self.results.extend(of_row.into_inner().unwrap_or_else(PoisonError::into_inner).2);
        }
    }

    fn answer(&self, worker: &mut Worker, row: &mut [f32], want: &LogitsWant<'_>) -> LogitsResult {
        let Worker { sampler, output: whole_output, .. } = worker;
        match *want {
            LogitsWant::Sample { params, limits, prompt, output, mu, pending: None, draw } => {
                LogitsResult::Sampled(sampler.sample(row, params, limits, History { prompt, output, mu }, draw))
            }
            LogitsWant::Sample { params, limits, prompt, output, mu, pending: Some(place), draw } => {
                let last = self.token(place);
                whole_output.clear();
                whole_output.extend_from_slice(output);
                whole_output.push(last);
                let history = History { prompt, output: whole_output, mu };
                LogitsResult::Sampled(sampler.sample(row, params, limits, history, draw))
            }
            LogitsWant::PromptLogprobs { target, num_top } => {
                LogitsResult::PromptLogprobs(sampler.prompt_logprobs(row, target, num_top))
            }
        }
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

/// A panic under these locks ends the whole operation, and the caller of the team reports it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
