//! Throughput, latency against rate, and the constants behind them.

use super::part::{ReportPart, ReportPlot, ReportSection};
use crate::chart::xy::{ChartLine, Scale, XyChart};
use crate::chart::{Chart, ChartKind, Series, number};
use crate::memory::output::Table;
use crate::paper::accelerators::{ALL_REDUCE_US, BANDWIDTH_SHARE, Deployment, FLOP_SHARE, HOST_MS};
use crate::paper::curves::{Curves, LIMIT, OTHER_LIMITS, RateCurve};
use crate::paper::results::PaperResults;
use crate::paper::systems::System;

pub fn throughput(results: &PaperResults) -> Option<ReportSection> {
    if results.curves.is_empty() {
        return None;
    }
    let mut table = Table::new([
        "load",
        "system",
        "requests/s",
        "output tok/s",
        "running requests",
        "memory given out",
        "memory with tokens",
        "preemptions",
        "computed again",
    ]);
    for curves in &results.curves {
        for curve in &curves.curves {
            let cells = match &curve.all_at_once {
                None => [
                    "out of memory".into(),
                    String::new(),
                    String::new(),
                    String::new(),
                    String::new(),
                    String::new(),
                    String::new(),
                ],
                Some(once) => [
                    number(once.req_per_s),
                    number(once.out_tok_per_s),
                    number(once.running_requests),
                    percent(once.allocated),
                    percent(once.tokens),
                    once.preempted.to_string(),
                    percent(once.recomputed_share),
                ],
            };
            table.row([curves.title.clone(), system(curve.system)].into_iter().chain(cells).collect());
        }
    }
    let single: Vec<&Curves> = results.curves.iter().filter(|curves| curves.figure.starts_with("12")).collect();
    let series = System::ALL.map(|system| Series {
        name: system.name().into(),
        values: single.iter().map(|curves| curves.throughput_ratio(system, System::ReserveMax)).collect(),
    });
    let chart = Chart {
        kind: ChartKind::Bars,
        title: "Simulated: throughput over that of reserving the maximum".into(),
        x_label: "load".into(),
        y_label: "requests a second, Max = 1".into(),
        places: single.iter().map(|curves| curves.scenario.clone()).collect(),
        series: series.to_vec(),
    };
    Some(ReportSection {
        title: "Throughput, all requests there from the start",
        is_simulated: true,
        parts: vec![
            ReportPart::Text(
                "The same scheduler, block pool and timing behind each system's rules for memory and batches. Means are \
                 over the time in which something runs, the end of the run included."
                    .into(),
            ),
            ReportPart::Plot("throughput".into(), ReportPlot::Categories(chart)),
            ReportPart::Table { caption: "Throughput by load and system (simulated)".into(), table },
        ],
    })
}

pub fn latency(results: &PaperResults) -> Option<ReportSection> {
    if results.curves.is_empty() {
        return None;
    }
    let [low, high] = OTHER_LIMITS;
    let mut parts = vec![ReportPart::Text(format!(
        "Requests arrive at random (Poisson). Normalised latency is the mean over the requests of the time from arrival to \
         end, divided by the tokens of the output (section 6.1). A rate is sustained if the normalised latency is at most \
         {LIMIT} times that of requests which are alone on the paged system. The sustained rate is where the curve crosses \
         this limit for the first time, on a straight line between two runs. Beside it are the rates for {low} and {high} \
         times."
    ))];
    let header = [
        "load".to_owned(),
        "limit, s a token".into(),
        "system".into(),
        "sustained, requests/s".into(),
        format!("within {low} x"),
        format!("within {high} x"),
        "paged over it".into(),
    ];
    let mut table = Table::new(header.iter().map(String::as_str));
    for curves in &results.curves {
        for curve in &curves.curves {
            let [first, second] = curve.sustained_others.map(rate);
            let ratio =
                curves.rate_ratio(System::Paged, curve.system).map_or("-".into(), |ratio| format!("{ratio:.2}"));
            table.row(vec![
                curves.title.clone(),
                format!("{:.3}", LIMIT * curves.alone_s),
                system(curve.system),
                if curve.all_at_once.is_none() { "out of memory".into() } else { rate(curve.sustained) },
                first,
                second,
                ratio,
            ]);
        }
        parts.push(ReportPart::Plot(format!("latency-{}", curves.scenario), ReportPlot::Xy(chart(curves))));
    }
    parts.push(ReportPart::Table { caption: "Sustained rates (simulated)".into(), table });
    Some(ReportSection { title: "Normalised latency against the rate of requests", is_simulated: true, parts })
}

