//! The same scheduler and pools, driven by a recording: no model, no clock, no actors.

use super::event::{Arrived, Committed, Event, Prompt};
use super::state::{Keyframe, State};
use super::summary::{PlanSummary, Told};
use crate::engine::allocation::{SwapGrant, find, resize_swap, serve, serve_swap};
use crate::engine::arbiter::Decision;
use crate::engine::block_pool::PoolStats;
use crate::engine::constraint::{Constraint, ConstraintSource};
use crate::engine::plan::{Deliveries, StepPlan};
use crate::engine::scheduler::{Admission, Arrival, Scheduler};
use crate::ids::{SeqId, TokenId};
use crate::sampling::params::TokenMask;
use std::sync::Arc;

/// Applies events one by one.
pub struct Replayer {
    pub(super) state: State,
}

/// What came of an event.
#[derive(Debug)]
pub enum Outcome {
    /// Nothing that anybody is told.
    Done,
    Planned(Box<Planned>),
    Committed(Deliveries),
}

/// A step as it was planned again.
#[derive(Debug)]
pub struct Planned {
    pub plan: StepPlan,
    /// Who had to yield, and for whom.
    pub preempted: Vec<(SeqId, SeqId)>,
    pub admissions: Vec<Admission>,
    pub decisions: Vec<Decision>,
    /// Who was paused and who came back.
    pub pauses: Deliveries,
}

impl Replayer {
    pub fn new(keyframe: &Keyframe) -> Self {
        Self { state: keyframe.state() }
    }

    pub fn scheduler(&self) -> &Scheduler {
        &self.state.scheduler
    }

    /// The device pool and the swap pool, as they are now.
    pub fn pools(&self) -> [PoolStats; 2] {
        [self.state.device.stats(), self.state.swap.stats()]
    }

    /// Applies the next event. An error says how what was decided differs from what was recorded; then the recording
    /// cannot be gone on with.
    pub fn apply(&mut self, event: &Event) -> Result<Outcome, String> {
        let State { scheduler, device, swap } = &mut self.state;
        match event {
            Event::Arrive(arrived) => scheduler.arrive_named(arrival(arrived), arrived.names.clone()),
            Event::Cancel(request) => scheduler.cancel(*request),
            Event::StopSample(request, sample) => scheduler.stop_sample(*request, *sample),
            Event::Copied(report) => scheduler.copied(report),
            Event::Tune(tuning) => {
                let stats = resize_swap(swap, tuning.num_swap_blocks);
                scheduler.tune(tuning, stats);
            }
            Event::Failed(recorded) => {
                let failed = scheduler.fail_running();
                (*device, *swap) = (device.renewed(), swap.renewed());
                if failed != *recorded {
                    return Err(format!(
                        "requests that fail with the executor: {recorded:?} in the recording, {failed:?} now"
                    ));
                }
            }
            Event::Plan { now, plan } => return self.plan(*now, plan.as_deref()),
            Event::Commit(committed) => return self.commit(committed),
        }
        Ok(Outcome::Done)
    }

    fn plan(&mut self, now: f64, recorded: Option<&PlanSummary>) -> Result<Outcome, String> {
        let State { scheduler, device, swap } = &mut self.state;
        scheduler.set_time(now);
        let Some(mut demand) = scheduler.demand() else {
            return match recorded {
                None => Ok(Outcome::Done),
                Some(_) => Err("a plan was made in the recording, and now results are waited for".into()),
            };
        };
        let Some(recorded) = recorded else {
            return Err("results were waited for in the recording, and now a plan is made".into());
        };
        let finds = scheduler.finds(&demand);
        if !finds.is_empty() {
            scheduler.found(&mut demand, find(swap, &finds));
        }
        let grant = serve(device, scheduler.config().block_size, demand);
        let mut summary = PlanSummary::new(&grant);
        let swap_demand = scheduler.reserve(&grant);
        let swap_grant = match swap_demand.is_empty() {
            true => SwapGrant::default(),
            false => serve_swap(swap, swap_demand),
        };
        summary.add_swap(&swap_grant);
        let plan = scheduler.plan(grant, swap_grant);
        let decisions = scheduler.take_decisions();
        summary.add_plan(&plan, &decisions);
        // Of no use here, and to be taken all the same.
        scheduler.take_stats();
        scheduler.take_quota_refusals();
        if let Some(difference) = recorded.difference(&summary) {
            return Err(difference);
        }
        Ok(Outcome::Planned(Box::new(Planned {
            plan,
            preempted: summary.preempted,
            admissions: scheduler.take_admissions(),
            decisions,
            pauses: scheduler.take_pauses(),
        })))
    }

    fn commit(&mut self, committed: &Committed) -> Result<Outcome, String> {
        let scheduler = &mut self.state.scheduler;
        scheduler.foretell(committed.foretold());
        let deliveries = scheduler.commit(committed.output());
        for (seq, names) in &committed.names {
            scheduler.add_names(*seq, names);
        }
        match committed.told.difference(&Told::new(&deliveries)) {
            Some(difference) => Err(difference),
            None => Ok(Outcome::Committed(deliveries)),
        }
    }
}

fn arrival(arrived: &Arrived) -> Arrival {
    let prompt = match &arrived.prompt {
        Prompt::Tokens(tokens) => tokens.clone(),
        Prompt::Length(len) => vec![0; *len],
    };
    Arrival {
        id: arrived.id,
        prompt: Arc::new(prompt),
        params: Arc::new(arrived.params()),
        n: arrived.n,
        priority: arrived.priority,
        cache_salt: arrived.salt.clone(),
        terms: arrived.terms,
        tenant: arrived.tenant,
        constraint: arrived.has_rules.then(|| Arc::new(UnknownRules) as Arc<dyn ConstraintSource>),
    }
}

/// There are rules. What they left is told with the results, so nobody asks them.
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
