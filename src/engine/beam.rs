//! Beam search: which continuations of a request's beams go on, and which become results.
//!
//! The rules, the order of their application and the scores are those of transformers' `generate(num_beams=…)`: of all
//! continuations of all beams, the `(1 + ends) · width` with the largest sums of log-probabilities are looked at. Those
//! that end and are among the best `width` become results; the best `width` that do not end go on. A result's score is
//! its sum over its length (with the end token) to the power of `length_penalty`; the best `width` results are kept.

use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::{EarlyStopping, FinishReason, PositionLogprobs, SamplingParams};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The state of a beam besides its tokens.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Beam {
    /// Sum of the log-probabilities of its output.
    pub score: f32,
    /// The log-probabilities of each token of its output.
    pub logprobs: Arc<Vec<PositionLogprobs>>,
}

/// A beam with the most likely tokens after it.
#[derive(Clone, Copy, Debug)]
pub struct OpenBeam<'a> {
    pub beam: &'a Beam,
    pub output: &'a [TokenId],
    /// Best first; at least [`num_candidates`], or as many as there are.
    pub next: &'a PositionLogprobs,
}

/// An output that may become one of the request's results.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hypothesis {
    pub score: f32,
    pub output: Vec<TokenId>,
    pub logprobs: Vec<PositionLogprobs>,
    pub reason: FinishReason,
}

/// One beam of the next step.
#[derive(Clone, Debug)]
pub struct Continuation {
    /// The index of the open beam that it continues.
    pub parent: usize,
    pub token: TokenId,
    pub beam: Beam,
}

/// The state of a request's search without its open beams.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BeamSearch {
    params: Arc<SamplingParams>,
    /// Tokens that the model has room for.
    max_tokens: usize,
    /// Best first, at most as many as the beams.
    results: Vec<Hypothesis>,
    /// False, permanently, once no beam could still become one of the best results.
    can_improve: bool,
}

/// The number of candidate tokens that a search with these parameters needs after each beam.
pub fn num_candidates(params: &SamplingParams) -> u32 {
    let ends = params.end_tokens().count() as u32;
    // Below `min_tokens`, ends do not count.
    num_kept(params) as u32 + if params.min_tokens > 0 { ends } else { 0 }
}

/// Continuations that a step considers.
fn num_kept(params: &SamplingParams) -> usize {
    let width = params.beam.as_ref().map_or(1, |beam| beam.width as usize);
    width * (1 + params.end_tokens().count()).max(2)
}

impl BeamSearch {
    /// A search for outputs of at most `max_tokens` tokens. `params.beam` must be set.
    pub fn new(params: Arc<SamplingParams>, max_tokens: usize) -> Self {
        Self { params, max_tokens, results: Vec::new(), can_improve: true }
    }

    fn width(&self) -> usize {
        self.params.beam.as_ref().map_or(1, |beam| beam.width as usize)
    }

