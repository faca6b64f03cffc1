//! Estimates how long outputs become, from those that have ended.
//!
//! Lengths are divided into buckets whose bounds grow geometrically. Each bucket estimates which part of the outputs
//! that reach it continue beyond it. So an output that was cut off at its `max_tokens` counts for how far outputs get,
//! and not for where they end (Kaplan and Meier, "Nonparametric Estimation from Incomplete Observations", 1958).
//! Without observations a prior with a heavy tail is used.

use crate::arrays;
use serde::{Deserialize, Serialize};

/// Buckets in each doubling of the length.
const PARTS: usize = 4;
/// Up to 2^29 tokens.
const NUM_BUCKETS: usize = 28 * PARTS;
/// The weight of an output decays by this factor with each later output, so about the last thousand count.
const MEMORY: f64 = 0.999;
/// In the prior, half of all outputs are longer than this, half of those are longer than three times this, and so on.
const PRIOR_TOKENS: f64 = 128.0;
/// The weight of the prior in a bucket, in outputs.
const PRIOR_WEIGHT: f64 = 0.1;
/// The least part of outputs that continue, whatever was observed.
const MIN_SURVIVAL: f64 = 1e-6;

/// The weighted observations of a bucket.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct SeenLengths {
    /// Outputs that reached it. An output that was cut off within the bucket counts for the part that it covered.
    reached: f64,
    ended: f64,
    /// Tokens that were generated there.
    tokens: f64,
}

/// The lengths of outputs of one kind.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OutputLengths {
    #[serde(with = "arrays")]
    seen: [SeenLengths; NUM_BUCKETS],
    /// Outputs may end before they have to.
    may_end: bool,
    /// The weight of the next observation. It grows, so that earlier observations count for less.
    weight: f64,
    /// For each bucket: the part of outputs that reach it, and the average number of tokens that an output has before
    /// it.
    #[serde(with = "arrays")]
    survival: [f64; NUM_BUCKETS + 1],
    #[serde(with = "arrays")]
    before: [f64; NUM_BUCKETS + 1],
    /// Tokens in a bucket of an output that gets there.
    #[serde(with = "arrays")]
    mean_tokens: [f64; NUM_BUCKETS],
}

impl OutputLengths {
    /// `may_end` says that outputs have tokens that end them. Other outputs are expected to reach their limit until
    /// some of them have been stopped.
    pub fn new(may_end: bool) -> Self {
        let mut lengths = Self {
            seen: [SeenLengths::default(); NUM_BUCKETS],
            may_end,
            weight: 1.0,
            survival: [1.0; NUM_BUCKETS + 1],
            before: [0.0; NUM_BUCKETS + 1],
            mean_tokens: [0.0; NUM_BUCKETS],
        };
        lengths.sum_up();
        lengths
    }

    /// An output ended after `num_tokens` tokens, at least 1. With `was_cut` it would have continued but reached its
    /// limit.
    pub fn observe(&mut self, num_tokens: usize, was_cut: bool) {
        let last = bucket(num_tokens.saturating_sub(1));
        let weight = self.weight;
        for (place, seen) in self.seen[..=last].iter_mut().enumerate() {
            let is_last = place == last;
            let tokens = if is_last { num_tokens as f64 - bound(place) } else { width(place) };
            seen.reached += if is_last && was_cut { weight * tokens / width(place) } else { weight };
            seen.ended += if is_last && !was_cut { weight } else { 0.0 };
            seen.tokens += weight * tokens;
        }
        self.weight /= MEMORY;
        if self.weight > 1e9 {
            for seen in &mut self.seen {
                seen.reached /= self.weight;
                seen.ended /= self.weight;
                seen.tokens /= self.weight;
            }
            self.weight = 1.0;
        }
        self.sum_up();
    }

    /// The observations of a bucket, with the prior.
    fn seen(&self, place: usize) -> SeenLengths {
        let SeenLengths { reached, ended, tokens } = self.seen[place];
        let (prior, goes_on) = match self.may_end {
            true => (PRIOR_WEIGHT * self.weight, (PRIOR_TOKENS + bound(place)) / (PRIOR_TOKENS + bound(place + 1))),
            false => (f64::MIN_POSITIVE, 1.0),
        };
        SeenLengths {
            reached: reached + prior,
            ended: ended + prior * (1.0 - goes_on),
            tokens: tokens + prior * width(place) * (1.0 + goes_on) / 2.0,
        }
    }

    fn sum_up(&mut self) {
        for place in 0..NUM_BUCKETS {
            let SeenLengths { reached, ended, tokens } = self.seen(place);
            let goes_on = (1.0 - ended / reached).max(MIN_SURVIVAL);
            self.survival[place + 1] = (self.survival[place] * goes_on).max(f64::MIN_POSITIVE);
            self.mean_tokens[place] = tokens / reached;
            self.before[place + 1] = self.before[place] + self.survival[place] * self.mean_tokens[place];
        }
    }

