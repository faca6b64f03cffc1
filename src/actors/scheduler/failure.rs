//! Handles an executor that fails or hangs: which requests fail, and whether the engine goes on.

use super::SchedulerActor;
use crate::messages::{ExecutorFailed, Reset};
use crate::stop::stop_system;
use actix::{ActorFutureExt, AsyncContext, Context, MailboxError, WrapFuture};
use pagetide_base::error::ApiError;
use pagetide_config::OnFailure;
use pagetide_metrics as metrics;
use std::time::Duration;

impl SchedulerActor {
    /// The executor has lost all KV and all steps in flight. Running requests fail. Waiting ones go on with empty
    /// pools.
    pub(super) fn fail(&mut self, failure: &ExecutorFailed, ctx: &mut Context<Self>) {
        self.tell();
        self.failures += 1;
        self.settings.restart.end();
        self.behind.clear();
        self.oldest_since = None;
        self.is_copying = false;
        let error = ApiError::engine(format!("the engine failed while this request ran: {}", failure.message));
        if !failure.restarted {
            return self.end(&error, &format!("a step failed: {}", failure.message));
        }
        if self.settings.on_failure == OnFailure::Exit {
            return self.end(&error, &format!("a step failed, and device.on_failure is exit: {}", failure.message));
        }
        let failed = self.scheduler().fail_running();
        self.recording.hear(|recorder| recorder.fail(&failed));
        self.recording.write_beside();
        tracing::error!(requests = failed.len(), "a step failed, its requests with it: {}", failure.message);
        metrics::executor_restarted();
        for request in failed {
            self.fail_client(request, &error);
        }
        self.idle = true;
        self.report_population();
        let (allocator, swap_pool) = (self.allocator.clone(), self.swap_pool.clone());
        let reset = async move {
            allocator.send(Reset).await?;
            swap_pool.send(Reset).await
        };
        ctx.wait(reset.into_actor(self).map(|done: Result<_, MailboxError>, this, ctx| match done {
            Ok(()) => this.wake(ctx),
            Err(_) => stop_system("a pool's actor is gone"),
        }));
    }

    /// The engine cannot go on: all requests fail.
    fn end(&mut self, error: &ApiError, why: &str) {
        self.tell();
        for request in self.clients.keys().copied().collect::<Vec<_>>() {
            self.fail_client(request, error);
        }
        self.recording.write_now();
        stop_system(why);
    }

    /// A device that hangs cannot be restarted, because its thread never comes back.
    pub(super) fn look_for_hung_step(&mut self, timeout: Duration) {
        let allowance = self.settings.restart.allowance();
        if self.oldest_since.take_if(|since| since.elapsed() >= timeout + allowance).is_some() {
            let seconds = timeout.as_secs_f64();
            let why = match allowance {
                Duration::ZERO => format!("the device has not finished a step for {seconds} s (device.step_timeout_s)"),
                _ => "a step has failed, and the executor does not come back".into(),
            };
            self.end(&ApiError::engine(format!("the engine hangs: {why}")), &why);
        }
    }
}
