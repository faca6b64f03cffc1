//! The running sequences.

use crate::sequence::{Rank, Sequence};
use serde::{Deserialize, Serialize};
use std::ops::Index;

/// Sequences in order of rank. They are stored contiguously, because a step goes through all of them and few come or go
/// in a step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct RunningSeqs {
    #[expect(clippy::vec_box, reason = "who comes or goes moves the places behind it, not the sequences")]
    seqs: Vec<Box<Sequence>>,
}

impl RunningSeqs {
    pub fn len(&self) -> usize {
        self.seqs.len()
    }

    pub fn is_empty(&self) -> bool {
        self.seqs.is_empty()
    }

    fn search(&self, rank: &Rank) -> Result<usize, usize> {
        self.seqs.binary_search_by(|seq| seq.rank.cmp(rank))
    }

    /// The index of a sequence. `guess` is tried first.
    pub fn place(&self, guess: usize, rank: &Rank) -> Option<usize> {
        match self.seqs.get(guess) {
            Some(seq) if seq.rank == *rank => Some(guess),
            _ => self.search(rank).ok(),
        }
    }

    pub fn at(&mut self, place: usize) -> &mut Sequence {
        &mut self.seqs[place]
    }

    pub fn get(&self, rank: &Rank) -> Option<&Sequence> {
        self.search(rank).ok().map(|place| &*self.seqs[place])
    }

    pub fn get_mut(&mut self, rank: &Rank) -> Option<&mut Sequence> {
        self.search(rank).ok().map(|place| &mut *self.seqs[place])
    }

    pub fn insert(&mut self, seq: Box<Sequence>) {
        let place = self.search(&seq.rank).expect_err("a sequence runs once");
        self.seqs.insert(place, seq);
    }

    pub fn remove(&mut self, rank: &Rank) -> Option<Box<Sequence>> {
        self.search(rank).ok().map(|place| self.seqs.remove(place))
    }

    /// Most senior first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Sequence> {
        self.seqs.iter().map(|seq| &**seq)
    }

    pub fn iter_mut(&mut self) -> impl DoubleEndedIterator<Item = &mut Sequence> {
        self.seqs.iter_mut().map(|seq| &mut **seq)
    }

    #[expect(clippy::vec_box, reason = "as above")]
    pub fn take(&mut self) -> Vec<Box<Sequence>> {
        std::mem::take(&mut self.seqs)
    }
}

impl Index<&Rank> for RunningSeqs {
    type Output = Sequence;

    fn index(&self, rank: &Rank) -> &Sequence {
        self.get(rank).expect("it runs")
    }
}
