//! The scheduler: who runs, who yields, who waits. Pure and deterministic.
//!
//! [`step`] has the protocol by which a step is planned; [`commit`] takes its results. The outcome of copies between the
//! tiers ([`Scheduler::copied`]) comes with the results, or by itself.
//!
//! In the simple loop, one step follows the other. In the overlapped one ([`SchedulerConfig::overlap`]), the next step
//! may be planned while the executor works on a step: a plan is made *ahead*. What is not known then:
//! - the token that the step in flight samples for a sequence. The next plan feeds it as *pending*: its place is
//!   known, its id only to the device. Where the sequence then turns out to have ended, what came of it is dropped.
//! - the samples that fork off a prompt. The sequence pauses for a plan.
//! - which blocks become full and get a name: only a commit tells that to the pool.
//!
//! Plans take effect in their order, as if each began when the one before had ended. So blocks that are given up may
//! go to a later plan while a plan in flight still uses them. No plan made ahead preempts: where blocks could run out,
//! there is none ([`Scheduler::demand`]), and the next one is made when nothing is in flight.
//!
//! Rules, in order of weight:
//! 1. Running sequences go first, most senior first. When device blocks run out, others yield, in the order of
//!    `Scheduler::yield_order`: the most senior last, so it always advances and every request ends.
//! 2. A sequence is admitted only when all its known tokens fit, and what all who run are expected to need for a while
//!    ([`AdmissionPolicy`]): so who yields does not come back only to yield again. Blocks are allocated as they are
//!    filled, and the rest of its prompt is promised to it.
//! 3. Admission is in order of rank, without overtaking, and not in a step that preempts. Where several tenants wait,
//!    they take turns, and each one's requests go in order of rank ([`SchedulerConfig::key_turns`]). Who waits for its tenant's
//!    quota, or for the part of the pool kept for those who must not yield, is passed by others, but not by those who want
//!    the same.
//! 4. Every running sequence with one token to feed (decode) is in the step; the rest of `max_num_batched_tokens`, or
//!    of it what is expected to keep within `inter_token_target`, goes to prompts, most senior first (chunked prefill).

mod admission;
mod beams;
mod check;
mod commit;
mod config;
mod contracts;
mod estimates;
mod ledger;
mod planning;
mod plans;
mod preemption;
mod queue;
mod quota;
mod replay;
mod report;
mod requests;
mod resize;
mod running;
mod searches;
mod sequences;
mod snapshot;
mod step;
pub mod summary;
mod tail;
#[cfg(test)]
pub mod test_engine;
mod tiers;
mod tuning;
mod turns;
mod victims;
mod waiting;
mod waits;

use crate::engine::allocation::Demand;
use crate::engine::bill::{Tenant, Terms};
use crate::engine::constraint::ConstraintSource;
use crate::engine::prefix_cache::BlockHasher;
use crate::ids::{RequestId, TokenId};
use crate::sampling::params::SamplingParams;
pub use config::{AdmissionPolicy, PreemptionMode, SchedulerConfig, SchedulingPolicy};
use contracts::Contracts;
use estimates::Estimates;
use ledger::Ledger;
use planning::Planning;
pub use planning::{NextStep, PlannedStep};
use plans::PlanInFlight;
use queue::AdmissionQueue;
pub use replay::Foretold;
pub use report::{Admission, CommitReport, Forecast, PlanReport, PlanStats};
use resize::Resize;
pub use searches::SearchStep;
use searches::Searches;
pub use sequences::Population;
use sequences::Sequences;
use serde::{Deserialize, Serialize};
pub use snapshot::{SchedulerSnapshot, SeqPhase, SeqSnapshot};
use std::collections::VecDeque;
use std::sync::Arc;
pub use tail::{Foresight, Tail, TailCopies, TailExcess};
use tiers::Tiers;
pub use tuning::Tuning;
pub use waits::WaitReason;

/// A request as the intake hands it over: valid, and small enough to run alone.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// Larger than all before it.
    pub id: RequestId,
    pub prompt: Arc<Vec<TokenId>>,
    pub params: Arc<SamplingParams>,
    /// Samples, at least 1.
    pub n: u32,
    pub priority: i32,
    /// Requests share cached blocks only with those of the same salt.
    pub cache_salt: Option<String>,
    pub terms: Terms,
    pub tenant: Tenant,
    /// Rules that the output of every sample follows.
    pub constraint: Option<Arc<dyn ConstraintSource>>,
}

/// Decides for each step which sequences run, which are preempted, and which are admitted.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Scheduler {
    /// The settings in force.
    config: SchedulerConfig,
    /// Where steps are still larger than was asked for.
    resize: Resize,
    seqs: Sequences,
    /// Who asks for admission, and why sequences wait.
    admission: AdmissionQueue,
    /// What requests are promised.
    contracts: Contracts,
    /// How long steps take and outputs become.
    estimates: Estimates,
    device: DevicePool,
    /// The swap pool, and the copies between the tiers.
    tiers: Tiers,
    /// What memory pressure has cost the requests.
    ledger: Ledger,
    /// The beam searches.
    searches: Searches,
    /// The plans that were made and whose results have not been taken in, oldest first.
    in_flight: VecDeque<PlanInFlight>,
    /// The step that is being planned.
    #[serde(skip)]
    planning: Planning,
}

/// The device pool as the scheduler knows it.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct DevicePool {
    /// What the pool is told with the next demand.
    pending: Demand,
    /// Blocks available at least: as of the last grant, since when blocks have only come back.
    available: usize,
}

impl Scheduler {
    pub fn new(config: SchedulerConfig) -> Self {
        assert!(config.max_num_batched_tokens >= config.max_num_seqs, "every decode must fit into a step");
        Self {
            resize: Resize::default(),
            seqs: Sequences::new(BlockHasher::new(config.hash_key, config.block_size)),
            admission: AdmissionQueue::default(),
            contracts: Contracts::default(),
            estimates: Estimates::default(),
            device: DevicePool { pending: Demand::default(), available: config.num_device_blocks },
            tiers: Tiers::new(config.num_swap_blocks),
            ledger: Ledger::default(),
            searches: Searches::default(),
            in_flight: VecDeque::new(),
            planning: Planning::default(),
            config,
        }
    }
}
