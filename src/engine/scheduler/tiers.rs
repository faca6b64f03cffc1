//! What moves between the device pool and the swap pool.
//!
//! Copies take their time beside the steps. A block that is copied out may be given away at once: whatever writes it
//! next waits for the copy, and free blocks are given out in the order in which they became free, so that this seldom
//! happens. A sequence that comes back runs once its blocks are there
//! ([`Scheduler::copied`](super::Scheduler::copied)).
//!
//! Blocks are copied out for three reasons: their sequence is preempted ([`Store`](crate::allocation::Store));
//! their sequence may soon be preempted, and then its preemption moves no more than a tail (*write-behind*); or the
//! device's prefix cache gives them away. The swap pool holds a block hash once, whichever way the block came, and all
//! three find it.

use super::ledger::Ledger;
use super::report::PlanStats;
use super::sequences::Sequences;
use super::tail::{Foresight, Tail};
use super::{PreemptionMode, SchedulerConfig};
use crate::allocation::{Admitted, Demand, Find, Grant, SwapBlock, SwapDemand, SwapGrant};
use crate::arbiter::CopyCosts;
use crate::block_pool::PoolStats;
use crate::plan::{StepPlan, SwapIn};
use crate::prefix_cache::BlockHash;
use crate::sequence::{Rank, SeqState, Sequence, SwapInUnderWay};
use crate::step_time::StepTimeModel;
use pagetide_base::ids::{BlockId, CopyId, IdMap, SeqId};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Blocks are copied ahead of need while fewer than this wait to be copied.
const MAX_QUEUED_BLOCKS: usize = 64;
/// Blocks that the device no longer caches are kept while fewer than this wait to be copied. Beyond that they are given
/// up: a sequence that comes back would wait behind them.
const MAX_QUEUED_FOR_CACHE: usize = 256;

/// Steps after which the [`LikelyVictims`] are looked for again though no sequence has come or gone.
const LIKELY_FOR_STEPS: u32 = 8;

/// The swap pool as the scheduler knows it, and the copies that are under way.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Tiers {
    /// For the next demand.
    pub pending: SwapDemand,
    /// As of the swap pool's last answer.
    pub stats: PoolStats,
    moving: Moving,
    likely_victims: LikelyVictims,
    /// How often [`Tiers::begin_demand`] was called: the age of a [`Tail`].
    looks: u32,
    /// Sequences whose blocks are on their way to the device.
    swap_ins: IdMap<CopyId, Rank>,
    last_copy: u64,
    pub costs: CopyCosts,
}

/// The sequences for which blocks are copied ahead of need: those that would have been preempted first some steps ago.
/// To find them, the cost of preempting each running sequence is looked at.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct LikelyVictims {
    /// In the order in which they would be preempted.
    order: Vec<Rank>,
    /// The sequences that ran then.
    #[serde(default)]
    running: Vec<SeqId>,
    steps_left: u32,
}

/// What the swap pool was asked for, until it has answered: an entry for each of the demand's.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Moving {
    storing: Vec<(SeqId, Foresight)>,
    taking: Vec<SeqId>,
    /// With the device blocks to copy.
    backing: Vec<(SeqId, Vec<BlockId>)>,
    keeping: Vec<BlockId>,
}

/// Swap blocks for a victim's KV.
pub(super) struct StoredKv {
    pub blocks: Vec<SwapBlock>,
    pub foresight: Foresight,
}

/// The swap pool's answers, by sequence.
pub(super) struct SwapAnswers {
    pub stored: IdMap<SeqId, StoredKv>,
    /// Blocks that were cached, for sequences that are admitted.
    pub taken: IdMap<SeqId, Vec<BlockId>>,
}

impl Tiers {
    pub fn new(num_swap_blocks: usize) -> Self {
        let stats = PoolStats { free: num_swap_blocks, ..PoolStats::default() };
        Self { stats, ..Self::default() }
    }

    /// Both pools are made anew: nothing is there, and nothing under way. What has been learned stays.
    pub fn reset(&mut self, num_swap_blocks: usize) {
        self.pending = SwapDemand::default();
        self.stats = PoolStats { free: num_swap_blocks, ..PoolStats::default() };
        self.swap_ins.clear();
        self.costs.clear_queue();
    }

    /// Whether sequences wait for copies to the device.
    pub fn has_swap_ins(&self) -> bool {
        !self.swap_ins.is_empty()
    }

    /// Ends the wait for a copy. `None` where its sequence has been dropped or preempted since.
    pub fn end_swap_in(&mut self, id: CopyId) -> Option<Rank> {
        self.swap_ins.remove(&id)
    }

    /// The sequences that wait for copies.
    pub fn swap_ins(&self) -> impl Iterator<Item = (&CopyId, &Rank)> {
        self.swap_ins.iter()
    }