fn chart(curves: &Curves) -> XyChart {
    let top = 2.0 * LIMIT * curves.alone_s;
    let line = |curve: &RateCurve| {
        // What is above the top is cut where the line leaves the chart.
        let mut points: Vec<(f64, f64)> = Vec::new();
        for point in &curve.points {
            if point.normalised_latency_s <= top {
                points.push((point.rate, point.normalised_latency_s));
                continue;
            }
            if let Some((x, y)) = points.last().copied() {
                let part = (top - y) / (point.normalised_latency_s - y);
                points.push((x + part * (point.rate - x), top));
            }
            break;
        }
        ChartLine::new(curve.system.name(), points)
    };
    XyChart {
        title: chart_title(curves),
        x_label: "requests a second".into(),
        y_label: "seconds a token".into(),
        x_scale: Scale::Linear,
        y_scale: Scale::Linear,
        lines: curves.curves.iter().map(line).collect(),
        marks: Vec::new(),
    }
}

/// Without the GPUs, so that it fits.
fn chart_title(curves: &Curves) -> String {
    let (model, rest) = curves.title.split_once(" on ").unwrap_or((&curves.title, ""));
    let load = rest.split_once(", ").map_or("", |(_, load)| load);
    match curves.figure.as_str() {
        "none" => format!("Simulated: {model}, {load}"),
        figure => format!("Simulated, figure {figure}: {model}, {load}"),
    }
}

/// The timing model.
pub fn constants(results: &PaperResults) -> Option<ReportSection> {
    if results.curves.is_empty() {
        return None;
    }
    let mut models = Table::new([
        "model",
        "GPUs",
        "GB/s",
        "fp16 TFLOP/s",
        "link, GB/s",
        "to the CPU, GB/s",
        "weights, GB",
        "KV slots",
        "KV bytes a token",
    ]);
    let mut timings = Table::new([
        "model",
        "a step, ms",
        "a decoded token, µs",
        "a token it attends to, ns",
        "a prompt token, µs",
        "a token it attends to, ns ",
        "copies, GB/s",
    ]);
    for deployment in Deployment::ALL {
        let (gpu, timing) = (deployment.gpu, deployment.timing());
        models.row(vec![
            deployment.model.into(),
            format!("{} x {}", deployment.num_gpus, gpu.name),
            number(gpu.gb_per_s),
            number(gpu.tflop_per_s),
            number(gpu.link_gb_per_s),
            number(gpu.host_gb_per_s),
            number(deployment.weights_gb),
            deployment.num_slots.to_string(),
            deployment.kv_bytes_per_token().to_string(),
        ]);
        let figures = [
            timing.step_ms,
            timing.decode_us,
            timing.decode_context_ns,
            timing.prompt_token_us,
            timing.prompt_context_ns,
            timing.copy_gb_per_s,
        ];
        timings.row([deployment.model.to_owned()].into_iter().chain(figures.map(number)).collect());
    }
    let text = format!(
        "The duration of a step is linear in its load, as in bench replay. The constants follow from data sheets and from \
         table 1 of the paper. Assumed, for all models and systems alike: kernels reach {} of the bandwidth and {} of the \
         FLOP/s, the host takes {HOST_MS} ms a step, and an all-reduce takes {ALL_REDUCE_US} µs before it moves data.",
        percent(BANDWIDTH_SHARE),
        percent(FLOP_SHARE)
    );
    Some(ReportSection {
        title: "The timing model",
        is_simulated: true,
        parts: vec![
            ReportPart::Text(text),
            ReportPart::Table { caption: "Models and GPUs".into(), table: models },
            ReportPart::Table { caption: "What follows for a step".into(), table: timings },
        ],
    })
}

fn system(system: System) -> String {
    format!("{} ({})", system.name(), system.stands_for())
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn rate(rate: f64) -> String {
    if rate > 0.0 { number(rate) } else { "none".into() }
}
