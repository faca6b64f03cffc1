//! Why who waits has to wait: for the console, and for recordings.

use super::Scheduler;
use crate::engine::allocation::Lack;
use crate::engine::sequence::{Rank, Sequence};
use crate::ids::RequestId;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Why a request does not run, as of the last plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WaitReason {
    /// Nobody has looked at it yet.
    NotAsked,
    /// This one goes first, and waits itself.
    Behind(RequestId),
    /// Its tenant holds as much as it may.
    Quota,
    /// Requests that must not yield hold as much of the pool as they may, or the first of them waits for that.
    NonPreemptible,
    /// The beams of its search come back one after the other.
    Beams,
    /// The device pool, or the step, had too little.
    Lack(Lack),
    /// It has blocks, and its KV is on its way from the swap pool into so many of them.
    SwapIn { blocks: usize },
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WaitReason::NotAsked => write!(f, "for the next step to be planned"),
            WaitReason::Behind(request) => write!(f, "in the queue behind {request}"),
            WaitReason::Quota => write!(f, "for its tenant's quota"),
            WaitReason::NonPreemptible => {
                write!(f, "for the part of the pool that requests which must not yield may hold")
            }
            WaitReason::Beams => write!(f, "for the beams of its search before it"),
            WaitReason::Lack(lack) => lack.fmt(f),
            WaitReason::SwapIn { blocks } => write!(f, "for {blocks} blocks to be copied back from the swap pool"),
        }
    }
}

/// Who was kept from starting when the last plan was made.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Waits {
    /// Who ends admission, and why.
    pub first: Option<(Rank, WaitReason)>,
    /// Who was passed over, and with them those in their lines behind them.
    pub passed: Vec<(Rank, WaitReason)>,
    /// Who has to come back before all others, and why it could not.
    pub late: Vec<(Rank, WaitReason)>,
}

impl Scheduler {
    /// Why a request does not run, or not with all its sequences; `None` where it does, or is not there.
    pub fn wait_of(&self, request: RequestId) -> Option<WaitReason> {
        let ranks = self.requests.get(&request)?;
        match ranks.iter().filter_map(|rank| self.waiting.get(rank)).min_by_key(|seq| seq.rank) {
            Some(seq) => Some(self.wait_in_queue(seq)),
            None => {
                let coming = ranks.iter().filter_map(|rank| self.running.get(rank)?.swap_in.as_deref());
                let blocks: usize = coming.map(|coming| coming.from.len()).sum();
                (blocks > 0).then_some(WaitReason::SwapIn { blocks })
            }
        }
    }

    fn wait_in_queue(&self, seq: &Sequence) -> WaitReason {
        let line = |seq: &Sequence| (seq.cached_tokens.is_some(), seq.tenant, seq.terms.preemptible);
        let is_behind = |(rank, _): &&(Rank, WaitReason)| {
            *rank == seq.rank
                || *rank < seq.rank && self.waiting.get(rank).is_some_and(|other| line(other) == line(seq))
        };
        // Of another tenant, it may go before though it came later.
        let is_others = |rank: &Rank| self.waiting.get(rank).is_some_and(|first| first.tenant != seq.tenant);
        let is_first = |(rank, _): &&(Rank, WaitReason)| *rank <= seq.rank || self.config.key_turns && is_others(rank);
        let Waits { first, passed, late } = &self.waits;
        if let Some((_, wait)) = late.iter().find(|(rank, _)| *rank == seq.rank) {
            return *wait;
        }
        match passed.iter().find(is_behind).or(first.as_ref().filter(is_first)) {
            Some((rank, wait)) if rank.request == seq.rank.request => *wait,
            Some((rank, _)) => WaitReason::Behind(rank.request),
            None => WaitReason::NotAsked,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::bill::Terms;
    use crate::engine::plan::Delivery;
    use crate::engine::scheduler::test_engine::{TestEngine, arrival, config};
    use crate::engine::scheduler::{Arrival, PlannedStep, SchedulerConfig};
    use std::time::Duration;

    /// The others must not yield, so it cannot come back in the time that it was promised.
    #[test]
    fn who_is_late_is_told_what_there_is_too_little_of() {
        let mut engine = TestEngine::new(SchedulerConfig { non_preemptible_blocks: 12, ..config() });
        let limited = Terms { max_pause: Some(Duration::from_secs(2)), ..Terms::default() };
        let kept = Terms { preemptible: false, ..Terms::default() };
        engine.scheduler.arrive(Arrival { terms: limited, ..arrival(1, 20, 40) });
        engine.scheduler.arrive(Arrival { terms: kept, ..arrival(2, 4, 44) });
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
        assert!(told.len() > 5, "it had to yield at {paused_at:?}");
        let lacks = |wait: &Option<WaitReason>| matches!(wait, Some(WaitReason::Lack(Lack::Blocks { wanted, available })) if wanted > available);
        assert!(told.iter().all(lacks), "{told:?}");
    }
}
