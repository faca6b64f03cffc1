//! Snapshots of the engine for the console. While no client watches, only a few sums are collected.

use pagetide_base::ids::BlockId;
use pagetide_engine::block_pool::PoolView;
use pagetide_engine::plan::StepPlan;
use pagetide_engine::scheduler::{PlanStats, Population, SeqSnapshot};
use std::time::{Duration, Instant};

/// The most copies between the tiers that are kept for the next look. Further ones are only counted.
const MAX_MOVES: usize = 1024;
/// For how long after a look copies are kept.
const WATCHED_FOR: Duration = Duration::from_secs(5);

/// The engine between two steps.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub seqs: Vec<Watched>,
    pub population: Population,
    /// Tokens in a block.
    pub block_size: usize,
    /// Bytes of a block.
    pub block_bytes: usize,
    pub device: PoolView,
    pub swap: PoolView,
    pub totals: WatchTotals,
    pub moves: Moves,
    /// The time that the snapshot took on the engine's thread.
    pub cost: Duration,
}

/// A sequence, and when its request arrived.
#[derive(Clone, Debug)]
pub struct Watched {
    pub view: SeqSnapshot,
    pub arrived: Instant,
}

/// WatchTotals since the start. The difference of two snapshots is what happened between them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WatchTotals {
    /// Requests that have ended, in any way.
    pub ended: u64,
    /// Of prompts that were admitted.
    pub prompt_tokens: u64,
    /// The part of these that the prefix cache held.
    pub cached_tokens: u64,
    pub generated_tokens: u64,
    pub recomputed_tokens: u64,
    pub preempted_swap: u64,
    pub preempted_recompute: u64,
    pub blocks_out: u64,
    pub blocks_in: u64,
    /// From a request's arrival to its first token.
    pub first_token: Sum,
    /// From one token of a sequence to the next.
    pub inter_token: Sum,
}

impl WatchTotals {
    pub fn add_plan(&mut self, stats: &PlanStats) {
        self.preempted_swap += stats.preempted_swap as u64;
        self.preempted_recompute += stats.preempted_recompute as u64;
        self.blocks_out += stats.blocks_out as u64;
        self.blocks_in += stats.blocks_in as u64;
    }
}

/// Durations added up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sum {
    pub count: u64,
    pub seconds: f64,
}

impl Sum {
    pub fn add(&mut self, duration: Duration) {
        self.count += 1;
        self.seconds += duration.as_secs_f64();
    }
}

/// Copies that were planned since the last look, oldest first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Moves {
    /// `(device block, swap block)`
    pub out: Vec<(BlockId, BlockId)>,
    /// `(swap block, device block)`
    pub back: Vec<(BlockId, BlockId)>,
}

/// Collects copies while a client watches.
#[derive(Debug, Default)]
pub struct MoveLog {
    moves: Moves,
    until: Option<Instant>,
}

impl MoveLog {
    /// Returns the copies since the last look, and keeps collecting for the next one.
    pub fn take(&mut self, now: Instant) -> Moves {
        self.until = Some(now + WATCHED_FOR);
        std::mem::take(&mut self.moves)
    }

    pub fn add(&mut self, plan: &StepPlan) {
        if self.until.is_none() || (plan.swap_out.is_empty() && plan.swap_in.is_empty()) {
            return;
        }
        if self.until.is_some_and(|until| until < Instant::now()) {
            *self = Self::default();
            return;
        }
        let Moves { out, back } = &mut self.moves;
        out.extend(plan.swap_out.iter().take(MAX_MOVES - out.len()));
        let pairs = plan.swap_in.iter().flat_map(|swap_in| &swap_in.pairs);
        back.extend(pairs.take(MAX_MOVES - back.len()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_base::ids::CopyId;
    use pagetide_engine::plan::SwapIn;

    fn plan(blocks: u32) -> StepPlan {
        let pairs: Vec<_> = (0..blocks).map(|block| (BlockId(block), BlockId(block + 1))).collect();
        StepPlan { swap_out: pairs.clone(), swap_in: vec![SwapIn { id: CopyId(1), pairs }], ..StepPlan::default() }
    }

    #[test]
    fn copies_are_kept_while_somebody_looks_and_not_without_bound() {
        let mut log = MoveLog::default();
        log.add(&plan(3));
        let now = Instant::now();
        assert_eq!(log.take(now), Moves::default(), "nobody had looked");
        log.add(&plan(3));
        let moves = log.take(now);
        assert_eq!((moves.out.len(), moves.back.len()), (3, 3));
        for _ in 0..3 {
            log.add(&plan(MAX_MOVES as u32 / 2 + 1));
        }
        assert_eq!(log.take(now).out.len(), MAX_MOVES);
        let long_ago = now.checked_sub(2 * WATCHED_FOR).expect("the machine is up for longer than that");
        log.take(long_ago);
        log.add(&plan(3));
        assert_eq!(log.take(now), Moves::default(), "who looked has gone");
    }
}
