//! The times at which tokens arrive.

use crate::report::RequestOutcome;
use crate::workload::WorkItem;
use std::time::{Duration, Instant};

/// Notes when tokens come.
pub struct Clock {
    sent: Instant,
    ttft: Option<Duration>,
    last: Instant,
    gaps: Vec<Duration>,
}

impl Clock {
    pub fn start() -> Self {
        let now = Instant::now();
        Self { sent: now, ttft: None, last: now, gaps: Vec::new() }
    }

    pub fn tokens(&mut self) {
        let now = Instant::now();
        match self.ttft {
            None => self.ttft = Some(now - self.sent),
            Some(_) => self.gaps.push(now - self.last),
        }
        self.last = now;
    }

    /// Number of times that tokens arrived.
    pub fn num_deliveries(&self) -> usize {
        self.gaps.len() + usize::from(self.ttft.is_some())
    }

    pub fn outcome(
        self,
        item: &WorkItem,
        output_tokens: usize,
        cached_tokens: usize,
        error: Option<String>,
    ) -> RequestOutcome {
        let short = || {
            let wanted = item.output_tokens as usize;
            (output_tokens != wanted).then(|| format!("{output_tokens} tokens came, {wanted} were asked for"))
        };
        RequestOutcome {
            error: error.or_else(short),
            prompt_tokens: item.prompt.len(),
            output_tokens,
            cached_tokens,
            ttft: self.ttft,
            gaps: self.gaps,
            e2e: self.sent.elapsed(),
            ..RequestOutcome::default()
        }
    }
}
