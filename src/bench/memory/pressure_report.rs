//! The report of [`super::pressure`].

use super::output::{Section, SectionPart, Table, percent};
use super::pressure_result::{Mode, PressureRow};
use crate::chart::{Chart, ChartKind, Series};
use serde_json::json;

pub fn section(subject: &str, about: &str, rows: &[PressureRow]) -> Section {
    Section {
        name: "pressure",
        title: "Throughput and latency against the size of the KV memory",
        parts: vec![SectionPart::Text(format!("{subject}: {about}")), SectionPart::Table(table(rows))],
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

fn table(rows: &[PressureRow]) -> Table {
    let mut header = vec!["pool", "mode", "out tok/s", "of unbounded"];
    header.extend(["TTFT p50, ms", "TTFT p99, ms", "ITL p50, ms", "ITL p99, ms"]);
    header.extend(["preemptions", "blocks out / in", "recomputed tokens", "identical"]);
    let has_oracle = rows.iter().any(|row| row.mode == Mode::Oracle);
    if has_oracle {
        header.extend(["of oracle", "ITL p99 / oracle's"]);
    }
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
        if has_oracle {
            let oracle = oracle_of(rows, row);
            let against =
                |text: fn(&PressureRow, &PressureRow) -> String| oracle.map_or("-".into(), |oracle| text(row, oracle));
            cells.push(against(|row, oracle| percent(row.out_tok_per_s / oracle.out_tok_per_s)));
            cells.push(against(|row, oracle| format!("{:.2}", row.itl_p99_ms / oracle.itl_p99_ms)));
        }
        table.row(cells);
    }
    table
}

/// The oracle's with the same pool.
fn oracle_of<'a>(rows: &'a [PressureRow], row: &PressureRow) -> Option<&'a PressureRow> {
    let is_it = |other: &&PressureRow| other.mode == Mode::Oracle && other.num_blocks == row.num_blocks;
    rows.iter().find(is_it).filter(|_| !row.unbounded)
}

/// A line for each mode, over the pools in the order of their sizes, the largest first.
fn chart(rows: &[PressureRow], title: &str, y_label: &str, value: fn(&PressureRow) -> f64) -> Chart {
    let mut sizes: Vec<usize> = rows.iter().filter(|row| !row.unbounded).map(|row| row.tokens).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    sizes.dedup();
    let names: Vec<String> = rows.iter().map(PressureRow::mode_name).collect();
    let mut series: Vec<Series> = Vec::new();
    for name in names {
        if series.iter().any(|series| series.name == name) {
            continue;
        }
        let at = |size: usize| rows.iter().find(|row| row.mode_name() == name && (row.unbounded || row.tokens == size));
        series.push(Series { values: sizes.iter().map(|size| at(*size).map(value)).collect(), name });
    }
    Chart {
        kind: ChartKind::Lines,
        title: title.into(),
        x_label: "tokens of the device pool".into(),
        y_label: y_label.into(),
        places: sizes.iter().map(usize::to_string).collect(),
        series,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(mode: Mode, tokens: usize, out_tok_per_s: f64, itl_p99_ms: f64) -> PressureRow {
        PressureRow {
            mode,
            unbounded: tokens == 999,
            share: 0.5,
            tokens,
            num_blocks: tokens / 16,
            out_tok_per_s,
            ttft_p50_ms: 1.0,
            ttft_p99_ms: 2.0,
            itl_p50_ms: 3.0,
            itl_p99_ms,
            preemptions: 0.0,
            blocks_out: 0.0,
            blocks_in: 0.0,
            recomputed_tokens: 0.0,
            identical: mode != Mode::Swap,
            runs: Vec::new(),
        }
    }

    #[test]
    fn a_run_stands_beside_the_oracle_of_its_pool() {
        let rows = [
            row(Mode::Auto, 999, 200.0, 10.0),
            row(Mode::Swap, 512, 90.0, 30.0),
            row(Mode::Oracle, 512, 100.0, 20.0),
            row(Mode::Swap, 256, 40.0, 60.0),
            row(Mode::Oracle, 256, 50.0, 40.0),
        ];
        let table = table(&rows).to_string();
        let ends: Vec<&str> = table.lines().skip(2).filter_map(|line| line.split("| 0 / 0 | 0 |").nth(1)).collect();
        let expected = [" yes | - | - |", " NO | 90.0 % | 1.50 |", " yes | 100.0 % | 1.00 |", " NO | 80.0 % | 1.50 |"];
        assert_eq!(ends[..4], expected, "{table}");
        assert!(table.contains("| 512 t (50.0 %) | swap | 90.0 | 45.0 % |"), "{table}");
        let chart = chart(&rows, "t", "y", |row| row.out_tok_per_s);
        assert_eq!(chart.places, ["512", "256"]);
        let values =
            |name: &str| chart.series.iter().find(|series| series.name == name).map(|series| &series.values[..]);
        assert_eq!(values("swap"), Some(&[Some(90.0), Some(40.0)][..]));
        assert_eq!(values("unbounded"), Some(&[Some(200.0), Some(200.0)][..]));
    }
}
