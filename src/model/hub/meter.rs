//! The progress of downloads.

use std::sync::{Arc, Mutex, MutexGuard};

/// Is told the bytes downloaded so far and in total.
pub type DownloadProgress = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// Counts the bytes of several files that are downloaded one after the other.
#[derive(Clone)]
pub struct DownloadMeter {
    state: Arc<Mutex<MeterCounts>>,
    report: DownloadProgress,
}

struct MeterCounts {
    /// Bytes of complete files.
    done: u64,
    /// Bytes of the current file, including earlier attempts.
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

    /// An attempt to download a file of `bytes` bytes begins, of which `have` are there.
    pub fn begin_file(&self, bytes: u64, have: u64) {
        let mut state = self.state();
        state.file_bytes = have;
        // A mirror may not have reported the size before.
        state.total = state.total.max(state.done.saturating_add(bytes));
    }

    /// More bytes of the current file have arrived.
    pub fn came(&self, bytes: u64) {
        let (done, total) = {
            let mut state = self.state();
            state.file_bytes += bytes;
            (state.done + state.file_bytes, state.total)
        };
        (self.report)(done, total);
    }
}
