//! What requests are promised: that they need not yield, or not for long.
//!
//! A request that is not preemptible starts only when all the blocks that it may ever need fit into the part of the pool
//! that such requests may hold; it is no victim then, and need not be: those who are hold the rest. While one waits for
//! that, later ones that must not yield either wait behind it, however small they are; others go before it.
//!
//! A sequence whose pauses are limited yields after those whose are not, and when it has been paused for half of that time
//! it comes back before all others, who yield to it. The other half is for a step that runs, and for the copies.

use super::Scheduler;
use super::admission::{ask, may_join};
use crate::engine::allocation::Admit;
use crate::engine::bill::most_blocks;
use crate::engine::sequence::{Rank, Sequence};
use crate::ids::RequestId;
use serde::{Deserialize, Serialize};

impl Scheduler {
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

    /// Seats that beams which must not yield do not take now, and may take again. What waits to be admitted takes seats
    /// like any other: nothing is kept from it.
    pub(super) fn num_reserved_seats(&self) -> usize {
        let unused = |(request, reserved): (&RequestId, &Reserved)| {
            let seqs = self.requests.get(request).into_iter().flatten().filter_map(|rank| self.seq(*rank));
            reserved.num_beams.saturating_sub(seqs.map(Sequence::seats).sum())
        };
        self.reserved.iter().map(unused).sum()
    }
}

/// Of a request that must not yield.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Reserved {
    pub num_blocks: usize,
    /// Beams that its search may have at once; they come and go.
    pub num_beams: usize,
}

#[cfg(test)]
mod tests {
    use crate::engine::bill::{Tenant, Terms};
    use crate::engine::plan::Delivery;
    use crate::engine::scheduler::test_engine::{TestEngine, arrival, config, seqs};
    use crate::engine::scheduler::{Arrival, PlannedStep, SchedulerConfig, SchedulingPolicy};
    use crate::ids::{RequestId, SeqId};
    use crate::sampling::params::{BeamParams, EarlyStopping, SamplingParams};
    use std::sync::Arc;
    use std::time::Duration;

    #[test]
    fn smaller_requests_do_not_overtake_one_that_waits_for_its_part_of_the_pool() {
        let mut engine = TestEngine::new(SchedulerConfig { non_preemptible_blocks: 4, ..config() });
        let terms = Terms { preemptible: false, ..Terms::default() };
        // 2 blocks each, but for the second of them: 4.
        for (id, max_tokens, tenant) in [(1, 5, 1), (2, 13, 1), (3, 5, 1), (4, 5, 2)] {
            let tenant = Tenant(tenant);
            engine.scheduler.arrive(Arrival { terms, tenant, ..arrival(id, 4, max_tokens) });
        }
        engine.scheduler.arrive(arrival(5, 4, 90));
        let plan = engine.plan();
        assert_eq!(seqs(&plan), [SeqId(1), SeqId(5)], "who may be preempted goes before");
        engine.commit(&plan);
        // Small ones keep coming; as one ends, the large one's turn comes all the same.
        let mut started = None;
        for id in 6..30 {
            let tenant = Tenant(1 + id as u32 % 2);
            engine.scheduler.arrive(Arrival { terms, tenant, ..arrival(id, 4, 5) });
            let plan = engine.plan();
            let second = seqs(&plan).contains(&SeqId(2));
            assert!(second || started.is_some() || !seqs(&plan).iter().any(|seq| (3..5).contains(&seq.0)), "{plan:?}");
            started = started.or(second.then_some(id));
            engine.commit(&plan);
        }
        assert!(started.is_some_and(|id| id < 12), "it started in step {started:?}");
    }

    /// Beams that start over, because nobody could go on or the executor has failed, find the seats that were kept for them.
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
        engine.scheduler.arrive(Arrival { terms, params, ..arrival(1, 12, 5) });
        let plan = engine.plan();
        assert_eq!(seqs(&plan), [SeqId(1)]);
        engine.commit(&plan);
        engine.scheduler.unblock();
        assert_eq!(seqs(&engine.plan()), [SeqId(1)]);
    }

    /// Seconds for which the second of two requests whose pauses are limited was paused: it was preempted for the first,
    /// and another request took the room before it was free for the second. The end of a pause is reported with the next
    /// plan, a second later.
    fn pauses(most: Duration) -> Vec<u32> {
        let policy = SchedulingPolicy::Priority;
        let mut engine = TestEngine::new(SchedulerConfig { num_device_blocks: 12, policy, ..config() });
        let terms = Terms { max_pause: Some(most), ..Terms::default() };
        engine.scheduler.arrive(arrival(1, 1, 90));
        engine.scheduler.arrive(Arrival { terms, priority: 1, ..arrival(2, 9, 10) });
        engine.scheduler.arrive(Arrival { terms, priority: 3, ..arrival(3, 9, 90) });
        let (mut paused_at, mut pauses) = (None, Vec::new());
        for second in 0..20 {
            if second == 9 {
                engine.scheduler.arrive(Arrival { priority: 2, ..arrival(4, 20, 90) });
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
    fn who_may_be_paused_for_so_long_is_back_when_half_of_it_is_over() {
        assert_eq!(pauses(Duration::from_secs(10)), [5 + 1], "the request that came before it is preempted");
        assert_eq!(pauses(Duration::from_secs(6)), [3 + 1]);
        assert!(pauses(Duration::from_secs(100)).is_empty());
    }
}
