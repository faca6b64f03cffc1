//! The draw with [`ExtraSamplers`], over a list of the tokens that are left. It is the only implementation: a device
//! gives its logits to the host for it. It uses the weights of the usual draw, so a request whose extra samplers change
//! nothing gets the tokens of a request without them.
//!
//! Entropies and surprises are sums and logarithms in float64, in order of token id.

use super::draw::Draw;
use super::row::{self, Candidates};
use super::thresholds::{inverse_temperature, top_p_target, weight_of_min_p};
use crate::ids::TokenId;
use crate::sampling::extra::{DynamicTemperature, ExtraSamplers, Mirostat, MirostatVersion, Xtc};
use crate::sampling::params::{PositionLogprobs, SamplingParams, TokenLogprob};
use std::cmp::Reverse;

/// The tokens by which mirostat 1 estimates how steep the distribution is.
const MIROSTAT_TOKENS: usize = 100;

/// The tokens that are left, in order of id, and working memory.
#[derive(Debug, Default)]
pub struct SamplerChain {
    tokens: Vec<TokenId>,
    logits: Vec<f32>,
    /// Set by [`SamplerChain::weigh`].
    weights: Vec<u64>,
    candidates: Candidates,
    scratch: Vec<u64>,
    /// How far each token is from the typical surprise, with its weight.
    distances: Vec<(f64, u64)>,
}

impl SamplerChain {
    /// Draws a token from sanitized logits. Returns its id, and mirostat's mu after it. A row without any finite logit
    /// gives token 0.
    pub fn draw(
        &mut self,
        logits: &[f32],
        params: &SamplingParams,
        extra: &ExtraSamplers,
        mu: f32,
        draw: Draw,
    ) -> (TokenId, f32) {
        // What `top_k` removes in any case never gets into the list.
        let top_k = params.top_k as usize;
        let is_short = extra.mirostat.is_none() && extra.top_n_sigma <= 0.0 && (1..logits.len()).contains(&top_k);
        let least = if is_short { row::kth_largest(logits, top_k, &mut self.candidates) } else { f32::MIN };
        row::indices_from(logits, least.max(f32::MIN), &mut self.tokens);
        self.logits.clear();
        self.logits.extend(self.tokens.iter().map(|token| logits[*token as usize]));
        match (&extra.mirostat, self.tokens.len()) {
            (_, 0) => (0, mu),
            // Nothing is chosen, and mu stays: it must not matter whether a token was forced or drawn.
            (_, 1) => (self.tokens[0], mu),
            (Some(mirostat), _) => {
                let scale = inverse_temperature(params.temperature);
                self.weigh(scale);
                self.mirostat(mirostat, scale, mu, logits.len());
                let place = self.place(draw);
                let surprise = (self.total() as f64 / self.weights[place] as f64).log2();
                let error = surprise - f64::from(mirostat.tau);
                (self.tokens[place], (f64::from(mu) - f64::from(mirostat.eta) * error) as f32)
            }
            (None, _) => {
                self.filter(params, extra, draw);
                (self.tokens[self.place(draw)], mu)
            }
        }
    }

    /// Log-probabilities of the last draw: of the token that it gave, and of the `num_top` most likely ones that it
    /// could give, of equal ones those with the lowest ids first.
    pub fn logprobs(&self, chosen: TokenId, num_top: u32) -> PositionLogprobs {
        if self.tokens.len() < 2 {
            return certain(chosen, num_top);
        }
        let total = self.total() as f64;
        let entry = |place: usize, rank: usize| {
            let logprob = (self.weights[place] as f64 / total).ln() as f32;
            TokenLogprob { token: self.tokens[place], logprob, rank: rank as u32 + 1 }
        };
        let key = |place: &usize| (Reverse(self.weights[*place]), self.tokens[*place]);
        let mut order: Vec<usize> = (0..self.tokens.len()).filter(|place| self.weights[*place] > 0).collect();
        let chosen = self.tokens.iter().position(|token| *token == chosen).expect("the draw gave one of its tokens");
        let rank = order.iter().filter(|place| key(place) < key(&chosen)).count();
        let num_top = order.len().min(num_top as usize);
        if num_top < order.len() {
            order.select_nth_unstable_by_key(num_top, key);
            order.truncate(num_top);
        }
        order.sort_unstable_by_key(key);
        let top = order.iter().enumerate().map(|(rank, place)| entry(*place, rank)).collect();
        PositionLogprobs { chosen: entry(chosen, rank), top }
    }

