//! Memory, sharing and block sizes.

use super::part::{ReportPart, ReportPlot, ReportSection};
use crate::chart::xy::{ChartLine, Scale, XyChart};
use crate::chart::{Chart, ChartKind, Series, number};
use crate::memory::layout;
use crate::memory::output::{Section, SectionPart, Table, fine_percent, percent};
use crate::memory::waste::Waste;
use crate::paper::ablations::{BlockSizeRow, LINK_TOKENS, SharingRow};
use crate::paper::results::PaperResults;
use crate::paper::shared::SharedResult;
use crate::paper::systems::System;

pub fn memory(results: &PaperResults) -> Option<ReportSection> {
    if results.layouts.is_empty() {
        return None;
    }
    let Section { parts, charts, .. } = layout::section(&results.layouts);
    let mut report = Vec::new();
    for part in parts {
        report.push(match part {
            SectionPart::Text(text) => ReportPart::Text(text),
            SectionPart::Table(table) => ReportPart::Table { caption: "KV memory by model".into(), table },
        });
    }
    report.extend(charts.into_iter().map(|(name, chart)| ReportPart::Plot(name, ReportPlot::Categories(chart))));
    for (source, systems) in &results.waste {
        report.extend(waste(source, systems));
    }
    if !results.over_time.is_empty() {
        report.extend(over_time(results));
    }
    Some(ReportSection { title: "Memory", is_simulated: false, parts: report })
}

fn waste(source: &str, systems: &[Waste]) -> [ReportPart; 2] {
    let mut table =
        Table::new(["system", "tokens", "reserved", "internal", "external", "running requests", "empty of given out"]);
    for row in systems {
        let shares = [row.tokens, row.reserved, row.internal, row.external].map(percent);
        let rest = [format!("{:.1}", row.batch), fine_percent(row.of_allocated)];
        table.row([row.system.clone()].into_iter().chain(shares).chain(rest).collect());
    }
    let share = |name: &str, value: fn(&Waste) -> f64| Series::new(name, systems.iter().map(|row| 100.0 * value(row)));
    let chart = Chart {
        kind: ChartKind::Stacked,
        title: format!("What the KV memory holds while requests wait: {source} (figure 2)"),
        x_label: "contiguous reservation; paged, with blocks of so many tokens".into(),
        y_label: "share of KV memory, %".into(),
        places: systems.iter().map(|row| short(&row.system)).collect(),
        series: vec![
            share("tokens", |row| row.tokens),
            share("reserved", |row| row.reserved),
            share("internal fragmentation", |row| row.internal),
            share("external fragmentation", |row| row.external),
        ],
    };
    let slug: String = source.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_lowercase();
    [
        ReportPart::Plot(format!("waste-{slug}"), ReportPlot::Categories(chart)),
        ReportPart::Table { caption: format!("What the KV memory holds: {source}"), table },
    ]
}

fn short(system: &str) -> String {
    let name = system.split(" (").next().unwrap_or(system);
    name.trim_start_matches("paged, blocks of ").replace("maximum length", "maximum")
}

fn over_time(results: &PaperResults) -> [ReportPart; 2] {
    let chart = |title: &str, y_label: &str, value: fn(&[f64; 4]) -> f64| {
        let line = |(system, moments): &(System, Vec<[f64; 4]>)| {
            ChartLine::new(system.name(), moments.iter().map(|moment| (moment[0], value(moment))).collect())
        };
        ReportPlot::Xy(XyChart {
            title: title.into(),
            x_label: "seconds".into(),
            y_label: y_label.into(),
            x_scale: Scale::Linear,
            y_scale: Scale::Linear,
            lines: results.over_time.iter().map(line).collect(),
            marks: Vec::new(),
        })
    };
    let tokens = "Simulated: KV memory that holds tokens, OPT-13B, as requests come";
    let running = "Simulated: requests that run, OPT-13B, as requests come (figure 1)";
    [
        ReportPart::Plot("memory-over-time".into(), chart(tokens, "share of KV memory, %", |moment| 100.0 * moment[2])),
        ReportPart::Plot("running-over-time".into(), chart(running, "requests", |moment| moment[3])),
    ]
}

pub fn sharing(results: &PaperResults) -> Option<ReportSection> {
    let shared = results.shared.as_ref()?;
    let mut claims = Table::new([
        "samples",
        "claimed, of one sample",
        "holds for outputs of, per prompt token",
        "tried with, tokens",
        "ours",
        "saved against copies",
        "Alpaca-like",
        "ShareGPT-like",
    ]);
    for row in &shared.memory {
        claims.row(vec![
            row.samples.to_string(),
            format!("{:.1} x", row.claimed),
            format!("{:.3}", row.output_part),
            format!("{} and {}", row.prompt, row.output),
            format!("{:.2} x", row.ours),
            percent(1.0 - row.ours / f64::from(row.samples)),
            format!("{:.2} x", row.alpaca),
            format!("{:.2} x", row.sharegpt),
        ]);
    }
    let mut saved = Table::new(["sequences", "lengths", "number", "blocks saved"]);
    for row in &shared.saved {
        saved.row(vec![row.of.clone(), row.lengths.clone(), row.count.to_string(), percent(row.saved)]);
    }
    let text = format!(
        "The scheduler and the block pool with blocks of {} tokens. n samples of a prompt of P tokens with outputs of O each \
         take (P + n O) / (P + O) times the memory of one, so the claimed ratios hold for exactly one length of output for \
         each prompt. Blocks saved are over the blocks without sharing, averaged over the steps of requests that run 16 at a \
         time. Beams have made-up candidates here.",
        shared.block_size
    );
    Some(ReportSection {
        title: "Sharing",
        is_simulated: false,
        parts: vec![
            ReportPart::Text(text),
            ReportPart::Table { caption: "Memory of several samples".into(), table: claims },
            ReportPart::Plot("saved-samples".into(), ReportPlot::Categories(saved_chart(shared, "samples"))),
            ReportPart::Plot("saved-beams".into(), ReportPlot::Categories(saved_chart(shared, "beams"))),
            ReportPart::Table { caption: "Blocks saved by sharing (figure 15)".into(), table: saved },
        ],
    })
}

