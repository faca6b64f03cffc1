//! What [`super::pressure`] measured, for people.

use super::chart::{Chart, Kind, Series};
use super::output::{Part, Section, Table, percent};
use super::pressure::{Mode, Run};
use serde::Serialize;
use serde_json::json;

/// Medians of a mode's runs with a pool.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub mode: Mode,
    /// Nothing has to yield.
    pub unbounded: bool,
    /// Of the demand.
    pub share: f64,
    pub tokens: usize,
    pub num_blocks: usize,
    pub out_tok_per_s: f64,
    pub ttft_p50_ms: f64,
    pub ttft_p99_ms: f64,
    pub itl_p50_ms: f64,
    pub itl_p99_ms: f64,
    pub preemptions: f64,
    pub blocks_out: f64,
    pub blocks_in: f64,
    pub recomputed_tokens: f64,
    /// In every round.
    pub identical: bool,
    pub runs: Vec<Run>,
}

impl Row {
    fn mode_name(&self) -> String {
        if self.unbounded { "unbounded".into() } else { self.mode.to_string() }
    }
}

pub fn section(subject: &str, about: &str, rows: &[Row]) -> Section {
    Section {
        name: "pressure",
        title: "Throughput and latency against the size of the KV memory",
        parts: vec![Part::Text(format!("{subject}: {about}")), Part::Table(table(rows))],
        charts: vec![
            (
                "pressure-throughput".into(),
                chart(rows, "Throughput", "output tokens a second", |row| row.out_tok_per_s),
            ),
            ("pressure-ttft".into(), chart(rows, "Time to first token, p50", "ms", |row| row.ttft_p50_ms)),
            ("pressure-itl".into(), chart(rows, "Time between tokens, p99", "ms", |row| row.itl_p99_ms)),
        ],
        figures: json!({ "subject": subject, "about": about, "rows": rows }),
    }
}

fn table(rows: &[Row]) -> Table {
    let mut header = vec!["pool", "mode", "out tok/s", "of unbounded"];
    header.extend(["TTFT p50, ms", "TTFT p99, ms", "ITL p50, ms", "ITL p99, ms"]);
    header.extend(["preemptions", "blocks out / in", "recomputed tokens", "identical"]);
    let mut table = Table::new(header);
    let unbounded = rows.iter().find(|row| row.unbounded);
    for row in rows {
        let mut cells = vec![
            format!("{} t ({})", row.tokens, percent(row.share)),
            row.mode_name(),
            format!("{:.1}", row.out_tok_per_s),
            unbounded.map_or("-".into(), |unbounded| percent(row.out_tok_per_s / unbounded.out_tok_per_s)),
        ];
        let times = [row.ttft_p50_ms, row.ttft_p99_ms, row.itl_p50_ms, row.itl_p99_ms];
        cells.extend(times.map(|ms| format!("{ms:.1}")));
        cells.extend([
            format!("{:.0}", row.preemptions),
            format!("{:.0} / {:.0}", row.blocks_out, row.blocks_in),
            format!("{:.0}", row.recomputed_tokens),
            if row.identical { "yes".into() } else { "NO".into() },
        ]);
        table.row(cells);
    }
    table
}

/// A line for each mode, over the pools in the order of their sizes, the largest first.
fn chart(rows: &[Row], title: &str, y_label: &str, value: fn(&Row) -> f64) -> Chart {
    let mut sizes: Vec<usize> = rows.iter().filter(|row| !row.unbounded).map(|row| row.tokens).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    sizes.dedup();
    let names: Vec<String> = rows.iter().map(Row::mode_name).collect();
    let mut series: Vec<Series> = Vec::new();
    for name in names {
        if series.iter().any(|series| series.name == name) {
            continue;
        }
        let at = |size: usize| rows.iter().find(|row| row.mode_name() == name && (row.unbounded || row.tokens == size));
        series.push(Series { values: sizes.iter().map(|size| at(*size).map(value)).collect(), name });
    }
    Chart {
        kind: Kind::Lines,
        title: title.into(),
        x_label: "tokens of the device pool".into(),
        y_label: y_label.into(),
        places: sizes.iter().map(usize::to_string).collect(),
        series,
    }
}