    fn filter(&mut self, params: &SamplingParams, extra: &ExtraSamplers, draw: Draw) {
        let min_keep = extra.min_keep as usize;
        self.weights.resize(self.tokens.len(), 0);
        self.top_n_sigma(extra.top_n_sigma);
        // `min_p` and `top_k` give the same in either order, and few tokens are sooner weighed.
        self.top_k(params.top_k as usize);
        let scale = extra.dynamic_temperature.map_or(inverse_temperature(params.temperature), |_| 1.0);
        self.weigh(scale);
        self.min_p(params.min_p, min_keep);
        self.typical_p(extra.typical_p, min_keep, scale);
        self.top_p(params.top_p, min_keep);
        if let Some(xtc) = &extra.xtc {
            self.xtc(xtc, min_keep, draw);
        }
        // The most likely token may have gone, and then the others have too little weight for the draw.
        self.weigh(match &extra.dynamic_temperature {
            Some(dynamic) => inverse_temperature(self.temperature(params.temperature, dynamic)),
            None => scale,
        });
    }

    /// Sets the weights. That of the most likely token is [`row::ONE`].
    fn weigh(&mut self, scale: f32) {
        row::weigh(&self.logits, row::max(&self.logits), scale, 0, &mut self.weights);
    }

    fn total(&self) -> u64 {
        row::sum_from(&self.weights, 0)
    }

    /// Keeps the tokens of which `is_kept` says so by token, logit and weight.
    fn keep(&mut self, is_kept: impl Fn(TokenId, f32, u64) -> bool) {
        let mut num = 0;
        for place in 0..self.tokens.len() {
            let (token, logit, weight) = (self.tokens[place], self.logits[place], self.weights[place]);
            if is_kept(token, logit, weight) {
                (self.tokens[num], self.logits[num], self.weights[num]) = (token, logit, weight);
                num += 1;
            }
        }
        self.tokens.truncate(num);
        self.logits.truncate(num);
        self.weights.truncate(num);
    }

    /// Keeps the tokens of at least this weight, and the `min_keep` most likely ones. (By their logits: the weights of
    /// unlikely tokens are all 0.)
    fn keep_from(&mut self, least: u64, min_keep: usize) {
        let least_logit = match min_keep {
            0 => f32::INFINITY,
            _ if min_keep >= self.logits.len() => return,
            _ => row::kth_largest(&self.logits, min_keep, &mut self.candidates),
        };
        self.keep(|_, logit, weight| weight >= least || logit >= least_logit);
    }

    /// Tang et al. 2024, "Top-nσ: Not All Logits Are You Need" (arXiv:2411.07641).
    fn top_n_sigma(&mut self, n: f32) {
        if n <= 0.0 {
            return;
        }
        let num = self.logits.len() as f64;
        let mean = self.logits.iter().map(|logit| f64::from(*logit)).sum::<f64>() / num;
        let square = |logit: &f32| (f64::from(*logit) - mean) * (f64::from(*logit) - mean);
        let deviation = (self.logits.iter().map(square).sum::<f64>() / num).sqrt();
        let least = f64::from(row::max(&self.logits)) - f64::from(n) * deviation;
        self.keep(|_, logit, _| f64::from(logit) >= least);
    }

