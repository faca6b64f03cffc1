//! A request that has ended, as a line of the log. No text of prompts or outputs is ever in it.

use crate::telemetry::timeline::{Run, Stages};
use std::time::{Duration, Instant};

/// The target of the lines, for filters: `info,pagetide::access=warn`.
pub const ACCESS: &str = "pagetide::access";

/// All that is known of a request at its end.
#[derive(Clone, Debug)]
pub struct Report {
    pub request_id: String,
    /// Of the trace that it is part of, if there is one.
    pub trace_id: Option<String>,
    /// The name of the API key.
    pub key: Option<String>,
    pub method: String,
    /// The route.
    pub path: &'static str,
    /// 499 where the client left before there was one.
    pub status: u16,
    pub arrived: Instant,
    pub ended: Instant,
    /// One for each prompt, in their order; empty where nothing was asked of the engine.
    pub runs: Vec<Run>,
    /// Why it ended before its time.
    pub cut: Option<&'static str>,
}

impl Report {
    pub fn duration(&self) -> Duration {
        self.ended.saturating_duration_since(self.arrived)
    }

    pub fn prompt_tokens(&self) -> usize {
        self.runs.iter().map(|run| run.prompt_tokens).sum()
    }

    pub fn cached_tokens(&self) -> usize {
        self.runs.iter().map(|run| run.cached_tokens).sum()
    }

    pub fn output_tokens(&self) -> usize {
        self.runs.iter().map(|run| run.output_tokens).sum()
    }

    /// What it has cost: all that was made, and the prompts that were worked on.
    pub fn used_tokens(&self) -> usize {
        let prompts = self.runs.iter().filter(|run| run.has_started()).map(|run| run.prompt_tokens);
        prompts.sum::<usize>() + self.output_tokens()
    }

    pub fn preemptions(&self) -> usize {
        self.runs.iter().map(|run| run.preemptions).sum()
    }

    /// The prompt that ended last: what the client waited for.
    pub fn longest(&self) -> Option<&Run> {
        self.runs.iter().max_by_key(|run| run.ended(self.ended))
    }

    /// The engine's numbers of its prompts, as recordings have them: `r12`, or `r12 and 3 more`.
    pub fn engine_requests(&self) -> String {
        match self.runs.as_slice() {
            [] => String::new(),
            [run] => run.request.to_string(),
            [first, more @ ..] => format!("{} and {} more", first.request, more.len()),
        }
    }

    /// `stop`, `length`, `cancelled` (the client has gone), `failed`, or why it was cut; empty where nothing was asked of
    /// the engine.
    pub fn finish(&self) -> &'static str {
        match (self.cut, self.longest()) {
            (Some(why), _) => why,
            (None, Some(run)) => run.finish.unwrap_or("cancelled"),
            (None, None) => "",
        }
    }

    /// From the arrival to the first token of the prompt that had one first.
    pub fn first_token(&self) -> Option<Duration> {
        let first = self.runs.iter().filter_map(Run::first_token_at).min()?;
        Some(first.saturating_duration_since(self.arrived))
    }

    /// What never came to the engine was read, or made by the HTTP server, all the time: that is told as its queue.
    pub fn stages(&self) -> Stages {
        let unheard = Stages { queue: self.duration(), ..Stages::default() };
        self.longest().map_or(unheard, |run| run.stages(self.arrived, self.ended))
    }

    /// One line: a request to the engine at info, any other at debug; and a warning where it took longer than `slow`.
    pub fn log(&self, slow: Option<Duration>) {
        self.log_answer();
        self.log_slow(slow);
    }

    fn log_answer(&self) {
        let (trace_id, key) = (self.trace_id.as_deref(), self.key.as_deref());
        let duration_ms = ms(self.duration());
        if self.runs.is_empty() {
            tracing::debug!(
                target: ACCESS,
                request_id = self.request_id,
                trace_id,
                key,
                method = self.method,
                path = self.path,
                status = self.status,
                duration_ms,
                "answered"
            );
            return;
        }
        tracing::info!(
            target: ACCESS,
            request_id = self.request_id,
            trace_id,
            key,
            method = self.method,
            path = self.path,
            status = self.status,
            engine_requests = self.engine_requests(),
            prompt_tokens = self.prompt_tokens(),
            cached_tokens = self.cached_tokens(),
            output_tokens = self.output_tokens(),
            finish = self.finish(),
            first_token_ms = self.first_token().map(ms),
            duration_ms,
            "answered"
        );
    }

    fn log_slow(&self, slow: Option<Duration>) {
        let (trace_id, key) = (self.trace_id.as_deref(), self.key.as_deref());
        let duration_ms = ms(self.duration());
        if slow.is_some_and(|slow| self.duration() > slow) {
            let Stages { queue, prefill, decode, paused } = self.stages();
            tracing::warn!(
                request_id = self.request_id,
                trace_id,
                key,
                path = self.path,
                engine_requests = self.engine_requests(),
                duration_ms,
                queue_ms = ms(queue),
                prefill_ms = ms(prefill),
                decode_ms = ms(decode),
                paused_ms = ms(paused),
                preemptions = self.preemptions(),
                prompts = self.runs.len(),
                prompt_tokens = self.prompt_tokens(),
                cached_tokens = self.cached_tokens(),
                output_tokens = self.output_tokens(),
                finish = self.finish(),
                "a slow request"
            );
        }
    }
}

fn ms(duration: Duration) -> u64 {
    duration.as_millis() as u64
}
