//! Preemption, and the way back: what victims leave in the swap pool, pauses, and the results of copies.

use super::plans::publish;
use super::quota::Holdings;
use super::tail::TailCopies;
use super::tiers::StoredKv;
use super::victims::Victims;
use super::{PreemptionMode, Scheduler};
use crate::allocation::{Demand, Grant, Store, SwapDemand};
use crate::arbiter::{Choice, VictimKv};
use crate::bill::QuotaTier;
use crate::plan::{CopyReport, Delivery, StepPlan};
use crate::sequence::{Rank, SeqState, Sequence, SwapInUnderWay};
use pagetide_base::ids::{RequestId, SeqId};
use std::sync::Arc;

impl Scheduler {
    pub(super) fn victims(&self) -> Victims<'_> {
        let Self { config, seqs, estimates, tiers, .. } = self;
        Victims { config, seqs, estimates, copy_costs: &tiers.costs }
    }

    /// What the step needs of the swap pool; empty on most steps.
    pub(super) fn swap_demand(&mut self, grant: &Grant) -> SwapDemand {
        let mut demand = self.tiers.begin_demand();
        let mut holdings: Option<Holdings> = None;
        for seq in &grant.preempted {
            let Some(store) = self.store(*seq) else { continue };
            let seq = &self.seqs.running[&self.seqs.rank_of(*seq)];
            let holdings = holdings.get_or_insert_with(|| Holdings::of_swap(&self.seqs, &self.config));
            if holdings.take(seq.tenant, store.num_blocks) {
                self.tiers.ask_to_store(seq, &self.config);
                demand.store.push(store);
            } else {
                self.planning.report.quota_refusals.push((seq.tenant, QuotaTier::Swap));
            }
        }
        self.tiers.take_cached(grant, &self.seqs, &mut demand);
        if self.config.num_swap_blocks > 0 {
            self.tiers.make_room(grant, &mut self.seqs, &mut demand);
            self.write_behind(grant, &mut demand);
            self.tiers.keep_evicted(grant, &mut demand);
        }
        demand
    }

    /// What a victim stores in the swap pool.
    fn store(&mut self, seq: SeqId) -> Option<Store> {
        let block_size = self.config.block_size;
        let seq = &self.seqs.running[&self.seqs.rank_of(seq)];
        // Blocks that are still being copied back are in the swap pool anyway.
        if seq.swap_in.is_some() || seq.num_computed == 0 || self.config.num_swap_blocks == 0 {
            return None;
        }
        let choice = match self.config.preemption_mode {
            PreemptionMode::Swap => Choice::Swap,
            PreemptionMode::Recompute => Choice::Recompute,
            PreemptionMode::Auto => {
                let victim = VictimKv { num_tokens: seq.num_computed, block_size, num_backed: seq.num_backed };
                let mut decision = self.tiers.costs.decide(seq.rank.request, &victim, &self.estimates.step_times);
                if decision.choice == Choice::Recompute
                    && self.tiers.costs.prefers_copies(decision.swap_s, decision.recompute_s)
                {
                    decision.choice = Choice::Swap;
                }
                self.planning.report.decisions.push(decision);
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

    /// While device blocks are scarce, the likely victims have all their full blocks but `max_tail_blocks` copied
    /// ahead: as many victims as hold what would be short.
    fn write_behind(&mut self, grant: &Grant, demand: &mut SwapDemand) {
        let max_tail_blocks = self.config.max_tail_blocks;
        let Some(short) = self.tiers.num_short(grant, &self.config) else { return };
        if self.tiers.note_tails(&mut self.seqs, max_tail_blocks) {
            return;
        }
        let room = self.tiers.write_behind_room();
        if room > 0 && self.tiers.wants_likely_victims(&self.seqs) {
            let order = self.victims().order().into_iter().map(|seq| seq.rank).collect();
            self.tiers.set_likely_victims(order, &self.seqs);
        }
        self.tiers.write_behind((short, room, max_tail_blocks), grant, &mut self.seqs, demand);
    }

    /// A running sequence gives its blocks up. `stored`: swap blocks for its KV.
    pub(super) fn preempt(&mut self, rank: Rank, stored: Option<StoredKv>, plan: &mut StepPlan) {
        let mut seq = self.seqs.running.remove(&rank).expect("only running sequences are preempted");
        let report = &mut self.planning.report;
        if let Some(coming) = seq.swap_in.take() {
            self.tiers.turn_back(&mut seq, *coming, &mut report.stats);
        } else if let Some(StoredKv { blocks: stored, foresight }) = stored {
            seq.num_computed = seq.num_computed.min(stored.len() * self.config.block_size);
            let table = seq.preempt(Some(stored.iter().map(|swap| swap.block).collect()));
            let copies = table.iter().zip(&stored).filter(|(_, swap)| swap.copy);
            let before = plan.swap_out.len();
            plan.swap_out.extend(copies.map(|(device, swap)| (*device, swap.block)));
            let num_copies = plan.swap_out.len() - before;
            self.ledger.bill(rank.request).swapped_out_blocks += num_copies;
            report.preemption_copies.push(TailCopies { num_blocks: num_copies, foresight });
            report.stats.preempted_swap += 1;
        } else {
            seq.preempt(None);
            report.stats.preempted_recompute += 1;
        }
        self.pause(seq);
    }

    /// Everything that runs is a beam that waits for another, and nothing was admitted: all give their blocks up, and
    /// the most senior starts over. Most of their content stays cached.
    pub(super) fn unblock(&mut self) {
        for mut seq in self.seqs.running.take() {
            self.device.pending.release.push(seq.preempt(None));
            self.planning.report.stats.preempted_recompute += 1;
            self.pause(seq);
        }
    }

    /// A sequence that was just preempted waits from now on. Where its KV had not come back since it was preempted
    /// before, the same pause goes on.
    fn pause(&mut self, mut seq: Box<Sequence>) {
        self.tiers.release_backing(&mut seq);
        self.ledger.bill(seq.rank.request).preemptions += 1;
        if !std::mem::replace(&mut seq.paused, true) {
            self.contracts.pause(&mut seq);
            self.planning.report.pauses.push((seq.rank.request, Delivery::Paused { sample: seq.sample }));
        }
        self.seqs.waiting.insert(seq);
    }

    /// The KV of a running sequence is there, perhaps again.
    pub(super) fn resume(&mut self, rank: Rank) {
        let seq = self.seqs.running.get_mut(&rank).expect("it runs");
        if std::mem::take(&mut seq.paused) {
            self.contracts.resume(&rank);
            self.planning.report.pauses.push((rank.request, Delivery::Resumed { sample: seq.sample }));
        }
    }

    /// Takes in what has become of copies between the tiers. To be called whenever a report is there, between plans.
    pub fn copied(&mut self, report: &CopyReport) {
        self.tiers.costs.observe(report);
        if !report.lost.is_empty() {
            self.tiers.lose(&report.lost, &mut self.seqs, self.config.block_size);
        }
        for (id, is_there) in &report.arrived {
            let Some(rank) = self.tiers.end_swap_in(*id) else { continue };
            let seq = self.seqs.running.get_mut(&rank).expect("a sequence that waits for a copy runs");
            let coming = *seq.swap_in.take().expect("it waits for this copy");
            self.admission.end_refusal();
            match is_there {
                true => self.swapped_in(rank, coming),
                false => self.compute_instead(rank, coming),
            }
            self.resume(rank);
        }
    }

    fn swapped_in(&mut self, rank: Rank, coming: SwapInUnderWay) {
        let block_size = self.config.block_size;
        let seq = self.seqs.running.get_mut(&rank).expect("a sequence that waits for a copy runs");
        seq.num_computed = coming.num_tokens;
        publish(seq, &self.seqs.hasher, block_size, &mut self.device.pending.publish);
        self.tiers.keep_swapped_in(seq, coming, block_size);
    }

    /// A swap-in failed. Its tokens and all tokens after them are computed again.
    fn compute_instead(&mut self, rank: Rank, coming: SwapInUnderWay) {
        let block_size = self.config.block_size;
        let seq = self.seqs.running.get_mut(&rank).expect("a sequence that waits for a copy runs");
        let rest = Arc::make_mut(&mut seq.table).split_off(coming.first_place);
        seq.num_computed = coming.first_place * block_size;
        seq.num_published = coming.first_place;
        self.device.pending.release.push(Arc::new(rest));
        self.tiers.lose(&coming.from, &mut self.seqs, block_size);
        self.tiers.pending.release.push(coming.from);
    }

    /// The executor has lost all KV. Requests with a running sequence are dropped and returned. The others start over
    /// when they are admitted. The caller has to renew both pools.
    pub fn fail_running(&mut self) -> Vec<RequestId> {
        // Sequences that waited for a copy had no part in it.
        let waited: Vec<Rank> = self.tiers.swap_ins().map(|(_, rank)| *rank).collect();
        for rank in waited {
            let mut seq = self.seqs.running.remove(&rank).expect("a sequence that waits for a copy runs");
            seq.swap_in = None;
            seq.preempt(None);
            self.seqs.waiting.insert(seq);
        }
        let mut failed: Vec<RequestId> = self.seqs.running.iter().map(|seq| seq.rank.request).collect();
        failed.sort_unstable();
        failed.dedup();
        for request in &failed {
            self.drop_request(*request);
        }
        self.seqs.waiting.lose_kv(|seq| {
            seq.backing.clear();
            if seq.is_swapped() {
                seq.state = SeqState::Waiting;
                seq.num_computed = 0;
            }
        });
        self.device.pending = Demand::default();
        self.device.available = self.config.num_device_blocks;
        self.tiers.reset(self.config.num_swap_blocks);
        self.in_flight.clear();
        failed
    }
}