    /// The average number of tokens still to come for an output that has `num_tokens` and may have at most
    /// `max_tokens`. At least 1, if another may come.
    pub fn remaining(&self, num_tokens: usize, max_tokens: usize) -> usize {
        let most = max_tokens.saturating_sub(num_tokens);
        let (place, last) = (bucket(num_tokens), bucket(max_tokens));
        // A part of a bucket has the same part of its tokens and of its ends.
        let part = |place: usize, end: usize| (end as f64 - bound(place)) / width(place);
        if place == last {
            let mean = self.mean_tokens[place] * most as f64 / width(place);
            return (mean.ceil() as usize).max(1).min(most);
        }
        let done = part(place, num_tokens);
        let here = self.mean_tokens[place] * (1.0 - done);
        let after = self.before[last] - self.before[place + 1]
            + self.survival[last] * self.mean_tokens[last] * part(last, max_tokens);
        let survival = self.survival[place] * (1.0 - done) + self.survival[place + 1] * done;
        let mean = here + after / survival;
        (mean.ceil() as usize).max(1).min(most)
    }
}

/// The bucket of the token after `num_tokens` others.
fn bucket(num_tokens: usize) -> usize {
    // Lengths up to 4 have a bucket each. From there on, a bucket is given by the binary exponent and the next two
    // bits.
    if num_tokens < PARTS {
        return num_tokens;
    }
    let doublings = num_tokens.ilog2() as usize;
    let part = (num_tokens >> (doublings - 2)) & (PARTS - 1);
    (PARTS * (doublings - 1) + part).min(NUM_BUCKETS - 1)
}

fn width(place: usize) -> f64 {
    bound(place + 1) - bound(place)
}

/// The first length of a bucket.
fn bound(place: usize) -> f64 {
    if place < PARTS {
        return place as f64;
    }
    let doublings = place / PARTS + 1;
    (PARTS + place % PARTS) as f64 * (1u64 << (doublings - 2)) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_each_other() {
        for num_tokens in (0..3000).chain([1 << 20, (1 << 28) + 12345]) {
            let place = bucket(num_tokens);
            assert!(bound(place) <= num_tokens as f64 && (num_tokens as f64) < bound(place + 1), "{num_tokens}");
        }
        assert_eq!(bucket(usize::MAX), NUM_BUCKETS - 1);
    }

    #[test]
    fn equal_lengths_are_learned() {
        let mut lengths = OutputLengths::new(true);
        (0..300).for_each(|_| lengths.observe(256, false));
        for num_tokens in [1, 10, 100, 200, 250] {
            let remaining = lengths.remaining(num_tokens, 8000);
            let right = 256 - num_tokens;
            assert!(remaining.abs_diff(right) <= 3 + right / 10, "{remaining} after {num_tokens}");
        }
        assert!(lengths.remaining(300, 8000) > 20, "nothing is known of what comes after");
        assert_eq!(lengths.remaining(250, 252), 2);
        assert_eq!(lengths.remaining(252, 252), 0);
    }

    #[test]
    fn what_was_cut_off_does_not_count_as_an_end() {
        let mut lengths = OutputLengths::new(true);
        (0..300).for_each(|_| lengths.observe(100, true));
        assert!(lengths.remaining(0, 100) >= 95);
        assert!(lengths.remaining(0, 4000) > 200, "where they would have ended is the prior's matter");
    }

    #[test]
    fn without_observed_ends_outputs_are_expected_at_their_maximum() {
        let mut lengths = OutputLengths::new(false);
        assert_eq!(lengths.remaining(17, 1000), 983);
        (0..100).for_each(|_| lengths.observe(1000, true));
        assert_eq!(lengths.remaining(17, 1000), 983);
        (0..100).for_each(|_| lengths.observe(50, false));
        let remaining = lengths.remaining(0, 1000);
        assert!((400..=600).contains(&remaining), "half are stopped after 50: {remaining}");
        assert!(lengths.remaining(60, 1000) > 900, "who got further goes on: {}", lengths.remaining(60, 1000));
    }

    /// Geometric lengths are memoryless: the expected rest is the same after any length.
    #[test]
    fn the_mean_of_the_remaining_output_is_learned() {
        let mut lengths = OutputLengths::new(true);
        let mut state = 1u64;
        for _ in 0..5000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let uniform = ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
            lengths.observe(1 + (-uniform.ln() * 200.0) as usize, false);
        }
        for num_tokens in [0, 50, 200, 400] {
            let remaining = lengths.remaining(num_tokens, 100_000);
            assert!((140..280).contains(&remaining), "{remaining} after {num_tokens}");
        }
    }

    #[test]
    fn older_observations_count_less() {
        let mut lengths = OutputLengths::new(true);
        (0..1000).for_each(|_| lengths.observe(1000, false));
        (0..30_000).for_each(|_| lengths.observe(100, false));
        assert!(lengths.remaining(0, 8000).abs_diff(100) < 15);
    }
}
