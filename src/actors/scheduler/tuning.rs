//! Settings that change between two steps.

use super::SchedulerActor;
use crate::messages::{Resize, Tune};
use crate::stop::stop_system;
use actix::{ActorFutureExt, AsyncContext, Context, Handler, ResponseFuture, WrapFuture};
use pagetide_base::error::ApiError;
use pagetide_engine::block_pool::PoolStats;
use pagetide_engine::scheduler::Tuning;
use tokio::sync::oneshot;

impl Handler<Tune> for SchedulerActor {
    type Result = ResponseFuture<Result<PoolStats, ApiError>>;

    fn handle(&mut self, Tune(tuning): Tune, ctx: &mut Self::Context) -> Self::Result {
        let (answer, stats) = oneshot::channel();
        // Not from within a handler: see `wake_soon`.
        ctx.spawn(actix::fut::ready(()).map(move |(), this: &mut Self, ctx| this.tune(tuning, answer, ctx)));
        Box::pin(async move { stats.await.map_err(|_| ApiError::engine("the engine has stopped")) })
    }
}

impl SchedulerActor {
    /// Changes the swap pool and the scheduler together. No other message is handled meanwhile, and no step is being
    /// planned.
    fn tune(&mut self, tuning: Tuning, answer: oneshot::Sender<PoolStats>, ctx: &mut Context<Self>) {
        let resized = self.swap_pool.send(Resize(tuning.num_swap_blocks));
        ctx.wait(resized.into_actor(self).map(move |stats, this, ctx| match stats {
            Ok(stats) => {
                this.recording.hear(|recorder| recorder.tune(&tuning));
                this.scheduler().tune(&tuning, stats);
                // The caller may have gone. The settings are in force all the same.
                let _ = answer.send(stats);
                this.wake(ctx);
            }
            Err(_) => stop_system("the swap pool's actor is gone"),
        }));
    }
}
