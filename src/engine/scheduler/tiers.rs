//! What moves between the device pool and the swap pool, and what follows from it.
//!
//! Copies take their time beside the steps. A block that is copied out may be given away at once: whoever writes it next
//! waits for the copy, and free blocks are given out in the order in which they became free, so that this seldom happens.
//! A sequence that comes back runs once its blocks are there ([`Scheduler::copied`]).
//!
//! Four kinds of blocks go down: those of a sequence that has to yield ([`Store`]), full ones of sequences that may soon
//! have to (*write-behind*), so that their preemption moves no more than a tail, and those that the device's prefix cache
//! gives away. Under its name a block is there once, whichever way it came, and found by all three.

use super::commit::publish;
use super::quota::Holdings;
use super::tail::{Foresight, Tail, TailCopies};
use super::{PreemptionMode, Scheduler};
use crate::engine::allocation::{Admitted, Demand, Find, Grant, Store, SwapBlock, SwapDemand, SwapGrant};
use crate::engine::arbiter::{Choice, Victim};
use crate::engine::bill::QuotaTier;
use crate::engine::plan::{CopyReport, StepPlan, SwapIn};
use crate::engine::prefix_cache::BlockHash;
use crate::engine::sequence::{Rank, SeqState, Sequence, SwapInUnderWay};
use crate::ids::{BlockId, CopyId, IdMap, SeqId};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Blocks that wait to be copied, at most, where more are copied ahead of need ...
const MAX_QUEUED_BLOCKS: usize = 64;
/// ... and where more are kept that the device no longer caches. Beyond that they are given up: a sequence that comes back
/// would wait behind them.
const MAX_QUEUED_FOR_CACHE: usize = 256;

/// For whom blocks are copied ahead of need: who would have yielded first some steps ago. To know that takes a look at what
/// each that runs would cost.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct LikelyVictims {
    /// First to yield first.
    order: Vec<Rank>,
    /// Of so many that ran.
    of: usize,
    steps_left: u32,
}

/// Steps after which [`LikelyVictims`] are looked for again though nobody has come or gone.
const LIKELY_FOR_STEPS: u32 = 8;

/// What the swap pool was asked for, until it has answered; an entry for each of the demand's.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Moving {
    storing: Vec<(SeqId, Foresight)>,
    taking: Vec<SeqId>,
    /// And the device's blocks.
    backing: Vec<(SeqId, Vec<BlockId>)>,
    keeping: Vec<BlockId>,
}

impl Scheduler {
    /// What to ask the swap pool before the device pool gets the demand: an entry for each candidate, or nothing where it
    /// can have nothing of theirs.
    pub(super) fn finds(&self, demand: &Demand) -> Vec<Find> {
        let is_empty = self.swap_stats.used + self.swap_stats.cached == 0;
        // What is to be forgotten must not be found.
        if is_empty || !self.config.prefix_caching || !self.pending_swap.forget.is_empty() {
            return Vec::new();
        }
        let find = |hashes: &Arc<Vec<BlockHash>>, usable_hashes| Find { hashes: hashes.clone(), usable_hashes };
        let usable = |swapped: bool, usable_hashes| if swapped { 0 } else { usable_hashes };
        let admit = demand.urgent.iter().chain(&demand.admit);
        admit.map(|admit| find(&admit.hashes, usable(!admit.held.is_empty(), admit.usable_hashes))).collect()
    }

    /// Completes the demand by the swap pool's answers: what is sooner computed is not fetched.
    pub(super) fn fetch_what_is_found(&self, demand: &mut Demand, held: Vec<Vec<bool>>) {
        for (admit, held) in demand.urgent.iter_mut().chain(&mut demand.admit).zip(held) {
            let num_held = held.iter().filter(|held| **held).count();
            let num_tokens = num_held * self.config.block_size;
            let compute_s = self.step_times.prompt_seconds(num_tokens, 0);
            if num_held > 0 && self.costs.swap_in_seconds(num_held) <= compute_s {
                admit.num_held_tokens = held.len() * self.config.block_size;
                admit.held = held;
            }
        }
    }

