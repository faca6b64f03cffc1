//! The comparison of two results.

use super::levels::LoadLevel;
use super::report::BenchReport;
use super::result::ResultFile;
use std::fmt;

/// A measure that is compared under each load.
struct Measure {
    name: &'static str,
    of: fn(&BenchReport) -> Option<f64>,
    more_is_better: bool,
}

const MEASURES: [Measure; 8] = [
    Measure { name: "output tok/s", of: |report| Some(report.out_tok_per_s), more_is_better: true },
    Measure { name: "requests/s", of: |report| Some(report.req_per_s), more_is_better: true },
    Measure { name: "first token p50, ms", of: |report| Some(report.ttft_ms?.p50), more_is_better: false },
    Measure { name: "first token p99, ms", of: |report| Some(report.ttft_ms?.p99), more_is_better: false },
    Measure { name: "between tokens p50, ms", of: |report| Some(report.itl_ms?.p50), more_is_better: false },
    Measure { name: "between tokens p99, ms", of: |report| Some(report.itl_ms?.p99), more_is_better: false },
    Measure { name: "end to end p50, ms", of: |report| Some(report.e2e_ms?.p50), more_is_better: false },
    Measure { name: "end to end p99, ms", of: |report| Some(report.e2e_ms?.p99), more_is_better: false },
];

/// What a difference is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Better,
    Worse,
    /// Rounds of the same differ as much.
    Noise,
    /// Unknown: at least two rounds of each are needed.
    OneRound,
}

impl Verdict {
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Better => "better",
            Verdict::Worse => "worse",
            Verdict::Noise => "within the noise",
            Verdict::OneRound => "one round: unknown",
        }
    }
}

/// One measure under one load.
#[derive(Clone, Debug, PartialEq)]
pub struct ComparisonRow {
    pub load: String,
    pub measure: &'static str,
    /// Means over the rounds.
    pub base: f64,
    pub other: f64,
    pub verdict: Verdict,
}

impl ComparisonRow {
    /// `other` divided by `base`; `None` if that is not a number.
    pub fn ratio(&self) -> Option<f64> {
        Some(self.other / self.base).filter(|ratio| ratio.is_finite())
    }
}

pub struct Comparison {
    pub rows: Vec<ComparisonRow>,
    /// What has to be known to believe it.
    pub warnings: Vec<String>,
}

impl Comparison {
    pub fn new(base: &ResultFile, other: &ResultFile) -> Self {
        let mut comparison = Self { rows: Vec::new(), warnings: warnings(base, other) };
        for level in &base.levels {
            match other.levels.iter().find(|candidate| candidate.sending == level.sending) {
                Some(same) => comparison.add(level, same),
                None => comparison.warnings.push(format!("{} is only in A", level.name())),
            }
        }
        let is_in_base = |level: &&LoadLevel| !base.levels.iter().any(|known| known.sending == level.sending);
        let alone = other.levels.iter().filter(is_in_base);
        comparison.warnings.extend(alone.map(|level| format!("{} is only in B", level.name())));
        comparison
    }

    fn add(&mut self, base: &LoadLevel, other: &LoadLevel) {
        for (name, level) in [("A", base), ("B", other)] {
            if level.all.failed > 0 {
                let (failed, all) = (level.all.failed, level.all.requests);
                self.warnings.push(format!("{name}, {}: {failed} of {all} requests failed", level.name()));
            }
        }
        let [a, b] = [base, other].map(|level| cached_percent(&level.all));
        if (a - b).abs() > MAX_CACHED_DIFFERENCE {
            self.warnings.push(format!(
                "{}: {a:.0} % of A's prompt tokens were cached, and {b:.0} % of B's: send prompts that the server has not \
                 seen (--seed), or restart it",
                base.name()
            ));
        }
        for measure in &MEASURES {
            let of = |level: &LoadLevel| level.rounds.iter().filter_map(measure.of).collect::<Vec<f64>>();
            let (a, b) = (of(base), of(other));
            if a.is_empty() || b.is_empty() {
                continue;
            }
            let verdict = verdict(&a, &b, measure.more_is_better);
            let (base_mean, other_mean) = (mean(&a), mean(&b));
            let row =
                ComparisonRow { load: base.name(), measure: measure.name, base: base_mean, other: other_mean, verdict };
            self.rows.push(row);
        }
    }
}

/// Per cent of the prompt tokens.
const MAX_CACHED_DIFFERENCE: f64 = 5.0;

