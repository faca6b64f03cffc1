//! Measures how long samples are paused by memory pressure.

use std::time::{Duration, Instant};

/// The pause of one sample. All beams of a search count as one sample.
#[derive(Clone, Copy, Default)]
pub struct Pause {
    /// Sequences that wait to come back.
    num_seqs: usize,
    /// When the first of them was paused.
    since: Option<Instant>,
}

impl Pause {
    /// One more of its sequences is paused. True if it is the first.
    pub fn begin(&mut self, now: Instant) -> bool {
        self.num_seqs += 1;
        self.since.replace(self.since.unwrap_or(now)).is_none()
    }

    /// One of them has come back. If it is the last: how long the sample was paused.
    pub fn end(&mut self, now: Instant) -> Option<Duration> {
        self.num_seqs = self.num_seqs.saturating_sub(1);
        let since = self.since.take_if(|_| self.num_seqs == 0)?;
        Some(now.saturating_duration_since(since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_paused_until_its_last_sequence_has_come_back() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut pause = Pause::default();
        assert_eq!(pause.end(at(0)), None, "it never began");
        assert!(pause.begin(at(10)));
        assert!(!pause.begin(at(20)));
        assert_eq!(pause.end(at(30)), None);
        assert_eq!(pause.end(at(50)), Some(Duration::from_millis(40)));
        assert!(pause.begin(at(60)));
        assert_eq!(pause.end(at(61)), Some(Duration::from_millis(1)));
    }
}