    fn min_p(&mut self, min_p: f32, min_keep: usize) {
        if min_p > 0.0 {
            self.keep_from(weight_of_min_p(min_p), min_keep);
        }
    }

    fn top_k(&mut self, top_k: usize) {
        if (1..self.logits.len()).contains(&top_k) {
            let least = row::kth_largest(&self.logits, top_k, &mut self.candidates);
            self.keep(|_, logit, _| logit >= least);
        }
    }

    /// Meister et al. 2023, "Locally Typical Sampling" (arXiv:2202.00666): the tokens whose surprise is nearest to the
    /// expected one, until they have more than this probability.
    fn typical_p(&mut self, typical_p: f32, min_keep: usize, scale: f32) {
        let total = self.total();
        if typical_p >= 1.0 || total == 0 {
            return;
        }
        // A surprise is ln(total) − ln(weight), so the difference of two of them has only logarithms of weights.
        let expected = self.weighted_logarithms() / total as f64;
        let max = row::max(&self.logits);
        let distance = |logit: f32, weight: u64| {
            // The weights of unlikely tokens are all 0, and only their logits tell which is nearer.
            let logarithm = match weight {
                0 => ((row::ONE as f64).ln() + f64::from(logit - max) * f64::from(scale)).min(0.0),
                _ => (weight as f64).ln(),
            };
            (logarithm - expected).abs()
        };
        let tokens = self.logits.iter().zip(&self.weights);
        self.distances.clear();
        self.distances.extend(tokens.map(|(logit, weight)| (distance(*logit, *weight), *weight)));
        let target = ((total as f64 * f64::from(typical_p)) as u64 + 1).min(total);
        let mut farthest = distance_at(&mut self.distances, target);
        if min_keep > self.distances.len() {
            return;
        } else if let Some(place) = min_keep.checked_sub(1) {
            let (_, (least, _), _) = self.distances.select_nth_unstable_by(place, |a, b| a.0.total_cmp(&b.0));
            farthest = farthest.max(*least);
        }
        self.keep(|_, logit, weight| distance(logit, weight) <= farthest);
    }

    /// Σ weight · ln(weight)
    fn weighted_logarithms(&self) -> f64 {
        let positive = self.weights.iter().filter(|weight| **weight > 0).map(|weight| *weight as f64);
        positive.map(|weight| weight * weight.ln()).sum()
    }

    fn top_p(&mut self, top_p: f32, min_keep: usize) {
        let total = self.total();
        if top_p < 1.0 && total > 0 {
            let target = top_p_target(top_p, total);
            let least = row::weight_threshold(&self.weights, total, target, &mut self.scratch);
            self.keep_from(least, min_keep);
        }
    }

    fn xtc(&mut self, xtc: &Xtc, min_keep: usize, draw: Draw) {
        // In units of 2⁻⁶⁴.
        let probability = (f64::from(xtc.probability) * (1_u128 << 64) as f64) as u128;
        if u128::from(draw.second_bits()) >= probability {
            return;
        }
        let least = ((self.total() as f64 * f64::from(xtc.threshold)).ceil() as u64).max(1);
        let choices = || self.tokens.iter().zip(&self.weights).filter(|(_, weight)| **weight >= least);
        // Of equally likely tokens that with the highest id ranks last.
        let last = choices().min_by_key(|(token, weight)| (**weight, u32::MAX - **token)).map(|(token, _)| *token);
        let removed = choices().count().saturating_sub(1);
        if self.tokens.len() - removed >= min_keep {
            self.keep(|token, _, weight| weight < least || Some(token) == last);
        }
    }

