//! The scheduler's invariants, asserted in tests.

use super::Scheduler;
use crate::block_pool::PoolStats;
use crate::plan::MAX_STEPS_IN_FLIGHT;
use crate::sequence::SeqState;
use pagetide_base::ids::BlockId;

impl Scheduler {
    /// Asserts the scheduler's invariants; for tests, between `plan` and `commit` or between steps.
    pub fn check(&self) {
        assert!(self.in_flight.len() <= if self.config.overlap { MAX_STEPS_IN_FLIGHT } else { 1 });
        for seq in self.seqs.running.iter() {
            let rank = &seq.rank;
            assert_eq!(seq.state, SeqState::Running);
            assert!(seq.num_computed < seq.num_tokens(), "{} has nothing left to compute", rank.seq);
            assert!(seq.num_planned() <= seq.num_tokens() + 1, "{} feeds more than one pending token", rank.seq);
            assert!(seq.table.len() * self.config.block_size >= seq.num_planned());
            let parts = self.in_flight.iter().flat_map(|plan| &plan.parts).filter(|part| part.rank == *rank);
            let planned = parts.fold((0, 0), |sum, part| (sum.0 + part.num_tokens, sum.1 + usize::from(part.samples)));
            assert_eq!((seq.computing, seq.sampling), planned, "{} and the plans in flight disagree", rank.seq);
        }
        for seq in self.seqs.waiting.iter() {
            assert_ne!(seq.state, SeqState::Running);
            assert!(seq.table.is_empty(), "{} waits and holds blocks", seq.rank.seq);
            assert!(seq.backing.is_empty() && seq.swap_in.is_none(), "{} waits and has copies", seq.rank.seq);
            assert_eq!((seq.computing, seq.sampling), (0, 0), "{} waits and is in flight", seq.rank.seq);
        }
        for (id, rank) in self.tiers.swap_ins() {
            let coming =
                self.seqs.running[rank].swap_in.as_ref().expect("a sequence that waits for a copy knows of it");
            assert_eq!(coming.id, *id);
        }
        let num_swap_ins = self.tiers.swap_ins().count();
        assert_eq!(self.seqs.running.iter().filter(|seq| seq.swap_in.is_some()).count(), num_swap_ins);
        self.seqs.check();
        assert!(self.seqs.running.len() <= self.config.max_num_seqs);
    }

    /// Tables that hold device blocks, and tables that hold swap blocks, between `plan` and `commit`.
    pub fn tables(&self) -> (Vec<&[BlockId]>, Vec<&[BlockId]>) {
        let swapped = self.seqs.waiting.iter().filter_map(|seq| match &seq.state {
            SeqState::Swapped(blocks) => Some(blocks.as_slice()),
            _ => None,
        });
        let device = self.seqs.running.iter().map(|seq| seq.table.as_slice());
        let device = device.chain(self.device.pending.release.iter().map(|table| table.as_slice()));
        let backing = self.seqs.running.iter().map(|seq| seq.backing.as_slice());
        let coming = self.seqs.running.iter().filter_map(|seq| Some(seq.swap_in.as_ref()?.from.as_slice()));
        let released = self.tiers.pending.release.iter().map(Vec::as_slice);
        (device.collect(), swapped.chain(backing).chain(coming).chain(released).collect())
    }

    /// The scheduler's own count of available device blocks, which tests compare with the pool's.
    pub fn check_against(&self, device: PoolStats) {
        assert_eq!(self.device.available, device.free + device.cached, "scheduler and allocator count differently");
    }
}
