//! Why who waits has to wait: for the console, and for recordings.

use super::Scheduler;
use crate::engine::allocation::Lack;
use crate::engine::sequence::{Rank, Sequence};
use crate::ids::RequestId;
use std::fmt;

/// Why a request does not run, as of the last plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
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

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wait::NotAsked => write!(f, "for the next step to be planned"),
            Wait::Behind(request) => write!(f, "in the queue behind {request}"),
            Wait::Quota => write!(f, "for its tenant's quota"),
            Wait::NonPreemptible => write!(f, "for the part of the pool that requests which must not yield may hold"),
            Wait::Beams => write!(f, "for the beams of its search before it"),
            Wait::Lack(lack) => lack.fmt(f),
            Wait::SwapIn { blocks } => write!(f, "for {blocks} blocks to be copied back from the swap pool"),
        }
    }
}

/// Who was kept from starting when the last plan was made.
#[derive(Clone, Debug, Default)]
pub(super) struct Waits {
    /// Who ends admission, and why.
    pub first: Option<(Rank, Wait)>,
    /// Who was passed over, and with them those in their lines behind them.
    pub passed: Vec<(Rank, Wait)>,
}

impl Scheduler {
    /// Why a request does not run, or not with all its sequences; `None` where it does, or is not there.
    pub fn wait_of(&self, request: RequestId) -> Option<Wait> {
        let ranks = self.requests.get(&request)?;
        match ranks.iter().filter_map(|rank| self.waiting.get(rank)).min_by_key(|seq| seq.rank) {
            Some(seq) => Some(self.wait_in_queue(seq)),
            None => {
                let coming = ranks.iter().filter_map(|rank| self.running.get(rank)?.swap_in.as_deref());
                let blocks: usize = coming.map(|coming| coming.from.len()).sum();
                (blocks > 0).then_some(Wait::SwapIn { blocks })
            }
        }
    }

    fn wait_in_queue(&self, seq: &Sequence) -> Wait {
        let line = |seq: &Sequence| (seq.cached_tokens.is_some(), seq.tenant, seq.terms.preemptible);
        let is_behind = |(rank, _): &&(Rank, Wait)| {
            *rank == seq.rank
                || *rank < seq.rank && self.waiting.get(rank).is_some_and(|other| line(other) == line(seq))
        };
        let is_first = |(rank, _): &&(Rank, Wait)| *rank <= seq.rank;
        let Waits { first, passed } = &self.waits;
        match passed.iter().find(is_behind).or(first.as_ref().filter(is_first)) {
            Some((rank, wait)) if rank.request == seq.rank.request => *wait,
            Some((rank, _)) => Wait::Behind(rank.request),
            None => Wait::NotAsked,
        }
    }
}
