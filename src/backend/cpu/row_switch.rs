//! Measures from how many rows on a product is faster if it takes panels of quantised weights apart first. It depends
//! on the processor and the format, and changes no bit of a result.

use super::gemm::{Linear, ProductWorkspace, Sink, Source, linear, measure_many_rows, takes_apart};
use super::isa::Isa;
use super::memory::Arena;
use super::pack::{ColumnOrder, CpuMatrix, On};
use super::simd::LANES;
use super::team::Team;
use crate::quant::{MAX_BLOCK_WEIGHTS, QuantFormat};
use crate::{DType, HostTensor, WeightFormat};
use pagetide_base::error::StartError;
use std::time::{Duration, Instant};

/// The numbers of rows that are tried, the last one only with tiles and for small blocks. Fewer rows are limited by the
/// memory anyway.
const TRIED: [usize; 6] = [16, 24, 32, 48, 64, MORE];
/// The answer for large blocks if taking apart is slower for all others. It is faster for this many on every processor.
const MORE: usize = 128;
/// Output columns of the product: two panels.
const N: usize = 2 * LANES;
/// Its inner dimension.
const K: usize = 1024;
/// Each way is run so often, in turn with the other. The shortest time counts.
const RUNS: usize = 8;
/// If taking apart takes this many times as long in two runs, it is not run again.
const HOPELESS: u32 = 2;
/// Taking apart has to be so much faster: a measurement is never exact.
const GAIN: f64 = 1.03;

fn has_large_blocks(format: QuantFormat) -> bool {
    format.block_weights() == MAX_BLOCK_WEIGHTS
}

/// The fewest rows for which a product takes quantised weights apart once for all of them, or with AMX, multiplies them
/// on tiles. [`usize::MAX`] if that is slower. The first call of the process for an instruction set and format
/// measures it, in less than a millisecond on a processor with products of bytes. Fails if there is no memory for that.
pub fn many_rows(isa: Isa, format: QuantFormat) -> Result<usize, StartError> {
    if isa == Isa::Amx && takes_apart(Isa::Avx512, format) {
        // What tiles are compared with, and what is used for fewer rows.
        many_rows(Isa::Avx512, format)?;
    }
    let mut error = None;
    let rows = measure_many_rows(isa, format, || {
        measure(isa, format).unwrap_or_else(|why| {
            error = Some(why);
            MORE
        })
    });
    error.map_or(Ok(rows), Err)
}

fn measure(isa: Isa, format: QuantFormat) -> Result<usize, StartError> {
    let (team, arena) = (Team::new(1).map_err(|error| StartError::new(error.to_string()))?, Arena::default());
    let bytes = vec![0; N * K / format.block_weights() * format.block_bytes()];
    let weights = HostTensor { format: WeightFormat::Quantized(format), rows: N, cols: K, bytes: &bytes };
    let on = On { arena: &arena, team: &team, isa };
    let w = &CpuMatrix::pack(&[weights], DType::F32, ColumnOrder::Plain, on)?;
    let mut workspace = ProductWorkspace::new(team.num_members())?;
    let x = vec![1.0; MORE * K];
    let mut out = vec![0.0; MORE * N];
    let mut time = |rows: usize, isa: Isa, many_rows: Option<usize>| {
        workspace.set_many_rows(many_rows);
        let layer = Linear { x: Source::Rows(&x), rows, w, bias: None };
        let start = Instant::now();
        linear(isa, &team, &mut workspace, layer, Sink::Store(&mut out));
        start.elapsed()
    };
    let other = if isa == Isa::Amx { (Isa::Avx512, None) } else { (isa, Some(usize::MAX)) };
    let (tried, otherwise) = if isa != Isa::Amx && has_large_blocks(format) {
        (&TRIED[..TRIED.len() - 1], MORE)
    } else {
        (&TRIED[..], usize::MAX)
    };
    let is_faster = |rows: &usize| {
        let mut shortest = [Duration::MAX; 2];
        for run in 0..RUNS {
            shortest = [shortest[0].min(time(*rows, isa, Some(0))), shortest[1].min(time(*rows, other.0, other.1))];
            if run > 0 && shortest[0] > HOPELESS * shortest[1] {
                break;
            }
        }
        shortest[1].as_secs_f64() > GAIN * shortest[0].as_secs_f64()
    };
    Ok(tried.iter().copied().find(is_faster).unwrap_or(otherwise))
}
