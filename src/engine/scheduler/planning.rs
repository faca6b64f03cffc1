//! The step protocol: what planning a step needs, in order, and what comes of it.
//!
//! ```text
//! next_step → Find → found → Serve → granted → Reserve → reserved → Execute … commit
//!              swap pool      device pool       swap pool            executor
//! ```
//!
//! [`Scheduler::next_step`](super::Scheduler::next_step) begins. Each question goes to the pool that it names, and the
//! pool's answer goes back to the scheduler, which says what it needs next. `Find` is left out where no sequence may
//! start, and `Reserve` where nothing is copied between the tiers. [`EngineState`] answers from two pools at hand, the
//! scheduler's actor by messages.
//!
//! [`EngineState`]: crate::state::EngineState

use super::report::PlanReport;
use super::summary::PlanSummary;
use crate::allocation::{Demand, Find, Grant, SwapDemand};
use crate::plan::StepPlan;

/// What the scheduler needs next.
#[derive(Debug)]
pub enum NextStep {
    /// Ask the swap pool ([`find`](crate::allocation::find)); [`Scheduler::found`](super::Scheduler::found)
    /// takes the answer.
    Find(Vec<Find>),
    /// Ask the device pool ([`serve`](crate::allocation::serve));
    /// [`Scheduler::granted`](super::Scheduler::granted) takes the answer.
    Serve(Demand),
    /// Ask the swap pool ([`serve_swap`](crate::allocation::serve_swap));
    /// [`Scheduler::reserved`](super::Scheduler::reserved) takes the answer.
    Reserve(SwapDemand),
    /// Run this plan; [`Scheduler::commit`](super::Scheduler::commit) takes the results. An empty plan needs no run and
    /// no commit.
    Execute(PlannedStep),
    /// No step can be planned before the next commit: the loop is the simple one, or blocks could run out, or as many
    /// plans as may be are in flight, or too many sequences would be left out.
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

/// The step that is being planned.
#[derive(Clone, Debug, Default)]
pub(super) struct Planning {
    pub stage: PlanningStage,
    /// Of the next plan. Between two steps it collects what happens.
    pub report: PlanReport,
    /// Plans carry a [`PlanSummary`].
    pub summarises: bool,
}

/// How far the step that is being planned has come.
#[derive(Clone, Debug, Default)]
pub(super) enum PlanningStage {
    #[default]
    NotBegun,
    Finding(Demand),
    Serving,
    Reserving(Grant),
}

impl Planning {
    /// The device pool has answered.
    pub fn granted(&mut self, grant: &Grant) {
        self.report.used_blocks = grant.stats.used;
        self.report.summary = self.summarises.then(|| Box::new(PlanSummary::new(grant)));
    }
}