    /// The temperature for what is left, by its entropy as a part of the largest that so many tokens can have.
    fn temperature(&self, temperature: f32, dynamic: &DynamicTemperature) -> f32 {
        let total = self.total() as f64;
        if self.tokens.len() < 2 || total == 0.0 {
            return 1.0;
        }
        let entropy = total.ln() - self.weighted_logarithms() / total;
        let part = (entropy / (self.tokens.len() as f64).ln()).clamp(0.0, 1.0);
        let (low, high) = ((temperature - dynamic.range).max(0.0), temperature + dynamic.range);
        (f64::from(low) + f64::from(high - low) * part.powf(f64::from(dynamic.exponent))) as f32
    }

    /// Keeps the tokens whose surprise is at most about `mu` bits; at least one.
    fn mirostat(&mut self, mirostat: &Mirostat, scale: f32, mu: f32, vocab_size: usize) {
        match mirostat.version {
            MirostatVersion::One => {
                let k = self.mirostat_k(scale, mu, vocab_size);
                self.top_k(k);
            }
            MirostatVersion::Two => {
                let least = (self.total() as f64 * (-f64::from(mu)).exp2()).ceil();
                match least <= row::ONE as f64 {
                    true => self.keep(|_, _, weight| weight as f64 >= least.max(1.0)),
                    false => {
                        let best = self.tokens[row::argmax(&self.logits)];
                        self.keep(|token, _, _| token == best);
                    }
                }
            }
        }
    }

    /// How many tokens are to be kept, at least 1: Basu et al., section 4. The most likely tokens give the exponent `s`
    /// of Zipf's law.
    fn mirostat_k(&mut self, scale: f32, mu: f32, vocab_size: usize) -> usize {
        let num = MIROSTAT_TOKENS.min(self.logits.len());
        let least = row::kth_largest(&self.logits, num, &mut self.candidates);
        let mut best: Vec<f32> = self.logits.iter().copied().filter(|logit| *logit >= least).collect();
        best.sort_unstable_by(|a, b| b.total_cmp(a));
        best.truncate(num);
        let (mut products, mut squares) = (0.0, 0.0);
        for (place, pair) in best.windows(2).enumerate() {
            let ratio_of_ranks = ((place + 2) as f64 / (place + 1) as f64).ln();
            products += ratio_of_ranks * f64::from((pair[0] - pair[1]) * scale);
            squares += ratio_of_ranks * ratio_of_ranks;
        }
        let s: f64 = products / squares;
        let vocab_size = vocab_size as f64;
        // The limit of the fraction for s = 1.
        let fraction = if s == 1.0 { 1.0 / vocab_size.ln() } else { (s - 1.0) / (1.0 - vocab_size.powf(1.0 - s)) };
        let k = (fraction * f64::from(mu).exp2()).powf(1.0 / s);
        // A conversion saturates, and makes 0 of what is not a number.
        (k as usize).max(1)
    }

    /// Where the token is that is drawn.
    fn place(&self, draw: Draw) -> usize {
        let point = draw.point(self.total());
        row::index_at(&self.weights, 0, point).expect("the point is below the sum of the weights")
    }
}

/// The log-probabilities where only one token could be drawn.
pub fn certain(token: TokenId, num_top: u32) -> PositionLogprobs {
    let chosen = TokenLogprob { token, logprob: 0.0, rank: 1 };
    PositionLogprobs { chosen, top: Vec::from_iter((num_top > 0).then_some(chosen)) }
}

/// The distance up to which the weights, from the nearest on, add up to `target`; at most their sum.
fn distance_at(mut rest: &mut [(f64, u64)], target: u64) -> f64 {
    let mut missing = target;
    while rest.len() > 1 {
        let middle = rest.len() / 2;
        rest.select_nth_unstable_by(middle, |a, b| a.0.total_cmp(&b.0));
        let (near, far) = rest.split_at_mut(middle);
        let sum: u64 = near.iter().map(|(_, weight)| weight).sum();
        if sum >= missing {
            rest = near;
        } else {
            missing -= sum;
            rest = far;
        }
    }
    rest.first().map_or(f64::INFINITY, |(distance, _)| *distance)
}

#[cfg(test)]
mod tests;
