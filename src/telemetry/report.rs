//! A finished request as a log line. It never contains text of prompts or outputs.

use crate::timeline::{Run, Stages};
use std::time::{Duration, Instant};

/// The log target of these lines, for filters such as `info,pagetide::access=warn`.
pub const ACCESS: &str = "pagetide::access";

/// Everything that is known about a request at its end.
#[derive(Clone, Debug)]
pub struct Report {
    pub request_id: String,
    /// The trace that the request belongs to, if any.
    pub trace_id: Option<String>,
    /// The name of the API key.
    pub key: Option<String>,
    pub method: String,
    /// The route.
    pub path: &'static str,
    /// 499 if the client disconnected before there was a status.
    pub status: u16,
    pub arrived: Instant,
    pub ended: Instant,
    /// One entry per prompt, in their order. Empty if the request did not reach the engine.
    pub runs: Vec<Run>,
    /// Why the request was cut short.
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

    /// Tokens that the request has used: all generated tokens, and the prompts that were worked on.
    pub fn used_tokens(&self) -> usize {
        let prompts = self.runs.iter().filter(|run| run.has_started()).map(|run| run.prompt_tokens);
        prompts.sum::<usize>() + self.output_tokens()
    }

    pub fn preemptions(&self) -> usize {
        self.runs.iter().map(|run| run.preemptions).sum()
    }

    /// The prompt that ended last, which is what the client waited for.
    pub fn longest(&self) -> Option<&Run> {
        self.runs.iter().max_by_key(|run| run.ended(self.ended))
    }

    /// The engine's ids of its prompts, as in recordings: `r12`, or `r12 and 3 more`.
    pub fn engine_requests(&self) -> String {
        match self.runs.as_slice() {
            [] => String::new(),
            [run] => run.request.to_string(),
            [first, more @ ..] => format!("{} and {} more", first.request, more.len()),
        }
    }

    /// `stop`, `length`, `cancelled` (the client disconnected), `failed`, or why the request was cut short. Empty if it
    /// did not reach the engine.
    pub fn finish(&self) -> &'static str {
        match (self.cut, self.longest()) {
            (Some(why), _) => why,
            (None, Some(run)) => run.finish.unwrap_or("cancelled"),
            (None, None) => "",
        }
    }

    /// Time from the arrival to the first token of any prompt.
    pub fn first_token(&self) -> Option<Duration> {
        let first = self.runs.iter().filter_map(Run::first_token_at).min()?;
        Some(first.saturating_duration_since(self.arrived))
    }

    /// The stages of the request. The whole time of a request that did not reach the engine counts as queue.
    pub fn stages(&self) -> Stages {
        let unheard = Stages { queue: self.duration(), ..Stages::default() };
        self.longest().map_or(unheard, |run| run.stages(self.arrived, self.ended))
    }

    /// Writes one line: at info for requests to the engine, at debug for others. A request that took longer than `slow`
    /// also gets a warning.
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
