//! What is seen of the scheduler at one moment, by the console and by the replay of recordings: where every sequence is
//! and what it holds. No tokens are in it.

use super::sequences::Population;
use super::{Scheduler, SchedulerConfig, WaitReason};
use crate::allocation::BlockTable;
use crate::bill::{Holding, Tenant};
use crate::sequence::{Rank, SeqState, Sequence};
use pagetide_base::ids::{BlockId, IdMap, RequestId};

/// The scheduler at one moment, between two steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SchedulerSnapshot {
    pub population: Population,
    pub seqs: Vec<SeqSnapshot>,
}

/// What a sequence does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeqPhase {
    /// It holds no blocks: it is new, or will be recomputed.
    Waiting,
    /// Its prompt is being computed, or KV that was dropped is being recomputed.
    Prefill,
    /// Its next token is being computed.
    Decode,
    /// It has device blocks, and waits for their content to come back from the swap pool.
    Returning,
    /// Its KV is in the swap pool.
    Swapped,
}

/// One sequence at a moment.
#[derive(Clone, Debug, PartialEq)]
pub struct SeqSnapshot {
    pub rank: Rank,
    pub sample: u32,
    pub phase: SeqPhase,
    pub num_prompt: usize,
    /// Tokens whose KV is there, on either tier.
    pub num_computed: usize,
    pub num_output: usize,
    pub max_output: usize,
    /// Prompt tokens that the cache held; `None` until it has been admitted.
    pub cached_tokens: Option<usize>,
    pub preemptions: u32,
    /// It was preempted, and has not come back.
    pub paused: bool,
    pub table: BlockTable,
    /// If it is returning: the index of the first block whose content is being copied back.
    pub first_returning: usize,
    /// Swap blocks with its KV, where it is swapped out or returns.
    pub swapped: Vec<BlockId>,
    /// Swap blocks with copies of what it has on the device.
    pub backing: Vec<BlockId>,
}

impl Scheduler {
    /// All sequences that hold blocks, and the first `most_waiting` of those that do not. Takes time for these, and for
    /// the tables of those in the swap pool.
    pub fn snapshot(&self, most_waiting: usize) -> SchedulerSnapshot {
        let mut seqs: Vec<SeqSnapshot> = self.seqs.running.iter().map(SeqSnapshot::of).collect();
        let (mut new, mut swapped) = (most_waiting, self.seqs.waiting.num_swapped());
        for seq in self.seqs.waiting.iter() {
            // Swapped sequences have waited longest, so few others are passed on the way to all of them.
            if new == 0 && swapped == 0 {
                break;
            }
            let left = if seq.is_swapped() { &mut swapped } else { &mut new };
            if *left > 0 {
                *left -= 1;
                seqs.push(SeqSnapshot::of(seq));
            }
        }
        SchedulerSnapshot { population: self.population(), seqs }
    }

    pub fn population(&self) -> Population {
        self.seqs.population()
    }

    /// The settings in force: see [`Scheduler::tune`].
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    pub fn has_request(&self, request: RequestId) -> bool {
        self.seqs.has_request(request)
    }

    /// Requests that have not ended.
    pub fn num_requests(&self) -> usize {
        self.seqs.requests().len()
    }

    /// The number of plans whose results have not been committed.
    pub fn num_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Whether sequences wait for copies. Where nothing else is planned, the next step may come with the next report.
    pub fn waits_for_copies(&self) -> bool {
        self.tiers.has_swap_ins()
    }

    /// Seconds that a block's copy takes, to the swap pool and to the device.
    pub fn copy_seconds(&self) -> [f64; 2] {
        self.tiers.costs.block_seconds()
    }

    /// Why a request does not run, or not with all its sequences; `None` where it does, or is not there.
    pub fn wait_of(&self, request: RequestId) -> Option<WaitReason> {
        self.admission.waits.reason(request, &self.seqs, self.config.key_turns)
    }

    /// What each tenant has, tenant 0 included.
    pub fn holdings(&self) -> IdMap<Tenant, Holding> {
        let mut held: IdMap<Tenant, Holding> = IdMap::default();
        for seq in self.seqs.iter() {
            let (place, blocks) = match &seq.state {
                SeqState::Waiting => (0, [0, 0]),
                SeqState::Running => {
                    let coming = seq.swap_in.as_ref().map_or(0, |coming| coming.from.len());
                    (1, [seq.table.len(), seq.backing.len() + coming])
                }
                SeqState::Swapped(blocks) => (2, [0, blocks.len()]),
            };
            let mut holding = Holding { blocks, ..Holding::default() };
            holding.sequences[place] = 1;
            *held.entry(seq.tenant).or_default() += holding;
        }
        held
    }
}

impl SeqSnapshot {
    fn of(seq: &Sequence) -> Self {
        let (phase, swapped, first_returning) = match (&seq.state, &seq.swap_in) {
            (SeqState::Waiting, _) => (SeqPhase::Waiting, Vec::new(), 0),
            (SeqState::Swapped(blocks), _) => (SeqPhase::Swapped, blocks.clone(), 0),
            (SeqState::Running, Some(coming)) => (SeqPhase::Returning, coming.from.clone(), coming.first_place),
            // Not only its last token is left to compute.
            (SeqState::Running, None) if seq.num_computed + 1 < seq.num_tokens() => (SeqPhase::Prefill, Vec::new(), 0),
            (SeqState::Running, None) if seq.output.is_empty() => (SeqPhase::Prefill, Vec::new(), 0),
            (SeqState::Running, None) => (SeqPhase::Decode, Vec::new(), 0),
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
