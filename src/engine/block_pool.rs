//! A pool of KV blocks: who holds which, and what is cached. The device pool and the swap pool are both one.

use crate::engine::prefix_cache::{BlockHash, EvictionPolicy, PrefixCache};
use crate::ids::BlockId;
use std::collections::VecDeque;

/// Fixed-size blocks with reference counts.
///
/// A block is in exactly one of three states:
/// - *used*: its reference count is the number of block tables that hold it, at least one;
/// - *cached*: no table holds it, its content has a hash and may be taken up again;
/// - *free*: no table holds it and its content means nothing.
///
/// `used + cached + free == num_blocks` always. A hash is published only for a full block, which is never written
/// again; so a block may be written by its holder exactly if its reference count is 1.
#[derive(Debug)]
pub struct BlockPool {
    references: Vec<u32>,
    /// Given out from the front. What became free last is there, so that no more memory is touched than is needed; but
    /// where the content is still to be copied, a block goes to the end: then the copy has had the most time when it is
    /// written again.
    free: VecDeque<BlockId>,
    cache: PrefixCache,
    keep_cached: bool,
    num_evicted: u64,
    /// Since [`BlockPool::take_evicted`].
    evicted: Vec<(BlockId, BlockHash)>,
}

/// A pool at a glance, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    pub used: usize,
    pub cached: usize,
    pub free: usize,
    /// Cached blocks that were given away since the pool was made.
    pub evicted: u64,
}

impl BlockPool {
    /// `keep_cached`: a published block stays cached after its last release; otherwise it becomes free, and content
    /// is shared only between tables that hold it at the same time.
    pub fn new(num_blocks: usize, keep_cached: bool) -> Self {
        Self::with_eviction(num_blocks, keep_cached, EvictionPolicy::default())
    }

    /// The same, with a policy for which cached block is given away first.
    pub fn with_eviction(num_blocks: usize, keep_cached: bool, policy: EvictionPolicy) -> Self {
        let last = u32::try_from(num_blocks).expect("block ids are 32 bits: the configuration bounds the pool");
        Self {
            references: vec![0; num_blocks],
            free: (0..last).map(BlockId).collect(),
            cache: PrefixCache::new(num_blocks, policy),
            keep_cached,
            num_evicted: 0,
            evicted: Vec::new(),
        }
    }

    pub fn num_blocks(&self) -> usize {
        self.references.len()
    }

    /// Blocks that [`BlockPool::allocate`] can give: free ones, and cached ones by eviction.
    pub fn available(&self) -> usize {
        self.free.len() + self.cache.num_idle()
    }

    pub fn stats(&self) -> PoolStats {
        let (free, cached) = (self.free.len(), self.cache.num_idle());
        PoolStats { used: self.num_blocks() - free - cached, cached, free, evicted: self.num_evicted }
    }

    /// A block with reference count 1 and no meaning yet: a free one, else the cached one that is worth least.
    pub fn allocate(&mut self) -> Option<BlockId> {
        if self.free.is_empty() {
            self.evict_one();
        }
        let block = self.free.pop_front()?;
        assert_eq!(self.references[block.index()], 0, "{block} was free and held at once");
        self.references[block.index()] = 1;
        Some(block)
    }

    /// Evicts cached blocks until so many are free, or none is cached any more.
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

    /// Blocks that were evicted since the last call, and what they hold until they are written again.
    pub fn take_evicted(&mut self) -> Vec<(BlockId, BlockHash)> {
        std::mem::take(&mut self.evicted)
    }

