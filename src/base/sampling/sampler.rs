//! From one row of logits to the next token.
//!
//! The order of operations is vLLM's:
//! 1. log-probabilities, of the model's raw logits (unless those of the draw are wanted);
//! 2. tokens that are not allowed, or banned, are excluded (`min_tokens` bans end and stop tokens);
//! 3. `logit_bias`;
//! 4. repetition, frequency and presence penalty; DRY;
//! 5. greedy, if the temperature is 0: the largest logit, and the lowest id of equal ones; otherwise
//! 6. `top_n_sigma`, temperature, `min_p`, `top_k`, `typical_p`, `top_p`, XTC (each over the remaining tokens). A
//!    dynamic temperature comes last. Mirostat takes the place of the filters, behind the temperature;
//! 7. the draw.
//!
//! Steps 6 and 7 work on integers, so that a device can reproduce them exactly in any order of addition. The weight of
//! a token is `round(2⁴⁰ · exp((logit − max) · (1 / temperature)))` (`sampler/row.rs` says how `exp` is computed), all
//! sums are sums of weights, and each filter keeps the tokens that reach a threshold. Tokens tied at the threshold of
//! `top_k` or `top_p` are all kept. The draw inverts the cumulative distribution in order of token id, at 64 random
//! bits of Philox4x32-10. The key is the request's seed, and the counter is made of position and sample, so a draw does
//! not depend on other requests. Tokens less than 2⁻⁴¹ times as likely as the best one are never drawn.
//!
//! Some samplers are rare ([`ExtraSamplers`](super::extra::ExtraSamplers)). A device leaves them to this code.

mod chain;
mod draw;
mod dry;
mod philox;
mod row;
mod thresholds;

pub use draw::{Draw, History};
pub use thresholds::{inverse_temperature, top_p_share, weight_of_min_p};

use crate::ids::TokenId;
use crate::sampling::params::{PositionLogprobs, Sampled, SamplingParams, TokenLimits, TokenLogprob};
use chain::SamplerChain;
use dry::DryPenalty;
use std::cmp::Ordering;
use thresholds::top_p_target;

/// Samples tokens. It holds only working memory, so no earlier call affects a result.
#[derive(Debug, Default)]
pub struct Sampler {
    raw: Vec<f32>,
    /// The weights of the tokens in `kept`, or of all tokens if `kept` is empty.
    weights: Vec<u64>,
    /// The tokens that `top_k` keeps, in order of id, and their logits.
    kept: Vec<TokenId>,
    kept_logits: Vec<f32>,
    candidates: row::Candidates,
    candidate_weights: Vec<u64>,
    /// Occurrences of each token in the output. All are zero between calls.
    counts: Vec<u32>,
    /// Whether the repetition penalty has been applied to each token. All are false between calls.
    penalized: Vec<bool>,
    dry: DryPenalty,
    chain: SamplerChain,
}

impl Sampler {
    pub fn new() -> Self {
        Self::default()
    }

