//! The progress of downloads.

use std::sync::{Arc, Mutex, MutexGuard};

/// Hears of bytes fetched and bytes to fetch.
pub type DownloadProgress = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// Counts the bytes of a few files, one after the other.
#[derive(Clone)]
pub struct DownloadMeter {
    state: Arc<Mutex<MeterCounts>>,
    report: DownloadProgress,
}

struct MeterCounts {
    /// Of files that are whole.
    done: u64,
    /// Of the file that is being fetched, with what earlier tries brought.
    file_bytes: u64,
    total: u64,
}

impl DownloadMeter {
    pub fn new(total: u64, report: DownloadProgress) -> Self {
        Self { state: Arc::new(Mutex::new(MeterCounts { done: 0, file_bytes: 0, total })), report }
    }

    fn state(&self) -> MutexGuard<'_, MeterCounts> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Bytes of the current file so far.
    pub fn file_bytes(&self) -> u64 {
        self.state().file_bytes
    }

    pub fn file_done(&self) {
        let mut state = self.state();
        state.done += std::mem::take(&mut state.file_bytes);
    }

    /// A try for a file of so many bytes, of which some are there.
    pub fn begin_file(&self, bytes: u64, have: u64) {
        let mut state = self.state();
        state.file_bytes = have;
        // A mirror may not have told it before.
        state.total = state.total.max(state.done.saturating_add(bytes));
    }

    /// Bytes of the file that is being fetched.
    pub fn came(&self, bytes: u64) {
        let (done, total) = {
            let mut state = self.state();
            state.file_bytes += bytes;
            (state.done + state.file_bytes, state.total)
        };
        (self.report)(done, total);
    }
}
