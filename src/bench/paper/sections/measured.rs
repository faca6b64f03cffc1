//! What was measured with the configured model.

use super::part::{ReportPart, ReportPlot, ReportSection};
use crate::chart::xy::{ChartLine, Scale, XyChart};
use crate::chart::{Chart, ChartKind, Series, number};
use crate::memory::output::Table;
use crate::paper::results::{MeasuredResults, PaperResults};
use crate::paper::systems::System;

pub fn section(results: &PaperResults) -> Option<ReportSection> {
    let measured = results.measured.as_ref()?;
    let setup = &measured.setup;
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    let kv_mib = mib(setup.kv_bytes_per_token as f64 * (setup.memory.num_blocks * setup.memory.block_size) as f64);
    let text = format!(
        "{}: {} requests, {}, of {:.1} and {:.1} tokens of prompt and output on average. The weights take {:.0} MiB. The KV \
         cache has {} blocks of {} tokens ({kv_mib:.0} MiB, {} bytes a token), and the longest sequence {} tokens, so {} of \
         them fit. The figures depend on this machine and on what else it did.",
        setup.subject,
        setup.requests,
        setup.source,
        setup.mean_prompt,
        setup.mean_output,
        mib(setup.weights_bytes as f64),
        setup.memory.num_blocks,
        setup.memory.block_size,
        setup.kv_bytes_per_token,
        setup.memory.max_model_len,
        setup.memory.num_blocks * setup.memory.block_size / setup.memory.max_model_len,
    );
    let mut parts = vec![ReportPart::Text(text)];
    parts.extend(systems(measured));
    parts.extend(kernels(measured));
    parts.extend(block_sizes(measured));
    parts.extend(swap(measured));
    Some(ReportSection { title: "This machine", is_simulated: false, parts })
}

fn systems(measured: &MeasuredResults) -> Vec<ReportPart> {
    let mut table = Table::new([
        "system",
        "requests a second",
        "wall time, s",
        "requests/s",
        "output tok/s",
        "normalised latency, s",
        "paged over it",
    ]);
    let paged = measured.at_once(System::Paged).map(|run| run.out_tok_per_s);
    for run in &measured.runs {
        let ratio = paged.filter(|_| run.rate.is_none()).map(|paged| format!("{:.2}", paged / run.out_tok_per_s));
        table.row(vec![
            format!("{} ({})", run.system.name(), run.system.stands_for()),
            run.rate.map_or("all at once".into(), number),
            format!("{:.1}", run.wall_s),
            number(run.req_per_s),
            number(run.out_tok_per_s),
            format!("{:.4}", run.normalised_latency_s),
            ratio.unwrap_or_else(|| "-".into()),
        ]);
    }
    for batch in &measured.transformers {
        let ratio = paged.map_or("-".into(), |paged| format!("{:.2}", paged / batch.out_tok_per_s()));
        table.row(vec![
            format!("transformers, generate, batches of {}", batch.batch),
            "all at once".into(),
            format!("{:.1}", batch.seconds),
            number(batch.requests as f64 / batch.seconds),
            number(batch.out_tok_per_s()),
            "-".into(),
            ratio,
        ]);
    }
    let at_once: Vec<_> = System::ALL.iter().filter_map(|system| measured.at_once(*system)).collect();
    let chart = Chart {
        kind: ChartKind::Bars,
        title: "Measured: throughput by system, all requests at once".into(),
        x_label: "system".into(),
        y_label: "output tokens a second".into(),
        places: at_once.iter().map(|run| run.system.name().into()).collect(),
        series: vec![Series::new("output tok/s", at_once.iter().map(|run| run.out_tok_per_s))],
    };
    let line = |system: System| {
        let runs = measured.runs.iter().filter(|run| run.system == system);
        let mut points: Vec<(f64, f64)> = runs.filter_map(|run| Some((run.rate?, run.normalised_latency_s))).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        ChartLine::new(system.name(), points)
    };
    let lines: Vec<ChartLine> = System::ALL.into_iter().map(line).filter(|line| !line.points.is_empty()).collect();
    let mut parts = vec![
        ReportPart::Plot("measured-throughput".into(), ReportPlot::Categories(chart)),
        ReportPart::Table { caption: "Systems on this machine (measured)".into(), table },
    ];
    if !lines.is_empty() {
        let chart = XyChart {
            title: "Measured: normalised latency against the rate of requests".into(),
            x_label: "requests a second".into(),
            y_label: "seconds a token".into(),
            x_scale: Scale::Linear,
            y_scale: Scale::Log,
            lines,
            marks: Vec::new(),
        };
        parts.push(ReportPart::Plot("measured-latency".into(), ReportPlot::Xy(chart)));
    }
    parts
}

fn kernels(measured: &MeasuredResults) -> Option<ReportPart> {
    let mut table = Table::new([
        "sequences",
        "tokens before",
        "contiguous, ms",
        "scattered, ms",
        "ratio",
        "whole step, contiguous, ms",
        "whole step, scattered, ms",
    ]);
    for row in &measured.kernels {
        let figures = [row.contiguous_ms, row.paged_ms].map(|ms| format!("{ms:.3}"));
        let steps = [row.contiguous_step_ms, row.paged_step_ms].map(|ms| format!("{ms:.3}"));
        let ratio = format!("{:.2}", row.paged_ms / row.contiguous_ms.max(f64::MIN_POSITIVE));
        let cells =
            [row.batch.to_string(), row.context.to_string()].into_iter().chain(figures).chain([ratio]).chain(steps);
        table.row(cells.collect());
    }
    let caption = "Attention over scattered and over contiguous blocks of 16 tokens (measured; figure 18a): what the tokens \
                   before add to a decode step";
    (!measured.kernels.is_empty()).then(|| ReportPart::Table { caption: caption.into(), table })
}

fn block_sizes(measured: &MeasuredResults) -> Option<ReportPart> {
    let mut table = Table::new(["block size", "output tok/s", "normalised latency, s"]);
    for run in &measured.block_sizes {
        table.row(vec![
            run.block_size.to_string(),
            number(run.out_tok_per_s),
            format!("{:.4}", run.normalised_latency_s),
        ]);
    }
    let caption = "Paged by block size, all requests at once (measured; figure 18b)".into();
    (!measured.block_sizes.is_empty()).then_some(ReportPart::Table { caption, table })
}

fn swap(measured: &MeasuredResults) -> Option<ReportPart> {
    let mut table = Table::new(["block size", "out, ms", "in, ms", "recompute, ms", "recompute over swap"]);
    for row in &measured.swap {
        let figures = [row.out_ms, row.in_ms, row.recompute_ms].map(|ms| format!("{ms:.3}"));
        let ratio = format!("{:.2}", row.recompute_ms / row.swap_ms().max(f64::MIN_POSITIVE));
        table.row([row.block_size.to_string()].into_iter().chain(figures).chain([ratio]).collect());
    }
    let caption = "Swapping against recomputing (measured; figure 19a)".into();
    (!measured.swap.is_empty()).then_some(ReportPart::Table { caption, table })
}
