//! Where every sequence is and what it holds, for who watches. No tokens are in it.

use super::Scheduler;
use crate::engine::allocation::BlockTable;
use crate::engine::sequence::{Rank, SeqState, Sequence};
use crate::ids::BlockId;

/// What a sequence does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It holds nothing: it is new, or what it had is to be computed again.
    Waiting,
    /// Its prompt is being computed, or what was dropped of it.
    Prefill,
    /// Its next token is.
    Decode,
    /// It has device blocks, and waits for their content to come back from the swap pool.
    Returning,
    /// Its KV is in the swap pool.
    Swapped,
}

/// One sequence at a moment.
#[derive(Clone, Debug, PartialEq)]
pub struct SeqView {
    pub rank: Rank,
    pub sample: u32,
    pub phase: Phase,
    pub num_prompt: usize,
    /// Tokens whose KV is there, on either tier.
    pub num_computed: usize,
    pub num_output: usize,
    pub max_output: usize,
    /// Prompt tokens that the cache held; `None` until it has been admitted.
    pub cached_tokens: Option<usize>,
    pub preemptions: u32,
    /// It has yielded, and has not come back.
    pub paused: bool,
    pub table: BlockTable,
    /// Returning: place in the table from which on the content has to come.
    pub first_returning: usize,
    /// In the swap pool: its KV, where it is swapped out or returns.
    pub swapped: Vec<BlockId>,
    /// There too: copies of what it has on the device.
    pub backing: Vec<BlockId>,
}

impl Scheduler {
    /// All sequences that hold blocks, and the first `most_waiting` of those that do not. Takes time for those, and for
    /// the tables of those in the swap pool.
    pub fn view(&self, most_waiting: usize) -> Vec<SeqView> {
        let mut views: Vec<SeqView> = self.running.iter().map(SeqView::of).collect();
        let (mut new, mut swapped) = (most_waiting, self.num_swapped);
        for seq in self.waiting.iter() {
            // Who was swapped out has waited longest, so few others are passed on the way to all of those.
            if new == 0 && swapped == 0 {
                break;
            }
            let left = if matches!(seq.state, SeqState::Swapped(_)) { &mut swapped } else { &mut new };
            if *left > 0 {
                *left -= 1;
                views.push(SeqView::of(seq));
            }
        }
        views
    }
}

impl SeqView {
    fn of(seq: &Sequence) -> Self {
        let (phase, swapped, first_returning) = match (&seq.state, &seq.swap_in) {
            (SeqState::Waiting, _) => (Phase::Waiting, Vec::new(), 0),
            (SeqState::Swapped(blocks), _) => (Phase::Swapped, blocks.clone(), 0),
            (SeqState::Running, Some(coming)) => (Phase::Returning, coming.from.clone(), coming.first_place),
            // Not only its last token is left to compute.
            (SeqState::Running, None) if seq.num_computed + 1 < seq.num_tokens() => (Phase::Prefill, Vec::new(), 0),
            (SeqState::Running, None) if seq.output.is_empty() => (Phase::Prefill, Vec::new(), 0),
            (SeqState::Running, None) => (Phase::Decode, Vec::new(), 0),
        };
        Self {
            rank: seq.rank,
            sample: seq.sample,
            phase,
            num_prompt: seq.prompt.len(),
            num_computed: seq.num_computed,
            num_output: seq.output.len(),
            max_output: seq.output.len() + seq.room(),
            cached_tokens: seq.cached_tokens,
            preemptions: seq.preemptions,
            paused: seq.paused,
            table: seq.table.clone(),
            first_returning,
            swapped,
            backing: seq.backing.clone(),
        }
    }
}
