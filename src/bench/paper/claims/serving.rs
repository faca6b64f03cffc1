//! Throughput and latency against other systems: sections 6.2 to 6.5, simulated.

use super::row::{ClaimRow, NumberClaim};
use crate::paper::curves::Curves;
use crate::paper::results::PaperResults;
use crate::paper::systems::System;
use crate::paper::systems::System::{DynamicBatches, Paged, ReserveMax, ReserveOracle, ReservePow2, StaticBatches};

const AT_ONCE: &str = "simulated: requests a second if all are there from the start";
const SUSTAINED: &str = "simulated: the rates that both sustain at the same normalised latency";
const ONE_STEP_COST: &str = "A step costs the same per row in every system here, and a larger batch pays for its rows in \
                             full. On a GPU, rows are partly hidden behind reading the weights.";

pub fn rows(results: &PaperResults) -> Vec<ClaimRow> {
    let curves = |key: &str| results.curves_of(key);
    let mut rows = vec![
        throughput(
            "OPT-13B: FasterTransformer over HF",
            "1.7 x",
            (1.5, 1.9),
            curves("sharegpt-13b"),
            (DynamicBatches, StaticBatches),
            "Static and dynamic batches differ here by padded prompts alone. What remains of the 1.7 is \
             FasterTransformer's fused kernels against PyTorch's, which have no part in this comparison.",
        ),
        throughput(
            "OPT-13B: paged over HF",
            "7.2 x",
            (6.0, 8.6),
            curves("sharegpt-13b"),
            (Paged, StaticBatches),
            "Without the 1.7 of faster kernels, the claim is 4.2: see the row above.",
        ),
        throughput(
            "OPT-66B: paged over FasterTransformer",
            "2.2 x",
            (1.8, 2.6),
            curves("sharegpt-66b"),
            (Paged, DynamicBatches),
            "The claim names no lengths. With ShareGPT-like ones, the longest output of a batch keeps all its places, \
             and only four sequences of the maximum length fit into this memory; both make batches slower than that.",
        ),
        ratio_range(
            results,
            "Paged over HF, at most",
            "vLLM's announcement",
            "up to 24 x",
            (12.0, 48.0),
            StaticBatches,
            |ratios| ratios.1,
            "The claim was measured with transformers' own kernels and its best batch size. A batch that waits until it \
             is full has a normalised latency far above the limit at low rates, which makes the ratio at the same \
             latency larger, and equal kernels make it smaller.",
        ),
        NumberClaim {
            topic: "Throughput",
            claim: "Paged over FasterTransformer or TGI, at most".into(),
            source: "vLLM's announcement",
            claimed: "up to 3.5 x",
            within: (2.5, 4.5),
            ours: curves("sharegpt-13b").and_then(|curves| curves.throughput_ratio(Paged, ReserveMax)),
            unit: " x",
            how: "simulated: requests a second if all are there, over iteration-level batches that reserve the maximum",
            why: ONE_STEP_COST,
            depends_on_speed: false,
        }
        .row(),
        ratio_range(
            results,
            "Paged over FasterTransformer, at most, at the same normalised latency",
            "6.2",
            "up to 22 x",
            (11.0, 44.0),
            DynamicBatches,
            |ratios| ratios.1,
            "A short answer of a batch waits for the longest one, so its latency for each token is high at any rate. How \
             much that lowers the sustained rate depends on the spread of the lengths, and the paper's lengths have a \
             longer tail than the log-normal ones here.",
        ),
    ];
    rows.extend(ours_against_orca(results));
    rows.extend(other_decoding(results));
    rows.extend(batched_requests(results));
    rows.extend(published_rates(results));
    rows
}

fn throughput(
    claim: &str,
    claimed: &'static str,
    within: (f64, f64),
    curves: Option<&Curves>,
    (system, base): (System, System),
    why: &'static str,
) -> ClaimRow {
    NumberClaim {
        topic: "Throughput",
        claim: claim.into(),
        source: "secondary literature",
        claimed,
        within,
        ours: curves.and_then(|curves| curves.throughput_ratio(system, base)),
        unit: " x",
        how: AT_ONCE,
        why,
        depends_on_speed: false,
    }
    .row()
}

