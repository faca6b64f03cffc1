//! Products with quantised weights on register tiles, written once over [`Simd`].
//!
//! Sums of products of bytes within a group are exact integers. They are multiplied with scales and added up in
//! float32, group after group, with operations that are rounded once. So a result has the same bits on every
//! instruction set, and for any number of rows.
//!
//! With few rows the codes are used as they are read, because memory is the limit. With many rows the codes and scales
//! of a chunk are first taken apart, once for all these rows. How many rows are many is measured (`many_rows`).

// Indices name registers here, as in `kernel`.
#![allow(clippy::needless_range_loop)]

mod formats;
mod unpacked;

use super::super::isa::Isa;
use super::super::pack::PanelLayout;
use super::super::simd::{LANES, Simd, SimdKernel};
use super::many_rows::many_rows;
use super::part::{ProductPart, QuantOperands};
use super::quant_input::{MAX_TILE_ROWS, QuantRow};
use crate::quant::{MAX_BLOCK_WEIGHTS, QuantFormat};
use formats::{
    Iq4Nl, Iq4Xs, Mxfp4, PART, PanelFormat, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, num_parts,
    parts_of_block,
};
use std::ops::Range;
use unpacked::{Unpacked, UnpackedChunk};

/// Computes a part, panels of one format after those of another.
///
/// # Safety
/// As for [`ProductPart::run`]; the panels exist.
pub(super) unsafe fn run(part: &ProductPart<'_>, operands: QuantOperands<'_>, isa: Isa) {
    let mut panels = part.panels.clone();
    while !panels.is_empty() {
        let format = operands.w.panel(panels.start).format;
        let end = panels.clone().find(|panel| operands.w.panel(*panel).format != format).unwrap_or(panels.end);
        let panels_of_format = panels.start..end;
        panels.start = end;
        let many_rows = operands.many_rows.unwrap_or_else(|| many_rows(isa, format));
        macro_rules! run {
            ($format:ident) => {
                isa.run(QuantKernel { part, operands, panels: panels_of_format, many_rows, format: $format })
            };
        }
        match format {
            QuantFormat::Q4_0 => run!(Q4_0),
            QuantFormat::Q4_1 => run!(Q4_1),
            QuantFormat::Q5_0 => run!(Q5_0),
            QuantFormat::Q5_1 => run!(Q5_1),
            QuantFormat::Q8_0 => run!(Q8_0),
            QuantFormat::Q2_K => run!(Q2K),
            QuantFormat::Q3_K => run!(Q3K),
            QuantFormat::Q4_K => run!(Q4K),
            QuantFormat::Q5_K => run!(Q5K),
            QuantFormat::Q6_K => run!(Q6K),
            QuantFormat::IQ4_NL => run!(Iq4Nl),
            QuantFormat::IQ4_XS => run!(Iq4Xs),
            QuantFormat::MXFP4 => run!(Mxfp4),
        }
    }
}

struct QuantKernel<'a, F> {
    part: &'a ProductPart<'a>,
    operands: QuantOperands<'a>,
    panels: Range<usize>,
    many_rows: usize,
    format: F,
}

impl<F: PanelFormat> SimdKernel for QuantKernel<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Range { start, end } = self.part.rows;
        for row in (start..end).step_by(BLOCK_ROWS) {
            let rows = row..end.min(row + BLOCK_ROWS);
            for panel in self.panels.clone() {
                // SAFETY: the panel exists (`ProductPart::run`), and no row is past the part's last.
                unsafe {
                    let first_left = match S::QUANT_ROWS {
                        8 => self.many_rows::<S, 8>(simd, rows.clone(), panel),
                        4 => self.many_rows::<S, 4>(simd, rows.clone(), panel),
                        _ => self.many_rows::<S, 2>(simd, rows.clone(), panel),
                    };
                    self.rows::<S>(simd, first_left..rows.end, panel, first_left == row);
                }
            }
        }
    }
}

