//! The metrics under llama.cpp's names (`metrics.llama_cpp_names`), for dashboards that expect those. They have no
//! labels, and their times are in seconds with fractions, so they are counted and written here.

use super::ended::EndedRequest;
use super::table::MetricKind;
use std::fmt::Write;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Starts counting under llama.cpp's names. Only the first call has an effect.
pub fn install() {
    COUNTS.get_or_init(|| Counts { start_unix_s: unix_time_s(), ..Counts::default() });
}

/// When the counting began; `None` before [`install`].
pub fn start_unix_s() -> Option<u64> {
    COUNTS.get().map(|counts| counts.start_unix_s)
}

static COUNTS: OnceLock<Counts> = OnceLock::new();

#[derive(Default)]
struct Counts {
    start_unix_s: u64,
    /// Prompt tokens that were computed, and those from the prefix cache.
    prompt: AtomicU64,
    cached: AtomicU64,
    predicted: AtomicU64,
    /// Of requests that have ended: prompt tokens that were computed, and the time until the first token.
    ended_prompt: AtomicU64,
    prompt_us: AtomicU64,
    /// Tokens after the first, and their time.
    ended_predicted: AtomicU64,
    predicted_us: AtomicU64,
    steps: AtomicU64,
    /// Sequences of all steps together.
    sequences: AtomicU64,
    longest: AtomicU64,
    running: AtomicU64,
    waiting: AtomicU64,
}

/// A metric of llama.cpp's.
pub struct LlamaCppMetric {
    pub name: &'static str,
    pub kind: MetricKind,
    pub help: &'static str,
    value: fn(&Counts) -> f64,
}

const fn counter(name: &'static str, help: &'static str, value: fn(&Counts) -> f64) -> LlamaCppMetric {
    LlamaCppMetric { name, kind: MetricKind::Counter, help, value }
}

const fn gauge(name: &'static str, help: &'static str, value: fn(&Counts) -> f64) -> LlamaCppMetric {
    LlamaCppMetric { name, kind: MetricKind::Gauge, help, value }
}

const NO_SPECULATION: &str = "Always 0: there is no speculative decoding.";

/// All of them, in the order of the documentation.
pub static LLAMA_CPP_METRICS: [LlamaCppMetric; 15] = [
    counter("llamacpp:prompt_tokens_total", "Prompt tokens that were computed, without cached ones.", |counts| {
        count(&counts.prompt)
    }),
    counter("llamacpp:prompt_tokens_cached_total", "Prompt tokens from the prefix cache.", |counts| {
        count(&counts.cached)
    }),
    counter("llamacpp:prompt_seconds_total", "Time from a request's first step to its first token.", |counts| {
        seconds(&counts.prompt_us)
    }),
    counter("llamacpp:tokens_predicted_total", "Generated tokens.", |counts| count(&counts.predicted)),
    counter(
        "llamacpp:tokens_predicted_seconds_total",
        "Time from a request's first token to its last one, pauses included.",
        |counts| seconds(&counts.predicted_us),
    ),
    counter("llamacpp:n_decode_total", "Steps of the engine.", |counts| count(&counts.steps)),
    counter(
        "llamacpp:n_tokens_max",
        "The most tokens that a sequence had at its end, its prompt included.",
        |counts| count(&counts.longest),
    ),
    counter("llamacpp:spec_decode_num_draft_tokens_total", NO_SPECULATION, |_| 0.0),
    counter("llamacpp:spec_decode_num_accepted_tokens_total", NO_SPECULATION, |_| 0.0),
    counter("llamacpp:spec_decode_num_drafts_total", NO_SPECULATION, |_| 0.0),
    gauge(
        "llamacpp:prompt_tokens_seconds",
        "Computed prompt tokens a second, mean over the requests that have ended.",
        |counts| rate(&counts.ended_prompt, &counts.prompt_us),
    ),
    gauge(
        "llamacpp:predicted_tokens_seconds",
        "Tokens a second after a request's first one, mean over the requests that have ended.",
        |counts| rate(&counts.ended_predicted, &counts.predicted_us),
    ),
    gauge("llamacpp:requests_processing", "Running sequences.", |counts| count(&counts.running)),
    gauge("llamacpp:requests_deferred", "Waiting sequences.", |counts| count(&counts.waiting)),
    gauge("llamacpp:n_busy_slots_per_decode", "Mean number of sequences in a step.", |counts| {
        ratio(count(&counts.sequences), count(&counts.steps))
    }),
];