    /// What the step needs of the swap pool; empty on most steps.
    pub(super) fn reserve(&mut self, grant: &Grant) -> SwapDemand {
        let mut demand = std::mem::take(&mut self.pending_swap);
        self.moving = Moving::default();
        self.looks = self.looks.wrapping_add(1);
        let mut holdings: Option<Holdings> = None;
        for seq in &grant.preempted {
            let Some(store) = self.store(*seq) else { continue };
            let tenant = self.running[&self.ranks[seq]].tenant;
            if holdings.get_or_insert_with(|| self.swap_holdings()).take(tenant, store.num_blocks) {
                let foresight = self.foresight(&self.running[&self.ranks[seq]]);
                self.moving.storing.push((*seq, foresight));
                demand.store.push(store);
            } else {
                self.report.quota_refusals.push((tenant, QuotaTier::Swap));
            }
        }
        for admitted in &grant.admitted {
            let seq = &self.waiting[&self.ranks[&admitted.seq]];
            if !admitted.swap_in.is_empty() && seq.state == SeqState::Waiting {
                self.moving.taking.push(admitted.seq);
                demand.take.push(admitted.swap_in.iter().map(|place| seq.hashes[*place]).collect());
            }
        }
        if self.config.num_swap_blocks > 0 {
            self.make_room(grant, &mut demand);
            self.write_behind(grant, &mut demand);
            let room = MAX_QUEUED_FOR_CACHE.saturating_sub(self.costs.queued_blocks());
            let (blocks, names): (Vec<_>, Vec<_>) = grant.evicted.iter().copied().take(room).unzip();
            (self.moving.keeping, demand.keep) = (blocks, names);
        }
        demand
    }

    /// What a victim leaves in the swap pool.
    fn store(&mut self, seq: SeqId) -> Option<Store> {
        let block_size = self.config.block_size;
        let rank = self.ranks[&seq];
        let seq = &self.running[&rank];
        // What is still on its way is in the swap pool anyway.
        if seq.swap_in.is_some() || seq.num_computed == 0 || self.config.num_swap_blocks == 0 {
            return None;
        }
        let choice = match self.config.preemption_mode {
            PreemptionMode::Swap => Choice::Swap,
            PreemptionMode::Recompute => Choice::Recompute,
            PreemptionMode::Auto => {
                let (num_tokens, num_backed) = (seq.num_computed, seq.num_backed);
                let victim = Victim { num_tokens, block_size, num_backed };
                let decision = self.costs.decide(rank.request, &victim, &self.step_times);
                self.report.decisions.push(decision);
                decision.choice
            }
        };
        let num_full = seq.num_computed / block_size;
        let num_blocks = match choice {
            Choice::Swap => seq.num_computed.div_ceil(block_size),
            Choice::SwapFull => num_full,
            Choice::Recompute => return None,
        };
        let hashes = seq.hashes[..num_full.min(seq.hashes.len())].to_vec();
        Some(Store { seq: seq.rank.seq, num_blocks, hashes })
    }

    /// Whether what a victim now leaves to be copied was bounded in the step before.
    fn foresight(&self, seq: &Sequence) -> Foresight {
        match self.config.write_behind_blocks {
            0 => Foresight::Off,
            _ => seq.tail.foresight(self.looks, seq.num_computed / self.config.block_size),
        }
    }

