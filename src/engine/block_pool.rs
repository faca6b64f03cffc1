//! A pool of KV blocks: reference counts, and the cache. The device pool and the swap pool are both of this type.

mod view;

use crate::prefix_cache::{BlockHash, EvictionPolicy, PrefixCache};
use pagetide_base::ids::BlockId;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
pub use view::{BlockState, PoolView};

/// Fixed-size blocks with reference counts.
///
/// A block is in exactly one of three states:
/// - *used*: its reference count is the number of block tables that hold it, at least one;
/// - *cached*: no table holds it, its content has a hash and may be taken up again;
/// - *free*: no table holds it and its content means nothing.
///
/// `used + cached + free == num_blocks + draining` always holds. If the pool was made smaller than what is used
/// ([`BlockPool::resize`]), blocks *drain*: they leave the pool when they are released. Until then no block is cached
/// or free.
///
/// A hash is published only for a full block, which is never written again; so a block may be written by its holder
/// exactly if its reference count is 1.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BlockPool {
    /// Reference counts of all blocks that there have ever been.
    references: Vec<u32>,
    /// Blocks that have left the pool, the last one last; they come back when it grows.
    retired: Vec<BlockId>,
    /// How many of them [`BlockPool::take_retired`] has returned.
    #[serde(skip)]
    num_told: usize,
    /// The number of used blocks that leave the pool when they are released. Which ones is open.
    draining: usize,
    /// Free blocks, allocated from the front. A block that becomes free goes to the front, so that no more memory is
    /// touched than needed. If its content is still to be copied, it goes to the end, so that the copy has the most
    /// time before the block is written again.
    free: VecDeque<BlockId>,
    cache: PrefixCache,
    keep_cached: bool,
    num_evicted: u64,
    /// Evictions since the last [`BlockPool::take_evicted`].
    evicted: Vec<(BlockId, BlockHash)>,
}

/// A pool at a glance, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolStats {
    pub used: usize,
    pub cached: usize,
    pub free: usize,
    /// Used blocks beyond the pool's size.
    pub draining: usize,
    /// Blocks evicted since the pool was made.
    pub evicted: u64,
}

impl BlockPool {
    /// `keep_cached`: a published block stays cached after its last release; otherwise it becomes free, and content
    /// is shared only between tables that hold it at the same time.
    pub fn new(num_blocks: usize, keep_cached: bool) -> Self {
        Self::with_eviction(num_blocks, keep_cached, EvictionPolicy::default())
    }

    /// The same, with an eviction policy.
    pub fn with_eviction(num_blocks: usize, keep_cached: bool, policy: EvictionPolicy) -> Self {
        let last = u32::try_from(num_blocks).expect("block ids are 32 bits: the configuration bounds the pool");
        Self {
            references: vec![0; num_blocks],
            retired: Vec::new(),
            num_told: 0,
            draining: 0,
            free: (0..last).map(BlockId).collect(),
            cache: PrefixCache::new(num_blocks, policy),
            keep_cached,
            num_evicted: 0,
            evicted: Vec::new(),
        }
    }

    /// An empty pool of this size that has learned nothing. For use after a failure, which leaves no content in the
    /// blocks.
    pub fn renewed(&self) -> Self {
        Self::with_eviction(self.num_blocks(), self.keep_cached, self.cache.policy())
    }

    /// Replaces the hashes of all blocks. `map` gives different hashes for different ones.
    pub fn map_hashes(&mut self, map: impl Fn(BlockHash) -> BlockHash + Copy) {
        self.cache.map_hashes(map);
        self.evicted.iter_mut().for_each(|(_, hash)| *hash = map(*hash));
    }

    /// Its approximate memory in bytes.
    pub fn num_bytes(&self) -> usize {
        self.references.len() * (size_of::<u32>() + size_of::<BlockId>()) + self.cache.num_bytes()
    }

    /// The pool's size. While blocks drain, more are used.
    pub fn num_blocks(&self) -> usize {
        self.references.len() - self.retired.len() - self.draining
    }

    /// Makes the pool larger or smaller. Free blocks leave it first, then cached ones, and then used ones as they are
    /// released. The other blocks keep their ids. A block that is added has no content.
    pub fn resize(&mut self, num_blocks: usize) {
        let missing = num_blocks.saturating_sub(self.num_blocks());
        let stay = missing.min(self.draining);
        self.draining -= stay;
        self.add_blocks(missing - stay);
        while self.num_blocks() > num_blocks {
            if self.free.is_empty() {
                self.evict_one();
            }
            // From the end, where the blocks are that were not touched lately, or never.
            match self.free.pop_back() {
                Some(block) => self.retired.push(block),
                None => self.draining += 1,
            }
        }
    }

    /// Adds blocks that had left the pool first, then new ones.
    fn add_blocks(&mut self, count: usize) {
        let from_retired = count.min(self.retired.len());
        self.free.extend(self.retired.drain(self.retired.len() - from_retired..));
        self.num_told = self.num_told.min(self.retired.len());
        let (before, total) = (self.references.len(), self.references.len() + count - from_retired);
        if total > before {
            self.references.resize(total, 0);
            self.cache.grow(total);
            let id =
                |block: usize| u32::try_from(block).expect("block ids are 32 bits: the configuration bounds the pool");
            self.free.extend((before..total).map(|block| BlockId(id(block))));
        }
    }

    /// Blocks that have left the pool since the last call and have not come back.
    pub fn take_retired(&mut self) -> Vec<BlockId> {
        let retired = self.retired[self.num_told..].to_vec();
        self.num_told = self.retired.len();
        retired
    }

    /// Blocks that [`BlockPool::allocate`] can give: free ones, and cached ones by eviction.
    pub fn available(&self) -> usize {
        self.free.len() + self.cache.num_idle()
    }

