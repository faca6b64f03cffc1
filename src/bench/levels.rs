//! What was measured at each load: its rounds, its distributions, and what the server told of its memory meanwhile.

use super::report::{BenchReport, PickPercentile, RequestOutcome, Times};
use super::samples::MemorySample;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt;
use std::time::Duration;

/// One load, measured once or several times.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LoadLevel {
    /// How requests were sent: `{"concurrency": 4}`, `{"rate_per_s": 2.0}`, or a word.
    pub sending: Value,
    pub rounds: Vec<BenchReport>,
    /// All rounds together.
    pub all: BenchReport,
    pub distribution: Distribution,
    /// Of all rounds. Times are since the benchmark's first request.
    pub samples: Vec<MemorySample>,
}

/// Measured times in ms: the smallest, 99 percentiles and the largest. Empty if there are none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    pub ttft_ms: Vec<f64>,
    pub itl_ms: Vec<f64>,
    pub e2e_ms: Vec<f64>,
}

/// A level that is being measured.
pub struct LevelInProgress {
    sending: Value,
    rounds: Vec<BenchReport>,
    outcomes: Vec<RequestOutcome>,
    wall: Duration,
    samples: Vec<MemorySample>,
}

impl LevelInProgress {
    pub fn new(sending: Value) -> Self {
        Self { sending, rounds: Vec::new(), outcomes: Vec::new(), wall: Duration::ZERO, samples: Vec::new() }
    }

    pub fn add_round(&mut self, outcomes: Vec<RequestOutcome>, wall: Duration, samples: Vec<MemorySample>) {
        self.rounds.push(BenchReport::new(&outcomes, wall));
        self.outcomes.extend(outcomes);
        self.wall += wall;
        self.samples.extend(samples);
    }

    pub fn done(self) -> LoadLevel {
        let Self { sending, rounds, outcomes, wall, samples } = self;
        LoadLevel {
            sending,
            rounds,
            all: BenchReport::new(&outcomes, wall),
            distribution: Distribution::of(&outcomes),
            samples,
        }
    }
}

impl Distribution {
    /// Of the requests that did not fail.
    pub fn of(outcomes: &[RequestOutcome]) -> Self {
        let good = || outcomes.iter().filter(|outcome| outcome.error.is_none());
        Self {
            ttft_ms: percentiles(good().filter_map(|outcome| outcome.ttft)),
            itl_ms: percentiles(good().flat_map(|outcome| outcome.gaps.iter().copied())),
            e2e_ms: percentiles(good().map(|outcome| outcome.e2e)),
        }
    }
}

fn percentiles(times: impl Iterator<Item = Duration>) -> Vec<f64> {
    let mut ms: Vec<f64> = times.map(|time| time.as_secs_f64() * 1e3).collect();
    ms.sort_by(f64::total_cmp);
    if ms.is_empty() {
        return ms;
    }
    // Nearest rank, as in the table; the first is the smallest.
    let rank = |percent: usize| (ms.len() * percent).div_ceil(100).max(1) - 1;
    // A thousandth of a ms is enough, and a short file is easier to keep.
    (0..=100).map(|percent| (ms[rank(percent)] * 1e3).round() / 1e3).collect()
}

impl LoadLevel {
    /// How requests were sent, in a few words.
    pub fn name(&self) -> String {
        let sending = &self.sending;
        match (sending["concurrency"].as_u64(), sending["rate_per_s"].as_f64(), sending["batch"].as_u64()) {
            (Some(concurrency), ..) => format!("concurrency {concurrency}"),
            (_, Some(rate), _) => format!("{rate} requests/s"),
            (.., Some(batch)) => format!("batch {batch}"),
            _ => sending.as_str().map_or_else(|| sending.to_string(), str::to_owned),
        }
    }

    /// The number alone.
    pub fn short_name(&self) -> String {
        match (self.sending["concurrency"].as_u64(), self.sending["rate_per_s"].as_f64()) {
            (Some(concurrency), _) => concurrency.to_string(),
            (_, Some(rate)) => format!("{rate}/s"),
            _ => self.name(),
        }
    }
}

/// A line for each level.
pub struct Summary<'a>(pub &'a [LoadLevel]);

pub const SUMMARY_COLUMNS: [&str; 9] =
    ["out tok/s", "req/s", "TTFT p50", "p99", "ITL p50", "p99", "E2E p50", "p99", "failed"];

impl LoadLevel {
    /// In the order of [`SUMMARY_COLUMNS`]; times in ms.
    pub fn summary(&self) -> [String; 9] {
        let all = &self.all;
        let of = |times: Option<Times>, what: PickPercentile| {
            times.map_or("-".into(), |times| format!("{:.1}", what(times)))
        };
        let (p50, p99): (PickPercentile, PickPercentile) = (|times| times.p50, |times| times.p99);
        [
            format!("{:.1}", all.out_tok_per_s),
            format!("{:.2}", all.req_per_s),
            of(all.ttft_ms, p50),
            of(all.ttft_ms, p99),
            of(all.itl_ms, p50),
            of(all.itl_ms, p99),
            of(all.e2e_ms, p50),
            of(all.e2e_ms, p99),
            all.failed.to_string(),
        ]
    }
}

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<18}", "times in ms")?;
        SUMMARY_COLUMNS.iter().try_for_each(|column| write!(f, "{column:>11}"))?;
        for level in self.0 {
            write!(f, "\n{:<18}", level.name())?;
            level.summary().iter().try_for_each(|cell| write!(f, "{cell:>11}"))?;
        }
        writeln!(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn percentiles_are_measured_values() {
        let ms = |ms| Duration::from_millis(ms);
        let all = percentiles((1..=200).rev().map(ms));
        assert_eq!((all.len(), all[0], all[50], all[99], all[100]), (101, 1.0, 100.0, 198.0, 200.0));
        assert_eq!(percentiles([ms(7)].into_iter()), [7.0; 101]);
        assert!(percentiles(std::iter::empty()).is_empty());
    }

    #[test]
    fn rounds_are_kept_apart_and_added_up() {
        let round = |tokens, ttft| {
            let ttft = Some(Duration::from_millis(ttft));
            vec![
                RequestOutcome { output_tokens: tokens, ttft, ..RequestOutcome::default() },
                RequestOutcome::failed("no", 1),
            ]
        };
        let mut level = LevelInProgress::new(json!({"concurrency": 4}));
        level.add_round(round(10, 5), Duration::from_secs(1), Vec::new());
        level.add_round(round(30, 9), Duration::from_secs(1), Vec::new());
        let level = level.done();
        assert_eq!(level.rounds.iter().map(|round| round.out_tok_per_s).collect::<Vec<_>>(), [10.0, 30.0]);
        assert_eq!((level.all.requests, level.all.failed, level.all.out_tok_per_s), (4, 2, 20.0));
        assert_eq!((level.distribution.ttft_ms[0], level.distribution.ttft_ms[100]), (5.0, 9.0));
        assert_eq!((level.name().as_str(), level.short_name().as_str()), ("concurrency 4", "4"));
        let table = Summary(&[level]).to_string();
        assert!(table.lines().nth(1).unwrap().starts_with("concurrency 4 "), "{table}");
        let sent = |sending| LevelInProgress::new(sending).done().name();
        assert_eq!([sent(json!({"rate_per_s": 2.5})), sent(json!("timestamps"))], ["2.5 requests/s", "timestamps"]);
    }
}
