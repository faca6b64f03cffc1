//! The log's way to standard error: a bounded queue, and a thread that writes.
//!
//! Standard error may be a pipe without a reader, a full disk or a stopped terminal. It must never block the code that
//! logs: a line that finds the queue full is dropped and counted, and the log gives the count when it can be written
//! again. The crate tracing-appender does not fit: when the program ends and its thread does not answer, it writes to
//! standard error itself, which blocks in exactly this case; and it does not count lines that could not be written.

use pagetide_metrics as metrics;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Maximum size of the queue in bytes: about ten thousand lines.
pub const MAX_BYTES: usize = 4 << 20;

#[derive(Clone, Default)]
pub struct Lines(Arc<SharedLines>);

#[derive(Default)]
struct SharedLines {
    state: Mutex<WriterState>,
    /// Signals that there is a line to write, or that one has been written.
    changed: Condvar,
}

#[derive(Default)]
struct WriterState {
    waiting: VecDeque<Vec<u8>>,
    num_bytes: usize,
    is_writing: bool,
    /// Lines dropped since the last report.
    num_dropped: u64,
}

impl Lines {
    /// Queues `line`, or drops it if the queue is full.
    pub fn push(&self, line: Vec<u8>) {
        let mut state = self.state();
        if state.num_bytes + line.len() > MAX_BYTES {
            return state.drop_line();
        }
        state.num_bytes += line.len();
        state.waiting.push_back(line);
        self.0.changed.notify_all();
    }

    /// Waits until all lines are written, for at most `most`.
    pub fn flush(&self, most: Duration) {
        let is_busy = |state: &mut WriterState| state.is_writing || !state.waiting.is_empty();
        // It no longer matters whether it was in time.
        drop(self.0.changed.wait_timeout_while(self.state(), most, is_busy));
    }

    /// Writes the lines to `out`, as long as the program runs.
    pub fn write_all_to(&self, mut out: impl Write) {
        loop {
            let line = self.take();
            let written = out.write_all(&line);
            let num_dropped = self.wrote(written.is_ok());
            if num_dropped > 0 {
                tracing::warn!(
                    lines = num_dropped,
                    "log lines were dropped: standard error accepted none, and too many lines waited"
                );
            }
        }
    }

    /// Waits for the next line.
    fn take(&self) -> Vec<u8> {
        let is_empty = |state: &mut WriterState| state.waiting.is_empty();
        let waited = self.0.changed.wait_while(self.state(), is_empty);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        let line = state.waiting.pop_front().unwrap_or_default();
        state.num_bytes -= line.len();
        state.is_writing = true;
        line
    }

    /// Number of dropped lines to report now.
    fn wrote(&self, is_done: bool) -> u64 {
        let mut state = self.state();
        state.is_writing = false;
        if !is_done {
            state.drop_line();
        }
        self.0.changed.notify_all();
        // Not for each line that a slow reader takes, and not without room for the report.
        let can_tell = is_done && state.num_bytes <= MAX_BYTES / 2;
        if can_tell { std::mem::take(&mut state.num_dropped) } else { 0 }
    }

    fn state(&self) -> MutexGuard<'_, WriterState> {
        // No code panics between two changes under this lock.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WriterState {
    fn drop_line(&mut self) {
        self.num_dropped += 1;
        metrics::log_line_dropped();
    }
}

/// The writer for `tracing`, which writes one line at a time.
impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        self.push(line.to_vec());
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A file whose writes wait for room even if another process has made it non-blocking.
pub struct Patient(pub File);

impl Write for Patient {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        loop {
            match self.0.write(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.wait(),
                written => return written,
            }
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

impl Patient {
    fn wait(&self) {
        let mut asked = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
        // SAFETY: the file is open, and the call writes only to `asked`. Whatever it returns, writing is tried again.
        let _ = unsafe { libc::poll(&raw mut asked, 1, 1000) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

    const SOON: Duration = Duration::from_secs(60);

    /// Accepts a line only when the test receives it; the first writes fail.
    struct Slow(SyncSender<Vec<u8>>, u32);

    impl Write for Slow {
        fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
            self.0.send(line.to_vec()).expect("the test receives");
            if self.1 > 0 {
                self.1 -= 1;
                return Err(ErrorKind::StorageFull.into());
            }
            Ok(line.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn slow(num_failures: u32) -> (Lines, Receiver<Vec<u8>>) {
        let (lines, (to, taken)) = (Lines::default(), sync_channel(0));
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer({
            let lines = lines.clone();
            move || lines.clone()
        });
        std::thread::spawn(move || {
            tracing::subscriber::with_default(subscriber.finish(), || writer.write_all_to(Slow(to, num_failures)));
        });
        (lines, taken)
    }

    #[test]
    fn dropped_lines_are_counted_once_there_is_room_again() {
        let (lines, taken) = slow(0);
        let line = vec![b'x'; MAX_BYTES / 4];
        lines.push(b"first".to_vec());
        while !lines.state().is_writing {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Without a reader four lines fit, and the others are dropped at once.
        for _ in 0..7 {
            lines.push(line.clone());
        }
        lines.flush(Duration::from_millis(1));
        assert_eq!(lines.state().num_dropped, 3);
        assert_eq!(taken.recv_timeout(SOON).unwrap(), b"first");
        for _ in 0..4 {
            assert_eq!(taken.recv_timeout(SOON).unwrap().len(), line.len());
        }
        let told = String::from_utf8(taken.recv_timeout(SOON).unwrap()).unwrap();
        assert!(told.contains("WARN") && told.contains("lines=3"), "{told}");
        lines.push(b"last".to_vec());
        assert_eq!(taken.recv_timeout(SOON).unwrap(), b"last");
        lines.flush(SOON);
        assert_eq!(lines.state().num_bytes, 0);
    }

    #[test]
    fn what_cannot_be_written_is_counted_too() {
        let (lines, taken) = slow(2);
        for line in ["a", "b", "c"] {
            lines.push(line.into());
            taken.recv_timeout(SOON).unwrap();
        }
        let told = String::from_utf8(taken.recv_timeout(SOON).unwrap()).unwrap();
        assert!(told.contains("lines=2"), "{told}");
    }
}
