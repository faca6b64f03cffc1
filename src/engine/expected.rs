//! How many blocks the running sequences will need, and whether another one fits beside them.
//!
//! Each running sequence grows by a token a step and releases everything when it ends. So the need is greatest just
//! before one of them ends, and only these moments have to be checked (Gong et al., "Past-Future Scheduler for LLM
//! Serving under SLA Guarantees", ASPLOS 2025, section 4). The moments are known, or are estimated by
//! [`crate::lengths`].

use serde::{Deserialize, Serialize};

/// What a sequence needs, from now until it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Life {
    /// Tokens that it has slots for, or promised blocks.
    pub num_tokens: usize,
    /// Steps until it ends. Each takes one more slot; the last token needs none.
    pub steps: usize,
    /// The sequences that it is or will become. Each grows.
    pub seats: usize,
}

impl Life {
    fn num_blocks(&self, block_size: usize) -> usize {
        self.num_tokens.div_ceil(block_size)
    }
}

/// The running sequences.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ExpectedNeed {
    block_size: usize,
    /// Sorted by their ends after the first query.
    lives: Vec<Life>,
    is_sorted: bool,
}

impl ExpectedNeed {
    pub fn new(block_size: usize, lives: Vec<Life>) -> Self {
        Self { block_size, lives, is_sorted: false }
    }

    pub fn push(&mut self, life: Life) {
        self.lives.push(life);
        self.is_sorted = false;
    }

    /// Whether `life`, which takes `num_new` of the pool's blocks now, fits beside the running sequences for the next
    /// `horizon` steps. These hold `num_used` of `num_blocks` blocks, with promised ones. If none is running, it fits.
    pub fn fits(&mut self, life: Life, num_new: usize, horizon: usize, num_used: usize, num_blocks: usize) -> bool {
        if !std::mem::replace(&mut self.is_sorted, true) {
            self.lives.sort_unstable_by_key(|life| life.steps);
        }
        self.lives.is_empty() || self.peak(life, num_new, horizon, num_used) <= num_blocks
    }

    /// The most blocks that are needed at once.
    fn peak(&self, newcomer: Life, num_new: usize, horizon: usize, num_used: usize) -> usize {
        let block_size = self.block_size;
        let num_held: usize = self.lives.iter().map(|life| life.num_blocks(block_size)).sum();
        let mut growth = Growth::new(block_size);
        self.lives.iter().for_each(|life| growth.add(life));
        growth.add(&newcomer);
        let now = num_used + num_new;
        let mut given_back = 0;
        let mut peak = now;
        let (before, after) = self.lives.split_at(self.lives.partition_point(|life| life.steps <= newcomer.steps));
        fn others(lives: &[Life]) -> impl Iterator<Item = (&Life, bool)> {
            lives.iter().map(|life| (life, false))
        }
        for (life, is_newcomer) in others(before).chain([(&newcomer, true)]).chain(others(after)) {
            let at = life.steps.min(horizon);
            peak = peak.max((now + growth.blocks_at(at)).saturating_sub(given_back));
            if life.steps >= horizon {
                break;
            }
            growth.remove(life);
            // Shared blocks come back when the last holder ends. Here each holder returns its share.
            given_back += match is_newcomer {
                true => num_new,
                false => life.num_blocks(block_size) * num_used.min(num_held) / num_held.max(1),
            };
        }
        peak
    }
}

/// Counts the blocks that sequences grow by without visiting each. A sequence of `n` tokens has `⌊(n + t + block_size -
/// 1) / block_size⌋` blocks after `t` steps. That is `t / block_size` more than now, plus what the remainders add.
struct Growth {
    block_size: usize,
    num_seqs: usize,
    /// Sequences for each `(n + block_size - 1) mod block_size`.
    remainders: Vec<usize>,
}

impl Growth {
    fn new(block_size: usize) -> Self {
        Self { block_size, num_seqs: 0, remainders: vec![0; block_size] }
    }

    fn remainder(&self, life: &Life) -> usize {
        (life.num_tokens + self.block_size - 1) % self.block_size
    }

    fn add(&mut self, life: &Life) {
        let remainder = self.remainder(life);
        self.remainders[remainder] += life.seats;
        self.num_seqs += life.seats;
    }

    fn remove(&mut self, life: &Life) {
        let remainder = self.remainder(life);
        self.remainders[remainder] -= life.seats;
        self.num_seqs -= life.seats;
    }

    fn blocks_at(&self, steps: usize) -> usize {
        let first = self.block_size - steps % self.block_size;
        let more: usize = self.remainders[first..].iter().sum();
        self.num_seqs * (steps / self.block_size) + more
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn life(num_tokens: usize, steps: usize) -> Life {
        Life { num_tokens, steps, seats: 1 }
    }

    /// Step by step, of sequences that share nothing.
    fn peak_by_steps(lives: &[Life], horizon: usize, block_size: usize) -> usize {
        let last = lives.iter().map(|life| life.steps).max().unwrap_or(0).min(horizon);
        let blocks = |life: &Life, step: usize| {
            let now = life.num_tokens.div_ceil(block_size);
            now + life.seats * ((life.num_tokens + step).div_ceil(block_size) - now)
        };
        let at = |step| lives.iter().filter(|life| life.steps >= step).map(|life| blocks(life, step)).sum();
        (0..=last).map(at).max().unwrap_or(0)
    }

    #[test]
    fn the_peak_is_that_of_every_step() {
        let mut state = 7u64;
        let mut below = |most: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % most) as usize
        };
        for _ in 0..2000 {
            let block_size = 1 + below(20);
            let num_lives = 1 + below(8);
            let mut lives: Vec<Life> = (0..num_lives).map(|_| life(1 + below(100), below(60))).collect();
            let newcomer = life(1 + below(100), below(60));
            let horizon = if below(2) == 0 { usize::MAX } else { below(60) };
            let num_used = lives.iter().map(|life| life.num_blocks(block_size)).sum();
            let num_new = newcomer.num_blocks(block_size);
            let mut expected = ExpectedNeed::new(block_size, lives.clone());
            lives.push(newcomer);
            let right = peak_by_steps(&lives, horizon, block_size);
            assert!(expected.fits(newcomer, num_new, horizon, num_used, right), "{lives:?}");
            assert!(!expected.fits(newcomer, num_new, horizon, num_used, right - 1), "{lives:?}");
        }
    }

    #[test]
    fn sequences_that_end_make_room_for_those_that_grow() {
        // 10 tokens and 30 to come, beside 30 tokens and 10 to come.
        let expected = ExpectedNeed::new(1, vec![life(30, 10)]);
        assert_eq!(expected.peak(life(10, 30), 10, usize::MAX, 30), 60, "40 and 20 when the first ends");
        assert_eq!(expected.peak(life(10, 30), 10, 5, 30), 50, "35 and 15 after five steps");
        let expected = ExpectedNeed::new(1, vec![life(30, 30)]);
        assert_eq!(expected.peak(life(10, 30), 10, usize::MAX, 30), 100);
    }

    #[test]
    fn shared_blocks_count_once() {
        // Ten sequences with 90 of 100 blocks in common; the newcomer needs ten of its own.
        let expected = ExpectedNeed::new(1, vec![life(100, 10); 10]);
        assert_eq!(expected.peak(life(100, 10), 10, 5, 190), 190 + 10 + 11 * 5);
        assert!(ExpectedNeed::new(1, Vec::new()).fits(life(1000, 1000), 1000, 1000, 0, 10), "nobody runs");
    }
}
