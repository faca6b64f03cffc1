//! Names for KV content: a chained hash per full block, and the index from hash to block.
//!
//! A block's KV depends on every token before it, so its hash covers its parent's hash and its own tokens. Equal
//! hashes therefore mean an equal prefix, and a prefix is looked up block by block from the start.

use crate::ids::{BlockId, IdMap, TokenId};
use smallvec::SmallVec;
use std::collections::hash_map::Entry;
use std::hash::{Hash, Hasher};

/// 128 bits of a keyed BLAKE3. Keyed with a secret of the process, so that no client can construct a collision and
/// read another's cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord)]
pub struct BlockHash([u8; 16]);

/// A part of it is a hash by itself.
impl Hash for BlockHash {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        state.write_u64(u64::from_le_bytes([a, b, c, d, e, f, g, h]));
    }
}

/// Computes block hashes for one block size.
#[derive(Clone, Debug)]
pub struct BlockHasher {
    key: [u8; 32],
    block_size: usize,
}

impl BlockHasher {
    pub fn new(key: [u8; 32], block_size: usize) -> Self {
        assert!(block_size > 0, "a block holds at least one token");
        Self { key, block_size }
    }

    /// The parent of a sequence's first block. Sequences with different salts share nothing.
    pub fn root(&self, salt: &[u8]) -> BlockHash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(b"salt").update(salt);
        truncate(hasher.finalize())
    }

    /// Hash of a full block of `block_size` tokens that follows `parent`.
    pub fn block(&self, parent: BlockHash, tokens: &[TokenId]) -> BlockHash {
        assert_eq!(tokens.len(), self.block_size, "only full blocks have a hash");
        // Room for the usual block sizes without an allocation.
        let mut bytes: SmallVec<[u8; 16 + 4 * 32]> = SmallVec::from_slice(&parent.0);
        bytes.resize(16 + 4 * tokens.len(), 0);
        for (bytes, token) in bytes[16..].chunks_exact_mut(4).zip(tokens) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        truncate(blake3::keyed_hash(&self.key, &bytes))
    }
}

fn truncate(hash: blake3::Hash) -> BlockHash {
    let mut out = [0; 16];
    out.copy_from_slice(&hash.as_bytes()[..16]);
    BlockHash(out)
}

/// Which block holds the KV of which hash, and the order in which unreferenced blocks are evicted: least recently
/// released first. A block is *idle* while it is indexed but no table holds it.
///
/// All operations take constant time: the eviction order is a doubly linked list through the blocks.
#[derive(Debug)]
pub struct PrefixCache {
    index: IdMap<BlockHash, BlockId>,
    nodes: Vec<Node>,
    /// Next to be evicted.
    oldest: Option<BlockId>,
    newest: Option<BlockId>,
    num_idle: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Node {
    hash: Option<BlockHash>,
    idle: bool,
    older: Option<BlockId>,
    newer: Option<BlockId>,
}

impl PrefixCache {
    pub fn new(num_blocks: usize) -> Self {
        Self {
            index: IdMap::default(),
            nodes: vec![Node::default(); num_blocks],
            oldest: None,
            newest: None,
            num_idle: 0,
        }
    }

    /// Idle blocks: cached, and free to be evicted.
    pub fn num_idle(&self) -> usize {
        self.num_idle
    }

    pub fn get(&self, hash: &BlockHash) -> Option<BlockId> {
        self.index.get(hash).copied()
    }

    pub fn hash_of(&self, block: BlockId) -> Option<BlockHash> {
        self.nodes[block.index()].hash
    }

    /// Names a block's content. False, and no change, where another block already carries the name.
    pub fn insert(&mut self, block: BlockId, hash: BlockHash) -> bool {
        assert!(self.nodes[block.index()].hash.is_none(), "{block} is already published");
        let Entry::Vacant(entry) = self.index.entry(hash) else { return false };
        entry.insert(block);
        self.nodes[block.index()].hash = Some(hash);
        true
    }

    /// No table holds the published block any more: it may be evicted, after all that were released before it.
    pub fn park(&mut self, block: BlockId) {
        let newest = self.newest;
        let node = &mut self.nodes[block.index()];
        assert!(node.hash.is_some() && !node.idle, "{block} is not a published block in use");
        *node = Node { idle: true, older: newest, newer: None, ..*node };
        match newest {
            Some(previous) => self.nodes[previous.index()].newer = Some(block),
            None => self.oldest = Some(block),
        }
        self.newest = Some(block);
        self.num_idle += 1;
    }

    /// A table takes an idle block up again.
    pub fn unpark(&mut self, block: BlockId) {
        let node = self.nodes[block.index()];
        assert!(node.idle, "{block} is not idle");
        match node.older {
            Some(older) => self.nodes[older.index()].newer = node.newer,
            None => self.oldest = node.newer,
        }
        match node.newer {
            Some(newer) => self.nodes[newer.index()].older = node.older,
            None => self.newest = node.older,
        }
        self.nodes[block.index()] = Node { hash: node.hash, ..Node::default() };
        self.num_idle -= 1;
    }

    /// Forgets a block's content; it must not be idle.
    pub fn remove(&mut self, block: BlockId) {
        let node = &mut self.nodes[block.index()];
        assert!(!node.idle, "{block} is idle: unpark it first");
        if let Some(hash) = node.hash.take() {
            self.index.remove(&hash);
        }
    }

    /// Forgets the least recently released idle block and gives it away, with its name.
    pub fn evict(&mut self) -> Option<(BlockId, BlockHash)> {
        let block = self.oldest?;
        let hash = self.hash_of(block).expect("an idle block has a name");
        self.unpark(block);
        self.remove(block);
        Some((block, hash))
    }

    /// Asserts every invariant; linear in the number of blocks.
    pub fn check(&self) {
        let mut seen = 0;
        let mut older = None;
        let mut at = self.oldest;
        while let Some(block) = at {
            let node = &self.nodes[block.index()];
            assert!(node.idle && node.hash.is_some(), "the eviction list holds {block}, which is not idle");
            assert_eq!(node.older, older, "broken link at {block}");
            seen += 1;
            older = at;
            at = node.newer;
        }
        assert_eq!(self.newest, older, "the list's end is not its newest block");
        assert_eq!(seen, self.num_idle, "idle blocks and eviction list differ");
        assert_eq!(self.nodes.iter().filter(|node| node.idle).count(), self.num_idle);
        assert_eq!(self.nodes.iter().filter(|node| node.hash.is_some()).count(), self.index.len());
        for (hash, block) in &self.index {
            assert_eq!(self.nodes[block.index()].hash, Some(*hash), "the index and {block} disagree");
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
        let mut cache = PrefixCache::new(4);
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
        let mut cache = PrefixCache::new(2);
        assert!(cache.insert(BlockId(0), names[0]));
        assert!(!cache.insert(BlockId(1), names[0]));
        assert_eq!(cache.get(&names[0]), Some(BlockId(0)));
        assert_eq!(cache.hash_of(BlockId(1)), None);
        cache.check();
    }
}
