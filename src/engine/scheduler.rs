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
mod batch;
mod beams;
mod billing;
mod check;
mod commit;
mod config;
mod contracts;
mod expectation;
mod foretold;
mod quota;
mod report;
mod requests;
mod running;
mod step;
pub mod summary;
mod tail;
#[cfg(test)]
pub mod test_engine;
mod tiers;
mod told;
mod tuning;
mod turns;
mod view;
mod waiting;
mod waits;

use crate::engine::allocation::{Demand, SwapDemand};
use crate::engine::arbiter::CopyCosts;
use crate::engine::beam::BeamSearch;
use crate::engine::bill::{KvBill, Tenant, Terms};
use crate::engine::block_pool::PoolStats;
use crate::engine::constraint::ConstraintSource;
use crate::engine::lengths::OutputLengths;
use crate::engine::plan::MAX_STEPS_IN_FLIGHT;
use crate::engine::prefix_cache::BlockHasher;
use crate::engine::prompt_pace::PromptPace;
use crate::engine::sequence::Rank;
use crate::engine::step_time::{PromptBudget, StepLoad, StepTimeModel};
use crate::ids::{CopyId, IdMap, RequestId, SeqId, TokenId};
use crate::sampling::params::SamplingParams;
use admission::Refusal;
use batch::grow;
pub use config::{AdmissionPolicy, PreemptionMode, SchedulerConfig, SchedulingPolicy};
use contracts::Reserved;
pub use foretold::{Foretold, SearchStep};
pub use report::{Admission, CommitReport, Forecast, PlanReport, PlanStats};
use running::Running;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use step::Planning;
pub use step::{NextStep, PlannedStep};
pub use tail::{Foresight, Tail, TailCopies, TailExcess};
use tiers::{LikelyVictims, Moving};
pub use told::Population;
pub use tuning::Tuning;
use tuning::WantedSize;
pub use view::{Phase, SeqView};
use waiting::Waiting;
pub use waits::WaitReason;
use waits::Waits;

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

/// A plan in flight.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct InFlight {
    /// In order of rank.
    parts: Vec<Part>,
    load: StepLoad,
    /// Nothing can be planned before its results are known.
    decides: bool,
}

/// A sequence's part of a plan.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Part {
    rank: Rank,
    num_tokens: usize,
    hidden_rows: usize,
    samples: bool,
}

/// Owns every sequence. A sequence is in exactly one of `running` and `waiting`, under its rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Scheduler {
    config: SchedulerConfig,
    /// Where the steps are still larger than was asked for.
    wanted_size: Option<WantedSize>,
    hasher: BlockHasher,
    running: Running,
    /// Waiting and swapped.
    waiting: Waiting,
    num_swapped: usize,
    requests: IdMap<RequestId, Vec<Rank>>,
    /// Of requests whose beams have made a step.
    searches: IdMap<RequestId, BeamSearch>,
    ranks: IdMap<SeqId, Rank>,
    next_seq: u64,
    /// Told to the device pool with the next demand.
    pending: Demand,
    /// Told to the swap pool with the next demand.
    pending_swap: SwapDemand,
    /// Device blocks available at least: as of the last grant, since when blocks have only come back.
    available: usize,
    /// As of its last answer.
    swap_stats: PoolStats,
    moving: Moving,
    #[serde(default)]
    likely_victims: LikelyVictims,
    /// Calls of [`Scheduler::reserve`]: how old a [`Tail`] is.
    #[serde(default)]
    looks: u32,
    /// Whose blocks are on their way to the device.
    swap_ins: IdMap<CopyId, Rank>,
    /// Seconds since some moment.
    now: f64,
    /// Who is paused, and not for as long as may be.
    limited: BTreeSet<Rank>,
    /// For running requests that must not yield.
    reserved: IdMap<RequestId, Reserved>,
    next_copy: u64,
    costs: CopyCosts,
    /// The plans that were made and whose results have not been taken in, oldest first.
    in_flight: VecDeque<InFlight>,
    step_times: StepTimeModel,
    prompt_pace: PromptPace,
    /// Of outputs without tokens that end them, and of those with.
    lengths: [OutputLengths; 2],
    /// Seconds of a decode step for each of its sequences.
    decode_s: f64,
    /// Who is first to ask for admission in the step being planned.
    asks: Option<Rank>,
    /// How many of those who asked last were admitted.
    #[serde(default)]
    num_admitted: usize,
    refusal: Option<Refusal>,
    forecast: Forecast,
    /// Of requests that memory pressure has cost something.
    bills: IdMap<RequestId, KvBill>,
    /// Requests whose bill has changed since they were told.
    billed: Vec<RequestId>,
    /// Who was kept from starting when the last plan was made.
    waits: Waits,
    /// Said for the next results by a recording.
    #[serde(skip)]
    foretold: Foretold,
    /// Of the next plan.
    #[serde(skip)]
    report: PlanReport,
    #[serde(skip)]
    planning: Planning,
    /// Plans carry a summary.
    #[serde(skip)]
    summarises: bool,
}