/// The smallest and the largest ratio of sustained rates over `base`, of loads with ShareGPT-like and Alpaca-like
/// lengths and one sample.
fn ratios(results: &PaperResults, base: System) -> Option<(f64, f64)> {
    let loads = results.curves.iter().filter(|curves| curves.figure.starts_with("12"));
    let ratios: Vec<f64> = loads.filter_map(|curves| curves.rate_ratio(Paged, base)).collect();
    let least = ratios.iter().copied().reduce(f64::min)?;
    Some((least, ratios.iter().copied().fold(least, f64::max)))
}

#[expect(clippy::too_many_arguments, reason = "one row, written out where it is made")]
fn ratio_range(
    results: &PaperResults,
    claim: &str,
    source: &'static str,
    claimed: &'static str,
    within: (f64, f64),
    base: System,
    pick: fn((f64, f64)) -> f64,
    why: &'static str,
) -> ClaimRow {
    NumberClaim {
        topic: "Throughput",
        claim: claim.into(),
        source,
        claimed,
        within,
        ours: ratios(results, base).map(pick),
        unit: " x",
        how: SUSTAINED,
        why,
        depends_on_speed: false,
    }
    .row()
}

/// Figure 12.
fn ours_against_orca(results: &PaperResults) -> Vec<ClaimRow> {
    let row = |key: &str, claim: &str, source, claimed, within, base, why| {
        NumberClaim {
            topic: "Latency against rate",
            claim: claim.into(),
            source,
            claimed,
            within,
            ours: results.curves_of(key).and_then(|curves| curves.rate_ratio(Paged, base)),
            unit: " x",
            how: SUSTAINED,
            why,
            depends_on_speed: false,
        }
        .row()
    };
    let (oracle, max) = ("1.7 to 2.7 x", "2.7 to 8 x");
    let few_requests = "At this size the memory holds few sequences, and a step is mostly reading the weights, so that \
                        the rate follows the number of sequences that fit.";
    let pow2 = "Between Oracle and Max: Pow2 reserves up to twice what an output takes.";
    let many = "Seven sequences of the maximum length fit, whatever the load, and a hundred short ones in pages: figure 13b \
                itself has 19 times as many requests at once. The rate of Max follows from seven requests and the \
                duration of a step.";
    let short = "Alpaca-like requests are short. Buddies of up to twice their length and weights that are read once a \
                 step leave less to win; the paper says so of its figure 12f, and shows about 1.4 in figures 12d and e.";
    vec![
        row(
            "sharegpt-13b",
            "OPT-13B, ShareGPT: paged over Oracle",
            "6.2, 12a",
            oracle,
            (1.7, 2.7),
            ReserveOracle,
            ONE_STEP_COST,
        ),
        row(
            "sharegpt-13b",
            "OPT-13B, ShareGPT: paged over Pow2",
            "6.2, 12a",
            "between the two",
            (1.7, 8.0),
            ReservePow2,
            pow2,
        ),
        row(
            "sharegpt-13b",
            "OPT-13B, ShareGPT: paged over Max",
            "6.2, 12a",
            max,
            (2.7, 8.0),
            ReserveMax,
            ONE_STEP_COST,
        ),
        row(
            "sharegpt-66b",
            "OPT-66B, ShareGPT: paged over Oracle",
            "6.2, 12b",
            oracle,
            (1.7, 2.7),
            ReserveOracle,
            few_requests,
        ),
        row("sharegpt-66b", "OPT-66B, ShareGPT: paged over Max", "6.2, 12b", max, (2.7, 8.0), ReserveMax, few_requests),
        row(
            "sharegpt-175b",
            "OPT-175B, ShareGPT: paged over Oracle",
            "6.2, 12c",
            oracle,
            (1.7, 2.7),
            ReserveOracle,
            ONE_STEP_COST,
        ),
        row(
            "sharegpt-175b",
            "OPT-175B, ShareGPT: paged over Max",
            "6.2, 12c",
            max,
            (2.7, 8.0),
            ReserveMax,
            ONE_STEP_COST,
        ),
        row("alpaca-13b", "OPT-13B, Alpaca: paged over Oracle", "6.3, 12d", "1.3 x", (1.1, 1.7), ReserveOracle, short),
        row(
            "alpaca-13b",
            "OPT-13B, Alpaca: paged over Max",
            "12d (read from the plot)",
            "about 4 x",
            (2.7, 8.0),
            ReserveMax,
            many,
        ),
        row(
            "alpaca-66b",
            "OPT-66B, Alpaca: paged over Oracle",
            "12e (read from the plot)",
            "about 1.4 x",
            (1.1, 1.9),
            ReserveOracle,
            short,
        ),
        row(
            "alpaca-175b",
            "OPT-175B, Alpaca: paged over Oracle",
            "12f (read from the plot)",
            "about 1.25 x",
            (1.0, 1.5),
            ReserveOracle,
            short,
        ),
        row(
            "sharegpt-13b",
            "Paged over Orca in general",
            "abstract",
            "2 to 4 x",
            (2.0, 4.0),
            ReservePow2,
            "The range is of all of Orca's variants; this row takes the middle one, Pow2.",
        ),
    ]
}

