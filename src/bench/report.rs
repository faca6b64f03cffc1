//! What a benchmark measured: per request, and summed up as a table and as JSON.

use pagetide_base::ids::TokenId;
use pagetide_engine::bill::KvBill;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// One request as its client saw it.
#[derive(Clone, Debug, Default)]
pub struct RequestOutcome {
    /// Why it failed; its times then count for nothing.
    pub error: Option<String>,
    pub prompt_tokens: usize,
    pub output_tokens: usize,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: usize,
    /// From sending to the first token.
    pub ttft: Option<Duration>,
    /// Between one delivery of tokens and the next.
    pub gaps: Vec<Duration>,
    /// From sending to the end.
    pub e2e: Duration,
    /// Of the output; known only of an engine in this process.
    pub tokens: Vec<TokenId>,
    /// What memory pressure has cost it; the same.
    pub bill: KvBill,
}

impl RequestOutcome {
    pub fn failed(error: impl Into<String>, prompt_tokens: usize) -> Self {
        Self { error: Some(error.into()), prompt_tokens, ..Self::default() }
    }

    /// Mean time per output token after the first.
    fn tpot(&self) -> Option<Duration> {
        let decoding: Duration = self.gaps.iter().sum();
        (self.output_tokens > 1 && !self.gaps.is_empty()).then(|| decoding / (self.output_tokens - 1) as u32)
    }
}

/// Exact statistics of a set of times, in milliseconds. A percentile is the smallest measured value that at least so
/// many percent of the values do not exceed (nearest rank).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Times {
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Times {
    /// `None` of no times.
    pub fn of(times: impl IntoIterator<Item = Duration>) -> Option<Self> {
        let mut ms: Vec<f64> = times.into_iter().map(|time| time.as_secs_f64() * 1e3).collect();
        ms.sort_by(f64::total_cmp);
        let max = *ms.last()?;
        let percentile = |p: usize| ms[(ms.len() * p).div_ceil(100) - 1];
        let mean = ms.iter().sum::<f64>() / ms.len() as f64;
        Some(Self { mean, p50: percentile(50), p90: percentile(90), p99: percentile(99), max })
    }
}

/// One of the figures.
pub type PickPercentile = fn(Times) -> f64;

/// A benchmark's result. Tokens and times are those of the requests that did not fail.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BenchReport {
    pub requests: usize,
    pub failed: usize,
    pub wall_s: f64,
    pub prompt_tokens: usize,
    pub output_tokens: usize,
    pub cached_tokens: usize,
    pub out_tok_per_s: f64,
    /// Prompt and output.
    pub total_tok_per_s: f64,
    pub req_per_s: f64,
    pub ttft_ms: Option<Times>,
    pub tpot_ms: Option<Times>,
    pub itl_ms: Option<Times>,
    pub e2e_ms: Option<Times>,
    pub first_error: Option<String>,
}

impl BenchReport {
    pub fn new(outcomes: &[RequestOutcome], wall: Duration) -> Self {
        let good: Vec<&RequestOutcome> = outcomes.iter().filter(|outcome| outcome.error.is_none()).collect();
        let sum = |tokens: fn(&RequestOutcome) -> usize| good.iter().map(|outcome| tokens(outcome)).sum::<usize>();
        let (prompt_tokens, output_tokens) =
            (sum(|outcome| outcome.prompt_tokens), sum(|outcome| outcome.output_tokens));
        let wall_s = wall.as_secs_f64();
        let per_s = |count: usize| if wall_s > 0.0 { count as f64 / wall_s } else { 0.0 };
        Self {
            requests: outcomes.len(),
            failed: outcomes.len() - good.len(),
            wall_s,
            prompt_tokens,
            output_tokens,
            cached_tokens: sum(|outcome| outcome.cached_tokens),
            out_tok_per_s: per_s(output_tokens),
            total_tok_per_s: per_s(prompt_tokens + output_tokens),
            req_per_s: per_s(good.len()),
            ttft_ms: Times::of(good.iter().filter_map(|outcome| outcome.ttft)),
            tpot_ms: Times::of(good.iter().filter_map(|outcome| outcome.tpot())),
            itl_ms: Times::of(good.iter().flat_map(|outcome| outcome.gaps.iter().copied())),
            e2e_ms: Times::of(good.iter().map(|outcome| outcome.e2e)),
            first_error: outcomes.iter().find_map(|outcome| outcome.error.clone()),
        }
    }
}

impl fmt::Display for BenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "requests          {:>10}   failed {}", self.requests, self.failed)?;
        writeln!(f, "wall time         {:>10.3} s", self.wall_s)?;
        writeln!(f, "prompt tokens     {:>10}   from the prefix cache {}", self.prompt_tokens, self.cached_tokens)?;
        writeln!(f, "output tokens     {:>10}", self.output_tokens)?;
        writeln!(f, "output            {:>10.1} tok/s", self.out_tok_per_s)?;
        writeln!(f, "prompt and output {:>10.1} tok/s", self.total_tok_per_s)?;
        writeln!(f, "requests          {:>10.3} per s", self.req_per_s)?;
        writeln!(f, "\n{:<26}{:>10}{:>10}{:>10}{:>10}{:>10}", "ms", "p50", "p90", "p99", "max", "mean")?;
        for (name, times) in [
            ("time to first token", self.ttft_ms),
            ("time per output token", self.tpot_ms),
            ("between tokens", self.itl_ms),
            ("end to end", self.e2e_ms),
        ] {
            match times {
                Some(Times { mean, p50, p90, p99, max }) => {
                    writeln!(f, "{name:<26}{p50:>10.2}{p90:>10.2}{p99:>10.2}{max:>10.2}{mean:>10.2}")?;
                }
                None => writeln!(f, "{name:<26}{:>10}", "-")?,
            }
        }
        if let Some(error) = &self.first_error {
            writeln!(f, "\nfirst error: {error}")?;
        }
        Ok(())
    }
}

