//! The arbiter: whether copying KV or computing it again takes less time. Both costs are learned from past steps and
//! copies.
//!
//! A victim can store all of its KV in the swap pool, a part of it, or nothing. The arbiter compares the time of the
//! copies (out now and in later, behind the copies that are queued) with the time of computing tokens again. The cost
//! of a token is the scheduler's estimate ([`StepTimeModel::prompt_seconds`]). The cost of a block is learned here.
//!
//! Only copies that are made tell what copies cost. So copies that are expected to be slower are made now and then:
//! otherwise one slow copy, as the first ones are while the swap pool's memory is touched, would be the last.

use crate::plan::{CopiesDone, CopyReport};
use crate::step_time::StepTimeModel;
use pagetide_base::ids::RequestId;
use serde::{Deserialize, Serialize};

/// The weight of a measured block decays by this factor with each later block, so about the last hundred count.
const MEMORY: f64 = 0.99;

/// The part of the time of computing tokens again that may be lost to copies that are only made to measure them.
const TRIAL_SHARE: f64 = 0.02;

/// What happens to a victim's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Choice {
    /// All of it goes to the swap pool.
    Swap,
    /// Its full blocks go to the swap pool. The tokens after them are computed again.
    SwapFull,
    /// Nothing is stored. When it comes back, blocks that are still cached are used.
    Recompute,
}

/// A victim's KV.
#[derive(Clone, Copy, Debug)]
pub struct VictimKv {
    pub num_tokens: usize,
    pub block_size: usize,
    /// Leading full blocks of which the swap pool already holds a copy.
    pub num_backed: usize,
}

/// A decision, with the seconds that each way was expected to take.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    pub request: RequestId,
    pub choice: Choice,
    pub num_tokens: usize,
    pub swap_s: f64,
    pub swap_full_s: f64,
    pub recompute_s: f64,
}

/// What copies cost.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CopyCosts {
    /// To the swap pool, and to the device.
    directions: [Seconds; 2],
    queued_blocks: usize,
    /// Seconds that the next trial may lose.
    #[serde(default)]
    trial_s: f64,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Seconds {
    sum: f64,
    weight: f64,
}

impl CopyCosts {
    pub fn observe(&mut self, report: &CopyReport) {
        for (seconds, CopiesDone { blocks, seconds: took }) in self.directions.iter_mut().zip(report.done) {
            if blocks > 0 && took.is_finite() {
                let kept = MEMORY.powi(blocks.min(10_000) as i32);
                // Weights of a geometric series, so that the mean of a steady rate is that rate.
                let weight = (1.0 - kept) / (1.0 - MEMORY);
                seconds.sum = seconds.sum * kept + weight * took / blocks as f64;
                seconds.weight = seconds.weight * kept + weight;
            }
        }
        self.queued_blocks = report.queued_blocks;
    }

    /// Adds blocks to the copies that are queued.
    pub fn enqueue(&mut self, num_blocks: usize) {
        self.queued_blocks += num_blocks;
    }

    /// After a failure no copy is in progress.
    pub fn clear_queue(&mut self) {
        self.queued_blocks = 0;
    }

    pub fn queued_blocks(&self) -> usize {
        self.queued_blocks
    }

    /// Seconds to copy a block, to the swap pool and to the device. If one direction has not been measured, it has the
    /// value of the other. If neither has, both are 0, so that the first copies are made.
    pub fn block_seconds(&self) -> [f64; 2] {
        let [out, back] = self.directions.map(|seconds| (seconds.weight > 0.0).then(|| seconds.sum / seconds.weight));
        [out.or(back).unwrap_or(0.0), back.or(out).unwrap_or(0.0)]
    }

    /// Seconds until `num_blocks` more blocks are on the device.
    pub fn swap_in_seconds(&self, num_blocks: usize) -> f64 {
        let [_, back] = self.block_seconds();
        (self.queued_blocks + num_blocks) as f64 * back
    }

    /// Whether to copy what is expected to take `copy_s` to copy and `compute_s` to compute: where copying is no
    /// slower, and as a trial where the time computed since the last one has paid for it.
    pub fn prefers_copies(&mut self, copy_s: f64, compute_s: f64) -> bool {
        let lost_s = copy_s - compute_s;
        if lost_s <= 0.0 {
            return true;
        }
        self.trial_s += TRIAL_SHARE * compute_s;
        let is_trial = self.trial_s >= lost_s;
        if is_trial {
            self.trial_s = 0.0;
        }
        is_trial
    }

