//! What requests are promised: that they need not yield, or not for long.
//!
//! A request that is not preemptible starts only when all the blocks that it may ever need fit into the part of the pool
//! that such requests may hold; it is no victim then, and need not be: those who are hold the rest.
//!
//! A sequence whose pauses are limited yields after those whose are not, and when it has been paused for half of that time
//! it comes back before all others, who yield to it. The other half is for a step that runs, and for the copies.

use super::Scheduler;
use super::admission::{ask, may_join};
use crate::engine::allocation::Admit;
use crate::engine::bill::most_blocks;
use crate::engine::sequence::{Rank, Sequence};
use crate::ids::RequestId;

impl Scheduler {
    /// Tells the time, in seconds since some moment, before a demand.
    pub fn set_time(&mut self, now: f64) {
        self.now = now;
    }

    /// Who has to come back now.
    pub(super) fn urgent(&mut self) -> Vec<Admit> {
        let ranks: Vec<Rank> = self.limited.iter().copied().collect();
        ranks.into_iter().filter_map(|rank| self.ask_if_urgent(rank)).collect()
    }

    fn ask_if_urgent(&mut self, rank: Rank) -> Option<Admit> {
        // It runs where its blocks are already on their way.
        let seq = self.waiting.get_mut(&rank)?;
        let paused = self.now - seq.paused_at;
        let is_urgent = seq.terms.max_pause.is_some_and(|most| paused >= most.as_secs_f64() / 2.0);
        let is_one_of_many = seq.is_beam() && self.requests[&rank.request].len() > 1;
        let block_size = self.config.block_size;
        let may_come = !is_one_of_many || may_join(seq, &self.running, &self.requests, block_size);
        (is_urgent && may_come).then(|| ask(seq, &self.hasher, &self.config, is_one_of_many))
    }

    /// What a new request has to have reserved, if it must not yield.
    pub(super) fn wants_reserved(&self, seq: &Sequence) -> Option<Reserved> {
        let is_new = !self.reserved.contains_key(&seq.rank.request);
        (is_new && !seq.terms.preemptible).then(|| {
            // Its last token needs no slot.
            let num_tokens = seq.num_tokens() + seq.room() - 1;
            let num_seqs = seq.seats();
            let num_blocks = most_blocks(self.config.block_size, seq.prompt.len(), num_tokens, num_seqs);
            Reserved { num_blocks, num_beams: if seq.is_beam() { num_seqs } else { 0 } }
        })
    }

    pub(super) fn num_reserved_blocks(&self) -> usize {
        self.reserved.values().map(|reserved| reserved.num_blocks).sum()
    }

    /// Seats that beams which must not yield do not take now, and may take again.
    pub(super) fn num_reserved_seats(&self) -> usize {
        let unused = |(request, reserved): (&RequestId, &Reserved)| {
            let seqs = self.requests.get(request).into_iter().flatten().filter_map(|rank| self.running.get(rank));
            reserved.num_beams.saturating_sub(seqs.map(Sequence::seats).sum())
        };
        self.reserved.iter().map(unused).sum()
    }
}

/// Of a request that must not yield.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reserved {
    pub num_blocks: usize,
    /// Beams that its search may have at once; they come and go.
    pub num_beams: usize,
}