    /// One step. Returns the beams of the next step, best first, or none if the search has ended.
    pub fn step(&mut self, open: &[OpenBeam<'_>]) -> Vec<Continuation> {
        let length = open.first().map_or(0, |beam| beam.output.len()) + 1;
        let mut candidates = self.candidates(open);
        candidates.truncate(num_kept(&self.params));
        let at_limit = length >= self.max_tokens;
        let mut beams = Vec::new();
        let was_full = self.results.len() == self.width();
        let mut ended = Vec::new();
        for (rank, candidate) in candidates.iter().enumerate() {
            match self.end_of(candidate.token, at_limit) {
                None if beams.len() < self.width() => beams.push(candidate.continuation(open, &self.params)),
                Some(reason) if rank < self.width() => ended.push((candidate, reason)),
                _ => {}
            }
        }
        if self.can_improve && !(was_full && self.early_stopping() == EarlyStopping::Yes) {
            for (candidate, reason) in ended {
                self.add(candidate, open, reason);
            }
        }
        let best = beams.first().map(|beam: &Continuation| beam.beam.score);
        self.can_improve &= best.is_some_and(|best| self.could_improve(best, length));
        let is_full = self.results.len() == self.width();
        if !self.can_improve || (is_full && self.early_stopping() == EarlyStopping::Yes) {
            beams.clear();
        }
        beams
    }

    /// The results, best first.
    pub fn results(self) -> Vec<Hypothesis> {
        self.results
    }

    /// Sets the results, as a recording supplies them.
    pub fn set_results(&mut self, results: Vec<Hypothesis>) {
        self.results = results;
    }

    /// The parameters of its request, to change what of them is written down.
    pub fn params_mut(&mut self) -> &mut Arc<SamplingParams> {
        &mut self.params
    }

    fn early_stopping(&self) -> EarlyStopping {
        self.params.beam.as_ref().map_or(EarlyStopping::No, |beam| beam.early_stopping)
    }

    fn length_penalty(&self) -> f32 {
        self.params.beam.as_ref().map_or(1.0, |beam| beam.length_penalty)
    }

    /// All continuations, best first. Ties are broken by the tokens, so that the result does not depend on the order of
    /// the beams.
    fn candidates(&self, open: &[OpenBeam<'_>]) -> Vec<Candidate> {
        let mut all = Vec::new();
        for (parent, beam) in open.iter().enumerate() {
            let no_end = self.params.is_below_min_tokens(beam.output.len());
            for (place, next) in beam.next.top.iter().enumerate() {
                if !(no_end && self.params.end_tokens().any(|end| end == next.token)) {
                    let score = beam.beam.score + next.logprob;
                    all.push(Candidate { parent, token: next.token, place, score });
                }
            }
        }
        let path = |candidate: &Candidate| (open[candidate.parent].output, candidate.token);
        all.sort_by(|a, b| b.score.total_cmp(&a.score).then_with(|| path(a).cmp(&path(b))));
        all
    }

    fn end_of(&self, token: TokenId, at_limit: bool) -> Option<FinishReason> {
        if self.params.eos_token_ids.contains(&token) {
            Some(FinishReason::Eos)
        } else if self.params.stop_token_ids.contains(&token) {
            Some(FinishReason::StopToken(token))
        } else {
            at_limit.then_some(FinishReason::Length)
        }
    }

    fn add(&mut self, candidate: &Candidate, open: &[OpenBeam<'_>], reason: FinishReason) {
        let Continuation { parent, token, beam } = candidate.continuation(open, &self.params);
        let mut output = open[parent].output.to_vec();
        output.push(token);
        let score = beam.score / (output.len() as f32).powf(self.length_penalty());
        let place = self.results.partition_point(|result| result.score >= score);
        self.results.insert(place, Hypothesis { score, output, logprobs: Arc::unwrap_or_clone(beam.logprobs), reason });
        self.results.truncate(self.width());
    }

    /// Whether a beam with this sum could become better than the worst result.
    fn could_improve(&self, best: f32, length: usize) -> bool {
        let Some(worst) = self.results.last().filter(|_| self.results.len() == self.width()) else { return true };
        let longest = self.early_stopping() == EarlyStopping::Never && self.length_penalty() > 0.0;
        let length = if longest { self.max_tokens } else { length };
        best / (length as f32).powf(self.length_penalty()) > worst.score
    }
}

/// A token after a beam.
#[derive(Debug)]
struct Candidate {
    parent: usize,
    token: TokenId,
    /// Among the most likely after its beam.
    place: usize,
    score: f32,
}

impl Candidate {
    fn continuation(&self, open: &[OpenBeam<'_>], params: &SamplingParams) -> Continuation {
        let OpenBeam { beam, next, .. } = &open[self.parent];
        let mut logprobs = Arc::clone(&beam.logprobs);
        if let Some(num_top) = params.beam.as_ref().and_then(|beam| beam.logprobs) {
            let top = next.top.iter().take(num_top as usize).cloned().collect();
            Arc::make_mut(&mut logprobs).push(PositionLogprobs { chosen: next.top[self.place], top });
        }
        Continuation { parent: self.parent, token: self.token, beam: Beam { score: self.score, logprobs } }
    }
}
