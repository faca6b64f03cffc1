//! Takes snapshots for the console.

use super::SchedulerActor;
use crate::messages::{Look, ViewPool};
use crate::snapshot::{Snapshot, Watched};
use crate::stop::stop_system;
use actix::{ActorFutureExt, AsyncContext, Context, Handler, MailboxError, ResponseFuture, WrapFuture};
use pagetide_base::error::ApiError;
use pagetide_engine::scheduler::SchedulerSnapshot;
use std::time::Instant;
use tokio::sync::oneshot;

impl Handler<Look> for SchedulerActor {
    type Result = ResponseFuture<Result<Snapshot, ApiError>>;

    fn handle(&mut self, look: Look, ctx: &mut Self::Context) -> Self::Result {
        let (answer, snapshot) = oneshot::channel();
        // Not from within a handler: see `wake_soon`.
        ctx.spawn(actix::fut::ready(()).map(move |(), this: &mut Self, ctx| this.look(look, answer, ctx)));
        Box::pin(async move { snapshot.await.map_err(|_| ApiError::engine("the engine has stopped")) })
    }
}

impl SchedulerActor {
    /// Takes a snapshot of the scheduler and both pools. No other message is handled meanwhile, and no step is being
    /// planned.
    fn look(&mut self, Look { most_waiting }: Look, answer: oneshot::Sender<Snapshot>, ctx: &mut Context<Self>) {
        let started = Instant::now();
        let SchedulerSnapshot { population, seqs } = self.scheduler().snapshot(most_waiting);
        // If a client has gone, the next message cancels its request.
        let arrived = |request| self.clients.get(&request).map_or(started, |client| client.arrived);
        let seqs = seqs.into_iter().map(|view| Watched { arrived: arrived(view.rank.request), view }).collect();
        let (block_size, block_bytes) = (self.settings.block_size, self.settings.block_bytes);
        let (totals, moves) = (self.totals, self.moves.take(started));
        let (allocator, swap_pool) = (self.allocator.clone(), self.swap_pool.clone());
        let pools = async move { Ok((allocator.send(ViewPool).await?, swap_pool.send(ViewPool).await?)) };
        ctx.wait(pools.into_actor(self).map(move |pools: Result<_, MailboxError>, _, _| match pools {
            Ok((device, swap)) => {
                let cost = started.elapsed();
                let snapshot =
                    Snapshot { seqs, population, block_size, block_bytes, device, swap, totals, moves, cost };
                // The watcher may have gone.
                let _ = answer.send(snapshot);
            }
            Err(_) => stop_system("a pool's actor is gone"),
        }));
    }
}
