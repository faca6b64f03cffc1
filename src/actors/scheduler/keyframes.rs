//! Takes keyframes of the engine's state for the flight recorder, and hands out recordings.

use super::SchedulerActor;
use crate::messages::{ClonePool, TakeRecording};
use crate::stop::stop_system;
use actix::{ActorFutureExt, AsyncContext, Context, Handler, MailboxError, MessageResult, WrapFuture};
use pagetide_engine::state::EngineState;
use pagetide_recorder::TooLarge;

impl SchedulerActor {
    /// Takes a keyframe, if it is time for one. No step can be planned now, and no message is handled meanwhile.
    pub(super) fn note_state(&mut self, ctx: &mut Context<Self>) {
        if !self.recording.recorder.as_ref().is_some_and(|recorder| recorder.wants_keyframe()) {
            return;
        }
        let pools = (self.allocator.send(ClonePool), self.swap_pool.send(ClonePool));
        let pools = async { Ok((pools.0.await?, pools.1.await?)) };
        ctx.wait(pools.into_actor(self).map(|pools: Result<_, MailboxError>, this, _| match pools {
            Ok((device, swap)) => {
                let state = EngineState { scheduler: this.scheduler().clone(), device, swap };
                this.recording.hear(|recorder| {
                    if let Err(TooLarge { keyframe_bytes, is_first: true }) = recorder.keyframe(state) {
                        tracing::warn!(
                            "recording pauses when its memory is full, until the state of this engine is smaller: it takes \
                             {} MiB now, and recorder.max_mib has to be more than three times that",
                            keyframe_bytes.div_ceil(1 << 20)
                        );
                    }
                });
            }
            Err(_) => stop_system("a pool's actor is gone"),
        }));
    }
}

impl Handler<TakeRecording> for SchedulerActor {
    type Result = MessageResult<TakeRecording>;

    fn handle(&mut self, _: TakeRecording, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.recording.recorder.as_ref().and_then(|recorder| recorder.take()))
    }
}