/// Figures 14, 16 and 17.
fn other_decoding(results: &PaperResults) -> Vec<ClaimRow> {
    let row = |key: &str, claim: &str, source, claimed, within, base, why| {
        NumberClaim {
            topic: "Other decoding",
            claim: claim.into(),
            source,
            claimed,
            within,
            ours: results.curves_of(key).and_then(|curves| curves.rate_ratio(Paged, base)),
            unit: " x",
            how: SUSTAINED,
            why,
            depends_on_speed: false,
        }
        .row()
    };
    let samples =
        "All systems compute a request's prompt once here, and the reserving ones keep a copy for each sample.";
    let beams = "The engines that reserve get their beams' forks for nothing here. In the paper they copy whole caches \
                 when beams change places, so that paged wins more there.";
    let prefix = "The sentences' lengths are ours, because the paper gives none. A longer sentence lowers the ratio.";
    let chat = "The conversations are made up: up to seven earlier turns with ShareGPT-like lengths.";
    vec![
        row(
            "samples-2",
            "2 samples, Alpaca: paged over Oracle",
            "14a (read from the plot)",
            "about 1.5 x",
            (1.1, 1.9),
            ReserveOracle,
            samples,
        ),
        row(
            "samples-4",
            "4 samples, Alpaca: paged over Oracle",
            "14b (read from the plot)",
            "about 1.65 x",
            (1.2, 2.1),
            ReserveOracle,
            samples,
        ),
        row(
            "samples-6",
            "6 samples, Alpaca: paged over Oracle",
            "14c (read from the plot)",
            "about 1.6 x",
            (1.2, 2.1),
            ReserveOracle,
            samples,
        ),
        row(
            "beams-2",
            "2 beams, Alpaca: paged over Oracle",
            "14d (read from the plot)",
            "about 1.6 x",
            (1.2, 2.1),
            ReserveOracle,
            beams,
        ),
        row(
            "beams-4",
            "4 beams, Alpaca: paged over Oracle",
            "14e (read from the plot)",
            "about 1.7 x",
            (1.3, 2.3),
            ReserveOracle,
            beams,
        ),
        row("beams-6", "6 beams, Alpaca: paged over Oracle", "6.3", "2.3 x", (1.8, 2.8), ReserveOracle, beams),
        row(
            "prefix-80",
            "A shared example (80 tokens): paged over Oracle",
            "6.4, 16a",
            "1.67 x",
            (1.3, 2.1),
            ReserveOracle,
            prefix,
        ),
        row(
            "prefix-341",
            "Five shared examples (341 tokens): paged over Oracle",
            "6.4, 16b",
            "3.58 x",
            (2.8, 4.4),
            ReserveOracle,
            prefix,
        ),
        row("chat", "Chatbot: paged over Oracle", "6.5, 17", "2 x", (1.6, 2.4), ReserveOracle, chat),
        row("chat", "Chatbot: paged over Max", "6.5, 17", "2 x", (1.6, 2.4), ReserveMax, chat),
        NumberClaim {
            topic: "Sharing",
            claim: "Beam 4: paged over FasterTransformer".into(),
            source: "secondary literature",
            claimed: "2.3 x",
            within: (1.8, 2.9),
            ours: results.curves_of("beams-4").and_then(|curves| curves.throughput_ratio(Paged, DynamicBatches)),
            unit: " x",
            how: AT_ONCE,
            why: "The paper's own 2.3 is of beam 6 over Orca (Oracle). A batch that reserves four times the maximum \
                  length for each request holds one request at a time in this memory.",
            depends_on_speed: false,
        }
        .row(),
    ]
}

