//! Why requests wait: for the console, and for the replay of recordings.

use super::sequences::Sequences;
use crate::allocation::Lack;
use crate::sequence::{Rank, Sequence};
use pagetide_base::ids::RequestId;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Why a request does not run, as of the last plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WaitReason {
    /// It has not asked for admission yet.
    NotAsked,
    /// This request goes first, and waits itself.
    Behind(RequestId),
    /// Its tenant holds as much as its quota allows.
    Quota,
    /// Requests that are not preemptible hold as much of the pool as they may, or the first of them waits for that.
    NonPreemptible,
    /// The beams of its search come back one after the other.
    Beams,
    /// The device pool or the step had too little room.
    Lack(Lack),
    /// It has device blocks, and its KV is being copied from the swap pool into `blocks` of them.
    SwapIn { blocks: usize },
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WaitReason::NotAsked => write!(f, "for the next step to be planned"),
            WaitReason::Behind(request) => write!(f, "in the queue behind {request}"),
            WaitReason::Quota => write!(f, "for its tenant's quota"),
            WaitReason::NonPreemptible => {
                write!(f, "for the part of the pool that non-preemptible requests may hold")
            }
            WaitReason::Beams => write!(f, "for the beams of its search before it"),
            WaitReason::Lack(lack) => lack.fmt(f),
            WaitReason::SwapIn { blocks } => write!(f, "for {blocks} blocks to be copied back from the swap pool"),
        }
    }
}

/// The sequences that could not start when the last plan was made.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct KeptWaiting {
    /// The sequence that ended admission.
    pub first: Option<(Rank, WaitReason)>,
    /// Sequences that were passed over, and with them those behind them in their lines.
    pub passed: Vec<(Rank, WaitReason)>,
    /// Sequences that have to come back before all others, and could not.
    pub late: Vec<(Rank, WaitReason)>,
}

impl KeptWaiting {
    /// Why a request does not run with all its sequences. `None` if it does, or if it is unknown. `key_turns`: tenants
    /// take turns.
    pub fn reason(&self, request: RequestId, seqs: &Sequences, key_turns: bool) -> Option<WaitReason> {
        let ranks = seqs.of_request(request);
        match ranks.iter().filter_map(|rank| seqs.waiting.get(rank)).min_by_key(|seq| seq.rank) {
            Some(seq) => Some(self.reason_in_queue(seq, seqs, key_turns)),
            None => {
                let coming = ranks.iter().filter_map(|rank| seqs.running.get(rank)?.swap_in.as_deref());
                let blocks: usize = coming.map(|coming| coming.from.len()).sum();
                (blocks > 0).then_some(WaitReason::SwapIn { blocks })
            }
        }
    }

    fn reason_in_queue(&self, seq: &Sequence, seqs: &Sequences, key_turns: bool) -> WaitReason {
        let line = |seq: &Sequence| (seq.cached_tokens.is_some(), seq.tenant, seq.terms.preemptible);
        let is_behind = |(rank, _): &&(Rank, WaitReason)| {
            *rank == seq.rank
                || *rank < seq.rank && seqs.waiting.get(rank).is_some_and(|other| line(other) == line(seq))
        };
        // A sequence of another tenant may go before though it came later.
        let is_others = |rank: &Rank| seqs.waiting.get(rank).is_some_and(|first| first.tenant != seq.tenant);
        let is_first = |(rank, _): &&(Rank, WaitReason)| *rank <= seq.rank || key_turns && is_others(rank);
        let Self { first, passed, late } = self;
        if let Some((_, reason)) = late.iter().find(|(rank, _)| *rank == seq.rank) {
            return *reason;
        }
        match passed.iter().find(is_behind).or(first.as_ref().filter(is_first)) {
            Some((rank, reason)) if rank.request == seq.rank.request => *reason,
            Some((rank, _)) => WaitReason::Behind(rank.request),
            None => WaitReason::NotAsked,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bill::Terms;
    use crate::plan::Delivery;
    use crate::scheduler::test_engine::{TestEngine, arrival, config};
    use crate::scheduler::{EngineRequest, PlannedStep, SchedulerConfig};
    use std::time::Duration;

    /// The others are non-preemptible, so it cannot come back within its limit.
    #[test]
    fn a_late_request_is_told_what_is_short() {
        let mut engine = TestEngine::new(SchedulerConfig { non_preemptible_blocks: 12, ..config() });
        let limited = Terms { max_pause: Some(Duration::from_secs(2)), ..Terms::default() };
        let kept = Terms { preemptible: false, ..Terms::default() };
        engine.scheduler.arrive(EngineRequest { terms: limited, ..arrival(1, 20, 40) });
        engine.scheduler.arrive(EngineRequest { terms: kept, ..arrival(2, 4, 44) });
        let (mut paused_at, mut told) = (None, Vec::new());
        for second in 0..40 {
            let PlannedStep { plan, report } = engine.plan_at(f64::from(second));
            let is_pause = |(_, pause): &(RequestId, Delivery)| matches!(pause, Delivery::Paused { .. });
            if report.pauses.iter().any(is_pause) {
                paused_at = Some(second);
            }
            told.extend(paused_at.filter(|at| second > *at).map(|_| engine.scheduler.wait_of(RequestId(1))));
            engine.commit(&plan);
        }
        assert!(told.len() > 5, "it was preempted at {paused_at:?}");
        let lacks = |wait: &Option<WaitReason>| matches!(wait, Some(WaitReason::Lack(Lack::Blocks { wanted, available })) if wanted > available);
        assert!(told.iter().all(lacks), "{told:?}");
    }
}
