//! Planning a step: see [`NextStep`] for the protocol.

use super::planning::{NextStep, PlannedStep, PlanningStage};
use super::plans::grow;
use super::{PlanReport, Scheduler};
use crate::allocation::{Demand, Grant, SwapGrant};
use crate::plan::{MAX_STEPS_IN_FLIGHT, StepPlan};

impl Scheduler {
    /// Plans carry a [`PlanSummary`](super::summary::PlanSummary) from now on, for a recorder to keep.
    pub fn summarise_plans(&mut self) {
        self.planning.summarises = true;
    }

    /// Whether a step has anything to do, even if it only releases blocks.
    pub fn has_work(&self) -> bool {
        !self.seqs.running.is_empty()
            || !self.seqs.waiting.is_empty()
            || !self.device.pending.release.is_empty()
            || !self.tiers.pending.is_empty()
    }

    /// Begins to plan a step at time `now`, in seconds since some moment.
    pub fn next_step(&mut self, now: f64) -> NextStep {
        self.contracts.now = now;
        if !self.has_work() {
            return NextStep::Idle;
        }
        let Some(demand) = self.demand() else { return NextStep::AwaitResults };
        let finds = self.tiers.finds(&demand, &self.config);
        if finds.is_empty() {
            self.planning.stage = PlanningStage::Serving;
            return NextStep::Serve(demand);
        }
        self.planning.stage = PlanningStage::Finding(demand);
        NextStep::Find(finds)
    }

    /// Takes the swap pool's answer to [`NextStep::Find`].
    ///
    /// # Panics
    ///
    /// This and the next two panic where nothing of the kind was asked.
    pub fn found(&mut self, held: Vec<Vec<bool>>) -> NextStep {
        let PlanningStage::Finding(mut demand) = std::mem::replace(&mut self.planning.stage, PlanningStage::Serving)
        else {
            panic!("the scheduler has not asked what the swap pool holds");
        };
        self.tiers.found(&mut demand, held, self.config.block_size, &self.estimates.step_times);
        NextStep::Serve(demand)
    }

    /// Takes the device pool's answer to [`NextStep::Serve`].
    pub fn granted(&mut self, grant: Grant) -> NextStep {
        let PlanningStage::Serving = std::mem::take(&mut self.planning.stage) else {
            panic!("the scheduler has not asked the device pool for blocks");
        };
        self.planning.granted(&grant);
        let demand = self.swap_demand(&grant);
        if demand.is_empty() {
            return self.execute(grant, SwapGrant::default());
        }
        self.planning.stage = PlanningStage::Reserving(grant);
        NextStep::Reserve(demand)
    }

    /// Takes the swap pool's answer to [`NextStep::Reserve`].
    pub fn reserved(&mut self, swap: SwapGrant) -> NextStep {
        let PlanningStage::Reserving(grant) = std::mem::take(&mut self.planning.stage) else {
            panic!("the scheduler has not asked the swap pool for blocks");
        };
        self.execute(grant, swap)
    }

    fn execute(&mut self, grant: Grant, swap: SwapGrant) -> NextStep {
        if let Some(summary) = &mut self.planning.report.summary {
            summary.add_swap(&swap);
        }
        let plan = self.plan(grant, swap);
        let mut report: PlanReport = std::mem::take(&mut self.planning.report);
        report.forecast = self.estimates.forecast;
        if let Some(summary) = &mut report.summary {
            summary.add_plan(&plan, &report.decisions);
        }
        NextStep::Execute(PlannedStep { plan, report })
    }

