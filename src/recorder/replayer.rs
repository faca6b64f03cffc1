//! Drives the same scheduler and pools by a recording, without model, clock or actors.

use super::deliveries::DeliverySummary;
use super::event::{Arrived, Committed, RecordedEvent, RecordedPrompt};
use super::keyframe::Keyframe;
use pagetide_base::ids::TokenId;
use pagetide_base::rules::{Constraint, ConstraintSource};
use pagetide_base::sampling::params::TokenMask;
use pagetide_engine::block_pool::PoolStats;
use pagetide_engine::plan::Deliveries;
use pagetide_engine::scheduler::summary::PlanSummary;
use pagetide_engine::scheduler::{EngineRequest, PlannedStep, Scheduler};
use pagetide_engine::state::EngineState;
use std::sync::Arc;

/// Applies events one by one.
pub struct Replayer {
    pub(super) state: EngineState,
}

/// The outcome of an event.
#[derive(Debug)]
pub enum ReplayOutcome {
    /// Nothing to report.
    Done,
    Planned(Box<PlannedStep>),
    Committed(Deliveries),
}

impl Replayer {
    pub fn new(keyframe: &Keyframe) -> Self {
        let mut state = keyframe.state();
        state.scheduler.summarise_plans();
        Self { state }
    }

    pub fn scheduler(&self) -> &Scheduler {
        &self.state.scheduler
    }

    /// The device pool and the swap pool, as they are now.
    pub fn pools(&self) -> [PoolStats; 2] {
        [self.state.device.stats(), self.state.swap.stats()]
    }

    /// Applies the next event. An error says how the decision differs from the recorded one. After an error the replay
    /// cannot continue.
    pub fn apply(&mut self, event: &RecordedEvent) -> Result<ReplayOutcome, String> {
        let scheduler = &mut self.state.scheduler;
        match event {
            RecordedEvent::Arrive(arrived) => scheduler.arrive_named(arrival(arrived), arrived.names.clone()),
            RecordedEvent::Cancel(request) => scheduler.cancel(*request),
            RecordedEvent::StopSample(request, sample) => scheduler.stop_sample(*request, *sample),
            RecordedEvent::Copied(report) => scheduler.copied(report),
            RecordedEvent::Tune(tuning) => {
                self.state.tune(tuning);
            }
            RecordedEvent::DropCached => self.state.drop_cached(),
            RecordedEvent::PutBack(names) => drop(self.state.put_back(names)),
            RecordedEvent::Erased(names) => self.state.erase(names),
            RecordedEvent::Failed(recorded) => {
                let failed = self.state.fail_running();
                if failed != *recorded {
                    return Err(format!(
                        "requests that fail with the executor: {recorded:?} in the recording, {failed:?} now"
                    ));
                }
            }
            RecordedEvent::Plan { now, plan } => return self.plan(*now, plan.as_deref()),
            RecordedEvent::Commit(committed) => return self.commit(committed),
        }
        Ok(ReplayOutcome::Done)
    }

    fn plan(&mut self, now: f64, recorded: Option<&PlanSummary>) -> Result<ReplayOutcome, String> {
        let planned = self.state.plan(now);
        match (recorded, planned) {
            (None, None) => Ok(ReplayOutcome::Done),
            (Some(_), None) => Err("a plan was made in the recording, and now results are waited for".into()),
            (None, Some(_)) => Err("results were waited for in the recording, and now a plan is made".into()),
            (Some(recorded), Some(planned)) => {
                match planned.report.summary.as_deref().and_then(|now| recorded.difference(now)) {
                    Some(difference) => Err(difference),
                    None => Ok(ReplayOutcome::Planned(Box::new(planned))),
                }
            }
        }
    }

    fn commit(&mut self, committed: &Committed) -> Result<ReplayOutcome, String> {
        let scheduler = &mut self.state.scheduler;
        scheduler.use_recorded_results(committed.recorded_results());
        let deliveries = scheduler.commit(committed.output()).deliveries;
        for (seq, names) in &committed.names {
            scheduler.add_names(*seq, names);
        }
        match committed.deliveries.difference(&DeliverySummary::new(&deliveries)) {
            Some(difference) => Err(difference),
            None => Ok(ReplayOutcome::Committed(deliveries)),
        }
    }
}

fn arrival(arrived: &Arrived) -> EngineRequest {
    let prompt = match &arrived.prompt {
        RecordedPrompt::Tokens(tokens) => tokens.clone(),
        RecordedPrompt::Length(len) => vec![0; *len],
    };
    EngineRequest {
        id: arrived.id,
        n: arrived.n,
        priority: arrived.priority,
        cache_salt: arrived.salt.clone(),
        terms: arrived.terms,
        tenant: arrived.tenant,
        constraint: arrived.has_rules.then(|| Arc::new(UnknownRules) as Arc<dyn ConstraintSource>),
        ..EngineRequest::new(prompt, arrived.params())
    }
}

/// A placeholder for rules. The recording supplies their results, so it is never asked.
#[derive(Clone, Copy, Debug)]
struct UnknownRules;

impl ConstraintSource for UnknownRules {
    fn start(&self) -> Box<dyn Constraint> {
        Box::new(*self)
    }
}

impl Constraint for UnknownRules {
    fn allowed(&mut self) -> Result<Option<TokenMask>, String> {
        Ok(None)
    }

    fn advance(&mut self, _: TokenId) -> Result<(), String> {
        Ok(())
    }
}
