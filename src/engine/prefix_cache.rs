//! The prefix cache: the index from block hash to block.

mod adaptive;
mod lists;

pub use crate::block_hash::{BlockHash, BlockHasher};
use adaptive::Adaptive;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use lists::Lists;
use pagetide_base::ids::BlockId;
use serde::{Deserialize, Serialize};

/// The index from hash to block, and the order of eviction. A block is *idle* while it is indexed but no table holds
/// it.
///
/// All operations take constant time, some of them on average.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "SavedCache")]
pub struct PrefixCache {
    /// The blocks that have a hash, by hash. The hash itself is in `names`.
    #[serde(skip)]
    index: HashTable<BlockId>,
    /// The hash of each block. It is valid only if `named` says that the block has one.
    names: Vec<BlockHash>,
    /// A bit for each block: whether it has a hash.
    named: Vec<u64>,
    num_idle: usize,
    order: Order,
}

#[derive(Deserialize)]
struct SavedCache {
    names: Vec<BlockHash>,
    named: Vec<u64>,
    num_idle: usize,
    order: Order,
}

impl TryFrom<SavedCache> for PrefixCache {
    type Error = String;

    fn try_from(SavedCache { names, named, num_idle, order }: SavedCache) -> Result<Self, String> {
        if named.len() != names.len().div_ceil(64) {
            return Err(format!("{} times 64 bits say which of {} blocks have a name", named.len(), names.len()));
        }
        let mut cache = Self { index: HashTable::new(), names, named, num_idle, order };
        cache.fill_index();
        Ok(cache)
    }
}

/// Which idle block is evicted first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum EvictionPolicy {
    /// The one that is worth least, by how often and how long ago it was used.
    #[default]
    Adaptive,
    /// The one that was released first.
    Lru,
}

/// The idle blocks, in the order of a policy.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Order {
    Adaptive(Box<Adaptive>),
    Lru(Lists<1>),
}

impl PrefixCache {
    pub fn new(num_blocks: usize, policy: EvictionPolicy) -> Self {
        Self {
            index: HashTable::with_capacity(num_blocks),
            names: vec![BlockHash([0; 16]); num_blocks],
            named: vec![0; num_blocks.div_ceil(64)],
            num_idle: 0,
            order: match policy {
                EvictionPolicy::Adaptive => Order::Adaptive(Box::new(Adaptive::new(num_blocks))),
                EvictionPolicy::Lru => Order::Lru(Lists::new(num_blocks)),
            },
        }
    }

    /// Grows to `num_blocks` blocks.
    pub fn grow(&mut self, num_blocks: usize) {
        self.names.resize(num_blocks, BlockHash([0; 16]));
        self.named.resize(num_blocks.div_ceil(64), 0);
        match &mut self.order {
            Order::Adaptive(adaptive) => adaptive.grow(num_blocks),
            Order::Lru(lists) => lists.grow(num_blocks),
        }
    }

    /// Idle blocks: cached, and free to be evicted.
    pub fn num_idle(&self) -> usize {
        self.num_idle
    }

    pub fn get(&self, hash: &BlockHash) -> Option<BlockId> {
        self.index.find(hash.spread(), |block| self.names[block.index()] == *hash).copied()
    }

    pub fn hash_of(&self, block: BlockId) -> Option<BlockHash> {
        self.is_named(block).then(|| self.names[block.index()])
    }

    pub fn is_named(&self, block: BlockId) -> bool {
        self.named[block.index() / 64] >> (block.index() % 64) & 1 == 1
    }

    /// Sets a block's hash. If another block already has this hash, nothing changes and the result is false.
    pub fn insert(&mut self, block: BlockId, hash: BlockHash) -> bool {
        assert!(!self.is_named(block), "{block} is already published");
        let (is_it, spread) =
            (|block: &BlockId| self.names[block.index()] == hash, |block: &BlockId| self.names[block.index()].spread());
        let Entry::Vacant(entry) = self.index.entry(hash.spread(), is_it, spread) else { return false };
        entry.insert(block);
        self.names[block.index()] = hash;
        self.named[block.index() / 64] |= 1 << (block.index() % 64);
        if let Order::Adaptive(adaptive) = &mut self.order {
            adaptive.insert(block, &hash);
        }
        true
    }

    /// No table holds the published block any more, so it may be evicted. The blocks of a prefix have to come in
    /// reverse order.
    pub fn park(&mut self, block: BlockId) {
        assert!(self.is_named(block), "{block} is not published");
        match &mut self.order {
            Order::Adaptive(adaptive) => adaptive.park(block),
            Order::Lru(lists) => lists.push(0, block),
        }
        self.num_idle += 1;
    }

    /// A table holds an idle block again.
    pub fn unpark(&mut self, block: BlockId) {
        match &mut self.order {
            Order::Adaptive(adaptive) => adaptive.unpark(block),
            Order::Lru(lists) => lists.remove(block),
        }
        self.num_idle -= 1;
    }

    /// One more table holds a block that is not idle.
    pub fn share(&mut self, block: BlockId) {
        if let Order::Adaptive(adaptive) = &mut self.order {
            adaptive.share(block);
        }
    }

    /// Forgets a block's content; it must not be idle.
    pub fn remove(&mut self, block: BlockId) {
        assert!(!self.is_idle(block), "{block} is idle: unpark it first");
        if let Some(hash) = self.hash_of(block) {
            self.named[block.index() / 64] &= !(1 << (block.index() % 64));
            let entry = self.index.find_entry(hash.spread(), |other| *other == block);
            entry.expect("a block that has a name is found by it").remove();
        }
    }