fn cached_percent(report: &BenchReport) -> f64 {
    100.0 * report.cached_tokens as f64 / report.prompt_tokens.max(1) as f64
}

fn warnings(base: &ResultFile, other: &ResultFile) -> Vec<String> {
    let mut warnings = Vec::new();
    // Other seeds are other prompts of the same lengths.
    let without_seed = |file: &ResultFile| {
        let mut workload = file.workload.clone();
        workload.as_object_mut().map(|fields| fields.remove("seed"));
        workload
    };
    if without_seed(base) != without_seed(other) {
        warnings.push("the workloads differ: see the commands".into());
    }
    if base.work != other.work {
        warnings.push(format!("the work of A is {}, that of B is {}: their lengths differ", base.work, other.work));
    } else if base.work != "exact" {
        warnings.push("the work is approximate: output lengths may differ between A and B".into());
    }
    warnings
}

/// Whether two sets of rounds differ by more than chance (Welch's t test, two-sided, 5 %).
fn verdict(base: &[f64], other: &[f64], more_is_better: bool) -> Verdict {
    if base.len() < 2 || other.len() < 2 {
        return Verdict::OneRound;
    }
    let difference = mean(other) - mean(base);
    let (a, b) = (variance(base) / base.len() as f64, variance(other) / other.len() as f64);
    let error = (a + b).sqrt();
    let freedom = (a + b).powi(2) / (a.powi(2) / (base.len() - 1) as f64 + b.powi(2) / (other.len() - 1) as f64);
    // If rounds do not differ at all, any difference counts.
    let bound = if error > 0.0 { critical_t(freedom) * error } else { 0.0 };
    match difference.abs() > bound {
        true if (difference > 0.0) == more_is_better => Verdict::Better,
        true => Verdict::Worse,
        false => Verdict::Noise,
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn variance(values: &[f64]) -> f64 {
    let mean = mean(values);
    values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (values.len() - 1) as f64
}

/// Student's t that 2.5 % exceed, of the next smaller number of degrees of freedom in the table.
fn critical_t(freedom: f64) -> f64 {
    const TABLE: [(f64, f64); 14] = [
        (1.0, 12.706),
        (2.0, 4.303),
        (3.0, 3.182),
        (4.0, 2.776),
        (5.0, 2.571),
        (6.0, 2.447),
        (7.0, 2.365),
        (8.0, 2.306),
        (9.0, 2.262),
        (10.0, 2.228),
        (15.0, 2.131),
        (20.0, 2.086),
        (30.0, 2.042),
        (60.0, 2.0),
    ];
    let known = TABLE.iter().rev().find(|(degrees, _)| *degrees <= freedom + 1e-9);
    known.map_or(TABLE[0].1, |(_, t)| *t)
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut load = None;
        for row in &self.rows {
            if load != Some(&row.load) {
                let name = &row.load;
                writeln!(f, "{name:<26}{:>12}{:>12}{:>9}", "A", "B", "B / A")?;
                load = Some(&row.load);
            }
            let ratio = row.ratio().map_or("-".into(), |ratio| format!("{ratio:.3}"));
            let ComparisonRow { measure, base, other, verdict, .. } = row;
            writeln!(f, "{measure:<26}{base:>12.2}{other:>12.2}{ratio:>9}  {}", verdict.name())?;
        }
        self.warnings.iter().try_for_each(|warning| writeln!(f, "note: {warning}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_counts_where_rounds_differ_less() {
        let tight = [100.0, 101.0, 99.0];
        assert_eq!(verdict(&tight, &[110.0, 111.0, 109.0], true), Verdict::Better);
        assert_eq!(verdict(&tight, &[110.0, 111.0, 109.0], false), Verdict::Worse);
        assert_eq!(verdict(&tight, &[101.0, 102.0, 100.0], true), Verdict::Noise);
        assert_eq!(verdict(&[100.0, 140.0, 60.0], &[110.0, 150.0, 70.0], true), Verdict::Noise);
        assert_eq!(verdict(&tight, &[200.0], true), Verdict::OneRound);
        assert_eq!(verdict(&[5.0, 5.0], &[5.0, 5.0], true), Verdict::Noise);
        assert_eq!(verdict(&[5.0, 5.0], &[4.0, 4.0], true), Verdict::Worse);
    }

    #[test]
    fn bounds_are_those_of_the_next_smaller_number_of_rounds() {
        assert_eq!([0.5, 1.0, 4.0, 4.7, 12.0, 1e9].map(critical_t), [12.706, 12.706, 2.776, 2.776, 2.228, 2.0]);
    }
}
