//! What a pool's blocks are at a moment, for who watches.

use crate::ids::BlockId;

/// Copied as it lies, which is quick; [`PoolView::states`] makes sense of it, on whatever thread has time.
#[derive(Clone, Debug, Default)]
pub struct PoolView {
    pub(super) references: Vec<u32>,
    /// As [`PrefixCache::named`](crate::engine::prefix_cache::PrefixCache::named).
    pub(super) named: Vec<u64>,
    pub(super) retired: Vec<BlockId>,
}

/// What a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    Free,
    Cached,
    /// So many tables hold it.
    Used(u32),
    /// It has left the pool.
    Retired,
}

impl PoolView {
    /// Of each block.
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