    /// Where victims need more room than there is, running sequences give up what was copied ahead for them.
    fn make_room(&mut self, grant: &Grant, demand: &mut SwapDemand) {
        let needed: usize = demand.store.iter().map(|store| store.num_blocks).sum();
        let released: usize = demand.release.iter().map(Vec::len).sum();
        let mut room = self.swap_stats.free + self.swap_stats.cached + released;
        for seq in self.running.iter_mut().filter(|seq| !grant.preempted.contains(&seq.rank.seq)) {
            if room >= needed {
                return;
            }
            room += seq.backing.len();
            demand.release.push(std::mem::take(&mut seq.backing));
            (seq.num_backed, seq.tail) = (0, Tail::no_room(self.looks));
        }
    }

    /// While device blocks are scarce, those who would yield first have all their full blocks but `max_tail_blocks`
    /// copied ahead: as many of them as hold what would be short.
    fn write_behind(&mut self, grant: &Grant, demand: &mut SwapDemand) {
        let config = &self.config;
        let available = grant.stats.free + grant.stats.cached;
        let keeps_nothing = config.preemption_mode == PreemptionMode::Recompute;
        let Some(mut short) = config.write_behind_blocks.checked_sub(available).filter(|_| !keeps_nothing) else {
            return;
        };
        if self.is_draining() {
            return;
        }
        let mut room = MAX_QUEUED_BLOCKS.saturating_sub(self.costs.queued_blocks());
        let (max_tail, look) = (config.max_tail_blocks, self.looks);
        let mut has_all = true;
        for seq in self.running.iter_mut() {
            let has_them = seq.num_published <= seq.num_backed + max_tail;
            has_all &= has_them;
            // What is still to come has no blocks to look at.
            if has_them && seq.swap_in.is_none() {
                seq.tail = Tail::copied(look, seq.num_published);
            }
        }
        if has_all {
            return;
        }
        if room > 0 {
            self.update_likely_victims();
        }
        for rank in self.likely_victims.order.iter().filter(|rank| !grant.preempted.contains(&rank.seq)) {
            if short == 0 {
                return;
            }
            let Some(seq) = self.running.get_mut(rank) else { continue };
            short = short.saturating_sub(seq.table.len());
            if seq.num_published <= seq.num_backed + max_tail {
                continue;
            }
            let places = seq.num_backed..seq.num_published.min(seq.num_backed + room);
            // As it will be if the swap pool takes all of them.
            seq.tail = match seq.num_published <= places.end + max_tail {
                true => Tail::copied(look, seq.num_published),
                false => Tail::queue_full(look),
            };
            if !places.is_empty() {
                room -= places.len();
                demand.back.push(seq.hashes[places.clone()].to_vec());
                self.moving.backing.push((seq.rank.seq, seq.table[places].to_vec()));
            }
        }
    }

    /// Looks at who would yield first, if that may have changed.
    fn update_likely_victims(&mut self) {
        let num_running = self.running.len();
        let LikelyVictims { steps_left, of, .. } = &mut self.likely_victims;
        if *steps_left > 0 && *of == num_running {
            *steps_left -= 1;
            return;
        }
        let order = self.yield_order().into_iter().map(|seq| seq.rank).collect();
        self.likely_victims = LikelyVictims { order, of: num_running, steps_left: LIKELY_FOR_STEPS };
    }

    /// Takes the swap pool's answers into the plan; what it stores for victims and has taken for those who start.
    pub(super) fn plan_copies(&mut self, swap: SwapGrant, plan: &mut StepPlan) -> Answers {
        let moving = std::mem::take(&mut self.moving);
        for ((seq, blocks), backed) in moving.backing.into_iter().zip(swap.backed) {
            let seq = self.running.get_mut(&self.ranks[&seq]).expect("only running sequences are copied ahead");
            seq.num_backed += backed.len();
            if backed.len() < blocks.len() {
                seq.tail = Tail::no_room(self.looks);
            }
            seq.backing.extend(backed.iter().map(|swap| swap.block));
            let request = seq.rank.request;
            let copies = blocks.into_iter().zip(backed).filter(|(_, swap)| swap.copy);
            let before = plan.swap_out.len();
            plan.swap_out.extend(copies.map(|(device, swap)| (device, swap.block)));
            if plan.swap_out.len() > before {
                self.bill(request).swapped_out_blocks += plan.swap_out.len() - before;
            }
        }
        let kept = moving.keeping.into_iter().zip(swap.kept);
        plan.swap_out.extend(kept.filter_map(|(device, swap)| Some((device, swap?))));
        self.swap_stats = swap.stats.unwrap_or(self.swap_stats);
        let stored = moving.storing.into_iter().zip(swap.stored);
        let stored = stored.filter_map(|((seq, foresight), blocks)| Some((seq, Stored { blocks: blocks?, foresight })));
        Answers { stored: stored.collect(), taken: moving.taking.into_iter().zip(swap.taken).collect() }
    }

