//! What the scheduler tells of itself and of its requests.

use super::{Scheduler, SchedulerConfig};
use crate::engine::arbiter::Decision;
use crate::engine::step_time::StepLoad;
use crate::ids::RequestId;
use serde::{Deserialize, Serialize};

/// What has happened since the last [`Scheduler::take_stats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepStats {
    pub preempted_swap: usize,
    pub preempted_recompute: usize,
    pub blocks_out: usize,
    pub blocks_in: usize,
    pub recomputed_tokens: usize,
}

/// A request's first sequence got its first blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admission {
    pub request: RequestId,
    pub prompt_tokens: usize,
    /// How many of them the prefix cache held, on either tier ...
    pub cached_tokens: usize,
    /// ... and how many of these were in the swap pool alone.
    pub swapped_tokens: usize,
}

/// What the scheduler thought of the last step that it planned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Forecast {
    /// Prompt tokens that it could have had beside its decodes.
    pub prompt_limit: usize,
    /// Seconds that its decodes take by themselves.
    pub decodes_s: f64,
    /// Seconds that a step takes longer for each prompt token.
    pub prompt_token_s: f64,
    /// Seconds that all of it takes.
    pub step_s: f64,
    /// Tokens of an output that has tokens which may end it, on average.
    pub output_tokens: usize,
    /// Steps for which who was considered last for admission had to find blocks.
    pub horizon: usize,
}

/// How many sequences are where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Population {
    pub running: usize,
    pub waiting: usize,
    pub swapped: usize,
}

impl Scheduler {
    /// As it is now: see [`Scheduler::tune`].
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    pub fn has_request(&self, request: RequestId) -> bool {
        self.requests.contains_key(&request)
    }

    /// Requests that have not ended, in any order.
    pub fn requests(&self) -> impl Iterator<Item = RequestId> {
        self.requests.keys().copied()
    }

    /// Requests that have not ended.
    pub fn num_requests(&self) -> usize {
        self.requests.len()
    }

    pub fn population(&self) -> Population {
        Population {
            running: self.running.len(),
            waiting: self.waiting.len() - self.num_swapped,
            swapped: self.num_swapped,
        }
    }

    /// Of the arbiter, since they were last taken.
    pub fn decisions(&self) -> &[Decision] {
        &self.decisions
    }

    pub fn take_stats(&mut self) -> StepStats {
        std::mem::take(&mut self.stats)
    }

    /// First admissions since the last call.
    pub fn take_admissions(&mut self) -> Vec<Admission> {
        std::mem::take(&mut self.admissions)
    }

    /// Slots in blocks that running sequences held when the last plan was made, and that hold no token even when all
    /// plans in flight are done.
    pub fn empty_slots(&self) -> usize {
        self.empty_slots
    }

    pub fn forecast(&self) -> Forecast {
        self.forecast
    }

    /// What the plan that was made last computes, while it is in flight.
    pub fn planned_load(&self) -> StepLoad {
        self.in_flight.back().map(|plan| plan.load).unwrap_or_default()
    }
}
