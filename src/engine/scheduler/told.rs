//! What the scheduler tells of itself and of its requests.

use super::{Scheduler, SchedulerConfig};
use crate::ids::RequestId;

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
}
