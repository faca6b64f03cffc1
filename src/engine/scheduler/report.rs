//! What the scheduler reports of a plan and of a commit: for metrics, bills, recordings and the console.

use super::summary::PlanSummary;
use super::{SearchStep, TailCopies};
use crate::arbiter::Decision;
use crate::bill::{QuotaTier, Tenant};
use crate::plan::Deliveries;
use crate::step_time::StepLoad;
use pagetide_base::ids::{RequestId, SeqId};
use serde::{Deserialize, Serialize};
use std::ops::AddAssign;

/// What was decided to make a plan, and what has happened since the plan before.
#[derive(Clone, Debug, Default)]
pub struct PlanReport {
    pub stats: PlanStats,
    /// The victims, and for each the sequence that needed blocks or a seat: it may be the victim itself.
    pub preempted: Vec<(SeqId, SeqId)>,
    /// What the arbiter has decided, for each victim that it was asked about.
    pub decisions: Vec<Decision>,
    /// For each sequence that was swapped out: the blocks that had not been copied ahead, and why.
    pub preemption_copies: Vec<TailCopies>,
    /// Requests whose first sequence was admitted for the first time.
    pub admissions: Vec<Admission>,
    /// Requests that a quota kept waiting, or kept from the swap pool. Each is reported once for each tier.
    pub quota_refusals: Vec<(Tenant, QuotaTier)>,
    /// Sequences that were paused, and that came back. They are told when a step is planned: it may be long before the
    /// step ends.
    pub pauses: Deliveries,
    /// Blocks of the device pool that sequences hold.
    pub used_blocks: usize,
    /// Slots in blocks that running sequences hold, which hold no token even when all plans in flight are done.
    pub empty_slots: usize,
    /// What the plan computes.
    pub load: StepLoad,
    pub forecast: Forecast,
    /// Where a recorder has asked for it: [`Scheduler::summarise_plans`](super::Scheduler::summarise_plans).
    pub summary: Option<Box<PlanSummary>>,
}

/// Preemptions and copies of a plan, and since the plan before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanStats {
    /// Sequences preempted to the swap pool.
    pub preempted_swap: usize,
    /// Sequences preempted whose KV was dropped.
    pub preempted_recompute: usize,
    /// Blocks copied to the swap pool.
    pub blocks_out: usize,
    /// Blocks copied back.
    pub blocks_in: usize,
}

impl AddAssign for PlanStats {
    fn add_assign(&mut self, more: Self) {
        self.preempted_swap += more.preempted_swap;
        self.preempted_recompute += more.preempted_recompute;
        self.blocks_out += more.blocks_out;
        self.blocks_in += more.blocks_in;
    }
}

/// What the results of a plan have changed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CommitReport {
    /// What the requests' owners are to be told, in order.
    pub deliveries: Deliveries,
    /// Requests of which the last sample finished.
    pub ended: Vec<RequestId>,
    /// Requests whose prompts were computed further, and how far: the leading tokens whose KV is there for the first
    /// time.
    pub prefilled: Vec<(RequestId, usize)>,
    /// Tokens that the plan computed again after their KV had been dropped.
    pub recomputed_tokens: usize,
    /// What the beam searches did.
    pub searches: Vec<SearchStep>,
}

/// A request's first sequence got its first blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    pub request: RequestId,
    pub prompt_tokens: usize,
    /// Prompt tokens that the prefix cache held, on either tier.
    pub cached_tokens: usize,
    /// Cached tokens that were in the swap pool alone.
    pub swapped_tokens: usize,
}

/// What the scheduler expects of the step that it has planned last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Forecast {
    /// Prompt tokens that the step could have had beside its decodes.
    pub prompt_limit: usize,
    /// Seconds that the decodes take by themselves.
    pub decodes_s: f64,
    /// Seconds by which each prompt token makes the step longer.
    pub prompt_token_s: f64,
    /// Seconds that the whole step takes.
    pub step_s: f64,
    /// Mean length in tokens of an output that a token may end.
    pub output_tokens: usize,
    /// Steps for which the last candidate for admission had to find blocks.
    pub horizon: usize,
}