/// Prefill and decoding of batches, apart from each other.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PhaseReport {
    /// From sending a batch to the first token of its last sequence.
    pub prefill_ms: Option<Times>,
    pub prefill_tok_per_s: f64,
    /// From there to the batch's end, over its steps.
    pub decode_step_ms: Option<Times>,
    pub decode_tok_per_s: f64,
}

impl PhaseReport {
    /// `batches`: the requests that ran together.
    pub fn new(batches: &[Vec<RequestOutcome>]) -> Self {
        let (mut prefills, mut steps) = (Vec::new(), Vec::new());
        let (mut prompt_tokens, mut decoded_tokens) = (0, 0);
        let mut decoding = Duration::ZERO;
        for batch in batches.iter().filter(|batch| batch.iter().all(|outcome| outcome.error.is_none())) {
            let prefill = batch.iter().filter_map(|outcome| outcome.ttft).max().unwrap_or_default();
            let end = batch.iter().map(|outcome| outcome.e2e).max().unwrap_or_default();
            let longest = batch.iter().map(|outcome| outcome.output_tokens).max().unwrap_or(0);
            prefills.push(prefill);
            prompt_tokens += batch.iter().map(|outcome| outcome.prompt_tokens - outcome.cached_tokens).sum::<usize>();
            if longest > 1 {
                steps.push((end - prefill) / (longest - 1) as u32);
                decoding += end - prefill;
                decoded_tokens += batch.iter().map(|outcome| outcome.output_tokens - 1).sum::<usize>();
            }
        }
        let per_s = |tokens: usize, time: Duration| {
            if time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
        };
        Self {
            prefill_tok_per_s: per_s(prompt_tokens, prefills.iter().sum()),
            decode_tok_per_s: per_s(decoded_tokens, decoding),
            prefill_ms: Times::of(prefills),
            decode_step_ms: Times::of(steps),
        }
    }
}

impl fmt::Display for PhaseReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |times: Option<Times>| times.map_or("-".into(), |times| format!("{:.2}", times.p50));
        writeln!(
            f,
            "prefill           {:>10.1} tok/s   {:>10} ms a batch (p50)",
            self.prefill_tok_per_s,
            ms(self.prefill_ms)
        )?;
        writeln!(
            f,
            "decode            {:>10.1} tok/s   {:>10} ms a step (p50)",
            self.decode_tok_per_s,
            ms(self.decode_step_ms)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn percentiles_are_exact() {
        let times = Times::of((1..=200).rev().map(ms)).unwrap();
        assert_eq!(times, Times { mean: 100.5, p50: 100.0, p90: 180.0, p99: 198.0, max: 200.0 });
        let one = Times::of([ms(7)]).unwrap();
        assert_eq!((one.p50, one.p99, one.max, one.mean), (7.0, 7.0, 7.0, 7.0));
        let two = Times::of([ms(1), ms(2)]).unwrap();
        assert_eq!((two.p50, two.p90), (1.0, 2.0));
        assert_eq!(Times::of([]), None);
    }

    fn outcome(prompt_tokens: usize, ttft: u64, gaps: &[u64]) -> RequestOutcome {
        RequestOutcome {
            prompt_tokens,
            output_tokens: gaps.len() + 1,
            ttft: Some(ms(ttft)),
            gaps: gaps.iter().map(|gap| ms(*gap)).collect(),
            e2e: ms(ttft + gaps.iter().sum::<u64>()),
            ..Default::default()
        }
    }

    #[test]
    fn a_report_counts_only_what_succeeded() {
        let outcomes = [outcome(100, 10, &[5, 7]), RequestOutcome::failed("503", 50), outcome(60, 30, &[])];
        let report = BenchReport::new(&outcomes, Duration::from_secs(2));
        assert_eq!((report.requests, report.failed, report.first_error.as_deref()), (3, 1, Some("503")));
        assert_eq!((report.prompt_tokens, report.output_tokens), (160, 4));
        assert_eq!((report.out_tok_per_s, report.total_tok_per_s, report.req_per_s), (2.0, 82.0, 1.0));
        assert_eq!(report.ttft_ms.unwrap().max, 30.0);
        assert_eq!(report.tpot_ms.unwrap().mean, 6.0, "only a request with several tokens has one");
        assert_eq!((report.itl_ms.unwrap().p50, report.itl_ms.unwrap().max), (5.0, 7.0));
        let table = report.to_string();
        assert!(table.contains("first error: 503") && table.contains("time to first token"), "{table}");
    }

    #[test]
    fn phases_are_measured_apart() {
        let batch = vec![outcome(100, 100, &[40, 20, 20]), outcome(100, 120, &[20, 20, 20])];
        let phases = PhaseReport::new(&[batch, vec![RequestOutcome::failed("no", 1)]]);
        assert!((phases.prefill_tok_per_s - 200.0 / 0.120).abs() < 1e-6, "{phases:?}");
        assert_eq!(phases.prefill_ms.unwrap().max, 120.0);
        assert_eq!(phases.decode_step_ms.unwrap().max, 20.0);
        assert!((phases.decode_tok_per_s - 6.0 / 0.060).abs() < 1e-6, "{phases:?}");
    }
}
