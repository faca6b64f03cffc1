//! Doubly linked lists of the blocks of a pool, and a bounded memory of evicted blocks.

use crate::arrays;
use crate::block_hash::BlockHash;
use hashbrown::HashTable;
use pagetide_base::ids::BlockId;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// `N` lists; a block is in at most one. All operations take constant time.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Lists<const N: usize> {
    links: Vec<Link>,
    #[serde(with = "arrays")]
    ends: [ListEnds; N],
}

/// Kept small, because there is one for each block of a pool.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Link {
    /// Or [`NO_LIST`].
    list: u8,
    /// Or [`NO_BLOCK`].
    older: BlockId,
    newer: BlockId,
}

const NO_LIST: u8 = u8::MAX;
/// A pool has no more than `u32::MAX` blocks, so that no block has this number.
const NO_BLOCK: BlockId = BlockId(u32::MAX);
const UNLINKED: Link = Link { list: NO_LIST, older: NO_BLOCK, newer: NO_BLOCK };

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct ListEnds {
    /// Or [`NO_BLOCK`].
    oldest: BlockId,
    newest: BlockId,
    len: usize,
}

impl<const N: usize> Lists<N> {
    pub fn new(num_blocks: usize) -> Self {
        const { assert!(N <= NO_LIST as usize) };
        let empty = ListEnds { oldest: NO_BLOCK, newest: NO_BLOCK, len: 0 };
        Self { links: vec![UNLINKED; num_blocks], ends: [empty; N] }
    }

    /// Grows to `num_blocks` blocks.
    pub fn grow(&mut self, num_blocks: usize) {
        self.links.resize(num_blocks, UNLINKED);
    }

    /// The list that a block is in.
    pub fn list_of(&self, block: BlockId) -> Option<usize> {
        let list = self.links[block.index()].list;
        (list != NO_LIST).then_some(list.into())
    }

    pub fn oldest(&self, list: usize) -> Option<BlockId> {
        Some(self.ends[list].oldest).filter(|block| *block != NO_BLOCK)
    }

    /// Puts a block that is in no list at the new end of one.
    pub fn push(&mut self, list: usize, block: BlockId) {
        let older = self.ends[list].newest;
        let link = &mut self.links[block.index()];
        assert_eq!(link.list, NO_LIST, "{block} is in a list");
        *link = Link { list: list as u8, older, newer: NO_BLOCK };
        match older {
            NO_BLOCK => self.ends[list].oldest = block,
            older => self.links[older.index()].newer = block,
        }
        self.ends[list].newest = block;
        self.ends[list].len += 1;
    }

    /// Takes a block out of its list.
    pub fn remove(&mut self, block: BlockId) {
        let Link { list, older, newer } = std::mem::replace(&mut self.links[block.index()], UNLINKED);
        assert_ne!(list, NO_LIST, "only a block of a list is removed");
        let ends = &mut self.ends[usize::from(list)];
        match older {
            NO_BLOCK => ends.oldest = newer,
            older => self.links[older.index()].newer = newer,
        }
        match newer {
            NO_BLOCK => ends.newest = older,
            newer => self.links[newer.index()].older = older,
        }
        ends.len -= 1;
    }

    /// About how many bytes of memory they take.
    pub fn num_bytes(&self) -> usize {
        self.links.len() * size_of::<Link>()
    }

    /// Asserts every invariant; linear in the number of blocks.
    pub fn check(&self) {
        for (list, ends) in self.ends.iter().enumerate() {
            let (mut older, mut at, mut len) = (NO_BLOCK, ends.oldest, 0);
            while at != NO_BLOCK {
                let link = &self.links[at.index()];
                assert_eq!((usize::from(link.list), link.older), (list, older), "broken link at {at}");
                (older, at, len) = (at, link.newer, len + 1);
            }
            assert_eq!((ends.newest, ends.len), (older, len), "the end or the length of list {list} is wrong");
        }
        let in_lists = self.links.iter().filter(|link| link.list != NO_LIST).count();
        assert_eq!(
            in_lists,
            self.ends.iter().map(|ends| ends.len).sum::<usize>(),
            "a block is in a list that does not have it"
        );
    }
}

/// What is remembered of evicted blocks, by hash: at most `capacity` entries, the oldest forgotten first.
///
/// Entries are stored in the order of eviction, and a table of their numbers finds them by hash. So most entries that a
/// step touches are contiguous.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(from = "SavedGhosts<T>")]
pub struct Ghosts<T> {
    capacity: usize,
    /// `None` if a block with this hash is there again.
    evicted: VecDeque<(BlockHash, Option<T>)>,
    /// The number of the first of them; the others follow, and wrap around.
    first: u32,
    /// The numbers of those that are remembered.
    #[serde(skip)]
    numbers: HashTable<u32>,
}

#[derive(Deserialize)]
struct SavedGhosts<T> {
    capacity: usize,
    evicted: VecDeque<(BlockHash, Option<T>)>,
    first: u32,
}

impl<T> From<SavedGhosts<T>> for Ghosts<T> {
    fn from(SavedGhosts { capacity, evicted, first }: SavedGhosts<T>) -> Self {
        let mut ghosts = Self { capacity, evicted, first, numbers: HashTable::new() };
        ghosts.number();
        ghosts
    }
}

