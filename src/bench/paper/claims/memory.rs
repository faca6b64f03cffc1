//! Memory, sharing and block sizes: sections 1 to 3, 6.3 and 7. Nothing here depends on a model's weights.

use super::row::{ClaimRow, NumberClaim};
use crate::memory::layout::MemoryLayout;
use crate::memory::waste::Waste;
use crate::paper::ablations::BlockSizeRow;
use crate::paper::results::PaperResults;
use crate::paper::shared::{SampleMemory, SharedResult};

const FROM_CONFIG: &str = "computed from config.json";
const FROM_POOL: &str = "the scheduler and the block pool, without a model";

pub fn rows(results: &PaperResults) -> Vec<ClaimRow> {
    [layout(results), waste(results), sharing(results), ablations(results)].concat()
}

fn layout(results: &PaperResults) -> Vec<ClaimRow> {
    let llama = results.layouts.first();
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let row = |claim: &str, source, claimed, within, unit, ours: fn(&MemoryLayout) -> f64, why| {
        NumberClaim {
            topic: "Memory",
            claim: claim.into(),
            source,
            claimed,
            within,
            ours: llama.map(ours),
            unit,
            how: FROM_CONFIG,
            why,
            depends_on_speed: false,
        }
        .row()
    };
    let mut rows = vec![
        row(
            "LLaMA-13B: KV of a token",
            "3",
            "800 KiB",
            (799.0, 801.0),
            " KiB",
            |layout| layout.kv_bytes_per_token as f64 / 1024.0,
            "",
        ),
        row(
            "LLaMA-13B: weights on a 40 GB A100",
            "1, 1",
            "65 %",
            (63.0, 67.0),
            " %",
            |layout| 100.0 * layout.weights,
            "",
        ),
        row(
            "LLaMA-13B: KV cache on a 40 GB A100",
            "1, 1",
            "over 30 %",
            (29.0, 35.0),
            " %",
            |layout| 100.0 * layout.kv,
            "",
        ),
        row(
            "Ten requests of 500 tokens: saved by paging",
            "secondary literature",
            "75 %",
            (74.0, 76.5),
            " %",
            |layout| 100.0 * layout.saved(),
            "",
        ),
    ];
    let bytes = |claim: &str, source, claimed, within, ours: Option<u64>| {
        NumberClaim {
            topic: "Memory",
            claim: claim.into(),
            source,
            claimed,
            within,
            ours: ours.map(gib),
            unit: " GiB",
            how: FROM_CONFIG,
            why: "",
            depends_on_speed: false,
        }
        .row()
    };
    rows.insert(
        1,
        bytes(
            "LLaMA-13B: KV of 2,048 tokens",
            "3",
            "1.6 GiB",
            (1.5, 1.65),
            llama.map(|layout| layout.kv_bytes_of_longest),
        ),
    );
    rows.push(bytes(
        "LLaMA-13B: ten requests that reserve 2,048 tokens",
        "secondary literature",
        "16 GB",
        (15.0, 16.5),
        llama.map(|layout| layout.reserved_bytes),
    ));
    rows.push(bytes(
        "LLaMA-13B: ten paged requests of 500 tokens",
        "secondary literature",
        "4 GB",
        (3.7, 4.1),
        llama.map(|layout| layout.paged_bytes),
    ));
    rows
}

/// Figure 2 and the blurbs that follow from it.
fn waste(results: &PaperResults) -> Vec<ClaimRow> {
    let sharegpt = results.waste.first().map(|(_, systems)| systems.as_slice());
    let of = |name: &str| sharegpt?.iter().find(|row| row.system.starts_with(name));
    let row = |claim: &str, source, claimed, within, ours: Option<f64>, why| {
        NumberClaim {
            topic: "Memory",
            claim: claim.into(),
            source,
            claimed,
            within,
            ours: ours.map(|ours| 100.0 * ours),
            unit: " %",
            how: FROM_POOL,
            why,
            depends_on_speed: false,
        }
        .row()
    };
    let unused = |row: &Waste| 1.0 - row.tokens;
    let lengths =
        "Lengths are log-normal with the paper's means, because the data set's own distribution is not given.";
    let first_fit = "A request that will still grow holds its whole length from the start, so a part of it is empty even if \
                     the length is known. The claim is of other loads.";
    let paged16 = of("paged, blocks of 16");
    vec![
        row(
            "Tokens in the memory, Orca (Max)",
            "2",
            "20.4 %",
            (17.0, 24.0),
            of("maximum").map(|row| row.tokens),
            lengths,
        ),
        row(
            "Tokens in the memory, Orca (Pow2)",
            "2",
            "26.8 %",
            (23.0, 31.0),
            of("Pow2").map(|row| row.tokens),
            lengths,
        ),
        row(
            "Tokens in the memory, Orca (Oracle)",
            "2",
            "38.2 %",
            (33.0, 43.0),
            of("Oracle").map(|row| row.tokens),
            lengths,
        ),
        row("Tokens in the memory, paged", "2", "96.3 %", (95.0, 99.0), paged16.map(|row| row.tokens), lengths),
        row(
            "Waste of the systems that reserve the maximum",
            "1",
            "60 to 80 %",
            (60.0, 81.0),
            of("maximum").map(unused),
            lengths,
        ),
        row(
            "Waste if exactly the length is reserved",
            "secondary literature",
            "20 to 40 %",
            (20.0, 40.0),
            of("exact").map(unused),
            first_fit,
        ),
        row(
            "Waste of paged",
            "vLLM's announcement",
            "below 4 %",
            (0.0, 4.0),
            paged16.map(|row| row.of_allocated),
            lengths,
        ),
        row(
            "Utilisation of paged",
            "secondary literature",
            "above 96 %",
            (96.0, 100.0),
            paged16.map(|row| row.tokens),
            lengths,
        ),
    ]
}

