//! A result, or the comparison of two, as one HTML file with tables and charts. It follows the reader's light or dark
//! theme and loads nothing from the network.

mod phases;

use super::chart::xy::{ChartLine, Scale, XyChart};
use super::chart::{STYLE, escape};
use super::comparison::{Comparison, Verdict};
use super::levels::{Distribution, LoadLevel, SUMMARY_COLUMNS};
use super::report::{BenchReport, PickPercentile, Times};
use super::result::{APPROXIMATE, ResultFile};
use super::samples::MemorySample;

const PAGE_STYLE: &str = "\
<style>
:root { color-scheme: light dark; --fg: #1f2328; --dim: #59636e; --bg: #ffffff; --box: #f6f8fa; --line: #d1d9e0; --good: #1a7f37; --bad: #cf222e; }
@media (prefers-color-scheme: dark) {
:root { --fg: #e6edf3; --dim: #9198a1; --bg: #0d1117; --box: #151b23; --line: #3d444d; --good: #3fb950; --bad: #f85149; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg); max-width: 1560px; margin: 0 auto; padding: 24px; }
h1 { font-size: 24px; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 32px 0 8px; border-bottom: 1px solid var(--line); padding-bottom: 4px; }
p { max-width: 75ch; }
.dim { color: var(--dim); }
pre { background: var(--box); padding: 10px 12px; border-radius: 6px; overflow-x: auto; white-space: pre-wrap; font-size: 13px; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 16px 0; }
.tile { background: var(--box); border-radius: 8px; padding: 10px 16px; min-width: 130px; }
.tile b { display: block; font-size: 22px; font-weight: 600; }
.tile span { color: var(--dim); font-size: 13px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 14px 5px 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--dim); font-weight: 500; }
th:first-child, td:first-child { text-align: left; }
td.load { padding-top: 14px; font-weight: 600; }
.better { color: var(--good); } .worse { color: var(--bad); } .unsure { color: var(--dim); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 560px), 1fr)); gap: 16px; }
.charts svg { width: 100%; height: auto; }
.note { border-left: 3px solid var(--bad); padding-left: 12px; }
</style>
";

/// `bench ... --html`
pub fn report(file: &ResultFile) -> String {
    let mut page = beginning(&format!("Benchmark: {}", file.subject_line()));
    about(&mut page, "", file);
    if let [level] = &file.levels[..] {
        tiles(&mut page, &level.all);
    }
    failures(&mut page, &file.levels);
    push(&mut page, "<h2>Each load</h2>\n<div class=\"wide\"><table>\n<tr><th>times in ms</th>");
    SUMMARY_COLUMNS.iter().for_each(|column| push(&mut page, &format!("<th>{column}</th>")));
    push(&mut page, "</tr>\n");
    for level in &file.levels {
        push(&mut page, &format!("<tr><td>{}</td>", escape(&level.name())));
        level.summary().iter().for_each(|cell| push(&mut page, &format!("<td>{cell}</td>")));
        push(&mut page, "</tr>\n");
    }
    push(&mut page, "</table></div>\n");
    phases::phases(&mut page, &file.phases);
    phases::roofline(&mut page, &file.roofline);
    let one = [("", file)];
    charts(&mut page, "Throughput against latency", &against_latency(&one));
    charts(&mut page, "Distributions", &distributions(&one));
    charts(&mut page, "Memory over time", &over_time(&file.levels));
    page + "</body>\n</html>\n"
}

