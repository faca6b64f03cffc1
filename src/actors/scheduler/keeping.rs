//! Reads prefixes out of the pools for files, puts them back, and erases them.
//!
//! Each of these looks into the pools between two steps, as flushing does. What it asks of the executor is sent in the
//! same moment, so that it has its place among the plans. Nothing is held in the pools meanwhile.

use super::SchedulerActor;
use crate::messages::{
    CountPrefix, Erase, ErasePrefix, ExecutorFailed, Locate, NamePrefix, PutBack, PutBackPrefix, ReadKv, ReadPrefix,
    WriteKv,
};
use crate::stop::stop_system;
use actix::{ActorFutureExt, AsyncContext, Context, Handler, MailboxError, MessageResult, ResponseFuture, WrapFuture};
use pagetide_base::error::ApiError;
use pagetide_base::ids::KvPlace;
use pagetide_engine::kept_prefix::leading;
use pagetide_engine::prefix_cache::BlockHash;
use std::future::Future;
use std::sync::Arc;
use tokio::sync::oneshot;

type KeepingAnswer<T> = oneshot::Sender<Result<T, ApiError>>;

impl Handler<NamePrefix> for SchedulerActor {
    type Result = MessageResult<NamePrefix>;

    fn handle(&mut self, NamePrefix { salt, tokens }: NamePrefix, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.scheduler().names_of(salt.as_deref().unwrap_or_default(), &tokens))
    }
}

impl Handler<CountPrefix> for SchedulerActor {
    type Result = ResponseFuture<Result<usize, ApiError>>;

    fn handle(&mut self, CountPrefix(names): CountPrefix, ctx: &mut Self::Context) -> Self::Result {
        between_steps(ctx, |this, answer, ctx| {
            // The caller may have gone, here and below.
            this.find_prefix(names, ctx, |_, places, _| drop(answer.send(Ok(places.len()))));
        })
    }
}

impl Handler<ReadPrefix> for SchedulerActor {
    type Result = ResponseFuture<Result<Vec<u8>, ApiError>>;

    fn handle(&mut self, ReadPrefix(names): ReadPrefix, ctx: &mut Self::Context) -> Self::Result {
        between_steps(ctx, |this, answer, ctx| {
            this.find_prefix(names, ctx, |this, places, ctx| {
                let (block_bytes, failures) = (this.settings.block_bytes, this.failures);
                this.answer_with(this.executor.send(ReadKv { places, block_bytes, failures }), answer, ctx);
            });
        })
    }
}

impl Handler<PutBackPrefix> for SchedulerActor {
    type Result = ResponseFuture<Result<(), ApiError>>;

    fn handle(&mut self, prefix: PutBackPrefix, ctx: &mut Self::Context) -> Self::Result {
        between_steps(ctx, |this, answer, ctx| this.put_back(prefix, answer, ctx))
    }
}

impl Handler<ErasePrefix> for SchedulerActor {
    type Result = ResponseFuture<Result<usize, ApiError>>;

    fn handle(&mut self, ErasePrefix(names): ErasePrefix, ctx: &mut Self::Context) -> Self::Result {
        between_steps(ctx, |this, answer, ctx| this.erase(names, answer, ctx))
    }
}

/// Calls `work` when no step is being planned, and answers what it answers.
fn between_steps<T: 'static>(
    ctx: &mut Context<SchedulerActor>,
    work: impl FnOnce(&mut SchedulerActor, KeepingAnswer<T>, &mut Context<SchedulerActor>) + 'static,
) -> ResponseFuture<Result<T, ApiError>> {
    let (answer, answered) = oneshot::channel();
    // Not from within a handler: see `wake_soon`.
    ctx.spawn(actix::fut::ready(()).map(move |(), this: &mut SchedulerActor, ctx| work(this, answer, ctx)));
    Box::pin(async move { answered.await.unwrap_or_else(|_| Err(ApiError::engine("the engine has stopped"))) })
}

