//! The scheduler decides which sequences run, which are preempted and which wait. It is pure and deterministic.
//!
//! [`NextStep`] has the protocol by which a step is planned; [`Scheduler::commit`] takes its results. The outcome of
//! copies between the tiers ([`Scheduler::copied`]) comes with the results, or by itself.
//!
//! In the simple loop, one step follows the other. In the overlapped one ([`SchedulerConfig::overlap`]), the next step
//! may be planned while the executor works on a step: a plan is made *ahead*. What is not known then:
//! - the token that the step in flight samples for a sequence. The next plan feeds it as *pending*: its position is
//!   known, and only the device knows its id. If the sequence turns out to have ended, its results are dropped.
//! - the samples that fork off a prompt. The sequence is left out of one plan.
//! - what follows a sequence whose output has rules, a beam, or a sequence for which the host draws
//!   ([`Sequence::decides`](crate::sequence::Sequence::decides)). It is left out of one plan, and so is in every second
//!   one. If more than a quarter of the sequences would be left out for this, no plan is made ahead.
//! - which blocks become full and get a block hash: only a commit tells the pool.
//!
//! Plans take effect in their order, as if each began when the one before had ended. So released blocks may go to a
//! later plan while a plan in flight still uses them. No plan made ahead preempts: if blocks could run out, no plan is
//! made ahead ([`NextStep::AwaitResults`]), and the next one is made when nothing is in flight.
//!
//! Rules, in order of weight:
//! 1. Running sequences go first, most senior first. When device blocks run out, sequences are preempted in the order
//!    of `Victims::order`. The most senior comes last, so it always advances and every request ends.
//! 2. A sequence is admitted only if blocks suffice for all its known tokens, and for what all running sequences are
//!    expected to need for a while ([`AdmissionPolicy`]). So a preempted sequence does not come back only to be
//!    preempted again. Blocks are allocated as they are filled, and the rest of its prompt is promised to it.
//! 3. Admission is in order of rank, without overtaking, and never in a step that preempts. If several tenants have
//!    waiting requests, they take turns, and each tenant's requests go in order of rank
//!    ([`SchedulerConfig::key_turns`]). A request that waits for its tenant's quota, or for the part of the pool
//!    reserved for non-preemptible requests, is overtaken by others, but not by those that wait for the same.
//! 4. Every running sequence with one token to feed (decode) is in the step. Prompts get the rest of
//!    `max_num_batched_tokens`, or as much of it as is expected to keep within `inter_token_target`, most senior first
//!    (chunked prefill).

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
mod test_engine;
mod tiers;
mod tuning;
mod turns;
mod victims;
mod wait_reason;
mod waiting;

use crate::allocation::Demand;
use crate::prefix_cache::{BlockHash, BlockHasher};
pub use crate::request::EngineRequest;
pub use config::{AdmissionPolicy, PreemptionMode, SchedulerConfig, SchedulingPolicy};
use contracts::Contracts;
use estimates::Estimates;
use ledger::Ledger;
use pagetide_base::ids::TokenId;
use planning::Planning;
pub use planning::{NextStep, PlannedStep};
use plans::PlanInFlight;
use queue::AdmissionQueue;
pub use replay::RecordedResults;
pub use report::{Admission, CommitReport, Forecast, PlanReport, PlanStats};
use resize::StepResize;
use searches::BeamSearches;
pub use searches::SearchStep;
pub use sequences::Population;
use sequences::Sequences;
use serde::{Deserialize, Serialize};
pub use snapshot::{SchedulerSnapshot, SeqPhase, SeqSnapshot};
use std::collections::VecDeque;
pub use tail::{Foresight, Tail, TailCopies, TailExcess};
use tiers::Tiers;
pub use tuning::Tuning;
pub use wait_reason::WaitReason;

/// Decides for each step which sequences run, which are preempted, and which are admitted.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Scheduler {
    /// The settings in force.
    config: SchedulerConfig,
    /// Where steps are still larger than was asked for.
    resize: StepResize,
    seqs: Sequences,
    /// Which sequence asks for admission first, and why sequences wait.
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
    searches: BeamSearches,
    /// Plans whose results have not been committed, oldest first.
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
            resize: StepResize::default(),
            seqs: Sequences::new(BlockHasher::new(config.hash_key, config.block_size)),
            admission: AdmissionQueue::default(),
            contracts: Contracts::default(),
            estimates: Estimates::default(),
            device: DevicePool { pending: Demand::default(), available: config.num_device_blocks },
            tiers: Tiers::new(config.num_swap_blocks),
            ledger: Ledger::default(),
            searches: BeamSearches::default(),
            in_flight: VecDeque::new(),
            planning: Planning::default(),
            config,
        }
    }

    /// The hashes of the full blocks of `tokens`, in requests with this salt.
    pub fn names_of(&self, salt: &str, tokens: &[TokenId]) -> Vec<BlockHash> {
        let hasher = &self.seqs.hasher;
        let mut parent = hasher.root(salt.as_bytes());
        let next = |tokens| {
            parent = hasher.block(parent, tokens);
            parent
        };
        tokens.chunks_exact(self.config.block_size).map(next).collect()
    }
}
