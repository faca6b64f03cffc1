//! Tables that are not about requests: prefill and decode apart, and each phase against the peak performance of the
//! machine.

use crate::chart::escape;
use serde_json::Value;

/// A number with `decimals` decimals; a dash if there is none.
fn figure(value: &Value, decimals: usize) -> String {
    value.as_f64().map_or("-".into(), |number| format!("{number:.decimals$}"))
}

fn percent(share: &Value) -> String {
    share.as_f64().map_or("-".into(), |share| format!("{:.1} %", 100.0 * share))
}

fn row(page: &mut String, cell: &str, cells: &[String]) {
    page.push_str("<tr>");
    cells.iter().for_each(|text| page.push_str(&format!("<{cell}>{}</{cell}>", escape(text))));
    page.push_str("</tr>\n");
}

/// Of `bench latency`; nothing of the others.
pub fn phases(page: &mut String, phases: &Value) {
    if phases.is_null() {
        return;
    }
    page.push_str("<h2>Prefill and decoding</h2>\n<div class=\"wide\"><table>\n");
    row(page, "th", &["times in ms", "tok/s", "p50", "p90", "p99", "max"].map(String::from));
    for (name, rate, times) in [
        ("prefill, of a batch", "prefill_tok_per_s", "prefill_ms"),
        ("decoding, of a step", "decode_tok_per_s", "decode_step_ms"),
    ] {
        let of = |percentile: &str| figure(&phases[times][percentile], 2);
        let cells = [name.into(), figure(&phases[rate], 1), of("p50"), of("p90"), of("p99"), of("max")];
        row(page, "td", &cells);
    }
    page.push_str("</table></div>\n");
}

/// Of `--roofline`; nothing without it.
pub fn roofline(page: &mut String, roofline: &Value) {
    let Some(kinds) = roofline["kinds"].as_array() else { return };
    let machine = &roofline["machine"];
    page.push_str(&format!(
        "<h2>Against the peak of the machine</h2>\n<p class=\"dim\">{} threads, {}: reads {} GB/s, multiplies \
         {} TFLOP/s. Steps took {} s of {} s.</p>\n<div class=\"wide\"><table>\n",
        machine["threads"],
        escape(machine["isa"].as_str().unwrap_or_default()),
        figure(&machine["read_gb_per_s"], 1),
        figure(&machine["tflop_per_s"], 3),
        figure(&roofline["steps_s"], 3),
        figure(&roofline["wall_s"], 3),
    ));
    let columns = ["phase", "calls", "s", "of step", "GB/s", "of reads", "TFLOP/s", "of peak", "floor s", "x floor"];
    row(page, "th", &columns.map(String::from));
    for kind in kinds {
        let name = escape(kind["kind"].as_str().unwrap_or_default());
        page.push_str(&format!(
            "<tr><td class=\"load\" colspan=\"{}\">{name}: {} steps of {} rows in all</td></tr>\n",
            columns.len(),
            kind["steps"],
            kind["rows"]
        ));
        for line in kind["phases"].as_array().into_iter().flatten() {
            let seconds = &line["seconds"];
            row(
                page,
                "td",
                &[
                    line["phase"].as_str().unwrap_or_default().into(),
                    line["calls"].to_string(),
                    figure(seconds, 3),
                    percent(&line["share"]),
                    figure(&line["gb_per_s"], 1),
                    percent(&line["share_of_reads"]),
                    figure(&line["tflop_per_s"], 3),
                    percent(&line["share_of_peak"]),
                    figure(&line["floor_s"], 3),
                    times_floor(seconds, &line["floor_s"]),
                ],
            );
        }
        let all = ["all".into(), String::new(), figure(&kind["seconds"], 3)];
        let rest = [figure(&kind["floor_s"], 3), times_floor(&kind["seconds"], &kind["floor_s"])];
        row(page, "td", &[&all[..], &vec![String::new(); 5], &rest].concat());
    }
    page.push_str("</table></div>\n");
}

/// What needs neither memory nor arithmetic has no floor.
fn times_floor(seconds: &Value, floor_s: &Value) -> String {
    match (seconds.as_f64(), floor_s.as_f64()) {
        (Some(seconds), Some(floor)) if floor > 0.0 => format!("{:.2}", seconds / floor),
        _ => "-".into(),
    }
}
