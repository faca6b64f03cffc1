//! What is measured with the configured model on this machine.

use super::row::{ClaimRow, NumberClaim};
use crate::paper::results::{MeasuredResults, PaperResults};
use crate::paper::systems::System::{
    self, DynamicBatches, Paged, ReserveMax, ReserveOracle, ReservePow2, StaticBatches,
};

const AT_ONCE: &str = "measured: output tokens a second, all requests there from the start";
const SMALL: &str = "On a CPU, a small model's step costs about as much for each row as one row costs, because weights stay \
                     in the caches and products are the limit. So more rows a step win less than on a GPU.";

pub fn rows(results: &PaperResults) -> Vec<ClaimRow> {
    let measured = results.measured.as_ref();
    let speed = |system: System| move |measured: &MeasuredResults| Some(measured.at_once(system)?.out_tok_per_s);
    let ratio = |base: System| {
        let measured = measured?;
        Some(speed(Paged)(measured)? / speed(base)(measured)?)
    };
    let row = |claim: &str, source, claimed, within, ours, how, why| {
        NumberClaim {
            topic: "This machine",
            claim: claim.into(),
            source,
            claimed,
            within,
            ours,
            unit: " x",
            how,
            why,
            depends_on_speed: true,
        }
        .row()
    };
    let generate = |better: bool| {
        let measured = measured?;
        let speeds = measured.transformers.iter().filter(|batch| better || batch.batch == 32);
        let theirs = speeds.map(|batch| batch.out_tok_per_s()).reduce(f64::max)?;
        Some(speed(Paged)(measured)? / theirs)
    };
    let real = "measured: paged over the real generate (--transformers), the same requests and threads";
    let real_why = "A small model and few cores: see the absolute figures in the table.";
    let kernel = measured.and_then(|measured| {
        let (paged, contiguous) = measured
            .kernels
            .iter()
            .fold((0.0, 0.0), |(paged, contiguous), row| (paged + row.paged_ms, contiguous + row.contiguous_ms));
        (contiguous > 0.0).then(|| paged / contiguous)
    });
    let swap = |block_size: usize| {
        let row = measured?.swap.iter().find(|row| row.block_size == block_size)?;
        Some(row.recompute_ms / row.swap_ms())
    };
    let swap_why = "The swap pool of a CPU is memory beside the KV cache, without a link between them, so copies are \
                    cheap at any block size.";
    let block = |block_size: usize| {
        let rows = &measured?.block_sizes;
        let best = rows.iter().map(|row| row.out_tok_per_s).reduce(f64::max)?;
        Some(rows.iter().find(|row| row.block_size == block_size)?.out_tok_per_s / best)
    };
    vec![
        row(
            "Paged over static batches (the same kernels)",
            "secondary literature",
            "7.2 x",
            (4.0, 24.0),
            ratio(StaticBatches),
            AT_ONCE,
            SMALL,
        ),
        row(
            "Paged over dynamic batches",
            "vLLM's announcement",
            "up to 3.5 x",
            (1.8, 8.0),
            ratio(DynamicBatches),
            AT_ONCE,
            SMALL,
        ),
        row("Paged over Max", "6.2", "2.7 to 8 x", (2.7, 8.0), ratio(ReserveMax), AT_ONCE, SMALL),
        row("Paged over Pow2", "6.2", "between the two", (1.3, 8.0), ratio(ReservePow2), AT_ONCE, SMALL),
        row("Paged over Oracle", "6.2", "1.7 to 2.7 x", (1.7, 2.7), ratio(ReserveOracle), AT_ONCE, SMALL),
        row(
            "Paged over generate, its better batch size",
            "goal of this project",
            "at least 10 x",
            (10.0, 1e6),
            generate(true),
            real,
            real_why,
        ),
        row(
            "Paged over generate, batches of 32",
            "goal of this project",
            "at least 24 x",
            (24.0, 1e6),
            generate(false),
            real,
            real_why,
        ),
        row(
            "Attention: scattered blocks over contiguous ones",
            "7.1, 18a",
            "1.2 to 1.26 x",
            (0.9, 1.26),
            kernel,
            "measured: what the context adds to a decode step; blocks of 16 in a row, or scattered",
            "The paper compares two implementations. Here both sides are one kernel, and a CPU's memory does not care much in which order blocks of some kilobytes come.",
        ),
        row(
            "Recomputing over swapping here, blocks of 16",
            "7.3, 19a",
            "comparable",
            (0.5, 1.5),
            swap(16),
            "measured: 256 tokens or more, out and back, against computing them",
            swap_why,
        ),
        row(
            "Block size 16 against the best, throughput",
            "7.2, 18b",
            "among the best",
            (0.85, 1.0),
            block(16),
            "measured: output tokens a second over those of the best block size",
            "The speed of this machine changes between runs.",
        ),
    ]
}
