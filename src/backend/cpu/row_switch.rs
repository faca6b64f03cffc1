//! Measures how products of many rows with quantised weights are fastest, and from how many rows on that is faster than
//! the way of few rows. It depends on the processor and the format, and changes no bit of a result.

use super::gemm::{
    Linear, ManyRows, ProductWorkspace, Sink, Source, fewest_many_rows, heights_of_many_rows, linear,
    measure_many_rows, reads_two_panels,
};
use super::isa::Isa;
use super::memory::Arena;
use super::pack::{ColumnOrder, CpuMatrix, On};
use super::simd::LANES;
use super::team::Team;
use crate::quant::{MAX_BLOCK_WEIGHTS, QuantFormat};
use crate::{DType, HostTensor, WeightFormat};
use pagetide_base::error::StartError;
use std::time::{Duration, Instant};

/// The numbers of rows that are tried, the first ones only where so few can be computed as many, the last one only with
/// tiles and for small blocks. Fewer rows are limited by the memory anyway.
const TRIED: [usize; 8] = [4, 8, 16, 24, 32, 48, 64, MORE];
/// The fewest rows that are tried with two panels at once. Here the weights are in a cache. From memory they come more
/// slowly that way, which 16 rows were measured to wait for.
const TRIED_WITH_TWO_PANELS: usize = 48;
/// The answer for large blocks if the way of many rows is slower for all others. It is faster for this many on every
/// processor.
const MORE: usize = 128;
/// Output columns of the product: two panels.
const N: usize = 2 * LANES;
/// Its inner dimension.
const K: usize = 1024;
/// Each way is run so often, in turn with the other. The shortest time counts.
const RUNS: usize = 8;
/// If the way of many rows takes this many times as long in two runs, it is not run again.
const HOPELESS: u32 = 2;
/// The way of many rows has to be so much faster: a measurement is never exact.
const GAIN: f64 = 1.03;

fn has_large_blocks(format: QuantFormat) -> bool {
    format.block_weights() == MAX_BLOCK_WEIGHTS
}

/// How products of many rows are computed. With AMX, many rows are those that it multiplies on tiles. The first call of
/// the process for an instruction set and format measures it, in about a millisecond on a processor with products of
/// bytes. Fails if there is no memory for that.
pub fn many_rows(isa: Isa, format: QuantFormat) -> Result<ManyRows, StartError> {
    if isa == Isa::Amx && !heights_of_many_rows(Isa::Avx512, format).is_empty() {
        // What tiles are compared with, and what is used for fewer rows.
        many_rows(Isa::Avx512, format)?;
    }
    let mut error = None;
    let many_rows = measure_many_rows(isa, format, || {
        measure(isa, format).unwrap_or_else(|why| {
            error = Some(why);
            ManyRows { from: MORE, max_height: usize::MAX }
        })
    });
    error.map_or(Ok(many_rows), Err)
}

fn measure(isa: Isa, format: QuantFormat) -> Result<ManyRows, StartError> {
    let (team, arena) = (Team::new(1).map_err(|error| StartError::new(error.to_string()))?, Arena::default());
    let bytes = vec![0; N * K / format.block_weights() * format.block_bytes()];
    let weights = HostTensor { format: WeightFormat::Quantized(format), rows: N, cols: K, bytes: &bytes };
    let on = On { arena: &arena, team: &team, isa };
    let w = &CpuMatrix::pack(&[weights], DType::F32, ColumnOrder::Plain, on)?;
    let mut workspace = ProductWorkspace::new(team.num_members())?;
    let x = vec![1.0; MORE * K];
    let mut out = vec![0.0; MORE * N];
    let mut time = |rows: usize, isa: Isa, many_rows: Option<ManyRows>| {
        workspace.set_many_rows(many_rows);
        let layer = Linear { x: Source::Rows(&x), rows, w, bias: None };
        let start = Instant::now();
        linear(isa, &team, &mut workspace, layer, Sink::Store(&mut out));
        start.elapsed()
    };
    let always = |max_height| Some(ManyRows { from: 0, max_height });
    // The height of the shortest of all runs, in which the heights take turns.
    let heights = heights_of_many_rows(isa, format);
    let runs = if heights.len() > 1 { RUNS } else { 0 };
    let turns = (0..runs).flat_map(|_| heights);
    let max_height = turns.min_by_key(|height| time(MORE, isa, always(**height))).map_or(usize::MAX, |height| *height);
    let few = Some(ManyRows { from: usize::MAX, max_height });
    let other = if isa == Isa::Amx { (Isa::Avx512, None) } else { (isa, few) };
    let (tried, otherwise) = if isa != Isa::Amx && has_large_blocks(format) {
        (&TRIED[..TRIED.len() - 1], MORE)
    } else {
        (&TRIED[..], usize::MAX)
    };
    let is_faster = |rows: &usize| {
        let mut shortest = [Duration::MAX; 2];
        for run in 0..RUNS {
            let times = [time(*rows, isa, always(max_height)), time(*rows, other.0, other.1)];
            shortest = [shortest[0].min(times[0]), shortest[1].min(times[1])];
            if run > 0 && shortest[0] > HOPELESS * shortest[1] {
                break;
            }
        }
        shortest[1].as_secs_f64() > GAIN * shortest[0].as_secs_f64()
    };
    let two_panels = if reads_two_panels(isa, format) { TRIED_WITH_TWO_PANELS } else { 0 };
    let fewest = two_panels.max(fewest_many_rows(isa, format));
    let mut tried = tried.iter().copied().filter(|rows| *rows >= fewest);
    Ok(ManyRows { from: tried.find(is_faster).unwrap_or(otherwise), max_height })
}