    /// Drops an idle block that will not be used again. This is not an eviction for lack of room.
    pub fn discard(&mut self, block: BlockId) {
        match &mut self.order {
            Order::Adaptive(adaptive) => adaptive.discard(block),
            Order::Lru(lists) => lists.remove(block),
        }
        self.num_idle -= 1;
        self.remove(block);
    }

    /// Evicts the idle block that is worth least. Returns it with its hash.
    pub fn evict(&mut self) -> Option<(BlockId, BlockHash)> {
        let block = match &mut self.order {
            Order::Adaptive(adaptive) => adaptive.evict(&self.names)?,
            Order::Lru(lists) => lists.oldest(0).inspect(|block| lists.remove(*block))?,
        };
        self.num_idle -= 1;
        let hash = self.names[block.index()];
        self.remove(block);
        Some((block, hash))
    }

    /// A bit for each block, 64 in a number, lowest first: whether it has a hash.
    pub fn named(&self) -> &[u64] {
        &self.named
    }

    /// The policy that it was made with.
    pub fn policy(&self) -> EvictionPolicy {
        match &self.order {
            Order::Adaptive(_) => EvictionPolicy::Adaptive,
            Order::Lru(_) => EvictionPolicy::Lru,
        }
    }

    /// Gives all content another name.
    pub fn map_hashes(&mut self, map: impl Fn(BlockHash) -> BlockHash) {
        // Also hashes that blocks had earlier, which must not be visible.
        self.names.iter_mut().for_each(|name| *name = map(*name));
        self.fill_index();
        if let Order::Adaptive(adaptive) = &mut self.order {
            adaptive.map_hashes(map);
        }
    }

    fn fill_index(&mut self) {
        self.index = HashTable::with_capacity(self.names.len());
        for block in (0..self.names.len()).map(|block| BlockId(block as u32)) {
            if self.is_named(block) {
                let spread = |block: &BlockId| self.names[block.index()].spread();
                self.index.insert_unique(spread(&block), block, spread);
            }
        }
    }

    /// Its approximate memory in bytes.
    pub fn num_bytes(&self) -> usize {
        let order = match &self.order {
            Order::Adaptive(adaptive) => adaptive.num_bytes(),
            Order::Lru(lists) => lists.num_bytes(),
        };
        self.index.allocation_size() + self.names.len() * size_of::<BlockHash>() + order
    }

    fn is_idle(&self, block: BlockId) -> bool {
        match &self.order {
            Order::Adaptive(adaptive) => adaptive.is_idle(block),
            Order::Lru(lists) => lists.list_of(block).is_some(),
        }
    }

    /// Asserts every invariant; linear in the number of blocks.
    pub fn check(&self) {
        match &self.order {
            Order::Adaptive(adaptive) => adaptive.check(),
            Order::Lru(lists) => lists.check(),
        }
        let blocks = (0..self.names.len()).map(|block| BlockId(block as u32));
        let idle: Vec<BlockId> = blocks.filter(|block| self.is_idle(*block)).collect();
        assert_eq!(idle.len(), self.num_idle, "idle blocks and their number differ");
        assert!(idle.iter().all(|block| self.is_named(*block)), "a block without a name is idle");
        let named = (0..self.names.len()).map(|block| BlockId(block as u32)).filter(|block| self.is_named(*block));
        assert_eq!(named.clone().count(), self.index.len());
        for block in named {
            assert_eq!(self.get(&self.names[block.index()]), Some(block), "the index and {block} disagree");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(count: u32) -> Vec<BlockHash> {
        let hasher = BlockHasher::new([7; 32], 1);
        let root = hasher.root(b"");
        (0..count).map(|token| hasher.block(root, &[token])).collect()
    }

    #[test]
    fn hash_covers_key_salt_parent_and_tokens() {
        let hasher = BlockHasher::new([1; 32], 2);
        let root = hasher.root(b"");
        let first = hasher.block(root, &[1, 2]);
        let all = [
            root,
            hasher.root(b"tenant"),
            first,
            hasher.block(root, &[2, 1]),
            hasher.block(first, &[1, 2]),
            BlockHasher::new([2; 32], 2).block(root, &[1, 2]),
            hasher.block(hasher.root(b"tenant"), &[1, 2]),
        ];
        for (i, a) in all.iter().enumerate() {
            for b in &all[i + 1..] {
                assert_ne!(a, b);
            }
        }
        assert_eq!(first, hasher.block(root, &[1, 2]));
    }

    #[test]
    fn evicts_in_order_of_release() {
        let names = hashes(4);
        let mut cache = PrefixCache::new(4, EvictionPolicy::Lru);
        for (block, hash) in names.iter().enumerate() {
            assert!(cache.insert(BlockId(block as u32), *hash));
        }
        for block in [2, 0, 3, 1] {
            cache.park(BlockId(block));
            cache.check();
        }
        cache.unpark(BlockId(3)); // from the middle
        cache.check();
        cache.park(BlockId(3));
        let order: Vec<_> = std::iter::from_fn(|| cache.evict()).map(|(block, _)| block.0).collect();
        assert_eq!(order, [2, 0, 1, 3]);
        assert!(names.iter().all(|hash| cache.get(hash).is_none()));
        cache.check();
    }

    #[test]
    fn the_first_block_of_a_hash_keeps_it() {
        let names = hashes(1);
        let mut cache = PrefixCache::new(2, EvictionPolicy::default());
        assert!(cache.insert(BlockId(0), names[0]));
        assert!(!cache.insert(BlockId(1), names[0]));
        assert_eq!(cache.get(&names[0]), Some(BlockId(0)));
        assert_eq!(cache.hash_of(BlockId(1)), None);
        cache.check();
    }
}
