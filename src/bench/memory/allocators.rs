//! Allocators of the systems that the paper compares with: each request gets one contiguous piece of the KV memory for
//! all its life, reserved when it starts.

use std::collections::{BTreeMap, BTreeSet};

/// Gives out contiguous slots. A slot holds the KV of one token.
pub trait Allocator {
    /// Allocates a piece of at least `num_slots`.
    fn allocate(&mut self, num_slots: usize) -> Option<MemoryPiece>;

    fn free(&mut self, piece: MemoryPiece);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MemoryPiece {
    pub start: usize,
    pub len: usize,
}

/// Pieces of powers of two, each at a multiple of its size; two halves that are free join again.
#[derive(Clone, Debug)]
pub struct Buddy {
    /// The starts of free pieces, by the logarithm of their size.
    free: Vec<BTreeSet<usize>>,
}

impl Buddy {
    /// Memory that is no power of two is several of them, the largest first.
    pub fn new(num_slots: usize) -> Self {
        let mut free = vec![BTreeSet::new(); usize::BITS as usize];
        let mut start = 0;
        for order in (0..usize::BITS as usize).rev().filter(|order| num_slots >> order & 1 == 1) {
            free[order].insert(start);
            start += 1 << order;
        }
        Self { free }
    }

    fn is_free(&self, order: usize, start: usize) -> bool {
        self.free.get(order).is_some_and(|starts| starts.contains(&start))
    }
}

impl Allocator for Buddy {
    fn allocate(&mut self, num_slots: usize) -> Option<MemoryPiece> {
        let order = num_slots.max(1).next_power_of_two().trailing_zeros() as usize;
        let mut from = (order..self.free.len()).find(|order| !self.free[*order].is_empty())?;
        let start = self.free[from].pop_first()?;
        while from > order {
            from -= 1;
            self.free[from].insert(start + (1 << from));
        }
        Some(MemoryPiece { start, len: 1 << order })
    }

    fn free(&mut self, piece: MemoryPiece) {
        let (mut start, mut order) = (piece.start, piece.len.trailing_zeros() as usize);
        // The buddy differs in one bit of its start. Beyond the memory's own pieces there is none that is free.
        while self.is_free(order, start ^ (1 << order)) {
            self.free[order].remove(&(start ^ (1 << order)));
            start &= !(1 << order);
            order += 1;
        }
        self.free[order].insert(start);
    }
}

/// Allocates pieces of exactly the requested size, at the first place with enough room.
#[derive(Clone, Debug)]
pub struct FirstFit {
    /// Free pieces: start and length. No two touch.
    free: BTreeMap<usize, usize>,
}

impl FirstFit {
    pub fn new(num_slots: usize) -> Self {
        Self { free: BTreeMap::from([(0, num_slots)]) }
    }
}

impl Allocator for FirstFit {
    fn allocate(&mut self, num_slots: usize) -> Option<MemoryPiece> {
        let num_slots = num_slots.max(1);
        let (start, len) = self.free.iter().find(|(_, len)| **len >= num_slots).map(|(start, len)| (*start, *len))?;
        self.free.remove(&start);
        if len > num_slots {
            self.free.insert(start + num_slots, len - num_slots);
        }
        Some(MemoryPiece { start, len: num_slots })
    }

    fn free(&mut self, piece: MemoryPiece) {
        let MemoryPiece { mut start, mut len } = piece;
        if let Some(after) = self.free.remove(&(start + len)) {
            len += after;
        }
        let before = self.free.range(..start).next_back().map(|(before, len)| (*before, *len));
        if let Some((before, before_len)) = before.filter(|(before, len)| before + len == start) {
            (start, len) = (before, before_len + len);
        }
        self.free.insert(start, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Checks that the pieces of different requests never overlap, lie within the memory and are large enough, that a
    /// request gets memory whenever some fits, and that the memory is whole again when all is free.
    fn check(
        mut allocator: impl Allocator,
        num_slots: usize,
        steps: &[(usize, usize)],
        size: fn(usize) -> usize,
        fits: fn(&[bool], usize) -> bool,
    ) -> Result<(), TestCaseError> {
        let mut used = vec![false; num_slots];
        let mut held: Vec<MemoryPiece> = Vec::new();
        for (wanted, which) in steps {
            if which % 3 == 0 && !held.is_empty() {
                let piece = held.swap_remove(which / 3 % held.len());
                used[piece.start..piece.start + piece.len].fill(false);
                allocator.free(piece);
            }
            let expected = fits(&used, *wanted);
            let piece = allocator.allocate(*wanted);
            prop_assert_eq!(piece.is_some(), expected, "{} of {:?}", wanted, &used);
            if let Some(piece) = piece {
                prop_assert_eq!(piece.len, size(*wanted));
                prop_assert!(piece.start + piece.len <= num_slots);
                let slots = &mut used[piece.start..piece.start + piece.len];
                prop_assert!(slots.iter().all(|used| !used), "given twice");
                slots.fill(true);
                held.push(piece);
            }
        }
        held.into_iter().for_each(|piece| allocator.free(piece));
        let largest = (1..=num_slots).rev().find(|len| fits(&vec![false; num_slots], *len));
        prop_assert!(allocator.allocate(largest.unwrap()).is_some(), "the memory did not become whole again");
        Ok(())
    }

    /// A free run of an aligned power of two inside one of the memory's own pieces.
    fn buddy_fits(used: &[bool], wanted: usize) -> bool {
        let len = wanted.next_power_of_two();
        used.chunks_exact(len).any(|slots| slots.iter().all(|used| !used))
    }

    fn run_fits(used: &[bool], wanted: usize) -> bool {
        used.windows(wanted).any(|slots| slots.iter().all(|used| !used))
    }

    proptest! {
        #[test]
        fn buddy_pieces_are_disjoint_and_join_again(
            num_slots in 1usize..300,
            steps in prop::collection::vec((1usize..80, 0usize..60), 1..80),
        ) {
            check(Buddy::new(num_slots), num_slots, &steps, usize::next_power_of_two, buddy_fits)?;
        }

        #[test]
        fn first_fit_pieces_are_exact_disjoint_and_join_again(
            num_slots in 1usize..300,
            steps in prop::collection::vec((1usize..80, 0usize..60), 1..80),
        ) {
            check(FirstFit::new(num_slots), num_slots, &steps, |wanted| wanted, run_fits)?;
        }
    }

    #[test]
    fn halves_join_only_with_their_own() {
        let mut buddy = Buddy::new(16);
        let pieces: Vec<MemoryPiece> = (0..4).map(|_| buddy.allocate(3).unwrap()).collect();
        assert_eq!(
            pieces.iter().map(|piece| (piece.start, piece.len)).collect::<Vec<_>>(),
            [(0, 4), (4, 4), (8, 4), (12, 4)]
        );
        buddy.free(pieces[1]);
        buddy.free(pieces[2]);
        assert_eq!(buddy.allocate(5), None, "eight free slots in a row, but of two pairs");
        buddy.free(pieces[0]);
        assert_eq!(buddy.allocate(5), Some(MemoryPiece { start: 0, len: 8 }));
    }
}
