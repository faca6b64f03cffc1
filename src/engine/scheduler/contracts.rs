//! What requests are promised: that they are not preempted, or not for long.
//!
//! A request that is not preemptible starts only when all the blocks that it may ever need fit into the part of the
//! pool that such requests may hold. It is no victim then, and need not be: the victims hold the rest. While one such
//! request waits for room, later ones wait behind it, however small they are. Other requests go before it.
//!
//! A sequence whose pauses are limited is preempted after those whose pauses are not. When half of its limit has
//! passed, it comes back before all others, which are preempted for it. The other half is for a step that runs, and for
//! the copies.

use super::SchedulerConfig;
use super::queue::ask;
use super::sequences::Sequences;
use crate::allocation::Admit;
use crate::bill::most_blocks;
use crate::sequence::{Rank, Sequence};
use pagetide_base::ids::{IdMap, RequestId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The promises that are in force.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Contracts {
    /// Seconds since some moment.
    pub now: f64,
    /// Paused sequences whose pauses are limited.
    limited: BTreeSet<Rank>,
    /// What running requests that are not preemptible may need.
    reserved: IdMap<RequestId, Reserved>,
}

/// The most that a request may need.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Reserved {
    pub num_blocks: usize,
    /// Beams that its search may have at once. They come and go.
    pub num_beams: usize,
}

impl Contracts {
    /// A sequence is paused from now on.
    pub fn pause(&mut self, seq: &mut Sequence) {
        seq.paused_at = self.now;
        if seq.terms.max_pause.is_some() {
            self.limited.insert(seq.rank);
        }
    }

    /// A sequence is not paused any more, or has ended.
    pub fn resume(&mut self, rank: &Rank) {
        self.limited.remove(rank);
    }

    /// Asks for the sequences that have to come back now.
    pub fn urgent(&self, seqs: &mut Sequences, config: &SchedulerConfig) -> Vec<Admit> {
        self.limited.iter().filter_map(|rank| self.ask_if_urgent(*rank, seqs, config)).collect()
    }

    fn ask_if_urgent(&self, rank: Rank, seqs: &mut Sequences, config: &SchedulerConfig) -> Option<Admit> {
        // If its blocks are already being copied back, it is running and not waiting.
        let seq = seqs.waiting.get(&rank)?;
        let is_urgent = seq.terms.max_pause.is_some_and(|most| self.now - seq.paused_at >= most.as_secs_f64() / 2.0);
        let is_one_of_many = seqs.is_one_of_many_beams(seq);
        if !is_urgent || is_one_of_many && !seqs.may_join(seq, config.block_size) {
            return None;
        }
        let seq = seqs.waiting.get_mut(&rank)?;
        Some(ask(seq, &seqs.hasher, config, is_one_of_many))
    }

    /// What a new request has to have reserved if it is not preemptible.
    pub fn wanted(&self, seq: &Sequence, block_size: usize) -> Option<Reserved> {
        let is_new = !self.reserved.contains_key(&seq.rank.request);
        (is_new && !seq.terms.preemptible).then(|| {
            // Its last token needs no slot.
            let num_tokens = seq.num_tokens() + seq.room() - 1;
            let num_seqs = seq.seats();
            let num_blocks = most_blocks(block_size, seq.prompt.len(), num_tokens, num_seqs);
            Reserved { num_blocks, num_beams: if seq.is_beam() { num_seqs } else { 0 } }
        })
    }

    pub fn reserve(&mut self, request: RequestId, reserved: Reserved) {
        self.reserved.insert(request, reserved);
    }

    /// A request has ended.
    pub fn end(&mut self, request: RequestId) {
        self.reserved.remove(&request);
    }

    pub fn num_reserved_blocks(&self) -> usize {
        self.reserved.values().map(|reserved| reserved.num_blocks).sum()
    }

    /// Seats that beams of running requests do not take now, and may take again. A sequence that waits to be admitted
    /// takes its seats like any other: none are kept from it.
    pub fn num_reserved_seats(&self, seqs: &Sequences) -> usize {
        let unused = |(request, reserved): (&RequestId, &Reserved)| {
            let beams = seqs.of_request(*request).iter().filter_map(|rank| seqs.get(*rank));
            reserved.num_beams.saturating_sub(beams.map(Sequence::seats).sum())
        };
        self.reserved.iter().map(unused).sum()
    }
}

#[cfg(test)]
mod tests {
    use crate::bill::{Tenant, Terms};
    use crate::plan::Delivery;
    use crate::scheduler::test_engine::{TestEngine, arrival, config, seqs};
    use crate::scheduler::{EngineRequest, PlannedStep, SchedulerConfig, SchedulingPolicy};
    use pagetide_base::ids::{RequestId, SeqId};
    use pagetide_base::sampling::params::{BeamParams, EarlyStopping, SamplingParams};
    use std::sync::Arc;
    use std::time::Duration;