impl SchedulerActor {
    /// Calls `then` with the places of the leading blocks of a prefix. No other message is handled meanwhile.
    fn find_prefix(
        &mut self,
        names: Vec<BlockHash>,
        ctx: &mut Context<Self>,
        then: impl FnOnce(&mut Self, Vec<KvPlace>, &mut Context<Self>) + 'static,
    ) {
        let (allocator, swap_pool, names) = (self.allocator.clone(), self.swap_pool.clone(), Arc::new(names));
        let found =
            async move { Ok((allocator.send(Locate(names.clone())).await?, swap_pool.send(Locate(names)).await?)) };
        ctx.wait(found.into_actor(self).map(|found: Result<_, MailboxError>, this, ctx| match found {
            Ok((device, swap)) => then(this, leading(&device, &swap), ctx),
            Err(_) => stop_system("a pool's actor is gone"),
        }));
    }

    /// The scheduler counts available blocks, to which cached ones belong as free ones do, so it needs not be told.
    fn put_back(
        &mut self,
        PutBackPrefix { names, content }: PutBackPrefix,
        answer: KeepingAnswer<()>,
        ctx: &mut Context<Self>,
    ) {
        let names = Arc::new(names);
        let written = self.allocator.send(PutBack(names.clone()));
        ctx.wait(written.into_actor(self).map(move |written, this, ctx| {
            let Ok(written) = written else { return stop_system("a pool's actor is gone") };
            this.recording.hear(|recorder| recorder.put_back(&names));
            let (block_bytes, failures) = (this.settings.block_bytes, this.failures);
            let (places, blocks): (Vec<usize>, Vec<_>) = written.into_iter().unzip();
            let of = |place: usize| &content[place * block_bytes..(place + 1) * block_bytes];
            let content = places.into_iter().map(of).collect::<Vec<_>>().concat();
            this.answer_with(this.executor.send(WriteKv { blocks, content, failures }), answer, ctx);
        }));
    }

    /// Blocks that a sequence holds stay. No sequence counts on others from one step to the next.
    fn erase(&mut self, names: Vec<BlockHash>, answer: KeepingAnswer<usize>, ctx: &mut Context<Self>) {
        let (allocator, swap_pool, names) = (self.allocator.clone(), self.swap_pool.clone(), Arc::new(names));
        let of_pools = names.clone();
        let erased =
            async move { Ok((allocator.send(Erase(of_pools.clone())).await?, swap_pool.send(Erase(of_pools)).await?)) };
        ctx.wait(erased.into_actor(self).map(move |erased: Result<_, MailboxError>, this, _| match erased {
            Ok((device, swap)) => {
                this.recording.hear(|recorder| recorder.erase(&names));
                let num_erased = device.iter().zip(&swap).filter(|(device, swap)| **device || **swap).count();
                drop(answer.send(Ok(num_erased)));
            }
            Err(_) => stop_system("a pool's actor is gone"),
        }));
    }

    /// Passes on what the executor answers.
    fn answer_with<T: 'static>(
        &self,
        asked: impl Future<Output = Result<Result<T, ExecutorFailed>, MailboxError>> + 'static,
        answer: KeepingAnswer<T>,
        ctx: &mut Context<Self>,
    ) {
        let failures = self.failures;
        ctx.spawn(asked.into_actor(self).map(move |answered, this, ctx| {
            let Ok(answered) = answered else { return stop_system("the executor's actor is gone") };
            if let Err(failure) = &answered
                && this.failures == failures
                && this.scheduler().num_in_flight() == 0
            {
                // Where a step is in flight, its answer tells of the failure.
                this.fail(failure, ctx);
            }
            let failed = |failure: ExecutorFailed| ApiError::engine(format!("the engine failed: {}", failure.message));
            drop(answer.send(answered.map_err(failed)));
        }));
    }
}
