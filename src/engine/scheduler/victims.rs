//! Which sequences are preempted first, what a preemption costs, and for how long a sequence should run before it may
//! be preempted again.

use super::config::{AdmissionPolicy, PreemptionMode, SchedulerConfig};
use super::estimates::Estimates;
use super::sequences::Sequences;
use super::turns::{Shares, tenant_parts};
use crate::allocation;
use crate::arbiter::{Choice, CopyCosts, VictimKv};
use crate::sequence::Sequence;
use std::cmp::Reverse;

/// What the next preemption of a sequence may cost, of what the sequence gains by running now and not later.
const MAX_PREEMPTION_SHARE: f64 = 0.1;
/// After each preemption a sequence runs for so many times as long before the next, in powers of two.
const HORIZON_DOUBLINGS: u32 = 2;

/// A sequence that was preempted this often is no longer preempted because its tenant has more than an equal part: a
/// tenant with one request larger than that would never get on.
const SPARED_FROM: u32 = 3;

/// Weighs preemptions against each other.
pub(super) struct Victims<'a> {
    pub config: &'a SchedulerConfig,
    pub seqs: &'a Sequences,
    pub estimates: &'a Estimates,
    pub copy_costs: &'a CopyCosts,
}

impl<'a> Victims<'a> {
    /// Steps for which blocks are to suffice when a sequence starts or comes back: by then, another preemption costs a
    /// small part of what the sequence has gained. Each preemption multiplies that, so that there are few of them. None
    /// where running sequences of lower priority would be preempted for it.
    pub fn horizon(&self, seq: &Sequence) -> usize {
        if self.config.admission == AdmissionPolicy::MaxTokens {
            return usize::MAX;
        }
        if self.seqs.running.iter().next_back().is_some_and(|last| last.rank.priority > seq.rank.priority) {
            return 0;
        }
        let factor = 2.0f64.powi((HORIZON_DOUBLINGS * seq.preemptions).min(1000) as i32);
        (self.steps_worth_preempting(seq) as f64 * factor) as usize
    }

    /// The tokens that a sequence has to generate for a preemption to be worth its cost.
    fn steps_worth_preempting(&self, seq: &Sequence) -> usize {
        let block_size = self.config.block_size;
        let gain_s = self.estimates.decode_s * MAX_PREEMPTION_SHARE;
        let num_steps = self.preemption_seconds(seq, seq.num_tokens()) / gain_s;
        // The estimate is not finite before steps have been measured, and if they take no time.
        if num_steps.is_finite() { (num_steps as usize).max(block_size) } else { block_size }
    }

    /// Seconds that are lost where a sequence is preempted with so many tokens computed.
    fn preemption_seconds(&self, seq: &Sequence, num_tokens: usize) -> f64 {
        let victim = VictimKv { num_tokens, block_size: self.config.block_size, num_backed: seq.num_backed };
        let decision = self.copy_costs.decide(seq.rank.request, &victim, &self.estimates.step_times);
        match self.config.preemption_mode {
            _ if self.config.num_swap_blocks == 0 => decision.recompute_s,
            PreemptionMode::Recompute => decision.recompute_s,
            PreemptionMode::Swap => decision.swap_s,
            PreemptionMode::Auto => match decision.choice {
                Choice::Swap => decision.swap_s,
                Choice::SwapFull => decision.swap_full_s,
                Choice::Recompute => decision.recompute_s,
            },
        }
    }

