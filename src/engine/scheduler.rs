//! The scheduler: who runs, who yields, who waits. Pure and deterministic.
//!
//! A step is four calls, with the pools and the executor answering in between:
//!
//! ```text
//! demand → (device pool) → reserve → (swap pool) → plan → (executor) → commit
//! ```
//!
//! and one more, `finds` and `found`, before the device pool gets a demand by which somebody may start. What has become
//! of copies between the tiers ([`Scheduler::copied`]) comes with the results, or by itself.
//!
//! In the simple loop, one step follows the other. In the overlapped one ([`SchedulerConfig::overlap`]), the first
//! three calls for the next step may come while the executor works on a step: a plan is made *ahead*. What is not known
//! then:
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
mod requests;
mod running;
mod tail;
mod tiers;
mod told;
mod tuning;
mod turns;
mod view;
mod waiting;
mod waits;
#[cfg(test)]
pub mod world;

use crate::engine::allocation::{Demand, Grant, Grown, SwapDemand, SwapGrant};
use crate::engine::arbiter::{CopyCosts, Decision};
use crate::engine::beam::BeamSearch;
use crate::engine::bill::{KvBill, QuotaTier, Tenant, Terms};
use crate::engine::block_pool::PoolStats;
use crate::engine::constraint::ConstraintSource;
use crate::engine::lengths::OutputLengths;
use crate::engine::plan::{Deliveries, MAX_STEPS_IN_FLIGHT, StepPlan};
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
use running::Running;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
pub use tail::{Foresight, Tail, TailCopies, TailExcess};
use tiers::{LikelyVictims, Moving};
pub use told::{Admission, Forecast, Population, StepStats};
pub use tuning::Tuning;
use tuning::WantedSize;
pub use view::{Phase, SeqView};
use waiting::Waiting;
pub use waits::Wait;
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
    #[serde(skip)]
    decisions: Vec<Decision>,
    /// What each sequence that had to yield left to be copied, since they were last taken.
    #[serde(skip)]
    preemption_copies: Vec<TailCopies>,
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
    empty_slots: usize,
    #[serde(skip)]
    stats: StepStats,
    #[serde(skip)]
    admissions: Vec<Admission>,
    #[serde(skip)]
    quota_refusals: Vec<(Tenant, QuotaTier)>,
    /// Of requests that memory pressure has cost something.
    bills: IdMap<RequestId, KvBill>,
    /// Requests whose bill has changed since they were told.
    billed: Vec<RequestId>,
    /// Since the last [`Scheduler::take_pauses`].
    #[serde(skip)]
    pauses: Deliveries,
    /// Who was kept from starting when the last plan was made.
    waits: Waits,
    /// What the searches of the last results did.
    #[serde(skip)]
    searched: Vec<SearchStep>,
    /// Said for the next results by a recording.
    #[serde(skip)]
    foretold: Foretold,
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
            decisions: Vec::new(),
            preemption_copies: Vec::new(),
            in_flight: VecDeque::new(),
            step_times: StepTimeModel::default(),
            prompt_pace: PromptPace::default(),
            lengths: [false, true].map(OutputLengths::new),
            decode_s: 0.0,
            asks: None,
            num_admitted: 0,
            refusal: None,
            forecast: Forecast::default(),
            empty_slots: 0,
            stats: StepStats::default(),
            admissions: Vec::new(),
            quota_refusals: Vec::new(),
            bills: IdMap::default(),
            billed: Vec::new(),
            pauses: Vec::new(),
            waits: Waits::default(),
            searched: Vec::new(),
            foretold: Foretold::default(),
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

    /// First call of a step: what it needs of the device pool. `None` where no step may be planned before the next
    /// commit: the loop is the simple one, or blocks could run out, or as many plans as may be are in flight.
    pub fn demand(&mut self) -> Option<Demand> {
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

    /// Third call: the step itself. An empty plan is done: it is not in flight, and no commit follows it.
    pub fn plan(&mut self, grant: Grant, swap: SwapGrant) -> StepPlan {
        let mut plan = StepPlan::default();
        let mut answers = self.plan_copies(swap, &mut plan);
        let has_changed = !grant.admitted.is_empty() || !grant.preempted.is_empty();
        if self.asks.is_some() {
            self.num_admitted = grant.admitted.len();
        }
        self.note_refusal(has_changed);
        if let Some((seq, lack)) = grant.refused {
            self.waits.first = Some((self.ranks[&seq], Wait::Lack(lack)));
        }
        self.waits.late = grant.late.iter().map(|(seq, lack)| (self.ranks[seq], Wait::Lack(*lack))).collect();
        for seq in &grant.preempted {
            self.preempt(self.ranks[seq], answers.stored.remove(seq), &mut plan);
        }
        self.hold_back_others(&grant.preempted);
        self.extend_tables(grant.grown, &mut plan);
        for admitted in grant.admitted {
            let rank = self.ranks[&admitted.seq];
            let mut seq = self.waiting.remove(&rank).expect("only waiting sequences are admitted");
            let taken = answers.taken.remove(&admitted.seq);
            let is_here = admitted.swap_in.is_empty();
            self.admit(&mut seq, admitted, taken, &mut plan);
            self.running.insert(seq);
            if is_here {
                self.resume(rank);
            }
        }
        let num_in: usize = plan.swap_in.iter().map(|swap_in| swap_in.pairs.len()).sum();
        self.costs.enqueue(plan.swap_out.len() + num_in);
        self.stats.blocks_out += plan.swap_out.len();
        self.available = grant.stats.free + grant.stats.cached;
        let in_flight = self.plan_batch(&mut plan.batch);
        if !plan.is_empty() {
            self.in_flight.push_back(in_flight);
        } else if self.in_flight.is_empty() && !has_changed && self.swap_ins.is_empty() {
            self.unblock();
        }
        plan
    }

    /// `grown`: most senior first, as they asked.
    fn extend_tables(&mut self, grown: Vec<Grown>, plan: &mut StepPlan) {
        let mut running = self.running.iter_mut();
        for grown in grown {
            let seq = running.find(|seq| seq.rank.seq == grown.seq).expect("only running sequences grow");
            let table = Arc::make_mut(&mut seq.table);
            if let Some((place, from, to)) = grown.copy {
                assert_eq!(std::mem::replace(&mut table[place], to), from, "the pool copied another block");
                plan.copy.push((from, to));
            }
            table.extend(grown.blocks);
            seq.tail_shared = false;
        }
    }
}