impl Scheduler {
    pub fn new(config: SchedulerConfig) -> Self {
        assert!(config.max_num_batched_tokens >= config.max_num_seqs, "every decode must fit into a step");
        Self {
            hasher: BlockHasher::new(config.hash_key, config.block_size),
            running: Running::default(),
            waiting: Waiting::default(),
            num_swapped: 0,
            requests: IdMap::default(),
            searches: IdMap::default(),
            ranks: IdMap::default(),
            next_seq: 0,
            pending: Demand::default(),
            pending_swap: SwapDemand::default(),
            available: config.num_device_blocks,
            swap_stats: PoolStats { free: config.num_swap_blocks, ..PoolStats::default() },
            moving: Moving::default(),
            likely_victims: LikelyVictims::default(),
            looks: 0,
            swap_ins: IdMap::default(),
            now: 0.0,
            limited: BTreeSet::new(),
            reserved: IdMap::default(),
            next_copy: 0,
            costs: CopyCosts::default(),
            in_flight: VecDeque::new(),
            step_times: StepTimeModel::default(),
            prompt_pace: PromptPace::default(),
            lengths: [false, true].map(OutputLengths::new),
            decode_s: 0.0,
            asks: None,
            num_admitted: 0,
            refusal: None,
            forecast: Forecast::default(),
            bills: IdMap::default(),
            billed: Vec::new(),
            waits: Waits::default(),
            foretold: Foretold::default(),
            report: PlanReport::default(),
            planning: Planning::default(),
            summarises: false,
            wanted_size: None,
            config,
        }
    }

    /// Plans whose results have not been taken in.
    pub fn num_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Whether a step has anything to do, if only giving blocks back.
    pub fn has_work(&self) -> bool {
        !self.running.is_empty()
            || !self.waiting.is_empty()
            || !self.pending.release.is_empty()
            || !self.pending_swap.is_empty()
    }

    /// What a step needs of the device pool; `None`: see [`NextStep::AwaitResults`].
    fn demand(&mut self) -> Option<Demand> {
        let most = if self.config.overlap { MAX_STEPS_IN_FLIGHT } else { 1 };
        if self.in_flight.len() >= most || self.in_flight.iter().any(|plan| plan.decides) {
            return None;
        }
        self.settle_size();
        let decodes = self.schedule_decodes();
        let config = &self.config;
        if self.waiting.is_empty() {
            self.prompt_pace.all_run();
        }
        let mut num_tokens = config.max_num_batched_tokens - decodes.num_decodes;
        if let Some(limit) = config.inter_token_target.and_then(|_| self.prompt_pace.limit(decodes.num_decodes)) {
            num_tokens = num_tokens.min(limit);
        }
        let mut budget = PromptBudget::new(&self.step_times, &decodes, config.inter_token_target, num_tokens);
        self.forecast = Forecast {
            prompt_limit: budget.left(0),
            decodes_s: self.step_times.expect(&decodes),
            prompt_token_s: self.step_times.prompt_seconds(1, 0),
            step_s: 0.0,
            output_tokens: self.lengths[1].remaining(0, config.max_model_len),
            horizon: self.forecast.horizon,
        };
        let (mut grows, mut promised, mut unpromised) = (Vec::new(), 0, 0);
        let (mut seats, mut goes_on) = (0, !self.in_flight.is_empty());
        for seq in self.running.iter_mut() {
            if seq.scheduled > 1 {
                let context = seq.num_planned();
                seq.scheduled = seq.scheduled.min(budget.left(context));
                budget.take(seq.scheduled, context);
            }
            seats += seq.seats();
            goes_on |= seq.scheduled > 0 || seq.swap_in.is_some();
            promised += seq.promised_blocks(config.block_size);
            if let Some(grow) = grow(seq, config.block_size) {
                unpromised += grow.new_blocks - grow.promised + usize::from(grow.writes_into.is_some());
                grows.push(grow);
            }
        }
        if decodes.num_decodes > 0 {
            self.decode_s = self.forecast.decodes_s / decodes.num_decodes as f64;
        }
        let token_budget = budget.left(0);
        seats += self.num_reserved_seats();
        let urgent = self.urgent();
        let may_yield = unpromised + promised > self.available || !urgent.is_empty();
        if may_yield && !self.in_flight.is_empty() {
            return None;
        }
        let config = &self.config;
        let mut demand = Demand { grow: grows, promised, urgent, ..std::mem::take(&mut self.pending) };
        if may_yield {
            demand.victims = self.victims();
        }
        demand.seats = config.max_num_seqs.saturating_sub(seats);
        demand.token_budget = token_budget;
        demand.reserve = config.reserve_blocks();
        // Where nothing goes on, nothing will need what the watermark keeps free.
        demand.watermark = if goes_on { config.watermark_blocks } else { 0 };
        if !goes_on || !self.is_refused() {
            demand.admit = self.candidates(&demand);
        }
        self.asks = demand.admit.first().map(|first| self.ranks[&first.seq]);
        if let Some(last) = demand.admit.last() {
            self.forecast.horizon = last.horizon.min(self.config.max_model_len);
        }
        // Where those who run all wait, for whom they have to be admitted, there is nothing to expect.
        let expects = goes_on || self.running.is_empty();
        demand.expected = if expects && !demand.admit.is_empty() { self.expected() } else { None };
        Some(demand)
    }
}
