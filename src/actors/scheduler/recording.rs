//! Reports the scheduler's calls to the flight recorder.

use crate::recordings;
use pagetide_config::RecorderConfig;
use pagetide_metrics as metrics;
use pagetide_recorder::{Cause, RawRecording, Recorder};
use std::sync::mpsc::{self, RecvTimeoutError};
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
    /// The last one that was written beside the steps.
    beside: Option<RecordingThread>,
}

impl SchedulerRecording {
    pub fn new(recorder: Option<Recorder>, config: RecorderConfig) -> Self {
        Self { recorder: recorder.map(Box::new), config, last_written: None, beside: None }
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

    /// Writes a recording in the background, after a failure of the executor that the engine survives. If the engine is
    /// stopped before it is written, the stop waits for it.
    pub fn write_beside(&mut self) {
        let Some(raw) = self.take_after_failure() else { return };
        let config = self.config.clone();
        self.beside = RecordingThread::start(move || write(raw, &config));
    }

    /// Writes a recording and waits for it, within limits, because the process is about to end.
    pub fn write_now(&mut self) {
        let Some(raw) = self.take_after_failure() else { return };
        let config = self.config.clone();
        if let Some(thread) = RecordingThread::start(move || write(raw, &config)) {
            thread.wait(MAX_WAIT);
        }
    }
}

impl Drop for SchedulerRecording {
    fn drop(&mut self) {
        if let Some(thread) = self.beside.take() {
            thread.wait(MAX_WAIT);
        }
    }
}

/// A thread that writes a recording.
struct RecordingThread {
    /// Disconnected when the thread has ended.
    ended: mpsc::Receiver<()>,
}

impl RecordingThread {
    fn start(write: impl FnOnce() + Send + 'static) -> Option<Self> {
        let (running, ended) = mpsc::channel();
        let run = move || {
            write();
            drop(running);
        };
        match std::thread::Builder::new().name("pagetide-recording".into()).spawn(run) {
            Ok(_) => Some(Self { ended }),
            Err(error) => {
                tracing::error!("there is no recording of the failure: no thread for it: {error}");
                None
            }
        }
    }

    /// Waits until the thread has ended. False if it takes longer than `most`.
    fn wait(self, most: Duration) -> bool {
        let in_time = self.ended.recv_timeout(most) != Err(RecvTimeoutError::Timeout);
        if !in_time {
            tracing::error!("there may be no recording of the failure: it is not written after {} s", most.as_secs());
        }
        in_time
    }
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
    fn a_recording_is_waited_for_but_not_for_long() {
        let (sender, written) = mpsc::channel();
        let thread = RecordingThread::start(move || sender.send(1).unwrap()).unwrap();
        assert!(thread.wait(Duration::from_secs(60)));
        assert_eq!(written.try_recv(), Ok(1), "it was waited for");
        let (release, hang) = mpsc::channel::<()>();
        let thread = RecordingThread::start(move || hang.recv().unwrap_or(())).unwrap();
        assert!(!thread.wait(Duration::from_millis(10)));
        drop(release);
    }

    #[test]
    fn the_end_of_an_engine_waits_for_a_recording_beside_it() {
        let (release, held) = mpsc::channel::<()>();
        let mut recording = SchedulerRecording::new(None, RecorderConfig::default());
        recording.beside = RecordingThread::start(move || held.recv().unwrap_or(()));
        let (sender, dropped) = mpsc::channel();
        std::thread::spawn(move || {
            drop(recording);
            sender.send(()).unwrap();
        });
        assert_eq!(dropped.recv_timeout(Duration::from_millis(100)), Err(RecvTimeoutError::Timeout), "it is written");
        drop(release);
        dropped.recv().unwrap();
    }
}