    /// The content of a block is not what its name says: nobody finds it any more.
    pub fn forget(&mut self, block: BlockId) {
        if self.cache.hash_of(block).is_none() {
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

    /// The same of a block whose content is still to be copied.
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
        if self.cache.hash_of(block).is_none() {
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

    /// Names the content of a full block in use. False where another block already carries the name, or this block
    /// has one.
    pub fn publish(&mut self, block: BlockId, hash: BlockHash) -> bool {
        assert!(self.is_used(block), "{block} is not in use");
        self.cache.hash_of(block).is_none() && self.cache.insert(block, hash)
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
        let mut held = vec![0; self.num_blocks()];
        for block in tables.flatten() {
            held[block.index()] += 1;
        }
        assert_eq!(held, self.references, "reference counts are not those of the tables");
        let mut is_free = vec![false; self.num_blocks()];
        for block in &self.free {
            assert!(!std::mem::replace(&mut is_free[block.index()], true), "{block} is free twice");
            assert!(!self.is_used(*block), "{block} is free and held");
            assert!(self.cache.hash_of(*block).is_none(), "{block} is free and published");
        }
        let used = self.references.iter().filter(|count| **count > 0).count();
        assert_eq!(used + self.cache.num_idle() + self.free.len(), self.num_blocks(), "a block is lost");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::prefix_cache::BlockHasher;

    fn hash(token: u32) -> BlockHash {
        let hasher = BlockHasher::new([0; 32], 1);
        hasher.block(hasher.root(b""), &[token])
    }

    #[test]
    fn free_blocks_go_before_cached_ones() {
        let mut pool = BlockPool::new(3, true);
        let first = pool.allocate().unwrap();
        assert!(pool.publish(first, hash(1)));
        pool.release(first);
        assert_eq!(pool.stats(), PoolStats { used: 0, cached: 1, free: 2, evicted: 0 });
        let others = [pool.allocate().unwrap(), pool.allocate().unwrap()];
        assert_eq!(pool.lookup(&hash(1)), Some(first));
        assert_eq!(pool.allocate(), Some(first));
        assert_eq!(pool.lookup(&hash(1)), None);
        assert_eq!(pool.allocate(), None);
        pool.check([&others[..], &[first]].into_iter());
    }

    #[test]
    fn a_cached_block_is_taken_up_again() {
        let mut pool = BlockPool::new(1, true);
        let block = pool.allocate().unwrap();
        pool.publish(block, hash(1));
        pool.release(block);
        pool.take(pool.lookup(&hash(1)).unwrap());
        pool.take(block);
        assert!(pool.is_shared(block));
        assert_eq!(pool.available(), 0);
        pool.check([&[block][..], &[block]].into_iter());
    }

    #[test]
    fn without_keeping_a_released_block_is_free() {
        let mut pool = BlockPool::new(1, false);
        let block = pool.allocate().unwrap();
        pool.publish(block, hash(1));
        assert_eq!(pool.lookup(&hash(1)), Some(block));
        pool.release(block);
        assert_eq!(pool.lookup(&hash(1)), None);
        assert_eq!(pool.stats().free, 1);
    }

    #[test]
    #[should_panic(expected = "released twice")]
    fn double_release_is_a_bug() {
        let mut pool = BlockPool::new(1, true);
        let block = pool.allocate().unwrap();
        pool.release(block);
        pool.release(block);
    }

    /// What a pool with LRU has to be, without thought for time.
    #[derive(Default)]
    struct Naive {
        /// Blocks of each table.
        tables: Vec<Vec<BlockId>>,
        names: std::collections::HashMap<BlockId, u32>,
        /// In order of release.
        idle: Vec<BlockId>,
    }

    #[test]
    fn a_pool_is_what_it_seems() {
        for seed in 0..40u64 {
            let mut state = seed;
            let mut random = move |below: usize| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) as usize % below
            };
            let num_blocks = 1 + random(12);
            let policy = [EvictionPolicy::Lru, EvictionPolicy::Adaptive][random(2)];
            let mut pool = BlockPool::with_eviction(num_blocks, true, policy);
            let mut naive = Naive { tables: vec![vec![]; 4], ..Naive::default() };
            for _ in 0..400 {
                operate(&mut pool, &mut naive, policy, &mut random);
                pool.check(naive.tables.iter().map(Vec::as_slice));
                assert_eq!(pool.stats().cached, naive.idle.len());
                for token in 0..10 {
                    let holder = naive.names.iter().find(|(_, name)| **name == token).map(|(block, _)| *block);
                    assert_eq!(pool.lookup(&hash(token)), holder);
                }
            }
        }
    }

    fn operate(
        pool: &mut BlockPool,
        naive: &mut Naive,
        policy: EvictionPolicy,
        random: &mut impl FnMut(usize) -> usize,
    ) {
        let table = random(4);
        match random(5) {
            0 | 1 => {
                let room = pool.stats().free;
                let Some(block) = pool.allocate() else {
                    return assert_eq!(room + naive.idle.len(), 0, "there is room");
                };
                let evicted = pool.take_evicted();
                assert_eq!(evicted.len(), usize::from(room == 0));
                for (block, name) in evicted {
                    let place = naive.idle.iter().position(|idle| *idle == block).expect("only idle blocks go");
                    assert!(place == 0 || policy != EvictionPolicy::Lru, "the least recently used goes first");
                    naive.idle.remove(place);
                    assert_eq!(naive.names.remove(&block).map(hash), Some(name));
                }
                naive.tables[table].push(block);
            }
            2 => {
                let Some(block) = naive.tables[table].last() else { return };
                let token = random(10) as u32;
                let is_new = !naive.names.contains_key(block) && naive.names.values().all(|name| *name != token);
                assert_eq!(pool.publish(*block, hash(token)), is_new);
                if is_new {
                    naive.names.insert(*block, token);
                }
            }
            3 => {
                let Some(block) = pool.lookup(&hash(random(10) as u32)) else { return };
                pool.take(block);
                naive.idle.retain(|idle| *idle != block);
                naive.tables[table].push(block);
            }
            _ => {
                let Some(block) = naive.tables[table].pop() else { return };
                pool.release(block);
                let is_idle = !naive.tables.iter().flatten().any(|held| *held == block);
                if is_idle && random(6) == 0 {
                    pool.forget(block);
                    naive.names.remove(&block);
                } else if is_idle && naive.names.contains_key(&block) {
                    naive.idle.push(block);
                }
            }
        }
    }
}
