//! Drops the prefix caches of both pools.

use super::SchedulerActor;
use crate::messages::{DropCached, FlushCaches};
use crate::stop::stop_system;
use actix::{ActorFutureExt, AsyncContext, Context, Handler, MailboxError, ResponseFuture, WrapFuture};
use pagetide_base::error::ApiError;
use pagetide_engine::block_pool::PoolStats;
use tokio::sync::oneshot;

impl Handler<FlushCaches> for SchedulerActor {
    type Result = ResponseFuture<Result<bool, ApiError>>;

    fn handle(&mut self, _: FlushCaches, ctx: &mut Self::Context) -> Self::Result {
        let (answer, is_empty) = oneshot::channel();
        // Not from within a handler: see `wake_soon`.
        ctx.spawn(actix::fut::ready(()).map(move |(), this: &mut Self, ctx| this.flush(answer, ctx)));
        Box::pin(async move { is_empty.await.map_err(|_| ApiError::engine("the engine has stopped")) })
    }
}

impl SchedulerActor {
    /// No other message is handled meanwhile, and no step is being planned. The scheduler counts available blocks, to
    /// which cached ones belong as free ones do, so it needs not be told. Where there are sequences, nothing is
    /// dropped: they count on blocks that are cached in the swap pool.
    fn flush(&mut self, answer: oneshot::Sender<bool>, ctx: &mut Context<Self>) {
        if self.scheduler().has_work() {
            let _ = answer.send(false);
            return;
        }
        let (allocator, swap_pool) = (self.allocator.clone(), self.swap_pool.clone());
        let pools = async move { Ok([allocator.send(DropCached).await?, swap_pool.send(DropCached).await?]) };
        ctx.wait(pools.into_actor(self).map(move |pools: Result<[PoolStats; 2], MailboxError>, this, _| match pools {
            Ok(stats) => {
                this.recording.hear(|recorder| recorder.drop_cached());
                // A plan in flight may still hold blocks of a sequence that has ended. The caller may have gone.
                let _ = answer.send(stats.iter().all(|pool| pool.used == 0));
            }
            Err(_) => stop_system("a pool's actor is gone"),
        }));
    }
}