    /// What a step needs of the device pool; `None`: see [`NextStep::AwaitResults`].
    fn demand(&mut self) -> Option<Demand> {
        let most = if self.config.overlap { MAX_STEPS_IN_FLIGHT } else { 1 };
        let some_wait = self.in_flight.iter().any(|plan| plan.decides);
        if self.in_flight.len() >= most || (some_wait && self.seqs.too_many_await_results()) {
            return None;
        }
        self.resize.settle(&mut self.config, &self.seqs, &self.contracts);
        let decodes = self.seqs.schedule_decodes();
        if self.seqs.waiting.is_empty() {
            self.estimates.prompt_pace.all_run();
        }
        let config = &self.config;
        let backlog = self.seqs.prompt_backlog(config.max_num_seqs);
        let mut budget = self.estimates.prompt_budget(&decodes, backlog, config);
        let prompt_limit = budget.left(0);
        let (mut grows, mut promised, mut unpromised) = (Vec::new(), 0, 0);
        let (mut seats, mut goes_on) = (0, !self.in_flight.is_empty());
        for seq in self.seqs.running.iter_mut() {
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
        let token_budget = budget.left(0);
        self.estimates.forecast_step(&decodes, prompt_limit, config);
        seats += self.contracts.num_reserved_seats(&self.seqs);
        let urgent = self.contracts.urgent(&mut self.seqs, config);
        let may_preempt = unpromised + promised > self.device.available || !urgent.is_empty();
        if may_preempt && !self.in_flight.is_empty() {
            return None;
        }
        let mut demand = Demand { grow: grows, promised, urgent, ..std::mem::take(&mut self.device.pending) };
        if may_preempt {
            demand.victims = self.victims().demanded();
        }
        demand.seats = self.config.max_num_seqs.saturating_sub(seats);
        demand.token_budget = token_budget;
        demand.reserve = self.config.reserve_blocks();
        // If no running sequence advances, none needs the blocks that the watermark keeps free.
        demand.watermark = if goes_on { self.config.watermark_blocks } else { 0 };
        if !goes_on || !self.admission.is_refused() {
            demand.admit = self.candidates(&demand);
        }
        self.admission.ask(&demand.admit, &self.seqs);
        if let Some(last) = demand.admit.last() {
            self.estimates.forecast.horizon = last.horizon.min(self.config.max_model_len);
        }
        // Where all running sequences wait, for others that have to be admitted, there is nothing to expect.
        let expects = (goes_on || self.seqs.running.is_empty()) && !demand.admit.is_empty();
        demand.expected = if expects { self.estimates.expected_need(&self.seqs, &self.config) } else { None };
        Some(demand)
    }

    /// Makes the plan from what the pools have granted. An empty plan is done: it is not in flight, and no commit
    /// follows it.
    fn plan(&mut self, grant: Grant, swap: SwapGrant) -> StepPlan {
        let mut plan = StepPlan::default();
        let mut answers = self.tiers.plan_copies(swap, &mut self.seqs, &mut self.ledger, &mut plan);
        let has_changed = grant.changes_who_runs();
        if self.admission.answer(&grant, &self.seqs) {
            self.estimates.prompt_pace.refused();
        }
        for seq in &grant.preempted {
            self.preempt(self.seqs.rank_of(*seq), answers.stored.remove(seq), &mut plan);
        }
        self.seqs.hold_back_beams_of(&grant.preempted);
        self.seqs.extend_tables(grant.grown, &mut plan);
        for admitted in grant.admitted {
            let taken = answers.taken.remove(&admitted.seq);
            self.admit(admitted, taken, &mut plan);
        }
        self.tiers.enqueue(&plan);
        self.device.available = grant.stats.free + grant.stats.cached;
        let (in_flight, empty_slots) = self.seqs.plan_batch(self.config.block_size, &mut plan.batch);
        self.estimates.forecast.step_s = self.estimates.step_times.expect(&in_flight.load);
        let report = &mut self.planning.report;
        report.stats.blocks_out += plan.swap_out.len();
        report.preempted = grant.preempted.into_iter().zip(grant.causes).collect();
        (report.empty_slots, report.load) = (empty_slots, in_flight.load);
        if !plan.is_empty() {
            self.in_flight.push_back(in_flight);
        } else if self.in_flight.is_empty() && !has_changed && !self.tiers.has_swap_ins() {
            self.unblock();
        }
        plan
    }
}