impl<F: PanelFormat> QuantKernel<'_, F> {
    /// Computes all whole tiles of `M` rows of a panel if they are so many that it is worth taking the panel apart.
    /// Returns the first row that is left.
    ///
    /// # Safety
    /// The rows and the panel exist.
    #[inline(always)]
    unsafe fn many_rows<S: Simd, const M: usize>(&self, simd: S, rows: Range<usize>, panel: usize) -> usize {
        // The rows of a register tile are in one tile of the input. Small blocks are hardly faster when taken apart.
        if F::IS_SMALL || rows.len() < self.many_rows || !rows.start.is_multiple_of(MAX_TILE_ROWS) {
            return rows.start;
        }
        let num_rows = rows.len() / M * M;
        let layout = PanelLayout::of(F::FORMAT);
        const { assert!(F::BLOCKS == PanelLayout::of(F::FORMAT).blocks) };
        let mut results = [[0.0_f32; LANES]; BLOCK_ROWS];
        let mut space = UnpackedChunk::new();
        // SAFETY: the caller's promise. A panel has `num_chunks` chunks.
        unsafe {
            let mut at: *const u8 = self.operands.w.panel(panel).data.get();
            for chunk in 0..layout.num_chunks(F::FORMAT, self.operands.w.k()) {
                space.fill(simd, self.format, at);
                for first in (0..num_rows).step_by(M) {
                    let x = self.operands.x.row(F::IS_SMALL, rows.start + first);
                    let mut sums = [simd.splat(0.0); M];
                    for m in 0..M {
                        sums[m] = simd.load(results[first + m].as_ptr());
                    }
                    add_chunk(simd, Unpacked(self.format), space.as_ptr(), chunk, x, None, &mut sums);
                    for m in 0..M {
                        simd.store(results[first + m].as_mut_ptr(), sums[m]);
                    }
                }
                at = at.add(layout.chunk_bytes);
            }
            for row in 0..num_rows {
                self.part.store(simd, rows.start + row, panel, simd.load(results[row].as_ptr()));
            }
        }
        rows.start + num_rows
    }

    /// Some rows of a panel.
    ///
    /// # Safety
    /// The rows and the panel exist.
    #[inline(always)]
    unsafe fn rows<S: Simd>(
        &self,
        simd: S,
        Range { start: mut row, end }: Range<usize>,
        panel: usize,
        mut is_first: bool,
    ) {
        while row < end {
            // The rows of a register tile are in one tile of the input.
            let rest = (end - row).min(MAX_TILE_ROWS - row % MAX_TILE_ROWS).min(S::QUANT_ROWS);
            // SAFETY: the caller's promise; no tile is taller than the rows that are left.
            unsafe {
                match rest {
                    1 => {
                        self.tile::<S, 1>(simd, row, panel, is_first);
                        row += 1;
                    }
                    2 | 3 => {
                        self.tile::<S, 2>(simd, row, panel, is_first);
                        row += 2;
                    }
                    8.. if S::QUANT_ROWS >= 8 => {
                        self.tile::<S, 8>(simd, row, panel, is_first);
                        row += 8;
                    }
                    _ if S::QUANT_ROWS >= 4 => {
                        self.tile::<S, 4>(simd, row, panel, is_first);
                        row += 4;
                    }
                    _ => {
                        self.tile::<S, 2>(simd, row, panel, is_first);
                        row += 2;
                    }
                }
            }
            is_first = false;
        }
    }

    /// `M` rows of a panel, in registers.
    ///
    /// # Safety
    /// Rows `row .. row + M` and the panel exist.
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize>(&self, simd: S, row: usize, panel: usize, is_first: bool) {
        let layout = PanelLayout::of(F::FORMAT);
        // The panel is in a cache from the second tile on. Spread over the steps: the processor handles only a few
        // misses at a time.
        let per_step = is_first.then_some(layout.chunk_bytes.div_ceil(8 * num_parts::<F>()));
        let mut results = [simd.splat(0.0); M];
        // SAFETY: a panel has `num_chunks` chunks. A row of the input is as long, with zeros behind its end.
        unsafe {
            let mut at: *const u8 = self.operands.w.panel(panel).data.get();
            let x = self.operands.x.row(F::IS_SMALL, row);
            for chunk in 0..layout.num_chunks(F::FORMAT, self.operands.w.k()) {
                add_chunk(simd, self.format, at, chunk, x, per_step, &mut results);
                at = at.add(layout.chunk_bytes);
            }
            for m in 0..M {
                self.part.store(simd, row + m, panel, results[m]);
            }
        }
    }
}

