//! Reports the scheduler's calls to the flight recorder.

use crate::recordings;
use pagetide_config::RecorderConfig;
use pagetide_metrics as metrics;
use pagetide_recorder::{Cause, RawRecording, Recorder};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// After a failure, the next automatic recording comes no sooner than this, so that a device that keeps failing does
/// not fill the disk.
const LEAST_INTERVAL: Duration = Duration::from_secs(60);

/// The longest time that a stopping engine waits for its recording, because supervisors restart a process that is
/// silent for too long.
const MAX_WAIT: Duration = Duration::from_secs(20);

/// The recorder, if recording is on.
pub(super) struct SchedulerRecording {
    pub recorder: Option<Box<Recorder>>,
    config: RecorderConfig,
    /// When a recording was last written automatically.
    last_written: Option<Instant>,
}

impl SchedulerRecording {
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