    /// Picks the token that follows `history`, which may be empty if the parameters have no penalties.
    /// `logits: [vocab]` must not be empty and are changed. A NaN counts as −∞, and +∞ as the largest number. A row
    /// without any finite logit gives token 0. Token ids outside the row are ignored in the parameters and in the
    /// history. `limits` are set if this position has more limits than the parameters imply
    /// ([`SamplingParams::limits`]).
    pub fn sample(
        &mut self,
        logits: &mut [f32],
        params: &SamplingParams,
        limits: Option<&TokenLimits>,
        history: History<'_>,
        draw: Draw,
    ) -> Sampled {
        assert!(!logits.is_empty(), "a row of logits has an entry for every token");
        let own_limits = if limits.is_none() { params.limits(draw.position as usize) } else { TokenLimits::default() };
        let limits = limits.unwrap_or(&own_limits);
        let changes = params.changes_logits(limits);
        if params.is_greedy() && !changes && params.logprobs.is_none() {
            return Sampled { mu: history.mu, ..Sampled::of(row::argmax(logits) as TokenId) };
        }
        row::sanitize(logits);
        if params.logprobs.is_some() && changes && !params.logprobs_of_draw() {
            self.raw.clear();
            self.raw.extend_from_slice(logits);
        }

        if let Some(allowed) = &limits.allowed {
            let others = logits.iter_mut().enumerate().filter(|(token, _)| !allowed.contains(*token as TokenId));
            others.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
        }
        for &token in &limits.banned {
            set(logits, token, |_| f32::NEG_INFINITY);
        }
        for &(token, bias) in &params.logit_bias {
            set(logits, token, |logit| logit + bias);
        }
        if params.has_penalties() {
            self.penalize(logits, params, history);
        }
        let (token, mu) = match &params.extra {
            _ if params.is_greedy() => (row::argmax(logits) as TokenId, history.mu),
            None => (self.draw(logits, params, draw) as TokenId, history.mu),
            Some(extra) => self.chain.draw(logits, params, extra, history.mu, draw),
        };

        if let (Some(num_top), true) = (params.logprobs, params.logprobs_of_draw()) {
            let logprobs = match params.is_greedy() {
                true => chain::certain(token, num_top),
                false => self.chain.logprobs(token, num_top),
            };
            return Sampled { token, mu, logprobs: Some(Box::new(logprobs)) };
        }
        let logprobs = params.logprobs.map(|num_top| {
            let raw = if changes { std::mem::take(&mut self.raw) } else { Vec::new() };
            let row = if changes { &raw } else { &*logits };
            let result = match params.logprob_token_ids.as_slice() {
                [] => self.position_logprobs(row, token as usize, num_top),
                asked => logprobs_of(row, token as usize, asked),
            };
            self.raw = raw;
            Box::new(result)
        });
        Sampled { token, mu, logprobs }
    }

    /// Log-probabilities at a position of a prompt: of `next_token`, the prompt's token there, and of the `num_top`
    /// most likely tokens. `logits: [vocab]` are those of the previous token. A token outside the row has
    /// log-probability −∞.
    pub fn prompt_logprobs(&mut self, logits: &mut [f32], next_token: TokenId, num_top: u32) -> PositionLogprobs {
        row::sanitize(logits);
        self.position_logprobs(logits, next_token as usize, num_top)
    }

    /// Ranks are ordered by log-probability, and by id where that is equal. Rank 1 is the token that greedy sampling
    /// takes.
    fn position_logprobs(&mut self, logits: &[f32], chosen: usize, num_top: u32) -> PositionLogprobs {
        let distribution = Distribution::of(logits);
        let num_top = logits.len().min(num_top as usize);
        let mut top: Vec<usize> = Vec::new();
        if num_top > 0 {
            let least = row::kth_largest(logits, num_top, &mut self.candidates);
            row::indices_from(logits, least, &mut self.kept);
            top.extend(self.kept.iter().map(|token| *token as usize));
            // A stable sort: equal logits, also zeros of either sign, stay in order of id. There are no NaNs.
            top.sort_by(|a, b| logits[*b].partial_cmp(&logits[*a]).unwrap_or(Ordering::Equal));
            top.truncate(num_top);
        }
        PositionLogprobs {
            chosen: distribution.ranked(chosen),
            top: top.into_iter().enumerate().map(|(rank, token)| distribution.entry(token, rank)).collect(),
        }
    }

    fn penalize(&mut self, logits: &mut [f32], params: &SamplingParams, whole_history: History<'_>) {
        let history = whole_history.last(params.repeat_last_n);
        if params.repetition_penalty != 1.0 {
            let factor = params.repetition_penalty;
            self.penalized.resize(self.penalized.len().max(logits.len()), false);
            let all = || history.prompt.iter().chain(history.output).map(|token| *token as usize);
            for token in all() {
                let Some(logit) = logits.get_mut(token) else { continue };
                if !std::mem::replace(&mut self.penalized[token], true) {
                    *logit = if *logit > 0.0 { (*logit / factor).min(f32::MAX) } else { *logit * factor };
                }
            }
            all().filter(|token| *token < logits.len()).for_each(|token| self.penalized[token] = false);
        }
        if params.frequency_penalty != 0.0 || params.presence_penalty != 0.0 {
            self.counts.resize(self.counts.len().max(logits.len()), 0);
            for &token in history.output.iter().filter(|token| (**token as usize) < logits.len()) {
                self.counts[token as usize] += 1;
            }
            for &token in history.output {
                let Some(logit) = logits.get_mut(token as usize) else { continue };
                let count = std::mem::take(&mut self.counts[token as usize]);
                if count > 0 {
                    *logit -= params.frequency_penalty * count as f32;
                    *logit -= params.presence_penalty;
                }
            }
        }
        if let Some(dry) = params.dry() {
            self.dry.apply(logits, dry, whole_history);
        }
    }

