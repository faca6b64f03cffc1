//! Who comes in: new requests, and those that had yielded.

use super::running::Running;
use super::waits::{WaitReason, Waits};
use super::{Scheduler, SchedulerConfig};
use crate::engine::allocation::{Admit, Admitted, Demand, Lack};
use crate::engine::plan::StepPlan;
use crate::engine::prefix_cache::BlockHasher;
use crate::engine::scheduler::Admission;
use crate::engine::sequence::{Rank, SeqState, Sequence};
use crate::ids::{BlockId, IdMap, RequestId};
use crate::sampling::params::Pooling;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Nobody was admitted, so nobody need ask again for some steps, unless something is given back or somebody comes who
/// goes before.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Refusal {
    /// Who asked first.
    pub first: Rank,
    steps_left: u32,
}

/// What a step by itself may change, names of blocks and expectations, is looked at again after so many.
const REFUSED_STEPS: u32 = 8;

/// See [`Scheduler::num_asked`].
const MIN_ASKED: usize = 32;

impl Scheduler {
    /// Whether it is known that nobody can be admitted in this step.
    pub(super) fn is_refused(&mut self) -> bool {
        let Some(refusal) = &mut self.refusal else { return false };
        refusal.steps_left -= 1;
        if refusal.steps_left == 0 {
            self.refusal = None;
        }
        true
    }

    /// `has_changed`: somebody was admitted, or had to yield.
    pub(super) fn note_refusal(&mut self, has_changed: bool) {
        let refused = self.asks.take().filter(|_| !has_changed);
        self.refusal = match refused {
            Some(first) => {
                self.prompt_pace.refused();
                Some(Refusal { first, steps_left: REFUSED_STEPS })
            }
            None => self.refusal.filter(|_| !has_changed),
        };
    }

    /// How many may ask for admission in this step. Each takes time, whether it is admitted or not: mostly the step's
    /// tokens are soon gone, and where they are not, twice as many ask in the next step.
    fn num_asked(&self) -> usize {
        MIN_ASKED.max(2 * self.num_admitted)
    }