/// Figure 13a.
fn batched_requests(results: &PaperResults) -> Vec<ClaimRow> {
    let running = |system| {
        let curves = results.curves_of("sharegpt-13b")?;
        Some(curves.of(system)?.all_at_once.as_ref()?.running_requests)
    };
    let row = |claim: &str, claimed, within, base| {
        NumberClaim {
            topic: "Throughput",
            claim: claim.into(),
            source: "6.2, 13a",
            claimed,
            within,
            ours: running(Paged).zip(running(base)).map(|(paged, base)| paged / base),
            unit: " x",
            how: "simulated: mean number of requests that run at once while others wait",
            why: "The paper counts at two requests a second, while some requests wait. Here they wait all the time, and each \
                  step runs as many as fit.",
            depends_on_speed: false,
        }
        .row()
    };
    vec![
        row("OPT-13B, ShareGPT: requests at once, paged over Oracle", "2.2 x", (1.8, 2.6), ReserveOracle),
        row("OPT-13B, ShareGPT: requests at once, paged over Max", "4.3 x", (3.5, 5.2), ReserveMax),
    ]
}

/// The knees of figure 12, which check the timing model.
fn published_rates(results: &PaperResults) -> Vec<ClaimRow> {
    let row = |key: &str, claim: &str, source, claimed, published: f64| {
        NumberClaim {
            topic: "The simulation itself",
            claim: claim.into(),
            source,
            claimed,
            within: (published / 1.5, published * 1.5),
            ours: results.curves_of(key).and_then(|curves| curves.of(Paged)).map(|curve| curve.sustained),
            unit: " requests/s",
            how: "simulated: the rate that paged sustains",
            why: "The timing model has no more than the data sheet and three assumptions (below), which are the same for \
                  all models, and lengths here have no tail as long as the data sets'. A short run ends before the \
                  queue of an overload is long, so its rates are higher still. Ratios between systems depend little on \
                  any of that.",
            depends_on_speed: false,
        }
        .row()
    };
    vec![
        row(
            "sharegpt-13b",
            "OPT-13B, ShareGPT: rate of paged",
            "12a (read from the plot)",
            "about 1.9 requests/s",
            1.9,
        ),
        row(
            "sharegpt-66b",
            "OPT-66B, ShareGPT: rate of paged",
            "12b (read from the plot)",
            "about 0.95 requests/s",
            0.95,
        ),
        row(
            "sharegpt-175b",
            "OPT-175B, ShareGPT: rate of paged",
            "12c (read from the plot)",
            "about 2.4 requests/s",
            2.4,
        ),
        row("alpaca-13b", "OPT-13B, Alpaca: rate of paged", "12d (read from the plot)", "about 28 requests/s", 28.0),
        row("alpaca-66b", "OPT-66B, Alpaca: rate of paged", "12e (read from the plot)", "about 18 requests/s", 18.0),
        row("alpaca-175b", "OPT-175B, Alpaca: rate of paged", "12f (read from the plot)", "about 20 requests/s", 20.0),
    ]
}
