//! What follows a replay.

use pagetide_recorder::{RecordedEvent, ReplayOutcome, Replayer};

/// Sees each event of a recording that is replayed. Times are since its beginning, in µs.
pub trait ReplayObserver {
    /// The state that it starts from.
    fn begin(&mut self, replayer: &Replayer);

    /// An event was applied.
    fn see(&mut self, at_us: u64, event: &RecordedEvent, outcome: &ReplayOutcome, replayer: &Replayer);

    fn end(&mut self, at_us: u64);
}