    /// A running sequence gives its blocks up.
    pub(super) fn preempt(&mut self, rank: Rank, stored: Option<Stored>, plan: &mut StepPlan) {
        let mut seq = self.running.remove(&rank).expect("only running sequences are preempted");
        if let Some(coming) = seq.swap_in.take() {
            self.turn_back(&mut seq, *coming);
        } else if let Some(Stored { blocks: stored, foresight }) = stored {
            seq.num_computed = seq.num_computed.min(stored.len() * self.config.block_size);
            let table = seq.preempt(Some(stored.iter().map(|swap| swap.block).collect()));
            let copies = table.iter().zip(&stored).filter(|(_, swap)| swap.copy);
            let before = plan.swap_out.len();
            plan.swap_out.extend(copies.map(|(device, swap)| (*device, swap.block)));
            let num_copies = plan.swap_out.len() - before;
            self.bill(rank.request).swapped_out_blocks += num_copies;
            self.report.preemption_copies.push(TailCopies { num_blocks: num_copies, foresight });
            self.num_swapped += 1;
            self.report.stats.preempted_swap += 1;
        } else {
            seq.preempt(None);
            self.report.stats.preempted_recompute += 1;
        }
        self.give_backing_up(&mut seq);
        self.pause(&mut seq);
        self.waiting.insert(seq);
    }

    /// It has to yield before its KV has come back: that is still in the swap pool.
    fn turn_back(&mut self, seq: &mut Sequence, coming: SwapInUnderWay) {
        self.swap_ins.remove(&coming.id);
        if coming.was_swapped {
            seq.preempt(Some(coming.from));
            self.num_swapped += 1;
            self.report.stats.preempted_swap += 1;
        } else {
            self.pending_swap.release.push(coming.from);
            seq.preempt(None);
            self.report.stats.preempted_recompute += 1;
        }
    }

    pub(super) fn give_backing_up(&mut self, seq: &mut Sequence) {
        if !seq.backing.is_empty() {
            self.pending_swap.release.push(std::mem::take(&mut seq.backing));
        }
        seq.num_backed = 0;
    }

    /// Starts the copies that an admitted sequence waits for.
    pub(super) fn start_swap_in(
        &mut self,
        seq: &mut Sequence,
        state: SeqState,
        taken: Option<Vec<BlockId>>,
        admitted: &Admitted,
        plan: &mut StepPlan,
    ) {
        self.next_copy += 1;
        let id = CopyId(self.next_copy);
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
        self.report.stats.blocks_in += pairs.len();
        self.bill(seq.rank.request).swapped_in_blocks += pairs.len();
        let (first_place, num_tokens) = (admitted.swap_in[0], admitted.num_computed);
        let is_nameless = false;
        let coming = SwapInUnderWay { id, from, first_place, num_tokens, was_swapped, is_nameless };
        seq.swap_in = Some(Box::new(coming));
        self.swap_ins.insert(id, seq.rank);
        plan.swap_in.push(SwapIn { id, pairs });
    }