    /// Chooses the way that brings a victim's KV back soonest. With equal costs it swaps.
    pub fn decide(&self, request: RequestId, victim: &VictimKv, steps: &StepTimeModel) -> Decision {
        let VictimKv { num_tokens, block_size, num_backed } = *victim;
        let [out, back] = self.block_seconds();
        let swap = |num_blocks: usize| {
            let num_out = num_blocks.saturating_sub(num_backed);
            (self.queued_blocks + num_out) as f64 * out + num_blocks as f64 * back
        };
        let num_full = num_tokens / block_size;
        let swap_s = swap(num_tokens.div_ceil(block_size));
        let full_tokens = num_full * block_size;
        let swap_full_s = swap(num_full) + steps.prompt_seconds(num_tokens - full_tokens, full_tokens);
        // Copies made ahead are found in the swap pool.
        let backed_tokens = num_backed.min(num_full) * block_size;
        let recompute_s = num_backed as f64 * back + steps.prompt_seconds(num_tokens - backed_tokens, backed_tokens);
        let choice = if swap_s <= swap_full_s.min(recompute_s) {
            Choice::Swap
        } else if swap_full_s <= recompute_s && num_full > 0 {
            Choice::SwapFull
        } else {
            Choice::Recompute
        };
        Decision { request, choice, num_tokens, swap_s, swap_full_s, recompute_s }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step_time::StepLoad;

    fn report(blocks: usize, seconds: f64) -> CopyReport {
        CopyReport { done: [CopiesDone { blocks, seconds }; 2], ..CopyReport::default() }
    }

    /// A token of a prompt takes this long.
    fn steps(token_s: f64) -> StepTimeModel {
        let mut steps = StepTimeModel::default();
        for num_tokens in [100, 200, 300, 400].repeat(20) {
            let load = StepLoad { prompt_tokens: num_tokens, ..StepLoad::default() };
            steps.observe(&load, num_tokens as f64 * token_s);
        }
        steps
    }

    fn choice(costs: &CopyCosts, num_tokens: usize, num_backed: usize, token_s: f64) -> Choice {
        let victim = VictimKv { num_tokens, block_size: 16, num_backed };
        costs.decide(RequestId(1), &victim, &steps(token_s)).choice
    }

    #[test]
    fn it_learns_what_a_block_costs() {
        let mut costs = CopyCosts::default();
        assert_eq!(costs.block_seconds(), [0.0; 2]);
        (0..50).for_each(|_| costs.observe(&report(10, 1e-3)));
        assert!((costs.block_seconds()[0] / 1e-4 - 1.0).abs() < 1e-6);
        (0..50).for_each(|_| costs.observe(&report(100, 1.0)));
        assert!((costs.block_seconds()[1] / 1e-2 - 1.0).abs() < 0.02);
        let one_way =
            CopyReport { done: [CopiesDone { blocks: 1, seconds: 0.5 }, CopiesDone::default()], ..report(0, 0.0) };
        let mut costs = CopyCosts::default();
        costs.observe(&one_way);
        assert_eq!(costs.block_seconds(), [0.5; 2], "the other way is taken to be alike");
    }

    #[test]
    fn the_sooner_way_is_chosen() {
        let mut costs = CopyCosts::default();
        costs.observe(&report(1000, 0.1)); // 100 µs a block, each way
        assert_eq!(choice(&costs, 1600, 0, 1e-4), Choice::Swap, "20 ms to move, 160 to compute");
        assert_eq!(choice(&costs, 1600, 0, 1e-6), Choice::Recompute, "20 ms to move, 1.6 to compute");
        assert_eq!(choice(&costs, 1600, 100, 9e-6), Choice::Swap, "10 ms to move back, however it is called");
        // The last block has one token: 0.2 ms to move, 0.1 to compute.
        assert_eq!(choice(&costs, 1601, 0, 1e-4), Choice::SwapFull);
        assert_eq!(choice(&costs, 15, 0, 1e-6), Choice::Recompute, "no block is full");
        // Queued copies count.
        assert_eq!(choice(&costs, 1600, 0, 2e-5), Choice::Swap);
        costs.enqueue(1000);
        assert_eq!(choice(&costs, 1600, 0, 2e-5), Choice::Recompute);
        costs.clear_queue();
        assert_eq!(choice(&costs, 1600, 0, 2e-5), Choice::Swap);
    }

    /// Copies that were slow once, and are fast now, are made again.
    #[test]
    fn slow_copies_are_tried_again() {
        for slower in [1.1, 2.0, 10.0] {
            let mut costs = CopyCosts::default();
            let num_computed = (0..1000).take_while(|_| !costs.prefers_copies(slower, 1.0)).count() as f64;
            let lost_s = slower - 1.0;
            assert!((num_computed - lost_s / TRIAL_SHARE).abs() <= 1.0, "{num_computed} before a trial of {lost_s} s");
            assert!(!costs.prefers_copies(slower, 1.0), "each trial is paid for");
            assert!(costs.prefers_copies(1.0, 1.0));
        }
    }

    #[test]
    fn an_unmeasured_way_is_tried() {
        assert_eq!(choice(&CopyCosts::default(), 1600, 0, 1e-6), Choice::Swap);
    }
}