    pub fn stats(&self) -> PoolStats {
        let (free, cached) = (self.free.len(), self.cache.num_idle());
        let used = self.references.len() - self.retired.len() - free - cached;
        PoolStats { used, cached, free, draining: self.draining, evicted: self.num_evicted }
    }

    /// Allocates a block with reference count 1 and no content: a free one, or else the cached one that is worth least.
    pub fn allocate(&mut self) -> Option<BlockId> {
        if self.free.is_empty() {
            self.evict_one();
        }
        let block = self.free.pop_front()?;
        assert_eq!(self.references[block.index()], 0, "{block} was free and held at once");
        self.references[block.index()] = 1;
        Some(block)
    }

    /// Evicts cached blocks until `num_free` are free, or none is cached.
    pub fn evict_ahead(&mut self, num_free: usize) {
        while self.free.len() < num_free && self.evict_one() {}
    }

    fn evict_one(&mut self) -> bool {
        let Some((block, hash)) = self.cache.evict() else { return false };
        self.num_evicted += 1;
        self.evicted.push((block, hash));
        self.free.push_back(block);
        true
    }

    /// Makes every cached block free. Nobody is told what they held: it is not to be kept.
    pub fn drop_cached(&mut self) {
        while let Some((block, _)) = self.cache.evict() {
            self.free.push_back(block);
        }
    }

    /// Blocks that were evicted since the last call, and what they hold until they are written again.
    pub fn take_evicted(&mut self) -> Vec<(BlockId, BlockHash)> {
        std::mem::take(&mut self.evicted)
    }

    /// Drops the hash of a block whose content is not what the hash says, so that it is no longer found.
    pub fn forget(&mut self, block: BlockId) {
        if !self.cache.is_named(block) {
            return;
        }
        if self.is_used(block) {
            self.cache.remove(block);
        } else {
            self.cache.discard(block);
            self.free.push_back(block);
        }
    }

    /// One more table holds the used block.
    pub fn retain(&mut self, block: BlockId) {
        let references = &mut self.references[block.index()];
        assert!(*references > 0, "{block} is not in use");
        *references += 1;
    }

    /// One table less holds the block. Release a table from its tail, so that the head of a prefix, which more
    /// requests can share, is evicted last.
    pub fn release(&mut self, block: BlockId) {
        self.give_back(block, VecDeque::push_front);
    }

    /// The same, for a block whose content is still to be copied.
    pub fn release_to_copy(&mut self, block: BlockId) {
        self.give_back(block, VecDeque::push_back);
    }

    fn give_back(&mut self, block: BlockId, add: fn(&mut VecDeque<BlockId>, BlockId)) {
        let references = &mut self.references[block.index()];
        assert!(*references > 0, "{block} was released twice");
        *references -= 1;
        if *references > 0 {
            return;
        }
        if self.draining > 0 {
            self.cache.remove(block);
            self.draining -= 1;
            self.retired.push(block);
        } else if !self.cache.is_named(block) {
            add(&mut self.free, block);
        } else if self.keep_cached {
            self.cache.park(block);
        } else {
            self.cache.remove(block);
            add(&mut self.free, block);
        }
    }

    pub fn is_shared(&self, block: BlockId) -> bool {
        self.references[block.index()] > 1
    }

    /// Tables that hold the block.
    pub fn num_references(&self, block: BlockId) -> u32 {
        self.references[block.index()]
    }

    /// Whether a table holds the block.
    pub fn is_used(&self, block: BlockId) -> bool {
        self.references[block.index()] > 0
    }

    /// The state of each block, for the console.
    pub fn view(&self) -> PoolView {
        let (references, named) = (self.references.clone(), self.cache.named().to_vec());
        PoolView { references, named, retired: self.retired.clone() }
    }

    /// Publishes the hash of a full block in use. False if another block already has this hash, or if this block has
    /// one.
    pub fn publish(&mut self, block: BlockId, hash: BlockHash) -> bool {
        assert!(self.is_used(block), "{block} is not in use");
        !self.cache.is_named(block) && self.cache.insert(block, hash)
    }

    /// The block that holds this content, in use or cached; its reference count is unchanged.
    pub fn lookup(&self, hash: &BlockHash) -> Option<BlockId> {
        self.cache.get(hash)
    }

    /// Takes up a block found by [`BlockPool::lookup`]: one more table holds it.
    pub fn take(&mut self, block: BlockId) {
        if self.is_used(block) {
            self.retain(block);
            self.cache.share(block);
        } else {
            self.cache.unpark(block);
            self.references[block.index()] = 1;
        }
    }

    /// Asserts every invariant, and that the reference counts are those of `tables`; linear in the pool.
    pub fn check<'a>(&self, tables: impl Iterator<Item = &'a [BlockId]>) {
        self.cache.check();
        let mut held = vec![0; self.references.len()];
        for block in tables.flatten() {
            held[block.index()] += 1;
        }
        assert_eq!(held, self.references, "reference counts are not those of the tables");
        let mut is_idle = vec![false; self.references.len()];
        for block in self.free.iter().chain(&self.retired) {
            assert!(!std::mem::replace(&mut is_idle[block.index()], true), "{block} is free, or gone, twice");
            assert!(!self.is_used(*block), "{block} is free, or gone, and held");
            assert!(!self.cache.is_named(*block), "{block} is free, or gone, and published");
        }
        let used = self.references.iter().filter(|count| **count > 0).count();
        let there = used + self.cache.num_idle() + self.free.len();
        assert_eq!(there, self.num_blocks() + self.draining, "a block is lost");
        assert!(self.draining == 0 || there == used, "blocks drain, and others are not used");
    }
}

#[cfg(test)]
mod tests;
