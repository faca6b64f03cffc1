//! Shows progress: as a bar on a terminal, else as log lines.

use indicatif::{HumanBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};
use pagetide_actors::runtime::{LoadPhase, LoadProgress};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Interval between two log lines.
const LOG_EVERY: Duration = Duration::from_secs(5);

/// Is told the bytes done and in total.
type Show = Box<dyn FnMut(u64, u64) + Send>;

/// Shows the download and the loading of a model: bytes, MiB/s, remaining time.
pub fn loading() -> LoadProgress {
    let on_terminal = std::io::stderr().is_terminal();
    let mut current: Option<(LoadPhase, u64, Show)> = None;
    Box::new(move |phase, done, total| {
        // Another total means another download: the small files come before the weights.
        if current.as_ref().is_none_or(|(shown, of, _)| (*shown, *of) != (phase, total)) {
            let show = if on_terminal { bar(phase, ProgressDrawTarget::stderr()) } else { lines(phase, done) };
            current = Some((phase, total, show));
        }
        if let Some((_, _, show)) = &mut current {
            show(done, total);
        }
    })
}

fn bar(phase: LoadPhase, target: ProgressDrawTarget) -> Show {
    let what = match phase {
        LoadPhase::Download => "Downloading",
        LoadPhase::Load => "Loading",
    };
    let template =
        format!("{what} {{wide_bar}} {{binary_bytes}}/{{binary_total_bytes}} {{binary_bytes_per_sec}} ETA {{eta}}");
    let style = ProgressStyle::with_template(&template).expect("the template is valid");
    let bar = ProgressBar::with_draw_target(None, target).with_style(style);
    Box::new(move |done, total| {
        bar.set_length(total);
        bar.set_position(done);
        if done >= total {
            bar.finish_and_clear();
        }
    })
}

/// `from` is the number of bytes that were there before.
fn lines(phase: LoadPhase, from: u64) -> Show {
    let what = match phase {
        LoadPhase::Download => "downloading",
        LoadPhase::Load => "loading",
    };
    let started = Instant::now();
    let (mut last_line, mut complete) = (started, false);
    Box::new(move |done, total| {
        if complete || (done < total && last_line.elapsed() < LOG_EVERY) {
            return;
        }
        complete = done >= total;
        last_line = Instant::now();
        let seconds = started.elapsed().as_secs_f64();
        let mib_per_s = done.saturating_sub(from) as f64 / f64::from(1 << 20) / seconds.max(1e-9);
        let (ready, of) = (HumanBytes(done), HumanBytes(total));
        tracing::info!("{what} the model: {ready} of {of}, {mib_per_s:.0} MiB/s, {seconds:.1} s");
    })
}

/// Progress of the requests of a file or a benchmark: done and total, tokens per second, remaining time.
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

    /// Another request is done, and has generated `tokens`.
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