impl<T> Ghosts<T> {
    pub fn new(capacity: usize) -> Self {
        // 32-bit numbers can tell this many apart.
        let capacity = capacity.min(u32::MAX as usize);
        Self { capacity, evicted: VecDeque::new(), first: 0, numbers: HashTable::new() }
    }

    /// Remembers up to `capacity` entries from now on, more than before.
    pub fn grow(&mut self, capacity: usize) {
        self.capacity = capacity.min(u32::MAX as usize);
    }

    /// Remembers an evicted block whose hash is not remembered yet. Returns the entry that is forgotten for it.
    pub fn add(&mut self, hash: BlockHash, ghost: T) -> Option<T> {
        let Self { evicted, first, numbers, .. } = self;
        if evicted.len() < self.capacity {
            evicted.push_back((hash, Some(ghost)));
            insert(numbers, evicted, *first, evicted.len() - 1);
            return None;
        }
        let Some((name, forgotten)) = evicted.pop_front() else { return Some(ghost) };
        if forgotten.is_some()
            && let Ok(entry) = numbers.find_entry(name.spread(), |number| number == first)
        {
            entry.remove();
        }
        *first = first.wrapping_add(1);
        evicted.push_back((hash, Some(ghost)));
        insert(numbers, evicted, *first, evicted.len() - 1);
        forgotten
    }

    /// A block with this hash is there again.
    pub fn remove(&mut self, hash: &BlockHash) -> Option<T> {
        let Self { evicted, first, numbers, .. } = self;
        let is_it = |number: &u32| evicted[place(*number, *first)].0 == *hash;
        let (number, _) = numbers.find_entry(hash.spread(), is_it).ok()?.remove();
        evicted[place(number, *first)].1.take()
    }

    pub fn map_hashes(&mut self, map: impl Fn(BlockHash) -> BlockHash) {
        self.evicted.iter_mut().for_each(|(name, _)| *name = map(*name));
        self.number();
    }

    /// Fills the table anew.
    fn number(&mut self) {
        let Self { evicted, first, numbers, .. } = self;
        numbers.clear();
        let remembered = (0..evicted.len()).filter(|place| evicted[*place].1.is_some());
        remembered.for_each(|place| insert(numbers, evicted, *first, place));
    }

    /// About how many bytes of memory they take.
    pub fn num_bytes(&self) -> usize {
        self.evicted.capacity() * size_of::<(BlockHash, Option<T>)>() + self.numbers.allocation_size()
    }

    pub fn check(&self) {
        assert!(self.evicted.len() <= self.capacity, "ghosts are not bounded");
        let remembered = self.evicted.iter().filter(|(_, ghost)| ghost.is_some());
        assert_eq!(remembered.count(), self.numbers.len(), "a ghost is not found, or more often than once");
        for number in &self.numbers {
            let (name, ghost) = &self.evicted[place(*number, self.first)];
            let found = self.numbers.find(name.spread(), |other| self.evicted[place(*other, self.first)].0 == *name);
            assert!(ghost.is_some() && found == Some(number), "a ghost is found under another's name");
        }
    }
}

fn place(number: u32, first: u32) -> usize {
    number.wrapping_sub(first) as usize
}

fn insert<T>(numbers: &mut HashTable<u32>, evicted: &VecDeque<(BlockHash, Option<T>)>, first: u32, at: usize) {
    let spread = |number: &u32| evicted[place(*number, first)].0.spread();
    numbers.insert_unique(evicted[at].0.spread(), first.wrapping_add(at as u32), spread);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_leave_lists_from_anywhere() {
        let mut lists = Lists::<2>::new(6);
        for block in [3, 0, 5, 1] {
            lists.push(usize::from(block == 5), BlockId(block));
            lists.check();
        }
        lists.remove(BlockId(0)); // the middle
        lists.check();
        lists.push(1, BlockId(0));
        assert_eq!([lists.oldest(0), lists.oldest(1)], [Some(BlockId(3)), Some(BlockId(5))]);
        assert_eq!([lists.list_of(BlockId(0)), lists.list_of(BlockId(2))], [Some(1), None]);
        for block in [3, 1, 0, 5] {
            lists.remove(BlockId(block));
            lists.check();
        }
        assert_eq!([lists.oldest(0), lists.oldest(1)], [None, None]);
    }

    #[test]
    fn the_oldest_ghosts_are_forgotten() {
        let name = |number| BlockHash::of_number(number);
        let mut ghosts = Ghosts::new(2);
        assert_eq!([ghosts.add(name(1), 'a'), ghosts.add(name(2), 'b')], [None, None]);
        assert_eq!(ghosts.remove(&name(1)), Some('a'));
        // Evicted once more: it is the newest now, and its old entry forgets nothing.
        assert_eq!(ghosts.add(name(1), 'c'), None);
        ghosts.check();
        assert_eq!(ghosts.add(name(3), 'd'), Some('b'));
        ghosts.check();
        assert_eq!(
            [ghosts.remove(&name(1)), ghosts.remove(&name(2)), ghosts.remove(&name(3))],
            [Some('c'), None, Some('d')]
        );
        let mut none = Ghosts::new(0);
        assert_eq!(none.add(name(1), 'a'), Some('a'));
        none.check();
    }
}
