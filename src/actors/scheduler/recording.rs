//! Reports the scheduler's calls to the flight recorder.

use super::SchedulerActor;
use crate::actors::messages::{ClonePool, TakeRecording};
use crate::actors::recordings;
use crate::actors::runtime::stop_system;
use crate::config::RecorderConfig;
use crate::engine::state::EngineState;
use crate::metrics;
use crate::recorder::{Cause, RawRecording, Recorder, TooLarge};
use actix::{ActorFutureExt, AsyncContext, Context, Handler, MailboxError, MessageResult, WrapFuture};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// After a failure, the next automatic recording comes no sooner than this, so that a device that keeps failing does
/// not fill the disk.
const LEAST_INTERVAL: Duration = Duration::from_secs(60);

/// The longest time that a stopping engine waits for its recording, because supervisors restart a process that is
/// silent for too long.
const MAX_WAIT: Duration = Duration::from_secs(20);

/// The recorder, if recording is on.
pub(super) struct Recording {
    pub recorder: Option<Box<Recorder>>,
    config: RecorderConfig,
    /// When a recording was last written automatically.
    last_written: Option<Instant>,
}

impl Recording {
    pub fn new(recorder: Option<Recorder>, config: RecorderConfig) -> Self {
        Self { recorder: recorder.map(Box::new), config, last_written: None }
    }

    /// Calls `tell` with the recorder, if there is one.
    pub fn hear(&mut self, tell: impl FnOnce(&mut Recorder)) {
        if let Some(recorder) = &mut self.recorder {
            tell(recorder);
        }
    }

    pub fn report(&self) {
        if let Some(recorder) = &self.recorder {
            metrics::recorder(recorder.num_bytes(), recorder.length());
        }
    }

    fn take_after_failure(&mut self) -> Option<RawRecording> {
        let is_soon = self.last_written.is_some_and(|last| last.elapsed() < LEAST_INTERVAL);
        let raw = self.recorder.as_ref().filter(|_| !is_soon)?.take()?;
        self.last_written = Some(Instant::now());
        Some(raw)
    }

    /// Writes a recording in the background, after a failure of the executor that the engine survives.
    pub fn write_beside(&mut self) {
        let Some(raw) = self.take_after_failure() else { return };
        let config = self.config.clone();
        let write = move || write(raw, &config);
        if let Err(error) = std::thread::Builder::new().name("pagetide-recording".into()).spawn(write) {
            tracing::error!("there is no recording of the failure: no thread for it: {error}");
        }
    }

    /// Writes a recording and waits for it, within limits, because the process is about to end.
    pub fn write_now(&mut self) {
        let Some(raw) = self.take_after_failure() else { return };
        let config = self.config.clone();
        within(MAX_WAIT, move || write(raw, &config));
    }
}

/// Runs `write` on a thread of its own and waits for it. False if it takes longer than `most`.
fn within(most: Duration, write: impl FnOnce() + Send + 'static) -> bool {
    let (done, is_done) = mpsc::channel();
    let write = move || {
        write();
        // The caller may no longer wait.
        let _ = done.send(());
    };
    if let Err(error) = std::thread::Builder::new().name("pagetide-recording".into()).spawn(write) {
        tracing::error!("there is no recording of the failure: no thread for it: {error}");
        return false;
    }
    let in_time = is_done.recv_timeout(most).is_ok();
    if !in_time {
        tracing::error!("there may be no recording of the failure: it is not written after {} s", most.as_secs());
    }
    in_time
}

fn write(raw: RawRecording, config: &RecorderConfig) {
    if let Err(error) = recordings::write(raw, Cause::Failure, config) {
        tracing::error!("there is no recording of the failure: {error}");
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_an_engine_waits_for_its_recording_but_not_for_long() {
        let (sender, written) = mpsc::channel();
        assert!(within(Duration::from_secs(60), move || sender.send(1).unwrap()));
        assert_eq!(written.try_recv(), Ok(1), "it was waited for");
        let (release, hang) = mpsc::channel::<()>();
        assert!(!within(Duration::from_millis(10), move || hang.recv().unwrap_or(())));
        drop(release);
    }
}