fn count(counter: &AtomicU64) -> f64 {
    counter.load(Ordering::Relaxed) as f64
}

fn seconds(microseconds: &AtomicU64) -> f64 {
    count(microseconds) / 1e6
}

fn rate(tokens: &AtomicU64, microseconds: &AtomicU64) -> f64 {
    ratio(count(tokens), seconds(microseconds))
}

/// 0 where there is nothing to divide by.
fn ratio(of: f64, by: f64) -> f64 {
    if by > 0.0 { of / by } else { 0.0 }
}

fn add(counter: &AtomicU64, more: usize) {
    counter.fetch_add(more as u64, Ordering::Relaxed);
}

fn add_time(microseconds: &AtomicU64, time: Duration) {
    microseconds.fetch_add(time.as_micros() as u64, Ordering::Relaxed);
}

fn unix_time_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The metrics as text; empty before [`install`].
pub(super) fn render() -> String {
    COUNTS.get().map(Counts::render).unwrap_or_default()
}

pub(super) fn set_requests(waiting: usize, running: usize) {
    if let Some(counts) = COUNTS.get() {
        counts.waiting.store(waiting as u64, Ordering::Relaxed);
        counts.running.store(running as u64, Ordering::Relaxed);
    }
}

pub(super) fn prompt_tokens(prompt: usize, cached: usize) {
    if let Some(counts) = COUNTS.get() {
        add(&counts.prompt, prompt - cached);
        add(&counts.cached, cached);
    }
}

pub(super) fn generated_tokens(tokens: usize) {
    if let Some(counts) = COUNTS.get() {
        add(&counts.predicted, tokens);
    }
}

pub(super) fn step(sequences: usize) {
    if let Some(counts) = COUNTS.get() {
        add(&counts.steps, 1);
        add(&counts.sequences, sequences);
    }
}

pub(super) fn request_ended(ended: &EndedRequest) {
    if let Some(counts) = COUNTS.get() {
        counts.end(ended);
    }
}

impl Counts {
    fn end(&self, ended: &EndedRequest) {
        let longest = ended.prompt_tokens + ended.generated.iter().copied().max().unwrap_or(0);
        self.longest.fetch_max(longest as u64, Ordering::Relaxed);
        let (Some(queued), Some(first)) = (ended.queued, ended.first_token) else { return };
        add(&self.ended_prompt, ended.prompt_tokens.saturating_sub(ended.cached_tokens));
        add_time(&self.prompt_us, first.saturating_sub(queued));
        add(&self.ended_predicted, ended.generated.iter().map(|tokens| tokens.saturating_sub(1)).sum());
        add_time(&self.predicted_us, ended.last_token.unwrap_or(first).saturating_sub(first));
    }

    fn render(&self) -> String {
        let mut page = String::new();
        for LlamaCppMetric { name, kind, help, value } in &LLAMA_CPP_METRICS {
            let (kind, value) = (kind.name(), value(self));
            // Writing to a string cannot fail.
            let _ = writeln!(page, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
        }
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uses its own counts, because the program's are global.
    #[test]
    fn tokens_and_times_are_counted_under_llama_cpps_names() {
        let counts = Counts::default();
        add(&counts.prompt, 7);
        counts.end(&EndedRequest {
            queued: Some(Duration::from_millis(500)),
            first_token: Some(Duration::from_millis(1000)),
            last_token: Some(Duration::from_millis(3000)),
            prompt_tokens: 10,
            cached_tokens: 3,
            generated: vec![5, 4],
            ..EndedRequest::default()
        });
        let page = counts.render();
        for line in [
            "# TYPE llamacpp:prompt_tokens_total counter",
            "llamacpp:prompt_tokens_total 7",
            "llamacpp:prompt_seconds_total 0.5",
            "llamacpp:tokens_predicted_seconds_total 2",
            "llamacpp:n_tokens_max 15",
            "llamacpp:prompt_tokens_seconds 14",
            "# TYPE llamacpp:predicted_tokens_seconds gauge",
            "llamacpp:predicted_tokens_seconds 3.5",
            "llamacpp:n_busy_slots_per_decode 0",
        ] {
            assert!(page.lines().any(|other| other == line), "{line} is not in\n{page}");
        }
    }
}
