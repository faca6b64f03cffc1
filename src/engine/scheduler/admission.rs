//! Admission: which waiting sequences ask to run, new ones and preempted ones, and what becomes of those that are
//! admitted.

use super::queue::ask;
use super::quota::Holdings;
use super::turns::turns;
use super::wait_reason::{KeptWaiting, WaitReason};
use super::{Admission, Scheduler};
use crate::allocation::{Admit, Admitted, Demand, Lack};
use crate::bill::QuotaTier;
use crate::plan::StepPlan;
use crate::sequence::{Rank, SeqState, Sequence};
use pagetide_base::ids::BlockId;
use std::sync::Arc;

impl Scheduler {
    /// The sequences at the head of the queue that might fit.
    pub(super) fn candidates(&mut self, demand: &Demand) -> Vec<Admit> {
        let released: usize = demand.release.iter().map(|table| table.len()).sum();
        let mut room = self.device.available + released;
        let most = demand.seats.min(demand.token_budget).min(self.admission.num_asked());
        let mut waits = KeptWaiting::default();
        let block_size = self.config.block_size;
        let mut admit = Vec::new();
        let mut holdings = Holdings::of_device(&self.seqs, &self.config);
        let mut turns = turns(&self.seqs, &self.config);
        let mut reserved = self.contracts.num_reserved_blocks();
        let (mut has_waiting_contract, mut kept_waiting) = (false, Vec::new());
        let mut waiting = std::mem::take(&mut self.seqs.waiting);
        let mut walk = waiting.walk();
        while admit.len() < most
            && let Some(seq) = match &turns {
                Some(shares) => walk.next_in_turn(|tenant| shares.of(tenant)),
                None => walk.next(),
            }
        {
            if demand.urgent.iter().any(|urgent| urgent.seq == seq.rank.seq) {
                continue;
            }
            // A sequence that has run before may come back: where beams wait for it, they hold blocks too.
            let is_new = seq.cached_tokens.is_none();
            // A sequence that waits for a part of the pool is not overtaken by others that want the same part.
            let wanted = self.contracts.wanted(seq, block_size).map_or(0, |wanted| wanted.num_blocks);
            // The first may exceed the reserved part, because the limit may have been larger when it arrived.
            has_waiting_contract |= reserved > 0 && reserved + wanted > self.config.non_preemptible_blocks;
            if wanted > 0 && has_waiting_contract {
                waits.passed.push((seq.rank, WaitReason::NonPreemptible));
                walk.leave_line();
                continue;
            }
            if is_new && !holdings.take(seq.tenant, seq.num_tokens().div_ceil(block_size)) {
                holdings.close(seq.tenant);
                kept_waiting.push(seq.rank);
                waits.passed.push((seq.rank, WaitReason::Quota));
                walk.leave_line();
                continue;
            }
            reserved += wanted;
            let is_one_of_many = self.seqs.is_one_of_many_beams(seq);
            if is_one_of_many && !self.seqs.may_join(seq, block_size) {
                waits.first = Some((seq.rank, WaitReason::Beams));
                break;
            }
            let steps = self.estimates.expected_steps(seq, self.config.admission);
            // Beams that wait for another beam hold room for it.
            let horizon = if is_one_of_many { 0 } else { self.victims().horizon(seq) };
            let asked = ask(seq, &self.seqs.hasher, &self.config, is_one_of_many);
            admit.push(Admit { steps, horizon, ..asked });
            let blocks = seq.num_tokens().div_ceil(block_size);
            if let Some(shares) = &mut turns {
                shares.add(seq.tenant, blocks, seq.seats());
            }
            if blocks > room {
                break; // it fits only with cached blocks: this one asks, and none after it
            }
            room -= blocks;
            if is_one_of_many {
                break;
            }
        }
        if most == 0 {
            let lack = if demand.seats == 0 { Lack::Seats { wanted: 1, free: 0 } } else { Lack::Tokens };
            waits.first = waiting.iter().next().map(|seq| (seq.rank, WaitReason::Lack(lack)));
        }
        self.admission.waits = KeptWaiting { late: std::mem::take(&mut self.admission.waits.late), ..waits };
        self.seqs.waiting = waiting;
        kept_waiting.into_iter().for_each(|rank| self.report_quota(rank));
        admit
    }