    /// What to ask the swap pool before the device pool gets the demand: an entry for each candidate, or nothing where
    /// the swap pool can have nothing of theirs.
    pub fn finds(&self, demand: &Demand, config: &SchedulerConfig) -> Vec<Find> {
        let is_empty = self.stats.used + self.stats.cached == 0;
        // Blocks that are about to be forgotten must not be found.
        if is_empty || !config.prefix_caching || !self.pending.forget.is_empty() {
            return Vec::new();
        }
        let find = |hashes: &Arc<Vec<BlockHash>>, usable_hashes| Find { hashes: hashes.clone(), usable_hashes };
        let usable = |swapped: bool, usable_hashes| if swapped { 0 } else { usable_hashes };
        let admit = demand.urgent.iter().chain(&demand.admit);
        admit.map(|admit| find(&admit.hashes, usable(!admit.held.is_empty(), admit.usable_hashes))).collect()
    }

    /// Completes the demand by the swap pool's answers. Blocks that are sooner computed are not fetched, except to
    /// measure copies again.
    pub fn found(&mut self, demand: &mut Demand, held: Vec<Vec<bool>>, block_size: usize, step_times: &StepTimeModel) {
        for (admit, held) in demand.urgent.iter_mut().chain(&mut demand.admit).zip(held) {
            let num_held = held.iter().filter(|held| **held).count();
            let compute_s = step_times.prompt_seconds(num_held * block_size, 0);
            let copy_s = self.costs.swap_in_seconds(num_held);
            if num_held > 0 && self.costs.prefers_copies(copy_s, compute_s) {
                admit.num_held_tokens = held.len() * block_size;
                admit.held = held;
            }
        }
    }

    /// Begins the demand of a step.
    pub fn begin_demand(&mut self) -> SwapDemand {
        self.moving = Moving::default();
        self.looks = self.looks.wrapping_add(1);
        std::mem::take(&mut self.pending)
    }

    /// A victim wants its KV stored.
    pub fn ask_to_store(&mut self, seq: &Sequence, config: &SchedulerConfig) {
        // Whether what it leaves to be copied was bounded in the step before.
        let foresight = match config.write_behind_blocks {
            0 => Foresight::Off,
            _ => seq.tail.foresight(self.looks, seq.num_computed / config.block_size),
        };
        self.moving.storing.push((seq.rank.seq, foresight));
    }

    /// Sequences that are admitted take what the swap pool has cached of theirs.
    pub fn take_cached(&mut self, grant: &Grant, seqs: &Sequences, demand: &mut SwapDemand) {
        for admitted in &grant.admitted {
            let seq = &seqs.waiting[&seqs.rank_of(admitted.seq)];
            if !admitted.swap_in.is_empty() && seq.state == SeqState::Waiting {
                self.moving.taking.push(admitted.seq);
                demand.take.push(admitted.swap_in.iter().map(|place| seq.hashes[*place]).collect());
            }
        }
    }

    /// Keeps blocks that the device's prefix cache has given away.
    pub fn keep_evicted(&mut self, grant: &Grant, demand: &mut SwapDemand) {
        let room = MAX_QUEUED_FOR_CACHE.saturating_sub(self.costs.queued_blocks());
        let (blocks, hashes): (Vec<_>, Vec<_>) = grant.evicted.iter().copied().take(room).unzip();
        (self.moving.keeping, demand.keep) = (blocks, hashes);
    }

    /// If victims need more room than the swap pool has, running sequences give up their copies made ahead.
    pub fn make_room(&mut self, grant: &Grant, seqs: &mut Sequences, demand: &mut SwapDemand) {
        let needed: usize = demand.store.iter().map(|store| store.num_blocks).sum();
        let released: usize = demand.release.iter().map(Vec::len).sum();
        let mut room = self.stats.free + self.stats.cached + released;
        for seq in seqs.running.iter_mut().filter(|seq| !grant.preempted.contains(&seq.rank.seq)) {
            if room >= needed {
                return;
            }
            room += seq.backing.len();
            demand.release.push(std::mem::take(&mut seq.backing));
            (seq.num_backed, seq.tail) = (0, Tail::no_room(self.looks));
        }
    }

    /// Whether blocks are to be copied ahead of need in this step, and how many device blocks are short.
    pub fn num_short(&self, grant: &Grant, config: &SchedulerConfig) -> Option<usize> {
        let available = grant.stats.free + grant.stats.cached;
        let keeps_nothing = config.preemption_mode == PreemptionMode::Recompute;
        config.write_behind_blocks.checked_sub(available).filter(|_| !keeps_nothing && !self.is_draining())
    }

