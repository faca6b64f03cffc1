//! Budgets: how much work one request may cause before it is refused.
//!
//! Work that grows faster than its input, or that a client can make large, spends steps of a [`Budget`]. It stops with
//! [`Exhausted`] when the steps or the time are used up, or when no caller waits for the result any more.

use crate::error::ApiError;
use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Steps between two checks of the clock and of whether the client has gone.
const STEPS_PER_LOOK: u64 = 256;

/// What is left of the work that one request may cause on one thread.
#[derive(Debug)]
pub struct Budget {
    max_steps: u64,
    left: Cell<u64>,
    until_look: Cell<u64>,
    time: Option<Time>,
    cancelled: Cancelled,
}

#[derive(Debug)]
struct Time {
    limit: Duration,
    end: Instant,
}

/// A flag that says that no caller waits for a job any more. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Cancelled(Arc<AtomicBool>);

impl Cancelled {
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Why work had to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exhausted {
    /// The work takes more steps than this.
    Steps(u64),
    /// The work takes longer than this.
    Time(Duration),
    /// Nobody waits for the result.
    Cancelled,
}

impl Budget {
    /// A budget of steps without a limit on time.
    pub fn steps(max_steps: u64) -> Self {
        let (left, until_look) = (Cell::new(max_steps), Cell::new(STEPS_PER_LOOK));
        Self { max_steps, left, until_look, time: None, cancelled: Cancelled::default() }
    }

    /// A budget of time, which starts now. The work ends early if `cancelled` is set.
    pub fn time(limit: Duration, cancelled: Cancelled) -> Self {
        let time = Time { limit, end: Instant::now() + limit };
        Self { time: Some(time), cancelled, ..Self::steps(u64::MAX) }
    }

    /// A budget with the same time limit and a number of steps, for a part of the work.
    pub fn part(&self, max_steps: u64) -> Self {
        let time = self.time.as_ref().map(|Time { limit, end }| Time { limit: *limit, end: *end });
        Self { time, cancelled: self.cancelled.clone(), ..Self::steps(max_steps) }
    }

    /// Spends `steps` of the budget. After an error, all later calls fail too.
    pub fn spend(&self, steps: u64) -> Result<(), Exhausted> {
        let left = self.left.get().checked_sub(steps).ok_or(Exhausted::Steps(self.max_steps))?;
        self.left.set(left);
        match self.until_look.get().checked_sub(steps) {
            Some(until_look) => self.until_look.set(until_look),
            None => {
                self.until_look.set(STEPS_PER_LOOK);
                self.look()?;
            }
        }
        Ok(())
    }

    /// Checks that there is time left and that a caller waits for the result. Call it before work that cannot be
    /// interrupted.
    pub fn look(&self) -> Result<(), Exhausted> {
        if self.cancelled.is_set() {
            return Err(Exhausted::Cancelled);
        }
        match &self.time {
            Some(Time { limit, end }) if Instant::now() >= *end => Err(Exhausted::Time(*limit)),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Exhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exhausted::Steps(limit) => write!(f, "it takes more than {limit} steps, this server's limit"),
            Exhausted::Time(limit) => {
                write!(f, "it takes longer than {} s, this server's limit (intake.job_timeout_s)", limit.as_secs_f64())
            }
            Exhausted::Cancelled => f.write_str("the client has gone"),
        }
    }
}

impl Exhausted {
    /// The API error for a request whose field `param` causes too much work.
    pub fn in_param(self, param: &str) -> ApiError {
        ApiError::too_complex(param, format!("{param} is too complex: {self}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_counted() {
        let budget = Budget::steps(10);
        assert_eq!(budget.spend(4), Ok(()));
        assert_eq!(budget.spend(6), Ok(()));
        assert_eq!(budget.spend(1), Err(Exhausted::Steps(10)));
        assert_eq!(budget.spend(0), Ok(()));
        assert_eq!(Budget::steps(u64::MAX).spend(u64::MAX), Ok(()));
    }

    #[test]
    fn a_part_has_steps_of_its_own_and_the_same_end() {
        let cancelled = Cancelled::default();
        let whole = Budget::time(Duration::from_secs(3600), cancelled.clone());
        let part = whole.part(1000);
        assert_eq!(part.spend(1000), Ok(()));
        assert_eq!(part.spend(1), Err(Exhausted::Steps(1000)));
        assert_eq!(whole.look(), Ok(()));
        cancelled.set();
        assert_eq!(whole.look(), Err(Exhausted::Cancelled));
        assert_eq!(whole.part(u64::MAX).spend(STEPS_PER_LOOK + 1), Err(Exhausted::Cancelled));
    }

    #[test]
    fn time_ends() {
        let budget = Budget::time(Duration::ZERO, Cancelled::default());
        assert_eq!(budget.look(), Err(Exhausted::Time(Duration::ZERO)));
        let error = Exhausted::Time(Duration::from_secs(10)).in_param("prompt");
        assert_eq!(
            error.to_string(),
            "prompt: prompt is too complex: it takes longer than 10 s, this server's limit (intake.job_timeout_s)"
        );
    }
}