fn sharing(results: &PaperResults) -> Vec<ClaimRow> {
    let shared = results.shared.as_ref();
    let row = |claim: String, source, claimed, within, unit, ours: Option<f64>, why| {
        NumberClaim {
            topic: "Sharing",
            claim,
            source,
            claimed,
            within,
            ours,
            unit,
            how: FROM_POOL,
            why,
            depends_on_speed: false,
        }
        .row()
    };
    let mut rows = Vec::new();
    let secondary = "secondary literature";
    for (samples, times, saved, range, saved_range) in [
        (4, "1.3 x of one sample", "67 %", (1.2, 1.4), (65.0, 70.0)),
        (8, "1.5 x of one sample", "81 %", (1.4, 1.6), (79.0, 83.0)),
        (16, "1.7 x of one sample", "89 %", (1.6, 1.85), (87.0, 91.0)),
    ] {
        let of = |shared: &SharedResult| shared.memory.iter().find(|row| row.samples == samples).cloned();
        let found = shared.and_then(of);
        let pick = |value: fn(&SampleMemory) -> f64| found.as_ref().map(value);
        rows.push(row(
            format!("{samples} samples, outputs of 1/9, 1/13 or 1/20 of the prompt: memory"),
            secondary,
            times,
            range,
            " x",
            pick(|row| row.ours),
            "",
        ));
        rows.push(row(
            format!("{samples} samples, the same lengths: saved against copies"),
            secondary,
            saved,
            saved_range,
            " %",
            pick(|row| 100.0 * (1.0 - row.ours / f64::from(row.samples))),
            "",
        ));
        rows.push(row(
            format!("{samples} samples, ShareGPT-like lengths: memory"),
            secondary,
            times,
            range,
            " x",
            pick(|row| row.sharegpt),
            "Samples share their prompt, and nothing of their outputs, which are twice as long as the prompts here. The \
             claim holds for long prompts with short outputs: see the table of section 5.",
        ));
    }
    let saved = |of: &str, lengths: &str, count: u32| {
        let row =
            shared?.saved.iter().find(|row| row.of == of && row.lengths.starts_with(lengths) && row.count == count)?;
        Some(100.0 * row.saved)
    };
    let per_cent =
        |claim: String, source, claimed, within, ours, why| row(claim, source, claimed, within, " %", ours, why);
    let lengths = "The mean over the steps depends on the spread of the lengths, which the paper does not give. Samples of \
                   one request end together here.";
    let beams = "Without a model the candidates' probabilities are made up, and decide how often beams fork. bench memory \
                 --only sharing measures it with a model: 38 to 76 % with random weights.";
    for (count, published, within) in
        [(2, "6.09 %", (4.5, 8.5)), (4, "8.53 %", (6.5, 12.0)), (6, "9.79 %", (7.5, 13.0))]
    {
        let claim = format!("{count} samples, Alpaca: blocks saved");
        rows.push(per_cent(claim, "15a", published, within, saved("samples", "Alpaca", count), lengths));
    }
    for (count, published, within) in
        [(2, "37.56 %", (30.0, 46.0)), (4, "53.13 %", (42.0, 64.0)), (6, "55.16 %", (44.0, 67.0))]
    {
        let claim = format!("{count} beams, Alpaca: blocks saved");
        rows.push(per_cent(claim, "15b", published, within, saved("beams", "Alpaca", count), beams));
    }
    for (count, published, within) in [(2, "16.2 %", (13.0, 21.0)), (6, "30.5 %", (26.0, 36.0))] {
        let claim = format!("{count} samples, ShareGPT: blocks saved");
        rows.push(per_cent(claim, "6.3", published, within, saved("samples", "ShareGPT", count), lengths));
    }
    for (count, published, within) in [(2, "44.3 %", (35.0, 53.0)), (6, "66.3 %", (53.0, 79.6))] {
        let claim = format!("{count} beams, ShareGPT: blocks saved");
        rows.push(per_cent(claim, "6.3", published, within, saved("beams", "ShareGPT", count), beams));
    }
    for (lengths_of, published, within) in
        [("Alpaca", "11 to 14 %", (10.5, 14.5)), ("ShareGPT", "29 to 36 %", (28.0, 37.0))]
    {
        let claim = format!("4 to 16 samples, {lengths_of}: blocks saved, as measured before (at 16)");
        let why = "Another number of requests or seed.";
        rows.push(per_cent(claim, "docs/memory.md", published, within, saved("samples", lengths_of, 16), why));
    }
    rows.push(row(
        "OPT-66B: widest beam search, where one that reserves has 4 at most and beam 6 runs out of memory".into(),
        secondary,
        "6 beams",
        (6.0, 64.0),
        " beams",
        shared.map(|shared| shared.widest_paged as f64),
        "",
    ));
    rows.push(row(
        "OPT-66B: widest beam search with a reservation of the maximum".into(),
        secondary,
        "fewer than 6 beams",
        (0.0, 5.0),
        " beams",
        shared.map(|shared| shared.widest_reserved as f64),
        "",
    ));
    rows
}