    /// Notes which running sequences have all their full blocks but `max_tail_blocks` copied. True where all have.
    pub fn note_tails(&self, seqs: &mut Sequences, max_tail_blocks: usize) -> bool {
        let mut has_all = true;
        for seq in seqs.running.iter_mut() {
            let has_them = seq.num_published <= seq.num_backed + max_tail_blocks;
            has_all &= has_them;
            // A sequence whose KV is being copied back has no blocks to copy out.
            if has_them && seq.swap_in.is_none() {
                seq.tail = Tail::copied(self.looks, seq.num_published);
            }
        }
        has_all
    }

    /// Blocks that may be copied ahead of need in this step.
    pub fn write_behind_room(&self) -> usize {
        MAX_QUEUED_BLOCKS.saturating_sub(self.costs.queued_blocks())
    }

    /// Copies the full blocks of the likely victims ahead of need, all but `max_tail_blocks` of each: of as many
    /// victims as hold the `short` blocks. `room`: how many may be copied.
    pub fn write_behind(
        &mut self,
        (mut short, mut room, max_tail_blocks): (usize, usize, usize),
        grant: &Grant,
        seqs: &mut Sequences,
        demand: &mut SwapDemand,
    ) {
        for rank in self.likely_victims.order.iter().filter(|rank| !grant.preempted.contains(&rank.seq)) {
            if short == 0 {
                return;
            }
            let Some(seq) = seqs.running.get_mut(rank) else { continue };
            short = short.saturating_sub(seq.table.len());
            if seq.num_published <= seq.num_backed + max_tail_blocks {
                continue;
            }
            let places = seq.num_backed..seq.num_published.min(seq.num_backed + room);
            // This assumes that the swap pool takes all of them.
            seq.tail = match seq.num_published <= places.end + max_tail_blocks {
                true => Tail::copied(self.looks, seq.num_published),
                false => Tail::queue_full(self.looks),
            };
            if !places.is_empty() {
                room -= places.len();
                demand.back.push(seq.hashes[places.clone()].to_vec());
                self.moving.backing.push((seq.rank.seq, seq.table[places].to_vec()));
            }
        }
    }

    /// Whether the likely victims may have changed: a sequence has come or gone, or some steps have passed.
    pub fn wants_likely_victims(&mut self, seqs: &Sequences) -> bool {
        let LikelyVictims { steps_left, running, .. } = &mut self.likely_victims;
        let may_have_changed =
            *steps_left == 0 || !seqs.running.iter().map(|seq| seq.rank.seq).eq(running.iter().copied());
        *steps_left -= u32::from(!may_have_changed);
        may_have_changed
    }

    /// The sequences that would be preempted now, in that order.
    pub fn set_likely_victims(&mut self, order: Vec<Rank>, seqs: &Sequences) {
        let running = seqs.running.iter().map(|seq| seq.rank.seq).collect();
        self.likely_victims = LikelyVictims { order, running, steps_left: LIKELY_FOR_STEPS };
    }

    /// Takes the swap pool's answers into the plan.
    pub fn plan_copies(
        &mut self,
        swap: SwapGrant,
        seqs: &mut Sequences,
        ledger: &mut Ledger,
        plan: &mut StepPlan,
    ) -> SwapAnswers {
        let moving = std::mem::take(&mut self.moving);
        for ((seq, blocks), backed) in moving.backing.into_iter().zip(swap.backed) {
            let rank = seqs.rank_of(seq);
            let seq = seqs.running.get_mut(&rank).expect("only running sequences are copied ahead");
            seq.num_backed += backed.len();
            if backed.len() < blocks.len() {
                seq.tail = Tail::no_room(self.looks);
            }
            seq.backing.extend(backed.iter().map(|swap| swap.block));
            let copies = blocks.into_iter().zip(backed).filter(|(_, swap)| swap.copy);
            let before = plan.swap_out.len();
            plan.swap_out.extend(copies.map(|(device, swap)| (device, swap.block)));
            if plan.swap_out.len() > before {
                ledger.bill(rank.request).swapped_out_blocks += plan.swap_out.len() - before;
            }
        }
        let kept = moving.keeping.into_iter().zip(swap.kept);
        plan.swap_out.extend(kept.filter_map(|(device, swap)| Some((device, swap?))));
        self.stats = swap.stats.unwrap_or(self.stats);
        let stored = moving.storing.into_iter().zip(swap.stored);
        let stored =
            stored.filter_map(|((seq, foresight), blocks)| Some((seq, StoredKv { blocks: blocks?, foresight })));
        SwapAnswers { stored: stored.collect(), taken: moving.taking.into_iter().zip(swap.taken).collect() }
    }

    /// The copies of a plan go off.
    pub fn enqueue(&mut self, plan: &StepPlan) {
        let num_in: usize = plan.swap_in.iter().map(|swap_in| swap_in.pairs.len()).sum();
        self.costs.enqueue(plan.swap_out.len() + num_in);
    }

