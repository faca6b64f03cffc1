//! A step that the executor has.

use crate::executor::ModelExecutor;
use crate::messages::{Execute, Executed};
use actix::dev::Request;
use pagetide_engine::scheduler::Forecast;
use pagetide_metrics::{self as metrics, StepMetrics};
use std::pin::Pin;
use std::time::Duration;

pub(super) struct SubmittedStep {
    /// What was known when it was planned.
    pub metrics: StepMetrics,
    pub forecast: Forecast,
    /// Whether it is the first step after a time without work.
    pub after_idle: bool,
    pub answer: Pin<Box<Request<ModelExecutor, Execute>>>,
}

/// Reports a step that is done.
pub(super) fn report_step(mut metrics: StepMetrics, forecast: Forecast, after_idle: bool, executed: &Executed) {
    let Executed { output, gap } = executed;
    metrics.execute = Duration::from_secs_f64(output.timing.forward_s + output.timing.swap_s);
    metrics.sample = Duration::from_secs_f64(output.timing.sample_s);
    metrics.gap = Some(*gap).filter(|_| !after_idle);
    metrics::step(&metrics);
    tracing::debug!(
        sequences = metrics.sequences,
        tokens = metrics.tokens,
        seconds = (metrics.execute + metrics.sample).as_secs_f64(),
        ?forecast,
        "a step has ended"
    );
}
