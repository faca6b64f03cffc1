//! Copies between the tiers that end while no step runs, and reports of all copies.

use super::SchedulerActor;
use crate::messages::AwaitCopies;
use crate::stop::stop_system;
use actix::{ActorFutureExt, AsyncContext, Context, WrapFuture};
use pagetide_engine::plan::CopyReport;
use pagetide_metrics as metrics;

impl SchedulerActor {
    /// Waits for the end of a copy while no step runs.
    pub(super) fn await_copies(&mut self, ctx: &mut Context<Self>) {
        if std::mem::replace(&mut self.awaits_copies, true) {
            return;
        }
        let (answer, failures) = (self.executor.send(AwaitCopies), self.failures);
        ctx.spawn(answer.into_actor(self).map(move |answer, this, ctx| {
            this.awaits_copies = false;
            match answer {
                Ok(_) if this.failures != failures => {} // these pools are gone
                Ok(Ok(report)) => {
                    this.recording.hear(|recorder| recorder.copied(&report));
                    this.scheduler().copied(&report);
                    this.report_copies(&report);
                    this.wake(ctx);
                }
                Ok(Err(failure)) => this.fail(&failure, ctx),
                Err(_) => stop_system("the executor's actor is gone"),
            }
        }));
    }

    pub(super) fn report_copies(&mut self, report: &CopyReport) {
        let lost = report.lost.len() + report.arrived.iter().filter(|(_, is_there)| !is_there).count();
        if lost > 0 {
            tracing::warn!(
                lost,
                "copies between the device and the swap pool failed: what they held is computed again"
            );
        }
        self.is_copying = report.queued_blocks > 0;
        let [out, back] = self.scheduler().copy_seconds();
        metrics::copies(out, back, report.queued_blocks);
    }
}