fn saved_chart(shared: &SharedResult, of: &str) -> Chart {
    let rows =
        |lengths: &str| shared.saved.iter().filter(|row| row.of == of && row.lengths == lengths).collect::<Vec<_>>();
    let names = ["Alpaca-like", "ShareGPT-like"];
    let series = names.map(|name| Series::new(name, rows(name).into_iter().map(|row| 100.0 * row.saved)));
    Chart {
        kind: ChartKind::Bars,
        title: format!("KV blocks saved by sharing: {of}"),
        x_label: of.into(),
        y_label: "blocks saved, %".into(),
        places: rows(names[0]).into_iter().map(|row| row.count.to_string()).collect(),
        series: series.to_vec(),
    }
}

pub fn ablations(results: &PaperResults) -> Option<ReportSection> {
    if results.block_sizes.is_empty() {
        return None;
    }
    let mut sizes = Table::new([
        "lengths",
        "block size",
        "normalised latency, s",
        "requests/s at once",
        "empty of given out",
        "hits of 341 shared tokens",
    ]);
    for row in &results.block_sizes {
        sizes.row(vec![
            row.lengths.clone(),
            row.block_size.to_string(),
            format!("{:.3}", row.normalised_latency_s),
            number(row.req_per_s),
            fine_percent(row.empty),
            percent(row.hit_rate),
        ]);
    }
    let line = |name: &str, value: fn(&BlockSizeRow) -> f64| {
        let rows = results.block_sizes.iter().filter(|row| row.lengths == name);
        ChartLine::new(name, rows.map(|row| (row.block_size as f64, value(row))).collect())
    };
    let chart = |title: &str, y_label: &str, value: fn(&BlockSizeRow) -> f64| {
        ReportPlot::Xy(XyChart {
            title: title.into(),
            x_label: "tokens of a block".into(),
            y_label: y_label.into(),
            x_scale: Scale::Log,
            y_scale: Scale::Linear,
            lines: vec![line("ShareGPT-like", value), line("Alpaca-like", value)],
            marks: Vec::new(),
        })
    };
    let links = results.links.iter().map(|row| row.link.as_str()).fold(Vec::new(), |mut links, link| {
        if links.last() != Some(&link) {
            links.push(link);
        }
        links
    });
    let mut by_link: Vec<ChartLine> = links
        .iter()
        .map(|link| {
            let rows = results.links.iter().filter(|row| row.link == *link);
            ChartLine::new(*link, rows.map(|row| (row.block_size as f64, row.swap_ms)).collect())
        })
        .collect();
    let first = results.links.iter().filter(|row| Some(&row.link.as_str()) == links.first());
    by_link.push(ChartLine::new("recompute", first.map(|row| (row.block_size as f64, row.recompute_ms)).collect()));
    let link_chart = XyChart {
        title: format!("Simulated: swapping {LINK_TOKENS} tokens out and in, by link, OPT-13B (figure 19a)"),
        x_label: "tokens of a block".into(),
        y_label: "ms".into(),
        x_scale: Scale::Log,
        y_scale: Scale::Log,
        lines: by_link,
        marks: Vec::new(),
    };
    let mut sharing =
        Table::new(["load", "requests/s with sharing", "without", "ratio", "running sequences with", "without "]);
    for row in &results.sharing {
        let SharingRow { load, shared_req_per_s, unshared_req_per_s, shared_running, unshared_running } = row;
        let figures = [
            shared_req_per_s,
            unshared_req_per_s,
            &(shared_req_per_s / unshared_req_per_s),
            shared_running,
            unshared_running,
        ];
        sharing.row([load.clone()].into_iter().chain(figures.map(|figure| number(*figure))).collect());
    }
    Some(ReportSection {
        title: "Ablations",
        is_simulated: true,
        parts: vec![
            ReportPart::Plot(
                "block-size-latency".into(),
                chart("Simulated: latency by block size (figure 18b)", "seconds a token", |row| {
                    row.normalised_latency_s
                }),
            ),
            ReportPart::Plot(
                "block-size-waste".into(),
                chart("Empty slots by block size", "% of slots given out", |row| 100.0 * row.empty),
            ),
            ReportPart::Table {
                caption: "Block sizes (simulated; the empty slots and hits are the pool's own)".into(),
                table: sizes,
            },
            ReportPart::Plot("swap-by-link".into(), ReportPlot::Xy(link_chart)),
            ReportPart::Table { caption: "Sharing on and off (simulated)".into(), table: sharing },
        ],
    })
}