/// `bench compare --html`
pub fn comparison(comparison: &Comparison, base: &ResultFile, other: &ResultFile) -> String {
    let mut page = beginning("Benchmark: A and B");
    about(&mut page, "A: ", base);
    about(&mut page, "B: ", other);
    for warning in &comparison.warnings {
        push(&mut page, &format!("<p class=\"note\">{}</p>\n", escape(warning)));
    }
    push(&mut page, "<h2>Differences</h2>\n<div class=\"wide\"><table>\n");
    push(&mut page, "<tr><th></th><th>A</th><th>B</th><th>B / A</th><th></th></tr>\n");
    let mut load = None;
    for row in &comparison.rows {
        if load != Some(&row.load) {
            push(&mut page, &format!("<tr><td class=\"load\" colspan=\"5\">{}</td></tr>\n", escape(&row.load)));
            load = Some(&row.load);
        }
        let class = match row.verdict {
            Verdict::Better => "better",
            Verdict::Worse => "worse",
            Verdict::Noise | Verdict::OneRound => "unsure",
        };
        let ratio = row.ratio().map_or("-".into(), |ratio| format!("{ratio:.3}"));
        let (measure, a, b, verdict) = (row.measure, row.base, row.other, row.verdict.name());
        push(
            &mut page,
            &format!(
                "<tr><td>{measure}</td><td>{a:.2}</td><td>{b:.2}</td><td>{ratio}</td><td class=\"{class}\">{verdict}</td></tr>\n"
            ),
        );
    }
    push(&mut page, "</table></div>\n");
    let both = [("A", base), ("B", other)];
    charts(&mut page, "Throughput against latency", &against_latency(&both));
    charts(&mut page, "Distributions", &distributions(&both));
    page + "</body>\n</html>\n"
}

fn push(page: &mut String, text: &str) {
    page.push_str(text);
}

/// A page up to its title: neither it nor what follows loads anything.
pub fn beginning(title: &str) -> String {
    let title = escape(title);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n\
         {PAGE_STYLE}{STYLE}</head>\n<body>\n<h1>{title}</h1>\n"
    )
}

/// What was run.
fn about(page: &mut String, name: &str, file: &ResultFile) {
    let ResultFile { command, version, date, .. } = file;
    let subject =
        if name.is_empty() { String::new() } else { format!("<b>{name}{}</b> ", escape(&file.subject_line())) };
    let date = escape(&date.chars().take(19).collect::<String>().replace('T', " "));
    push(
        page,
        &format!(
            "<p>{subject}<span class=\"dim\">{date} UTC, measured with Pagetide {}</span></p>\n<pre>{}</pre>\n",
            escape(version),
            escape(command)
        ),
    );
    if file.work != "exact" {
        push(page, &format!("<p class=\"note\">Approximate. {APPROXIMATE}</p>\n"));
    }
}

/// The figures of the only load.
fn tiles(page: &mut String, report: &BenchReport) {
    let ms = |times: Option<Times>| times.map_or("-".into(), |times| format!("{:.1} / {:.1} ms", times.p50, times.p99));
    let tiles = [
        (format!("{:.1}", report.out_tok_per_s), "output tokens per second"),
        (format!("{:.2}", report.req_per_s), "requests per second"),
        (ms(report.ttft_ms), "time to first token, p50 / p99"),
        (ms(report.itl_ms), "between tokens, p50 / p99"),
        (ms(report.e2e_ms), "end to end, p50 / p99"),
    ];
    push(page, "<div class=\"tiles\">\n");
    for (figure, what) in tiles {
        push(page, &format!("<div class=\"tile\"><b>{figure}</b><span>{what}</span></div>\n"));
    }
    push(page, "</div>\n");
}

fn failures(page: &mut String, levels: &[LoadLevel]) {
    for level in levels.iter().filter(|level| level.all.failed > 0) {
        let (failed, requests) = (level.all.failed, level.all.requests);
        let why = level.all.first_error.as_deref().unwrap_or_default();
        let name = escape(&level.name());
        push(
            page,
            &format!(
                "<p class=\"note\">{name}: {failed} of {requests} requests failed. The first: {}</p>\n",
                escape(why)
            ),
        );
    }
}

/// A section, if there is a chart for it.
fn charts(page: &mut String, title: &str, charts: &[XyChart]) {
    if charts.is_empty() {
        return;
    }
    push(page, &format!("<h2>{title}</h2>\n<div class=\"charts\">\n"));
    charts.iter().for_each(|chart| push(page, &chart.element()));
    push(page, "</div>\n");
}

