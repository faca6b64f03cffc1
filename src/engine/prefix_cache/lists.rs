//! Doubly linked lists through the blocks of a pool, and a bounded memory of those that were evicted.

use super::BlockHash;
use crate::engine::arrays;
use crate::ids::{BlockId, IdMap};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// `N` lists; a block is in at most one. All operations take constant time.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Lists<const N: usize> {
    links: Vec<Link>,
    #[serde(with = "arrays")]
    ends: [Ends; N],
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Link {
    list: Option<usize>,
    older: Option<BlockId>,
    newer: Option<BlockId>,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Ends {
    oldest: Option<BlockId>,
    newest: Option<BlockId>,
    len: usize,
}

impl<const N: usize> Lists<N> {
    pub fn new(num_blocks: usize) -> Self {
        Self { links: vec![Link::default(); num_blocks], ends: [Ends::default(); N] }
    }

    /// There are so many blocks now, more than before.
    pub fn grow(&mut self, num_blocks: usize) {
        self.links.resize(num_blocks, Link::default());
    }

    /// The list that a block is in.
    pub fn list_of(&self, block: BlockId) -> Option<usize> {
        self.links[block.index()].list
    }

    pub fn oldest(&self, list: usize) -> Option<BlockId> {
        self.ends[list].oldest
    }

    /// Puts a block that is in no list at the new end of one.
    pub fn push(&mut self, list: usize, block: BlockId) {
        let older = self.ends[list].newest;
        let link = &mut self.links[block.index()];
        assert!(link.list.is_none(), "{block} is in a list");
        *link = Link { list: Some(list), older, newer: None };
        match older {
            Some(older) => self.links[older.index()].newer = Some(block),
            None => self.ends[list].oldest = Some(block),
        }
        self.ends[list].newest = Some(block);
        self.ends[list].len += 1;
    }

    /// Takes a block out of its list.
    pub fn remove(&mut self, block: BlockId) {
        let Link { list, older, newer } = std::mem::take(&mut self.links[block.index()]);
        let ends = &mut self.ends[list.expect("only a block of a list is removed")];
        match older {
            Some(older) => self.links[older.index()].newer = newer,
            None => ends.oldest = newer,
        }
        match newer {
            Some(newer) => self.links[newer.index()].older = older,
            None => ends.newest = older,
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
            let (mut older, mut at, mut len) = (None, ends.oldest, 0);
            while let Some(block) = at {
                let link = &self.links[block.index()];
                assert_eq!((link.list, link.older), (Some(list), older), "broken link at {block}");
                (older, at, len) = (at, link.newer, len + 1);
            }
            assert_eq!((ends.newest, ends.len), (older, len), "the end or the length of list {list} is wrong");
        }
        let in_lists = self.links.iter().filter(|link| link.list.is_some()).count();
        assert_eq!(
            in_lists,
            self.ends.iter().map(|ends| ends.len).sum::<usize>(),
            "a block is in a list that does not have it"
        );
    }
}

/// What is remembered of evicted blocks, under their names: no more of them than `capacity`, oldest forgotten first.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ghosts<T> {
    capacity: usize,
    index: IdMap<BlockHash, (u64, T)>,
    /// In order of eviction; a name that came back, and perhaps went again, is here still, with another number.
    order: VecDeque<(u64, BlockHash)>,
    next: u64,
}

impl<T> Ghosts<T> {
    pub fn new(capacity: usize) -> Self {
        Self { capacity, index: IdMap::default(), order: VecDeque::new(), next: 0 }
    }

    /// So many are remembered from now on, more than before.
    pub fn grow(&mut self, capacity: usize) {
        self.capacity = capacity;
    }

    /// Remembers an evicted block. What is forgotten for it is returned.
    pub fn add(&mut self, hash: BlockHash, ghost: T) -> Option<T> {
        self.next += 1;
        self.index.insert(hash, (self.next, ghost));
        self.order.push_back((self.next, hash));
        if self.order.len() <= self.capacity {
            return None;
        }
        let (number, hash) = self.order.pop_front().expect("one was just added");
        let is_current = self.index.get(&hash).is_some_and(|(current, _)| *current == number);
        if is_current { self.index.remove(&hash).map(|(_, ghost)| ghost) } else { None }
    }

    /// A block of this name is there again.
    pub fn remove(&mut self, hash: &BlockHash) -> Option<T> {
        self.index.remove(hash).map(|(_, ghost)| ghost)
    }

    pub fn rename(&mut self, rename: impl Fn(BlockHash) -> BlockHash) {
        self.index = self.index.drain().map(|(name, ghost)| (rename(name), ghost)).collect();
        self.order.iter_mut().for_each(|(_, name)| *name = rename(*name));
    }

    /// About how many bytes of memory they take.
    pub fn num_bytes(&self) -> usize {
        self.index.capacity() * size_of::<(BlockHash, (u64, T))>()
            + self.order.capacity() * size_of::<(u64, BlockHash)>()
    }

    pub fn check(&self) {
        assert!(self.order.len() <= self.capacity && self.index.len() <= self.order.len(), "ghosts are not bounded");
        let current = self.order.iter().filter(|(number, hash)| self.index.get(hash).is_some_and(|it| it.0 == *number));
        assert_eq!(current.count(), self.index.len(), "a ghost would never be forgotten");
    }
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
