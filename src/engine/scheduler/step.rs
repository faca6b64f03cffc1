//! The step protocol: what planning a step needs, in order, and what comes of it.
//!
//! ```text
//! next_step → Find → found → Serve → granted → Reserve → reserved → Execute … commit
//!              swap pool      device pool       swap pool            executor
//! ```
//!
//! [`Scheduler::next_step`] begins. Each question goes to the pool that it names, and the pool's answer goes back to the
//! scheduler, which says what it needs next. `Find` is left out where no sequence may start, and `Reserve` where nothing
//! is copied between the tiers. [`EngineState`] answers from two pools at hand, the scheduler's actor by messages.
//!
//! [`EngineState`]: crate::engine::state::EngineState

use super::report::PlanReport;
use super::summary::PlanSummary;
use super::{Scheduler, WaitReason};
use crate::engine::allocation::{Demand, Find, Grant, Grown, SwapDemand, SwapGrant};
use crate::engine::plan::StepPlan;
use std::sync::Arc;

/// What the scheduler needs next.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "it is made and taken apart at once, and a box would be an allocation a step"
)]
pub enum NextStep {
    /// Ask the swap pool ([`find`](crate::engine::allocation::find)); [`Scheduler::found`] takes the answer.
    Find(Vec<Find>),
    /// Ask the device pool ([`serve`](crate::engine::allocation::serve)); [`Scheduler::granted`] takes the answer.
    Serve(Demand),
    /// Ask the swap pool ([`serve_swap`](crate::engine::allocation::serve_swap)); [`Scheduler::reserved`] takes the
    /// answer.
    Reserve(SwapDemand),
    /// Run this plan; [`Scheduler::commit`] takes the results. An empty plan needs no run and no commit.
    Execute(PlannedStep),
    /// No step can be planned before the next commit: the loop is the simple one, or blocks could run out, or as many
    /// plans as may be are in flight.
    AwaitResults,
    /// There is nothing to do until a request arrives.
    Idle,
}

/// A plan, and what was decided to make it.
#[derive(Debug, Default)]
pub struct PlannedStep {
    pub plan: StepPlan,
    pub report: PlanReport,
}

/// How far the step that is being planned has come.
#[derive(Clone, Debug, Default)]
#[expect(clippy::large_enum_variant, reason = "there is one, and a box would be an allocation a step")]
pub(super) enum Planning {
    #[default]
    NotBegun,
    Finding(Demand),
    Serving,
    Reserving(Grant),
}

impl Scheduler {
    /// Plans carry a [`PlanSummary`] from now on, for a recorder to keep.
    pub fn summarise_plans(&mut self) {
        self.summarises = true;
    }

    /// Begins to plan a step at time `now`, in seconds since some moment.
    pub fn next_step(&mut self, now: f64) -> NextStep {
        self.now = now;
        if !self.has_work() {
            return NextStep::Idle;
        }
        let Some(demand) = self.demand() else { return NextStep::AwaitResults };
        let finds = self.finds(&demand);
        if finds.is_empty() {
            self.planning = Planning::Serving;
            return NextStep::Serve(demand);
        }
        self.planning = Planning::Finding(demand);
        NextStep::Find(finds)
    }

    /// Takes the swap pool's answer to [`NextStep::Find`].
    ///
    /// # Panics
    ///
    /// This and the next two panic where nothing of the kind was asked.
    pub fn found(&mut self, held: Vec<Vec<bool>>) -> NextStep {
        let Planning::Finding(mut demand) = std::mem::replace(&mut self.planning, Planning::Serving) else {
            panic!("the scheduler has not asked what the swap pool holds");
        };
        self.fetch_what_is_found(&mut demand, held);
        NextStep::Serve(demand)
    }

    /// Takes the device pool's answer to [`NextStep::Serve`].
    pub fn granted(&mut self, grant: Grant) -> NextStep {
        let Planning::Serving = std::mem::take(&mut self.planning) else {
            panic!("the scheduler has not asked the device pool for blocks");
        };
        self.report.used_blocks = grant.stats.used;
        self.report.summary = self.summarises.then(|| Box::new(PlanSummary::new(&grant)));
        let demand = self.reserve(&grant);
        if demand.is_empty() {
            return self.execute(grant, SwapGrant::default());
        }
        self.planning = Planning::Reserving(grant);
        NextStep::Reserve(demand)
    }

    /// Takes the swap pool's answer to [`NextStep::Reserve`].
    pub fn reserved(&mut self, swap: SwapGrant) -> NextStep {
        let Planning::Reserving(grant) = std::mem::take(&mut self.planning) else {
            panic!("the scheduler has not asked the swap pool for blocks");
        };
        self.execute(grant, swap)
    }

    fn execute(&mut self, grant: Grant, swap: SwapGrant) -> NextStep {
        if let Some(summary) = &mut self.report.summary {
            summary.add_swap(&swap);
        }
        let plan = self.plan(grant, swap);
        let mut report = std::mem::take(&mut self.report);
        report.forecast = self.forecast;
        if let Some(summary) = &mut report.summary {
            summary.add_plan(&plan, &report.decisions);
        }
        NextStep::Execute(PlannedStep { plan, report })
    }

    /// Makes the plan from what the pools have granted. An empty plan is done: it is not in flight, and no commit
    /// follows it.
    fn plan(&mut self, grant: Grant, swap: SwapGrant) -> StepPlan {
        let mut plan = StepPlan::default();
        let mut answers = self.plan_copies(swap, &mut plan);
        let has_changed = !grant.admitted.is_empty() || !grant.preempted.is_empty();
        if self.asks.is_some() {
            self.num_admitted = grant.admitted.len();
        }
        self.note_refusal(has_changed);
        if let Some((seq, lack)) = grant.refused {
            self.waits.first = Some((self.ranks[&seq], WaitReason::Lack(lack)));
        }
        self.waits.late = grant.late.iter().map(|(seq, lack)| (self.ranks[seq], WaitReason::Lack(*lack))).collect();
        for seq in &grant.preempted {
            self.preempt(self.ranks[seq], answers.stored.remove(seq), &mut plan);
        }
        self.hold_back_others(&grant.preempted);
        self.report.preempted = grant.preempted.into_iter().zip(grant.causes).collect();
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
        self.report.stats.blocks_out += plan.swap_out.len();
        self.available = grant.stats.free + grant.stats.cached;
        let in_flight = self.plan_batch(&mut plan.batch);
        if !plan.is_empty() {
            self.report.load = in_flight.load;
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
