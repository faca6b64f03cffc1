//! Progress on a terminal as a bar, elsewhere as log lines.

use crate::actors::runtime::LoadProgress;
use indicatif::{HumanBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Between two log lines.
const LOG_EVERY: Duration = Duration::from_secs(5);

/// Shows a model's loading: bytes, MiB/s, time left.
pub fn loading() -> LoadProgress {
    if std::io::stderr().is_terminal() { loading_bar(ProgressDrawTarget::stderr()) } else { loading_lines() }
}

fn loading_bar(target: ProgressDrawTarget) -> LoadProgress {
    let style = ProgressStyle::with_template(
        "Loading {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} ETA {eta}",
    );
    let bar = ProgressBar::with_draw_target(None, target).with_style(style.expect("the template is valid"));
    Box::new(move |done, total| {
        bar.set_length(total);
        bar.set_position(done);
        if done >= total {
            bar.finish_and_clear();
        }
    })
}

fn loading_lines() -> LoadProgress {
    let started = Instant::now();
    let (mut last_line, mut complete) = (started, false);
    Box::new(move |done, total| {
        if complete || (done < total && last_line.elapsed() < LOG_EVERY) {
            return;
        }
        complete = done >= total;
        last_line = Instant::now();
        let seconds = started.elapsed().as_secs_f64();
        let mib_per_s = done as f64 / f64::from(1 << 20) / seconds.max(1e-9);
        let (read, of) = (HumanBytes(done), HumanBytes(total));
        tracing::info!("loading the model: {read} of {of}, {mib_per_s:.0} MiB/s, {seconds:.1} s");
    })
}

/// Requests of a file or a benchmark: done of total, tokens per second, time left.
pub struct RequestProgress {
    bar: Option<ProgressBar>,
    total: u64,
    done: u64,
    tokens: u64,
    started: Instant,
    last_line: Instant,
}

impl RequestProgress {
    pub fn new(total: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} requests {msg} ETA {eta}");
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            bar.with_style(style.expect("the template is valid"))
        });
        let now = Instant::now();
        Self { bar, total, done: 0, tokens: 0, started: now, last_line: now }
    }

    /// One more request is done; it generated `tokens`.
    pub fn request_done(&mut self, tokens: u64) {
        self.done += 1;
        self.tokens += tokens;
        let seconds = self.started.elapsed().as_secs_f64().max(1e-9);
        let speed = format!("{:.1} tok/s", self.tokens as f64 / seconds);
        match &self.bar {
            Some(bar) => {
                bar.set_message(speed);
                bar.set_position(self.done);
            }
            None if self.last_line.elapsed() >= LOG_EVERY || self.done == self.total => {
                self.last_line = Instant::now();
                let left_s = seconds / self.done as f64 * (self.total - self.done) as f64;
                tracing::info!("{} of {} requests, {speed}, about {left_s:.0} s left", self.done, self.total);
            }
            None => {}
        }
    }
}

impl Drop for RequestProgress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
