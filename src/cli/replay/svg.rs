//! The timeline as a picture: a line for each request, and what the pools held.

use super::timeline::{Level, PreemptionMark, Timeline, TimelinePhase};
use pagetide_engine::block_pool::PoolStats;
use std::fmt::Write;

const WIDTH: f64 = 1200.0;
/// Left of the lines: names.
const MARGIN: f64 = 70.0;
const POOL_HEIGHT: f64 = 60.0;
const GAP: f64 = 24.0;
/// Of a request's line; less where there are many.
const MAX_ROW: f64 = 14.0;
const MIN_ROW: f64 = 2.0;
const ROWS_HEIGHT: f64 = 1600.0;

fn colour(phase: TimelinePhase) -> &'static str {
    match phase {
        TimelinePhase::Waiting => "#b8bcc4",
        TimelinePhase::Prompt => "#3f7fd0",
        TimelinePhase::Decoding => "#3fa66b",
        TimelinePhase::Paused => "#e08a2e",
    }
}

pub fn draw(timeline: &Timeline) -> String {
    let until_us = timeline.until_us.max(1) as f64;
    let x = |us: u64| MARGIN + us as f64 / until_us * (WIDTH - MARGIN - 10.0);
    let num_rows = timeline.requests.len();
    let row = (ROWS_HEIGHT / num_rows.max(1) as f64).clamp(MIN_ROW, MAX_ROW);
    let rows_top = 2.0 * (POOL_HEIGHT + GAP) + 2.0 * GAP;
    let height = rows_top + row * num_rows as f64 + GAP;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height:.0}\" width=\"{WIDTH}\" \
         height=\"{height:.0}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let mut put = |text: String| {
        svg += &text;
        svg.push('\n');
    };
    let mut left = MARGIN;
    for phase in TimelinePhase::ALL {
        put(format!("<rect x=\"{left}\" y=\"6\" width=\"12\" height=\"12\" fill=\"{}\"/>", colour(phase)));
        put(format!("<text x=\"{}\" y=\"16\">{}</text>", left + 16.0, phase.name()));
        left += 90.0;
    }
    put(format!("<text x=\"{left}\" y=\"16\" fill=\"#c02020\">| preempted</text>"));
    let pools: [(&str, PoolOf); 2] = [("device", |level| &level.device), ("swap", |level| &level.swap)];
    for (place, (name, stats)) in pools.into_iter().enumerate() {
        let top = GAP + place as f64 * (POOL_HEIGHT + GAP) + 8.0;
        put(format!("<text x=\"4\" y=\"{}\">{name}</text>", top + 12.0));
        put(format!("<text x=\"4\" y=\"{}\" fill=\"#777\">blocks</text>", top + 26.0));
        put(pool(timeline, top, &x, stats));
    }
    for tick in 0..=10u64 {
        let us = timeline.until_us * tick / 10;
        put(format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#777\">{:.2} s</text>",
            x(us),
            rows_top - 8.0,
            us as f64 / 1e6
        ));
    }
    for (place, (request, spans)) in timeline.requests.iter().enumerate() {
        let top = rows_top + place as f64 * row;
        if row >= 9.0 {
            put(format!("<text x=\"4\" y=\"{:.1}\">{request}</text>", top + row - 3.0));
        }
        for span in spans {
            let (from, to) = (x(span.from_us), x(span.to_us));
            let ms = (span.to_us - span.from_us) as f64 / 1e3;
            put(format!(
                "<rect x=\"{from:.2}\" y=\"{top:.1}\" width=\"{:.2}\" height=\"{:.1}\" fill=\"{}\">\
                 <title>{request} {} {ms:.1} ms</title></rect>",
                (to - from).max(0.2),
                (row - 1.0).max(1.0),
                colour(span.phase),
                span.phase.name(),
            ));
        }
    }
    let place_of = |mark: &PreemptionMark| timeline.requests.keys().position(|request| *request == mark.request);
    for mark in &timeline.preemptions {
        let Some(place) = place_of(mark) else { continue };
        let top = rows_top + place as f64 * row;
        let cause = mark.cause.map_or(String::new(), |cause| format!(" for {cause}"));
        put(format!(
            "<rect x=\"{:.2}\" y=\"{top:.1}\" width=\"1.5\" height=\"{row:.1}\" fill=\"#c02020\">\
             <title>{} is preempted{cause}</title></rect>",
            x(mark.at_us),
            mark.request
        ));
    }
    for failure in &timeline.failures {
        let at = x(*failure);
        put(format!(
            "<line x1=\"{at:.2}\" x2=\"{at:.2}\" y1=\"{GAP}\" y2=\"{height:.0}\" stroke=\"#c02020\" \
             stroke-dasharray=\"4 3\"><title>the executor fails</title></line>"
        ));
    }
    put("</svg>".into());
    svg
}

/// One of the two pools.
type PoolOf = fn(&Level) -> &PoolStats;

/// Used blocks, and cached ones above them, as parts of the pool.
fn pool(timeline: &Timeline, top: f64, x: &impl Fn(u64) -> f64, stats: PoolOf) -> String {
    let area = |part: fn(&PoolStats) -> usize, fill: &str| {
        let mut path = format!("M{MARGIN} {:.1}", top + POOL_HEIGHT);
        let mut last = top + POOL_HEIGHT;
        for level in &timeline.levels {
            let stats = stats(level);
            let num_blocks = stats.used + stats.cached + stats.free;
            let y = top + POOL_HEIGHT * (1.0 - part(stats) as f64 / num_blocks.max(1) as f64);
            // Steps that change nothing to see are left out.
            if (y - last).abs() >= 0.25 {
                let x = x(level.at_us);
                write!(path, "L{x:.1} {last:.1}L{x:.1} {y:.1}").expect("writing to a String");
                last = y;
            }
        }
        let right = x(timeline.until_us);
        format!("<path d=\"{path}L{right:.1} {last:.1}L{right:.1} {:.1}Z\" fill=\"{fill}\"/>", top + POOL_HEIGHT)
    };
    let frame = format!(
        "<rect x=\"{MARGIN}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{POOL_HEIGHT}\" fill=\"#f4f5f7\"/>",
        WIDTH - MARGIN - 10.0
    );
    let cached = area(|stats| stats.used + stats.cached, "#c9d9ee");
    let used = area(|stats| stats.used, "#3f7fd0");
    format!("{frame}\n{cached}\n{used}")
}