    /// Takes in what has become of copies: to be called whenever a report is there, between plans.
    pub fn copied(&mut self, report: &CopyReport) {
        self.costs.observe(report);
        if !report.lost.is_empty() {
            self.lose(&report.lost);
        }
        for (id, is_there) in &report.arrived {
            // A sequence that has been dropped since then, or had to yield, waits no more.
            let Some(rank) = self.swap_ins.remove(id) else { continue };
            let seq = self.running.get_mut(&rank).expect("who waits for a copy runs");
            let coming = *seq.swap_in.take().expect("it waits for this copy");
            self.refusal = None;
            match is_there {
                true => self.has_come(rank, coming),
                false => self.compute_instead(rank, coming),
            }
        }
    }

    fn has_come(&mut self, rank: Rank, coming: SwapInUnderWay) {
        let (block_size, is_draining) = (self.config.block_size, self.is_draining());
        let seq = self.running.get_mut(&rank).expect("who waits for a copy runs");
        seq.num_computed = coming.num_tokens;
        publish(seq, &self.hasher, block_size, &mut self.pending.publish);
        // Full blocks do not change any more, so the copies stay good for the next time, where there is room for them.
        let mut from = coming.from;
        let num_full = if coming.was_swapped { coming.num_tokens / block_size } else { from.len() };
        // What others have found to hold nothing has no name: nobody would find it again.
        let num_full = if is_draining || coming.is_nameless { 0 } else { num_full };
        let tail = from.split_off(num_full.min(from.len()));
        if !tail.is_empty() {
            self.pending_swap.release.push(tail);
        }
        if coming.was_swapped {
            seq.num_backed = from.len();
        }
        seq.backing.extend(from);
        self.resume(rank);
    }

    /// What should have come has not: it is computed again, like everything behind it.
    fn compute_instead(&mut self, rank: Rank, coming: SwapInUnderWay) {
        let seq = self.running.get_mut(&rank).expect("who waits for a copy runs");
        let rest = Arc::make_mut(&mut seq.table).split_off(coming.first_place);
        seq.num_computed = coming.first_place * self.config.block_size;
        seq.num_published = coming.first_place;
        self.pending.release.push(Arc::new(rest));
        self.lose(&coming.from);
        self.pending_swap.release.push(coming.from);
        self.resume(rank);
    }

    /// These blocks of the swap pool hold nothing. Who relied on them computes from there on.
    fn lose(&mut self, lost: &[BlockId]) {
        self.pending_swap.forget.extend(lost);
        for seq in self.waiting.iter_mut() {
            let SeqState::Swapped(blocks) = &mut seq.state else { continue };
            let Some(first) = blocks.iter().position(|block| lost.contains(block)) else { continue };
            self.pending_swap.release.push(blocks.split_off(first));
            seq.num_computed = first * self.config.block_size;
            if first == 0 {
                seq.state = SeqState::Waiting;
                self.num_swapped -= 1;
            }
        }
        for seq in self.running.iter_mut() {
            if let Some(coming) = &mut seq.swap_in {
                coming.is_nameless |= coming.from.iter().any(|block| lost.contains(block));
            }
            if seq.backing.iter().any(|block| lost.contains(block)) {
                self.pending_swap.release.push(std::mem::take(&mut seq.backing));
                (seq.num_backed, seq.tail) = (0, Tail::default());
            }
        }
    }

    /// Whether sequences wait for copies and nothing else is planned: the next step may come with the next report.
    pub fn waits_for_copies(&self) -> bool {
        !self.swap_ins.is_empty()
    }

    /// Seconds that a block's copy takes, to the swap pool and to the device.
    pub fn copy_seconds(&self) -> [f64; 2] {
        self.costs.block_seconds()
    }
}

/// What it has given a victim.
pub(super) struct Stored {
    blocks: Vec<SwapBlock>,
    foresight: Foresight,
}

/// What the swap pool has given.
pub(super) struct Answers {
    pub stored: IdMap<SeqId, Stored>,
    pub taken: IdMap<SeqId, Vec<BlockId>>,
}