/// The name of the file before that of the line, if there are two files.
fn named(file: &str, line: &str) -> String {
    if file.is_empty() { line.to_owned() } else { format!("{file}: {line}") }
}

/// Latencies over throughput, a point for each level; none of files with one level alone.
fn against_latency(files: &[(&str, &ResultFile)]) -> Vec<XyChart> {
    if files.iter().all(|(_, file)| file.levels.len() < 2) {
        return Vec::new();
    }
    let chart = |title: &str, of: fn(&BenchReport) -> Option<Times>| {
        let mut lines = Vec::new();
        let percentiles: [(&str, PickPercentile); 2] = [("p50", |times| times.p50), ("p99", |times| times.p99)];
        for (name, file) in files {
            for (percentile, value) in percentiles {
                let measured = file.levels.iter().filter_map(|level| Some((level, value(of(&level.all)?))));
                let (labels, points) =
                    measured.map(|(level, ms)| (level.short_name(), (level.all.out_tok_per_s, ms))).unzip();
                lines.push(ChartLine { labels, ..ChartLine::new(named(name, percentile), points) });
            }
        }
        XyChart {
            title: title.into(),
            x_label: "output tokens per second; at each point, the load".into(),
            y_label: "ms".into(),
            x_scale: Scale::Linear,
            y_scale: Scale::Log,
            lines,
            marks: Vec::new(),
        }
    };
    vec![
        chart("Time to first token", |report| report.ttft_ms),
        chart("Between tokens", |report| report.itl_ms),
        chart("End to end", |report| report.e2e_ms),
    ]
}

/// Which share of the times is not longer than so much.
fn distributions(files: &[(&str, &ResultFile)]) -> Vec<XyChart> {
    let chart = |title: &str, of: fn(&Distribution) -> &[f64]| {
        let mut lines = Vec::new();
        for (name, file) in files {
            for level in &file.levels {
                let points = of(&level.distribution).iter().enumerate();
                let points: Vec<(f64, f64)> = points.map(|(percent, ms)| (*ms, percent as f64)).collect();
                if !points.is_empty() {
                    lines.push(ChartLine::new(named(name, &level.name()), points));
                }
            }
        }
        XyChart {
            title: title.into(),
            x_label: "ms".into(),
            y_label: "% of requests that took at most this".into(),
            x_scale: Scale::Log,
            y_scale: Scale::Linear,
            lines,
            marks: Vec::new(),
        }
    };
    let all = [
        chart("Time to first token", |all| &all.ttft_ms),
        chart("Between tokens", |all| &all.itl_ms),
        chart("End to end", |all| &all.e2e_ms),
    ];
    all.into_iter().filter(|chart| !chart.lines.is_empty()).collect()
}