    fn draw(&mut self, logits: &[f32], params: &SamplingParams, draw: Draw) -> usize {
        let (least, total) = self.distribution(logits, params);
        match row::index_at(&self.weights, least, draw.point(total)) {
            Some(place) => self.kept.get(place).map_or(place, |token| *token as usize),
            None => row::argmax(logits),
        }
    }

    /// Sets `self.weights` and `self.kept`. Returns `(least, total)`: the tokens that can be drawn are those with a
    /// weight of at least `least`, and `total` is the sum of their weights. It is 0 if no logit is finite.
    fn distribution(&mut self, logits: &[f32], params: &SamplingParams) -> (u64, u64) {
        self.kept.clear();
        let max = row::max(logits);
        if max == f32::NEG_INFINITY {
            self.weights.clear();
            return (1, 0);
        }
        let top_k = params.top_k as usize;
        let left = if (1..logits.len()).contains(&top_k) {
            let least_logit = row::kth_largest(logits, top_k, &mut self.candidates);
            row::indices_from(logits, least_logit, &mut self.kept);
            self.kept_logits.clear();
            self.kept_logits.extend(self.kept.iter().map(|token| logits[*token as usize]));
            &self.kept_logits
        } else {
            logits
        };
        let mut least = weight_of_min_p(params.min_p);
        let mut total = row::weigh(left, max, inverse_temperature(params.temperature), least, &mut self.weights);
        if params.top_p < 1.0 && total > 0 {
            let target = top_p_target(params.top_p, total);
            least = row::weight_threshold(&self.weights, total, target, &mut self.candidate_weights);
            total = row::sum_from(&self.weights, least);
        }
        (least, total)
    }
}

fn set(logits: &mut [f32], token: TokenId, change: impl FnOnce(f32) -> f32) {
    if let Some(logit) = logits.get_mut(token as usize) {
        *logit = change(*logit);
    }
}

#[cfg(test)]
mod tests;

/// A row's log-probabilities.
struct Distribution<'a> {
    logits: &'a [f32],
    max: f32,
    log_sum: f64,
}

impl<'a> Distribution<'a> {
    fn of(logits: &'a [f32]) -> Self {
        let max = row::max(logits);
        Self { logits, max, log_sum: row::log_sum_exp(logits, max) }
    }

    /// The token of this rank, from 0 on. A token outside the row has log-probability −∞.
    fn entry(&self, token: usize, rank: usize) -> TokenLogprob {
        let logprob = match self.logits.get(token).copied().unwrap_or(f32::NEG_INFINITY) {
            f32::NEG_INFINITY => f32::NEG_INFINITY,
            logit => (f64::from(logit - self.max) - self.log_sum) as f32,
        };
        TokenLogprob { token: token as TokenId, logprob, rank: rank as u32 + 1 }
    }

    /// The token, whose rank is looked up.
    fn ranked(&self, token: usize) -> TokenLogprob {
        let rank = if token < self.logits.len() { row::rank(self.logits, token) } else { self.logits.len() };
        self.entry(token, rank)
    }
}

/// The log-probabilities of `asked`, after that of the chosen token where it is none of them.
fn logprobs_of(logits: &[f32], chosen: usize, asked: &[TokenId]) -> PositionLogprobs {
    let distribution = Distribution::of(logits);
    let chosen = distribution.ranked(chosen);
    let before = (!asked.contains(&chosen.token)).then_some(chosen);
    let asked = asked.iter().map(|token| distribution.ranked(*token as usize));
    PositionLogprobs { chosen, top: before.into_iter().chain(asked).collect() }
}
