//! What is expected of the sequences: how long they run, whom it costs least to stop, and for how long a sequence should
//! run before it may have to yield again.

use super::{AdmissionPolicy, PreemptionMode, Scheduler};
use crate::engine::allocation;
use crate::engine::arbiter::{Choice, Victim};
use crate::engine::expected::{Expected, Life};
use crate::engine::sequence::{Rank, Sequence};
use std::cmp::Reverse;

/// Of what a sequence gains by running now and not later, what its next preemption may cost.
const MAX_PREEMPTION_SHARE: f64 = 0.1;
/// A sequence that had to yield comes back for so many times as long as the last time, in powers of two.
const HORIZON_DOUBLINGS: u32 = 2;

/// Who has yielded so often does so no more because of its tenant's part: a tenant with one request larger than that would
/// never get on.
const SPARED_FROM: u32 = 3;

impl Scheduler {
    /// Takes in how long an output has become: it has ended, or, `was_cut`, is as long as it may.
    pub(super) fn learn_length(&mut self, rank: Rank, was_cut: bool) {
        let Some(seq) = self.seq(rank) else { return };
        let (num_tokens, may_end) = (seq.output.len(), seq.may_end());
        if num_tokens > 0 && !seq.is_beam() {
            self.lengths[usize::from(may_end)].observe(num_tokens, was_cut);
        }
    }

    /// Steps until a sequence is expected to end: it has then taken a slot for all its tokens but the last.
    pub(super) fn expected_steps(&self, seq: &Sequence) -> usize {
        let most = seq.room();
        let num_tokens = match self.config.admission {
            _ if seq.pooling.is_some() => 0,
            AdmissionPolicy::MaxTokens => most,
            // A search goes on until it has what it wants.
            _ if seq.is_beam() => most,
            _ => {
                let so_far = seq.output.len();
                let expected = self.lengths[usize::from(seq.may_end())].remaining(so_far, so_far + most);
                expected.max(seq.certain()).min(most)
            }
        };
        num_tokens.saturating_sub(1)
    }

    /// What those who run are expected to need; `None` where that decides nothing.
    pub(super) fn expected(&self) -> Option<Expected> {
        if self.config.admission == AdmissionPolicy::Prompt {
            return None;
        }
        let prompt_limit = self.forecast.prompt_limit.max(1);
        let mut to_compute = 0;
        let life = |seq: &Sequence| {
            let num_tokens = seq.num_tokens().max(seq.planned_end());
            let coming = seq.swap_in.as_ref().map_or(0, |coming| coming.num_tokens);
            let rest = seq.num_tokens().saturating_sub(seq.num_planned().max(coming));
            // Prompts are computed one after the other before they grow: they are there for longer.
            to_compute += if rest > 1 { rest } else { 0 };
            let delay = if rest > 1 { to_compute.div_ceil(prompt_limit) } else { 0 };
            Life { num_tokens, steps: self.expected_steps(seq) + delay, seats: seq.seats() }
        };
        Some(Expected::new(self.config.block_size, self.running.iter().map(life).collect()))
    }

    /// Steps for which blocks are to suffice when a sequence starts or comes back: by then, another preemption costs a
    /// small part of what it has gained. Each preemption multiplies that, so that there are few of them. None where
    /// others will yield to it, being of lower priority.
    pub(super) fn horizon(&self, seq: &Sequence) -> usize {
        if self.config.admission == AdmissionPolicy::MaxTokens {
            return usize::MAX;
        }
        if self.running.iter().next_back().is_some_and(|last| last.rank.priority > seq.rank.priority) {
            return 0;
        }
        let factor = 2.0f64.powi((HORIZON_DOUBLINGS * seq.preemptions).min(1000) as i32);
        (self.steps_worth_preempting(seq) as f64 * factor) as usize
    }

    /// Tokens that a sequence has to get for a preemption to be worth its cost.
    fn steps_worth_preempting(&self, seq: &Sequence) -> usize {
        let block_size = self.config.block_size;
        let gain_s = self.decode_s * MAX_PREEMPTION_SHARE;
        let num_steps = self.yield_seconds(seq, seq.num_tokens()) / gain_s;
        // Before steps have been seen, and where they take no time.
        if num_steps.is_finite() { (num_steps as usize).max(block_size) } else { block_size }
    }