fn ablations(results: &PaperResults) -> Vec<ClaimRow> {
    let sizes = |lengths: &str| -> Vec<&BlockSizeRow> {
        results.block_sizes.iter().filter(|row| row.lengths.starts_with(lengths)).collect()
    };
    /// Latency of the worst block size of `of`, over that of the best of all sizes.
    fn worst(rows: &[&BlockSizeRow], of: &[usize]) -> Option<f64> {
        let best = rows.iter().map(|row| row.normalised_latency_s).reduce(f64::min)?;
        let chosen = rows.iter().filter(|row| of.contains(&row.block_size));
        Some(chosen.map(|row| row.normalised_latency_s).fold(0.0, f64::max) / best)
    }
    let row = |claim: &str, source, claimed, within, unit, ours, how, why| {
        NumberClaim {
            topic: "Ablations",
            claim: claim.into(),
            source,
            claimed,
            within,
            ours,
            unit,
            how,
            why,
            depends_on_speed: false,
        }
        .row()
    };
    let simulated = "simulated: normalised latency at the rate that blocks of 16 just serve, over the best block size";
    let no_kernel = "The simulation has no cost of small blocks in the kernel, so only waste makes a difference, and small \
                     blocks are best.";
    let few = "The rate is that of a run with as many requests as the other loads have. So many short requests nearly fit \
               into the memory at once, and large blocks waste what nobody needs. Their empty slots are in the table.";
    let link = |block_size: usize| {
        let row = results.links.iter().find(|row| row.link.starts_with("PCIe 4") && row.block_size == block_size)?;
        Some(row.recompute_ms / row.swap_ms)
    };
    let by_link = "the timing model of OPT-13B, PCIe 4 x16, 256 tokens";
    let constants = "It depends on the assumed time of a transfer and on the share of the peak that a prompt of 256 tokens \
                     reaches.";
    let sharing = |index: usize| {
        let row = results.sharing.get(index)?;
        Some(row.shared_req_per_s / row.unshared_req_per_s)
    };
    vec![
        row(
            "ShareGPT: block sizes 16 to 128 against the best",
            "7.2, 18b",
            "among the best",
            (1.0, 1.5),
            " x",
            worst(&sizes("ShareGPT"), &[16, 32, 64, 128]),
            simulated,
            no_kernel,
        ),
        row(
            "Alpaca: block sizes 16 and 32 against the best",
            "7.2, 18b",
            "work well",
            (1.0, 1.6),
            " x",
            worst(&sizes("Alpaca"), &[16, 32]),
            simulated,
            no_kernel,
        ),
        row(
            "Alpaca: block size 256 against the best",
            "7.2, 18b",
            "much worse",
            (2.0, 1e6),
            " x",
            worst(&sizes("Alpaca"), &[256]),
            simulated,
            few,
        ),
        row(
            "Recomputing over swapping, blocks of 1",
            "7.3, 19a",
            "far below 1",
            (0.0, 0.5),
            " x",
            link(1),
            by_link,
            constants,
        ),
        row(
            "Recomputing over swapping, blocks of 16",
            "7.3, 19a",
            "comparable",
            (0.5, 1.5),
            " x",
            link(16),
            by_link,
            constants,
        ),
        row(
            "Recomputing over swapping, blocks of 256",
            "7.3, 19a",
            "at most 1.2",
            (0.5, 1.6),
            " x",
            link(256),
            by_link,
            constants,
        ),
        row(
            "Five shared examples: throughput with sharing over without",
            "6.4 (implied)",
            "above 1",
            (1.1, 1e6),
            " x",
            sharing(0),
            "simulated: all requests at once",
            "",
        ),
        row(
            "4 samples, Alpaca: throughput as one request over four",
            "6.3 (implied)",
            "above 1",
            (1.0, 1e6),
            " x",
            sharing(1),
            "simulated: all requests at once",
            "",
        ),
    ]
}