    /// Running sequences that may be preempted, in the order in which they are.
    ///
    /// The most senior is last, so that it always advances, and before it those whose pauses are limited. The others go
    /// - by priority, the lowest first;
    /// - where tenants take turns: first those whose tenant has more than its part, unless they were preempted often;
    /// - last those that are about to end, and give their blocks back anyway;
    /// - by how often they were preempted, the fewest times first;
    /// - by what a block of theirs costs, within a factor of two, the cheapest first;
    /// - by age, the youngest first.
    pub fn order(&self) -> Vec<&'a Sequence> {
        let Self { config, seqs, estimates, .. } = *self;
        let first = seqs.running.iter().next().map(|seq| seq.rank);
        let parts: Option<(Shares, usize)> = tenant_parts(seqs, config);
        let mut order: Vec<&Sequence> = seqs.running.iter().filter(|seq| seq.terms.preemptible).collect();
        order.sort_by_cached_key(|seq| {
            let ends_soon = estimates.expected_steps(seq, config.admission) < self.steps_worth_preempting(seq);
            let is_small = parts.as_ref().is_some_and(|(shares, num)| !shares.is_large(seq.tenant, *num));
            let is_spared = parts.is_some() && seq.preemptions >= SPARED_FROM;
            let block_s = self.preemption_seconds(seq, seq.num_computed) / seq.table.len().max(1) as f64;
            (
                (Some(seq.rank) == first, seq.terms.max_pause.is_some()),
                (Reverse(seq.rank.priority), is_spared, is_small, ends_soon, seq.preemptions),
                (binary_exponent(block_s), Reverse(seq.rank)),
            )
        });
        order
    }

    /// [`Victims::order`] as the device pool is told.
    pub fn demanded(&self) -> Vec<allocation::Victim> {
        let first = self.seqs.running.iter().next().map(|seq| seq.rank);
        let victim = |seq: &Sequence| allocation::Victim {
            seq: seq.rank.seq,
            table: seq.table.clone(),
            seats: seq.seats(),
            may_be_preempted_for_urgent: Some(seq.rank) != first && seq.terms.max_pause.is_none(),
            promised: seq.promised_blocks(self.config.block_size),
        };
        self.order().into_iter().map(victim).collect()
    }
}

/// How often 1 has to be doubled to get a number that is not negative, rounded down.
fn binary_exponent(number: f64) -> i32 {
    (number.to_bits() >> (f64::MANTISSA_DIGITS - 1)) as i32 - (f64::MAX_EXP - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::test_engine::{TestEngine, arrival, config, seqs};
    use crate::scheduler::{EngineRequest, SchedulerConfig, SchedulingPolicy};
    use pagetide_base::ids::SeqId;

    /// Whether a prompt that fits starts beside a sequence that will need the last blocks in four steps.
    fn starts(admission: AdmissionPolicy, priority: i32) -> bool {
        let policy = SchedulingPolicy::Priority;
        let mut engine = TestEngine::new(SchedulerConfig { admission, policy, ..config() });
        engine.scheduler.arrive(EngineRequest { priority: 1, ..arrival(1, 8, 50) });
        for _ in 0..40 {
            let plan = engine.plan();
            engine.commit(&plan);
        }
        // 12 of 16 blocks are used, and each of the two sequences needs another one soon.
        engine.scheduler.arrive(EngineRequest { priority, ..arrival(2, 12, 50) });
        seqs(&engine.plan()).contains(&SeqId(2))
    }

    #[test]
    fn a_sequence_that_would_soon_be_preempted_does_not_start() {
        assert!(starts(AdmissionPolicy::Prompt, 1));
        assert!(!starts(AdmissionPolicy::Expected, 1));
        assert!(starts(AdmissionPolicy::Expected, 0), "the other one would be preempted");
        assert!(
            !starts(AdmissionPolicy::MaxTokens, 1) && !starts(AdmissionPolicy::MaxTokens, 0),
            "no sequence is preempted"
        );
    }

    #[test]
    fn the_cheapest_are_preempted_first() {
        let mut engine = TestEngine::new(SchedulerConfig { policy: SchedulingPolicy::Priority, ..config() });
        for (id, max_tokens, priority) in [(1, 50, 0), (2, 3, 1), (3, 50, 1), (4, 50, 1), (5, 3, 2)] {
            engine.scheduler.arrive(EngineRequest { priority, ..arrival(id, 4, max_tokens) });
        }
        let plan = engine.plan();
        engine.commit(&plan);
        let order = |engine: &TestEngine| {
            engine.scheduler.victims().order().iter().map(|seq| seq.rank.seq.0).collect::<Vec<_>>()
        };
        assert_eq!(order(&engine), [5, 4, 3, 2, 1], "by priority; who is about to end later; the youngest first");
        let rank = engine.scheduler.seqs.rank_of(SeqId(4));
        engine.scheduler.seqs.running.get_mut(&rank).unwrap().preemptions = 1;
        assert_eq!(order(&engine), [5, 3, 4, 2, 1], "a sequence that was preempted before goes later");
    }
}
