//! A snapshot of a pool's blocks, for the console.

use pagetide_base::ids::BlockId;

/// A plain copy of the pool's arrays, which is fast. [`PoolView::states`] interprets it on another thread.
#[derive(Clone, Debug, Default)]
pub struct PoolView {
    pub(super) references: Vec<u32>,
    /// As [`PrefixCache::named`](crate::prefix_cache::PrefixCache::named).
    pub(super) named: Vec<u64>,
    pub(super) retired: Vec<BlockId>,
}

/// What a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    Free,
    Cached,
    /// This many tables hold it.
    Used(u32),
    /// It has left the pool.
    Retired,
}

impl PoolView {
    /// The fraction of its blocks that tables hold, 0 to 1.
    pub fn used_share(&self) -> f64 {
        let used = self.references.iter().filter(|references| **references > 0).count();
        used as f64 / self.references.len().max(1) as f64
    }

    /// The state of each block.
    pub fn states(&self) -> Vec<BlockState> {
        let is_named = |place: usize| self.named[place / 64] >> (place % 64) & 1 == 1;
        let state = |(place, references): (usize, &u32)| match *references {
            0 if is_named(place) => BlockState::Cached,
            0 => BlockState::Free,
            references => BlockState::Used(references),
        };
        let mut states: Vec<BlockState> = self.references.iter().enumerate().map(state).collect();
        self.retired.iter().for_each(|block| states[block.index()] = BlockState::Retired);
        states
    }
}