/// A line over time: its name, a factor, and what of a sample.
type Curve = (&'static str, f64, fn(&MemorySample) -> Option<f64>);

/// Charts of the server's memory; none if the server gave no samples.
fn over_time(levels: &[LoadLevel]) -> Vec<XyChart> {
    let mut samples: Vec<&MemorySample> = levels.iter().flat_map(|level| &level.samples).collect();
    samples.sort_by(|a, b| a.t_s.total_cmp(&b.t_s));
    // The beginning of each run of each level, which has no long gap between samples.
    let mut marks: Vec<(f64, String)> = Vec::new();
    for level in levels.iter().filter(|_| levels.len() > 1) {
        let starts = level.samples.iter().enumerate().filter(|(index, sample)| {
            let before = index.checked_sub(1).map(|before| level.samples[before].t_s);
            let others = |from: f64| samples.iter().any(|other| other.t_s > from && other.t_s < sample.t_s);
            before.is_none_or(others)
        });
        marks.extend(starts.map(|(_, sample)| (sample.t_s, level.short_name())));
    }
    let chart = |title: &str, y_label: &str, lines: &[Curve]| {
        let of = |factor: f64, value: fn(&MemorySample) -> Option<f64>| {
            samples.iter().filter_map(|sample| Some((sample.t_s, factor * value(sample)?))).collect::<Vec<_>>()
        };
        let lines = lines.iter().map(|(name, factor, value)| ChartLine::new(*name, of(*factor, *value)));
        XyChart {
            title: title.into(),
            x_label: "seconds since the first request".into(),
            y_label: y_label.into(),
            x_scale: Scale::Linear,
            y_scale: Scale::Linear,
            lines: lines.filter(|line| !line.points.is_empty()).collect(),
            marks: marks.clone(),
        }
    };
    let all = [
        chart(
            "KV blocks",
            "% of the tier's blocks",
            &[
                ("device, used", 100.0, |sample| sample.device_used),
                ("device, cached", 100.0, |sample| sample.device_cached),
                ("swap pool, used", 100.0, |sample| sample.swap_used),
            ],
        ),
        chart(
            "Requests in the server",
            "requests",
            &[("running", 1.0, |sample| sample.running), ("waiting or paused", 1.0, |sample| sample.waiting)],
        ),
    ];
    all.into_iter().filter(|chart| !chart.lines.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::levels::LevelInProgress;
    use super::super::report::RequestOutcome;
    use super::*;
    use serde_json::{Value, json};
    use std::time::Duration;

    fn level(concurrency: u32, ttft: u64) -> LoadLevel {
        let mut level = LevelInProgress::new(json!({ "concurrency": concurrency }));
        for round in 0..3 {
            let ms = |ms| Duration::from_millis(ms);
            let outcome = RequestOutcome {
                output_tokens: 3,
                ttft: Some(ms(ttft + round)),
                gaps: vec![ms(5), ms(6)],
                e2e: ms(ttft + 11),
                ..RequestOutcome::default()
            };
            let t_s = f64::from(concurrency) + round as f64 * 10.0;
            let sample = MemorySample { t_s, device_used: Some(0.5), running: Some(1.0), ..MemorySample::default() };
            level.add_round(vec![outcome; 4], Duration::from_secs(1), vec![sample]);
        }
        level.done()
    }

    fn file(levels: Vec<LoadLevel>) -> ResultFile {
        ResultFile {
            command: "pagetide bench serve --model <m>".into(),
            version: "1".into(),
            date: "2026-01-02T03:04:05Z".into(),
            subject: json!({"model": "a & b", "url": "http://h"}),
            workload: json!({"fixed": [8, 2], "seed": 1}),
            work: "exact".into(),
            sending: Value::Null,
            result: None,
            levels,
            phases: Value::Null,
            roofline: Value::Null,
        }
    }

    /// The words of a page, and that it asks for nothing.
    fn assert_stands_alone(page: &str) {
        assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"));
        let without_namespaces = page.replace("http://www.w3.org/2000/svg", "");
        for fetched in ["src=", "href=", "url(", "@import", "<script"] {
            assert!(!without_namespaces.contains(fetched), "{fetched}");
        }
        assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
    }

    #[test]
    fn a_report_has_each_load_and_its_charts() {
        let page = report(&file(vec![level(1, 20), level(4, 90)]));
        assert_stands_alone(&page);
        assert_eq!(page.matches("<svg").count(), 3 + 3 + 2, "against latency, distributions, memory");
        assert!(page.contains("a &amp; b") && page.contains("--model &lt;m&gt;") && !page.contains("<m>"));
        // Three rounds of two levels, by turns.
        let marks = page.matches("stroke-dasharray").count();
        assert_eq!(marks, 2 * 6, "in both charts over time");
        let single = report(&file(vec![level(1, 20)]));
        assert_eq!((single.matches("<svg").count(), single.contains("class=\"tile\"")), (3 + 2, true));
        let mut plain = file(vec![LoadLevel { samples: Vec::new(), ..level(1, 20) }]);
        plain.work = "approximate".into();
        let page = report(&plain);
        assert!(page.contains("Approximate.") && !page.contains("Memory over time"));
        assert!(!page.contains("Prefill and decoding") && !page.contains("what the machine can do"));
    }

    #[test]
    fn a_report_has_the_phases_and_the_roofline() {
        let times = json!({"mean": 1.0, "p50": 12.345, "p90": 2.0, "p99": 3.0, "max": 4.0});
        let mut latency = file(vec![level(1, 20)]);
        latency.phases = json!({
            "prefill_ms": times, "prefill_tok_per_s": 678.9, "decode_step_ms": null, "decode_tok_per_s": 0.0,
        });
        let line = json!({
            "phase": "up <", "calls": 3, "seconds": 0.5, "share": 0.25, "gb_per_s": 10.0, "share_of_reads": 0.2,
            "tflop_per_s": 0.125, "share_of_peak": 0.5, "floor_s": 0.25,
        });
        latency.roofline = json!({
            "machine": {"isa": "avx2", "threads": 2, "read_gb_per_s": 50.0, "tflop_per_s": 0.5}, "wall_s": 2.5, "steps_s": 2.0,
            "kinds": [{"kind": "decode", "steps": 7, "rows": 14, "seconds": 2.0, "floor_s": 0.0, "phases": [line]}],
        });
        let page = report(&latency);
        assert_stands_alone(&page);
        for told in [
            "<td>678.9</td><td>12.35</td><td>2.00</td><td>3.00</td><td>4.00</td>",
            "<td>0.0</td><td>-</td><td>-</td><td>-</td><td>-</td>",
            "2 threads, avx2: reads 50.0 GB/s, multiplies 0.500 TFLOP/s. Steps took 2.000 s of 2.500 s.",
            "decode: 7 steps of 14 rows in all",
            "<td>up &lt;</td><td>3</td><td>0.500</td><td>25.0 %</td><td>10.0</td><td>20.0 %</td><td>0.125</td>\
             <td>50.0 %</td><td>0.250</td><td>2.00</td>",
            "<td>all</td><td></td><td>2.000</td><td></td><td></td><td></td><td></td><td></td><td>0.000</td><td>-</td>",
        ] {
            assert!(page.contains(told), "{told}: {page}");
        }
    }

    #[test]
    fn a_comparison_says_what_differs_and_by_how_much() {
        let (base, mut other) = (file(vec![level(1, 20), level(4, 90)]), file(vec![level(1, 10), level(8, 90)]));
        other.workload = json!({"fixed": [8, 2], "seed": 2});
        other.levels[0].all.prompt_tokens = 1000;
        other.levels[0].all.cached_tokens = 50;
        assert_eq!(Comparison::new(&base, &other).warnings.len(), 2, "5 % more cached is nothing");
        other.levels[0].all.cached_tokens = 510;
        let warnings = Comparison::new(&base, &other).warnings;
        assert!(
            warnings.iter().any(|warning| {
                warning.starts_with("concurrency 1: 0 % of A's prompt tokens were cached, and 51 % of B's")
            }),
            "{warnings:?}"
        );
        other.levels[0].all.cached_tokens = 0;
        let compared = Comparison::new(&base, &other);
        assert_eq!(compared.warnings, ["concurrency 4 is only in A", "concurrency 8 is only in B"]);
        let row = compared.rows.iter().find(|row| row.measure == "first token p50, ms").unwrap();
        assert_eq!(
            (row.load.as_str(), row.base, row.other, row.verdict),
            ("concurrency 1", 21.0, 11.0, Verdict::Better)
        );
        let gap = compared.rows.iter().find(|row| row.measure == "between tokens p50, ms").unwrap();
        assert_eq!((gap.ratio(), gap.verdict), (Some(1.0), Verdict::Noise));
        assert!(compared.to_string().contains("better"), "{compared}");
        let page = comparison(&compared, &base, &other);
        assert_stands_alone(&page);
        assert!(page.contains("A: concurrency 4") && page.contains("class=\"better\""));
    }
}