    #[test]
    fn smaller_requests_do_not_overtake_one_that_waits_for_its_part_of_the_pool() {
        let mut engine = TestEngine::new(SchedulerConfig { non_preemptible_blocks: 4, ..config() });
        let terms = Terms { preemptible: false, ..Terms::default() };
        // 2 blocks each, but for the second of them: 4.
        for (id, max_tokens, tenant) in [(1, 5, 1), (2, 13, 1), (3, 5, 1), (4, 5, 2)] {
            let tenant = Tenant(tenant);
            engine.scheduler.arrive(EngineRequest { terms, tenant, ..arrival(id, 4, max_tokens) });
        }
        engine.scheduler.arrive(arrival(5, 4, 90));
        let plan = engine.plan();
        assert_eq!(seqs(&plan), [SeqId(1), SeqId(5)], "who may be preempted goes before");
        engine.commit(&plan);
        // Small requests keep arriving. When one ends, the large one is admitted all the same.
        let mut started = None;
        for id in 6..30 {
            let tenant = Tenant(1 + id as u32 % 2);
            engine.scheduler.arrive(EngineRequest { terms, tenant, ..arrival(id, 4, 5) });
            let plan = engine.plan();
            let second = seqs(&plan).contains(&SeqId(2));
            assert!(second || started.is_some() || !seqs(&plan).iter().any(|seq| (3..5).contains(&seq.0)), "{plan:?}");
            started = started.or(second.then_some(id));
            engine.commit(&plan);
        }
        assert!(started.is_some_and(|id| id < 12), "it started in step {started:?}");
    }

    /// Beams that start over, because none could advance or because the executor failed, still have their reserved
    /// seats.
    #[test]
    fn seats_that_are_kept_for_beams_are_not_kept_from_them() {
        let mut engine = TestEngine::new(SchedulerConfig {
            max_num_seqs: 4,
            max_num_batched_tokens: 4,
            non_preemptible_blocks: 16,
            ..config()
        });
        let beam = BeamParams { width: 4, length_penalty: 1.0, early_stopping: EarlyStopping::Never, logprobs: None };
        let params = Arc::new(SamplingParams { max_tokens: 5, beam: Some(beam), ..SamplingParams::default() });
        let terms = Terms { preemptible: false, ..Terms::default() };
        engine.scheduler.arrive(EngineRequest { terms, params, ..arrival(1, 12, 5) });
        let plan = engine.plan();
        assert_eq!(seqs(&plan), [SeqId(1)]);
        engine.commit(&plan);
        engine.scheduler.unblock();
        assert_eq!(seqs(&engine.plan()), [SeqId(1)]);
    }

    /// Seconds for which the second of two requests whose pauses are limited was paused: it was preempted for the
    /// first, and another request took the room before it was free for the second. The end of a pause is reported with
    /// the next plan, a second later.
    fn pauses(most: Duration) -> Vec<u32> {
        let policy = SchedulingPolicy::Priority;
        let mut engine = TestEngine::new(SchedulerConfig { num_device_blocks: 12, policy, ..config() });
        let terms = Terms { max_pause: Some(most), ..Terms::default() };
        engine.scheduler.arrive(arrival(1, 1, 90));
        engine.scheduler.arrive(EngineRequest { terms, priority: 1, ..arrival(2, 9, 10) });
        engine.scheduler.arrive(EngineRequest { terms, priority: 3, ..arrival(3, 9, 90) });
        let (mut paused_at, mut pauses) = (None, Vec::new());
        for second in 0..20 {
            if second == 9 {
                engine.scheduler.arrive(EngineRequest { priority: 2, ..arrival(4, 20, 90) });
            }
            let PlannedStep { plan, report } = engine.plan_at(f64::from(second));
            engine.commit(&plan);
            for (request, pause) in report.pauses {
                match pause {
                    Delivery::Paused { .. } if request == RequestId(3) => paused_at = Some(second),
                    Delivery::Resumed { .. } if request == RequestId(3) => {
                        pauses.extend(paused_at.take().map(|at| second - at));
                    }
                    _ => {}
                }
            }
            assert!(pauses.is_empty() || !seqs(&plan).contains(&SeqId(4)), "both have room in second {second}");
        }
        assert_eq!(paused_at.is_some(), pauses.is_empty());
        pauses
    }

    #[test]
    fn a_request_with_a_longest_pause_comes_back_after_half_of_it() {
        assert_eq!(pauses(Duration::from_secs(10)), [5 + 1], "the request that came before it is preempted");
        assert_eq!(pauses(Duration::from_secs(6)), [3 + 1]);
        assert!(pauses(Duration::from_secs(100)).is_empty());
    }
}