    /// The head of the queue, as long as it might fit.
    pub(super) fn candidates(&mut self, demand: &Demand) -> Vec<Admit> {
        let released: usize = demand.release.iter().map(|table| table.len()).sum();
        let mut room = self.available + released;
        let most = demand.seats.min(demand.token_budget).min(self.num_asked());
        let mut waits = Waits::default();
        let block_size = self.config.block_size;
        let mut admit = Vec::new();
        let mut holdings = self.device_holdings();
        let mut turns = self.turns();
        let mut reserved = self.num_reserved_blocks();
        let (mut has_waiting_contract, mut kept_waiting) = (false, Vec::new());
        let mut waiting = std::mem::take(&mut self.waiting);
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
            // Who has run before may come back: where beams wait for it, they hold blocks too.
            let is_new = seq.cached_tokens.is_none();
            // Who waits for a part of the pool is not overtaken by others that want the same part.
            let wanted = self.wants_reserved(seq).map_or(0, |wanted| wanted.num_blocks);
            // The first may have more than there is for them: it did fit when it came, perhaps under another limit.
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
            // The prompt of a search comes in like any other.
            let is_one_of_many = seq.is_beam() && self.requests[&seq.rank.request].len() > 1;
            if is_one_of_many && !may_join(seq, &self.running, &self.requests, block_size) {
                waits.first = Some((seq.rank, WaitReason::Beams));
                break;
            }
            // Beams that wait for another have room for it.
            let (steps, horizon) = (self.expected_steps(seq), if is_one_of_many { 0 } else { self.horizon(seq) });
            let asked = ask(seq, &self.hasher, &self.config, is_one_of_many);
            admit.push(Admit { steps, horizon, ..asked });
            let blocks = seq.num_tokens().div_ceil(block_size);
            if let Some(shares) = &mut turns {
                shares.add(seq.tenant, blocks, seq.seats());
            }
            if blocks > room {
                break; // only cached blocks could make it fit: ask for this one, and no further
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
        self.waits = Waits { late: std::mem::take(&mut self.waits.late), ..waits };
        self.waiting = waiting;
        kept_waiting.into_iter().for_each(|rank| self.meet_quota(rank));
        admit
    }

    /// Takes up a sequence with the blocks that it was given, in the swap pool too: `taken`.
    pub(super) fn admit(
        &mut self,
        seq: &mut Sequence,
        admitted: Admitted,
        taken: Option<Vec<BlockId>>,
        plan: &mut StepPlan,
    ) {
        let Admitted { num_computed, num_new_tokens, .. } = admitted;
        if let Some(wanted) = self.wants_reserved(seq) {
            self.reserved.insert(seq.rank.request, wanted);
        }
        let state = std::mem::replace(&mut seq.state, SeqState::Running);
        self.num_swapped -= usize::from(matches!(state, SeqState::Swapped(_)));
        if seq.cached_tokens.is_none() {
            let (request, prompt_tokens) = (seq.rank.request, seq.prompt.len());
            let swapped_tokens = admitted.swap_in.len() * self.config.block_size;
            self.report.admissions.push(Admission {
                request,
                prompt_tokens,
                cached_tokens: num_computed,
                swapped_tokens,
            });
            seq.cached_tokens = Some(num_computed);
            seq.high_water = num_computed;
            if num_computed > 0 {
                let bill = self.bill(request);
                bill.cached_device_tokens += num_computed - swapped_tokens;
                bill.cached_swap_tokens += swapped_tokens;
            }
        }
        seq.admitted_tokens = seq.num_tokens();
        if admitted.swap_in.is_empty() {
            if let SeqState::Swapped(blocks) = state {
                self.pending_swap.release.push(blocks); // the device still had all of it
            }
            seq.num_computed = num_computed;
            seq.num_published = num_computed / self.config.block_size;
        } else {
            self.start_swap_in(seq, state, taken, &admitted, plan);
        }
        seq.table = Arc::new(admitted.table);
        seq.scheduled = num_new_tokens;
    }
}

/// What a waiting sequence asks for. `is_one_of_many`: it is one of several beams.
pub(super) fn ask(seq: &mut Sequence, hasher: &BlockHasher, config: &SchedulerConfig, is_one_of_many: bool) -> Admit {
    let (block_size, num_tokens) = (config.block_size, seq.num_tokens());
    let (held, num_held_tokens) = match &seq.state {
        SeqState::Swapped(blocks) => (vec![true; blocks.len()], seq.num_computed),
        _ => (Vec::new(), 0),
    };
    let mut usable_hashes = (num_tokens - 1) / block_size;
    if seq.params.prompt_logprobs.is_some() && seq.sample == 0 {
        // The logits of every prompt token are wanted once.
        let missing = seq.prompt_logprobs.len() + 1 < seq.prompt.len();
        usable_hashes = if missing { seq.prompt_logprobs.len() / block_size } else { usable_hashes };
    }
    if seq.params.pooling == Some(Pooling::Mean) {
        // So are the states of every token.
        usable_hashes = usable_hashes.min(seq.pooled.num_rows / block_size);
    }
    seq.extend_hashes(hasher, block_size, usable_hashes);
    Admit {
        seq: seq.rank.seq,
        hashes: seq.hashes.clone(),
        usable_hashes,
        num_tokens,
        held,
        num_held_tokens,
        seats: seq.seats().min(config.max_num_seqs),
        steps: 0,
        horizon: 0,
        // The last token of a beam waits for the other beams.
        num_held_back: usize::from(is_one_of_many),
    }
}

/// Whether a waiting beam can be admitted: one after the other, so that each finds the blocks that it shares with those
/// before it under their names. Otherwise beams that have yielded could need more memory than they had.
pub(super) fn may_join(
    seq: &Sequence,
    running: &Running,
    requests: &IdMap<RequestId, Vec<Rank>>,
    block_size: usize,
) -> bool {
    let mut others = requests[&seq.rank.request].iter().filter_map(|rank| running.get(rank));
    let is_complete = |beam: &Sequence| {
        beam.num_computed + 1 == beam.num_tokens() && beam.num_published == beam.num_computed / block_size
    };
    others.all(is_complete)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::scheduler::test_engine::{TestEngine, arrival, config};
    use crate::engine::scheduler::{Arrival, SchedulingPolicy};
    use crate::ids::SeqId;

    /// Makes a step; who asked for admission in it.
    fn step(engine: &mut TestEngine) -> Vec<u64> {
        let mut asked = Vec::new();
        let planned = engine.plan_seen(0.0, |demand| asked.extend(demand.admit.iter().map(|admit| admit.seq.0)));
        engine.commit(&planned.unwrap().plan);
        asked
    }

    #[test]
    fn who_was_refused_asks_again_when_something_has_changed_or_after_a_while() {
        let policy = SchedulingPolicy::Priority;
        let mut engine = TestEngine::new(SchedulerConfig { policy, ..config() });
        // Two of 4 blocks and more later, one of 10, and there are 16.
        for (id, prompt) in [(1, 16), (2, 16), (3, 40)] {
            engine.scheduler.arrive(Arrival { priority: 1, ..arrival(id, prompt, 20) });
        }
        assert_eq!(step(&mut engine), [1, 2, 3]);
        assert_eq!(step(&mut engine), [3]);
        assert!((0..REFUSED_STEPS).all(|_| step(&mut engine).is_empty()), "nothing has changed");
        assert_eq!(step(&mut engine), [3], "after a while");
        engine.scheduler.arrive(Arrival { priority: 1, ..arrival(4, 4, 20) });
        assert!(step(&mut engine).is_empty(), "who came behind it waits with it");
        engine.scheduler.arrive(Arrival { priority: 0, ..arrival(5, 4, 1) });
        assert_eq!(step(&mut engine)[0], 5, "it goes before");
        engine.scheduler.cancel(RequestId(1));
        assert_eq!(step(&mut engine), [3], "something was given back, and is not enough");
        engine.scheduler.cancel(RequestId(2));
        assert!(step(&mut engine).contains(&3));
        assert!(engine.scheduler.running.get(&engine.scheduler.ranks[&SeqId(3)]).is_some());
    }

    /// Tokens of the sequence in the next step, which is made.
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