    /// A quota keeps a sequence from asking: reported once.
    fn report_quota(&mut self, rank: Rank) {
        let seq = self.seqs.waiting.get_mut(&rank).expect("only waiting sequences are candidates");
        if !std::mem::replace(&mut seq.met_quota, true) {
            self.planning.report.quota_refusals.push((seq.tenant, QuotaTier::Device));
        }
    }

    /// Lets a waiting sequence run, with the blocks that it was given on the device and in the swap pool (`taken`).
    pub(super) fn admit(&mut self, admitted: Admitted, taken: Option<Vec<BlockId>>, plan: &mut StepPlan) {
        let rank = self.seqs.rank_of(admitted.seq);
        let mut seq = self.seqs.waiting.remove(&rank).expect("only waiting sequences are admitted");
        if let Some(wanted) = self.contracts.wanted(&seq, self.config.block_size) {
            self.contracts.reserve(rank.request, wanted);
        }
        if seq.cached_tokens.is_none() {
            self.report_first_admission(&mut seq, &admitted);
        }
        let state = std::mem::replace(&mut seq.state, SeqState::Running);
        seq.admitted_tokens = seq.num_tokens();
        seq.scheduled = admitted.num_new_tokens;
        let is_here = admitted.swap_in.is_empty();
        if is_here {
            if let SeqState::Swapped(blocks) = state {
                self.tiers.pending.release.push(blocks); // the device still had all blocks
            }
            seq.num_computed = admitted.num_computed;
            seq.num_published = admitted.num_computed / self.config.block_size;
        } else {
            let swap_in = self.tiers.start_swap_in(&mut seq, state, taken, &admitted);
            self.planning.report.stats.blocks_in += swap_in.pairs.len();
            self.ledger.bill(rank.request).swapped_in_blocks += swap_in.pairs.len();
            plan.swap_in.push(swap_in);
        }
        seq.table = Arc::new(admitted.table);
        self.seqs.running.insert(seq);
        if is_here {
            self.resume(rank);
        }
    }