/// Adds the products of a chunk of a panel with `M` rows. At each step, so many bytes ahead of it are prefetched.
///
/// # Safety
/// `at` is a chunk in this format, and the input has this chunk of these rows.
#[inline(always)]
unsafe fn add_chunk<S: Simd, F: PanelFormat, const M: usize>(
    simd: S,
    format: F,
    at: *const u8,
    chunk: usize,
    x: QuantRow,
    prefetched_per_step: Option<usize>,
    results: &mut [S::V; M],
) {
    for block in 0..F::BLOCKS {
        let block_in_row = chunk * F::BLOCKS + block;
        let mut sums = [simd.splat(0.0); M];
        for part in block * parts_of_block::<F>()..(block + 1) * parts_of_block::<F>() {
            // Counted from the start of the row.
            let part_in_row = chunk * num_parts::<F>() + part;
            let mut ints = [simd.splat_int(0); M];
            // SAFETY: the caller's promise.
            unsafe {
                let words = x.codes.add(part_in_row * (PART / 4) * x.stride);
                macro_rules! four_steps {
                    ($half:literal: $($step:literal)*) => {
                        if $half * HALF % F::GROUP == 0 {
                            ints = begin::<S, F, M>(simd, x, 2 * part_in_row + $half);
                        }
                        if S::SUMS_FOUR && !F::IS_SIGNED {
                            let mut four = [simd.table(&[0; LANES]); 4];
                            $(
                                if let Some(bytes) = prefetched_per_step {
                                    simd.prefetch(at.wrapping_add(PREFETCH_BYTES + (8 * part + $step) * bytes));
                                }
                                four[$step % 4] = format.codes::<S, $step>(simd, at, part);
                            )*
                            for m in 0..M {
                                let word = |step: usize| *words.add((4 * $half + step) * x.stride + m);
                                let of_row = [word(0), word(1), word(2), word(3)];
                                ints[m] = simd.dot_four(ints[m], four, of_row, F::LARGEST);
                            }
                        } else {
                            $(
                                if let Some(bytes) = prefetched_per_step {
                                    simd.prefetch(at.wrapping_add(PREFETCH_BYTES + (8 * part + $step) * bytes));
                                }
                                let codes = format.codes::<S, $step>(simd, at, part);
                                add_products::<S, F, M>(simd, &mut ints, codes, words.add($step * x.stride));
                            )*
                        }
                        if ($half + 1) * HALF % F::GROUP == 0 {
                            let scale = format.scale(simd, at, (part * PART + $half * HALF) / F::GROUP);
                            for m in 0..M {
                                let product = simd.to_floats(ints[m]);
                                sums[m] = if F::IS_SMALL { product } else { simd.fused(product, scale, sums[m]) };
                            }
                        }
                    };
                }
                four_steps!(0: 0 1 2 3);
                four_steps!(1: 4 5 6 7);
            }
        }
        // SAFETY: the caller's promise.
        unsafe {
            let minima = minima::<S, F, M>(simd, format, at, block_in_row, x);
            let [factor, minimum_factor] = format.factors(simd, at, block);
            for m in 0..M {
                let mut result = simd.mul(factor, sums[m]);
                if F::HAS_MINIMUM {
                    result = simd.fused(minimum_factor, simd.to_floats(minima[m]), result);
                }
                let scale = simd.splat(*x.scales.add(block_in_row * x.stride + m));
                results[m] = simd.fused(result, scale, results[m]);
            }
        }
    }
}

/// The integer sums of a group before its first step: they make up for the bias of the codes. The group begins with
/// half a part, counted from the start of the row.
///
/// # Safety
/// The input has these rows.
#[inline(always)]
unsafe fn begin<S: Simd, F: PanelFormat, const M: usize>(simd: S, x: QuantRow, half: usize) -> [S::Ints; M] {
    let bias = if F::IS_SIGNED && S::ADDS_128 { 128 } else { F::BIAS };
    let mut ints = [simd.splat_int(0); M];
    if bias != 0 {
        for m in 0..M {
            // SAFETY: the caller's promise.
            let minus_sum = unsafe {
                match F::GROUP {
                    HALF => *x.minus_sums_16.add(half * x.stride + m),
                    _ => *x.minus_sums_32.add(half / 2 * x.stride + m),
                }
            };
            // A shift, because it takes its operand from memory.
            ints[m] = simd.or_shifted(ints[m], simd.splat_int(minus_sum), bias.trailing_zeros());
        }
    }
    ints
}

/// Adds the products of four weights of each column.
///
/// # Safety
/// The words exist.
#[inline(always)]
unsafe fn add_products<S: Simd, F: PanelFormat, const M: usize>(
    simd: S,
    ints: &mut [S::Ints; M],
    codes: S::Bytes,
    words: *const u32,
) {
    for m in 0..M {
        // SAFETY: the caller's promise.
        let word = unsafe { *words.add(m) };
        ints[m] = match F::IS_SIGNED {
            true => simd.dot_signed(ints[m], codes, word),
            false => simd.dot_bytes(ints[m], codes, word),
        };
    }
}

/// The sums that belong to the second of [`PanelFormat::factors`].
///
/// # Safety
/// As for [`add_chunk`].
#[inline(always)]
unsafe fn minima<S: Simd, F: PanelFormat, const M: usize>(
    simd: S,
    format: F,
    at: *const u8,
    block_in_row: usize,
    x: QuantRow,
) -> [S::Ints; M] {
    let mut sums = [simd.splat_int(0); M];
    if !F::HAS_MINIMUM {
        return sums;
    }
    // SAFETY: the caller's promise.
    unsafe {
        if F::IS_SMALL {
            for m in 0..M {
                sums[m] = simd.splat_int(*x.minus_sums_32.add(block_in_row * x.stride + m));
            }
            return sums;
        }
        let num_pairs = MAX_BLOCK_WEIGHTS / F::GROUP / 2;
        let pairs = if F::GROUP == HALF { x.pairs_16 } else { x.pairs_32 };
        for pair in 0..num_pairs {
            let minima = format.minima(simd, at, pair);
            for m in 0..M {
                let of_row = *pairs.add((block_in_row * num_pairs + pair) * x.stride + m);
                sums[m] = simd.dot_shorts(sums[m], minima, of_row);
            }
        }
    }
    sums
}

/// Weights of a column in half of a part.
const HALF: usize = PART / 2;

/// Rows that are computed for all panels before the next ones: as many as stay in the second-level cache with the
/// panels of a task. Tiles of the input begin at multiples of it.
const BLOCK_ROWS: usize = 8 * MAX_TILE_ROWS;

/// How far ahead weights are prefetched where memory is the limit.
const PREFETCH_BYTES: usize = 4096;