    /// Starts the copies that an admitted sequence waits for. `taken`: the blocks that were cached, where it was not
    /// swapped out.
    pub fn start_swap_in(
        &mut self,
        seq: &mut Sequence,
        state: SeqState,
        taken: Option<Vec<BlockId>>,
        admitted: &Admitted,
    ) -> SwapIn {
        self.last_copy += 1;
        let id = CopyId(self.last_copy);
        let places = admitted.swap_in.iter().copied();
        let was_swapped = matches!(state, SeqState::Swapped(_));
        let (from, pairs): (_, Vec<_>) = match state {
            SeqState::Swapped(from) => {
                let pairs = places.map(|place| (from[place], admitted.table[place])).collect();
                (from, pairs)
            }
            _ => {
                let from = taken.expect("what is swapped in was taken");
                let pairs = from.iter().copied().zip(places.map(|place| admitted.table[place])).collect();
                (from, pairs)
            }
        };
        let (first_place, num_tokens) = (admitted.swap_in[0], admitted.num_computed);
        let is_nameless = false;
        let coming = SwapInUnderWay { id, from, first_place, num_tokens, was_swapped, is_nameless };
        seq.swap_in = Some(Box::new(coming));
        self.swap_ins.insert(id, seq.rank);
        SwapIn { id, pairs }
    }

    /// A sequence is preempted before its KV has come back: that is still in the swap pool.
    pub fn turn_back(&mut self, seq: &mut Sequence, coming: SwapInUnderWay, stats: &mut PlanStats) {
        self.swap_ins.remove(&coming.id);
        if coming.was_swapped {
            seq.preempt(Some(coming.from));
            stats.preempted_swap += 1;
        } else {
            self.pending.release.push(coming.from);
            seq.preempt(None);
            stats.preempted_recompute += 1;
        }
    }

    /// Releases the copies that were made ahead for a sequence.
    pub fn release_backing(&mut self, seq: &mut Sequence) {
        if !seq.backing.is_empty() {
            self.pending.release.push(std::mem::take(&mut seq.backing));
        }
        seq.num_backed = 0;
    }

    /// Keeps the blocks that a swap-in came from, where there is room: full blocks do not change any more, so the
    /// copies stay good for the next preemption.
    pub fn keep_swapped_in(&mut self, seq: &mut Sequence, coming: SwapInUnderWay, block_size: usize) {
        let mut from = coming.from;
        let num_full = if coming.was_swapped { coming.num_tokens / block_size } else { from.len() };
        // Blocks that were found to hold nothing have no hash, so they would not be found again.
        let num_full = if self.is_draining() || coming.is_nameless { 0 } else { num_full };
        let tail = from.split_off(num_full.min(from.len()));
        if !tail.is_empty() {
            self.pending.release.push(tail);
        }
        if coming.was_swapped {
            seq.num_backed = from.len();
        }
        seq.backing.extend(from);
    }

    /// These blocks of the swap pool hold nothing. Sequences that relied on them compute from there on.
    pub fn lose(&mut self, lost: &[BlockId], seqs: &mut Sequences, block_size: usize) {
        self.pending.forget.extend(lost);
        seqs.waiting.lose_kv(|seq| {
            let SeqState::Swapped(blocks) = &mut seq.state else { return };
            let Some(first) = blocks.iter().position(|block| lost.contains(block)) else { return };
            self.pending.release.push(blocks.split_off(first));
            seq.num_computed = first * block_size;
            if first == 0 {
                seq.state = SeqState::Waiting;
            }
        });
        for seq in seqs.running.iter_mut() {
            if let Some(coming) = &mut seq.swap_in {
                coming.is_nameless |= coming.from.iter().any(|block| lost.contains(block));
            }
            if seq.backing.iter().any(|block| lost.contains(block)) {
                self.pending.release.push(std::mem::take(&mut seq.backing));
                (seq.num_backed, seq.tail) = (0, Tail::default());
            }
        }
    }

    /// The swap pool has another size, which it may still have to shrink to. Preemptions that were foreseen under the
    /// old settings are not bounded any more.
    pub fn resize(&mut self, stats: PoolStats, seqs: &mut Sequences) {
        self.looks = self.looks.wrapping_add(1);
        self.stats = stats;
        // Copies that were made ahead are given up, as many as it takes.
        let mut too_many = self.stats.draining;
        for seq in seqs.running.iter_mut() {
            if too_many == 0 {
                return;
            }
            if !seq.backing.is_empty() {
                too_many = too_many.saturating_sub(seq.backing.len());
                self.pending.release.push(std::mem::take(&mut seq.backing));
                (seq.num_backed, seq.tail) = (0, Tail::default());
            }
        }
    }

    /// Whether more blocks of the swap pool are used than its size.
    pub fn is_draining(&self) -> bool {
        self.stats.draining > 0
    }
}