    fn report_first_admission(&mut self, seq: &mut Sequence, admitted: &Admitted) {
        let (request, cached_tokens) = (seq.rank.request, admitted.num_computed);
        let swapped_tokens = admitted.swap_in.len() * self.config.block_size;
        let prompt_tokens = seq.prompt.len();
        self.planning.report.admissions.push(Admission { request, prompt_tokens, cached_tokens, swapped_tokens });
        seq.cached_tokens = Some(cached_tokens);
        seq.high_water = cached_tokens;
        if cached_tokens > 0 {
            let bill = self.ledger.bill(request);
            bill.cached_device_tokens += cached_tokens - swapped_tokens;
            bill.cached_swap_tokens += swapped_tokens;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::queue::REFUSED_STEPS;
    use crate::scheduler::SchedulerConfig;
    use crate::scheduler::test_engine::{TestEngine, arrival, config};
    use crate::scheduler::{EngineRequest, SchedulingPolicy};
    use pagetide_base::ids::{RequestId, SeqId};

    /// Makes a step, and returns the sequences that asked for admission in it.
    fn step(engine: &mut TestEngine) -> Vec<u64> {
        let mut asked = Vec::new();
        let planned = engine.plan_seen(0.0, |demand| asked.extend(demand.admit.iter().map(|admit| admit.seq.0)));
        engine.commit(&planned.unwrap().plan);
        asked
    }

    #[test]
    fn a_refused_sequence_asks_again_after_a_change_or_some_steps() {
        let policy = SchedulingPolicy::Priority;
        let mut engine = TestEngine::new(SchedulerConfig { policy, ..config() });
        // Two of 4 blocks and more later, one of 10, and there are 16.
        for (id, prompt) in [(1, 16), (2, 16), (3, 40)] {
            engine.scheduler.arrive(EngineRequest { priority: 1, ..arrival(id, prompt, 20) });
        }
        assert_eq!(step(&mut engine), [1, 2, 3]);
        assert_eq!(step(&mut engine), [3]);
        assert!((0..REFUSED_STEPS).all(|_| step(&mut engine).is_empty()), "nothing has changed");
        assert_eq!(step(&mut engine), [3], "after a while");
        engine.scheduler.arrive(EngineRequest { priority: 1, ..arrival(4, 4, 20) });
        assert!(step(&mut engine).is_empty(), "who came behind it waits with it");
        engine.scheduler.arrive(EngineRequest { priority: 0, ..arrival(5, 4, 1) });
        assert_eq!(step(&mut engine)[0], 5, "it goes before");
        engine.scheduler.cancel(RequestId(1));
        assert_eq!(step(&mut engine), [3], "something was given back, and is not enough");
        engine.scheduler.cancel(RequestId(2));
        assert!(step(&mut engine).contains(&3));
        assert!(engine.scheduler.seqs.running.get(&engine.scheduler.seqs.rank_of(SeqId(3))).is_some());
    }

    /// Makes the next step, and returns the tokens of the sequence in it.
    fn step_tokens(engine: &mut TestEngine, seq: u64) -> usize {
        let plan = engine.plan();
        let tokens = plan.batch.iter().find(|planned| planned.seq.0 == seq).map_or(0, |planned| planned.tokens.len());
        engine.commit(&plan);
        tokens
    }

    #[test]
    fn prompts_come_in_small_pieces_while_somebody_waits_for_blocks() {
        let mut engine = TestEngine::new(SchedulerConfig { inter_token_target: Some(1.0), ..config() });
        engine.scheduler.arrive(arrival(1, 4, 40));
        step_tokens(&mut engine, 1);
        engine.scheduler.arrive(arrival(2, 40, 20));
        assert_eq!(step_tokens(&mut engine, 2), 40, "there are blocks for everybody");
        engine.scheduler.arrive(arrival(3, 36, 1));
        assert_eq!(step_tokens(&mut engine, 3), 0, "there are none");
        engine.scheduler.cancel(RequestId(2));
        assert_eq!(step_tokens(&mut engine, 3), 32, "who waited for them has time");
        assert_eq!(step_tokens(&mut engine, 3), 4);
        engine.scheduler.arrive(arrival(4, 36, 1));
        assert_eq!(step_tokens(&mut engine, 4), 36, "nobody has waited since");
    }

    #[test]
    fn as_many_ask_as_may_well_be_admitted() {
        let seats = SchedulerConfig { num_device_blocks: 1_000, max_num_seqs: 500, ..config() };
        let mut engine = TestEngine::new(SchedulerConfig { max_num_batched_tokens: 500, ..seats });
        (1..=400).for_each(|id| engine.scheduler.arrive(arrival(id, 1, 20)));
        let asked: Vec<usize> = (0..5).map(|_| step(&mut engine).len()).collect();
        assert_eq!(asked, [32, 64, 128, 176, 0], "all were admitted");
        // 30 of 16 tokens fill a step.
        let mut engine = TestEngine::new(SchedulerConfig { max_num_batched_tokens: 500, ..seats });
        (1..=400).for_each(|id| engine.scheduler.arrive(arrival(id, 16, 20)));
        let asked: Vec<usize> = (0..3).map(|_| step(&mut engine).len()).collect();
        assert_eq!(asked, [32, 64, 58], "as the tokens allow, which others take too");
    }
}
