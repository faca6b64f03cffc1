//! Drops the prefix caches of both pools.

use super::SchedulerActor;
use crate::messages::{DropCached, FlushCaches};
use crate::stop::stop_system;
use actix::{ActorFutureExt, AsyncContext, Context, Handler, MailboxError, ResponseFuture, WrapFuture};
use pagetide_base::error::ApiError;
use pagetide_engine::block_pool::PoolStats;
use tokio::sync::oneshot;

impl Handler<FlushCaches> for SchedulerActor {
    type Result = ResponseFuture<Result<[PoolStats; 2], ApiError>>;

    fn handle(&mut self, _: FlushCaches, ctx: &mut Self::Context) -> Self::Result {
        let (answer, stats) = oneshot::channel();
        // Not from within a handler: see `wake_soon`.
        ctx.spawn(actix::fut::ready(()).map(move |(), this: &mut Self, ctx| this.flush(answer, ctx)));
        Box::pin(async move { stats.await.map_err(|_| ApiError::engine("the engine has stopped")) })
    }
}

impl SchedulerActor {
    /// No other message is handled meanwhile, and no step is being planned. The scheduler counts available blocks, to
    /// which cached ones belong as free ones do, so it needs not be told.
    fn flush(&mut self, answer: oneshot::Sender<[PoolStats; 2]>, ctx: &mut Context<Self>) {
        let (allocator, swap_pool) = (self.allocator.clone(), self.swap_pool.clone());
        let pools = async move { Ok([allocator.send(DropCached).await?, swap_pool.send(DropCached).await?]) };
        ctx.wait(pools.into_actor(self).map(move |pools: Result<_, MailboxError>, this, _| match pools {
            Ok(stats) => {
                this.recording.hear(|recorder| recorder.drop_cached());
                // The caller may have gone.
                let _ = answer.send(stats);
            }
            Err(_) => stop_system("a pool's actor is gone"),
        }));
    }
}