    /// Seconds that are lost where a sequence yields with so many tokens computed.
    fn yield_seconds(&self, seq: &Sequence, num_tokens: usize) -> f64 {
        let victim = Victim { num_tokens, block_size: self.config.block_size, num_backed: seq.num_backed };
        let decision = self.costs.decide(seq.rank.request, &victim, &self.step_times);
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

    /// Running sequences, first to yield first; nobody who need not.
    ///
    /// The most senior is last, so that it always advances, and before it those whose pauses were limited. The others go
    /// by priority; by whether their tenant has more than its part, where tenants take turns and it has not cost them dear
    /// already; by whether they are about to end, and give their blocks back anyway; by how often they have yielded;
    /// by what a block of theirs costs, within a factor of two; and by age, the youngest first.
    pub(super) fn yield_order(&self) -> Vec<&Sequence> {
        let first = self.running.iter().next().map(|seq| seq.rank);
        let parts = self.parts();
        let mut seqs: Vec<&Sequence> = self.running.iter().filter(|seq| seq.terms.preemptible).collect();
        seqs.sort_by_cached_key(|seq| {
            let ends_soon = self.expected_steps(seq) < self.steps_worth_preempting(seq);
            let is_small = parts.as_ref().is_some_and(|(shares, num)| !shares.is_large(seq.tenant, *num));
            let is_spared = parts.is_some() && seq.preemptions >= SPARED_FROM;
            let block_s = self.yield_seconds(seq, seq.num_computed) / seq.table.len().max(1) as f64;
            (
                (Some(seq.rank) == first, seq.terms.max_pause.is_some()),
                (Reverse(seq.rank.priority), is_spared, is_small, ends_soon, seq.preemptions),
                (binary_exponent(block_s), Reverse(seq.rank)),
            )
        });
        seqs
    }

    /// Who yields, first to yield first.
    pub(super) fn victims(&self) -> Vec<allocation::Victim> {
        let first = self.running.iter().next().map(|seq| seq.rank);
        let victim = |seq: &Sequence| allocation::Victim {
            seq: seq.rank.seq,
            table: seq.table.clone(),
            seats: seq.seats(),
            yields_to_urgent: Some(seq.rank) != first && seq.terms.max_pause.is_none(),
            promised: seq.promised_blocks(self.config.block_size),
        };
        self.yield_order().into_iter().map(victim).collect()
    }
}

/// Of a number that is not negative: how often it doubles from 1.
fn binary_exponent(number: f64) -> i32 {
    (number.to_bits() >> (f64::MANTISSA_DIGITS - 1)) as i32 - (f64::MAX_EXP - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::scheduler::test_engine::{TestEngine, arrival, config, seqs};
    use crate::engine::scheduler::{Arrival, SchedulerConfig, SchedulingPolicy};
    use crate::ids::SeqId;

    /// Whether a prompt that fits starts beside a sequence that will need the last blocks in four steps.
    fn starts(admission: AdmissionPolicy, priority: i32) -> bool {
        let policy = SchedulingPolicy::Priority;
        let mut engine = TestEngine::new(SchedulerConfig { admission, policy, ..config() });
        engine.scheduler.arrive(Arrival { priority: 1, ..arrival(1, 8, 50) });
        for _ in 0..40 {
            let plan = engine.plan();
            engine.commit(&plan);
        }
        // 12 of 16 blocks are taken, and each of the two needs another one soon.
        engine.scheduler.arrive(Arrival { priority, ..arrival(2, 12, 50) });
        seqs(&engine.plan()).contains(&SeqId(2))
    }

    #[test]
    fn who_would_have_to_yield_soon_does_not_start() {
        assert!(starts(AdmissionPolicy::Prompt, 1));
        assert!(!starts(AdmissionPolicy::Expected, 1));
        assert!(starts(AdmissionPolicy::Expected, 0), "the other one would yield");
        assert!(!starts(AdmissionPolicy::MaxTokens, 1) && !starts(AdmissionPolicy::MaxTokens, 0), "nobody yields");
    }

    #[test]
    fn the_cheapest_yield_first() {
        let mut engine = TestEngine::new(SchedulerConfig { policy: SchedulingPolicy::Priority, ..config() });
        for (id, max_tokens, priority) in [(1, 50, 0), (2, 3, 1), (3, 50, 1), (4, 50, 1), (5, 3, 2)] {
            engine.scheduler.arrive(Arrival { priority, ..arrival(id, 4, max_tokens) });
        }
        let plan = engine.plan();
        engine.commit(&plan);
        let order =
            |engine: &TestEngine| engine.scheduler.yield_order().iter().map(|seq| seq.rank.seq.0).collect::<Vec<_>>();
        assert_eq!(order(&engine), [5, 4, 3, 2, 1], "by priority; who is about to end later; the youngest first");
        let rank = engine.scheduler.ranks[&SeqId(4)];
        engine.scheduler.running.get_mut(&rank).unwrap().preemptions = 1;
        assert_eq!(order(&engine), [5, 3, 4, 2, 1], "who has yielded before goes later");
    }
}
