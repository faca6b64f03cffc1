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
    const HAS_INTEGER_PRODUCTS: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Range { start, end } = self.part.rows;
        for row in (start..end).step_by(BLOCK_ROWS) {
            let rows = row..end.min(row + BLOCK_ROWS);
            let mut panel = self.panels.start;
            while panel < self.panels.end {
                let left = self.panels.end - panel;
                let (mut width, mut first_left) = (1, row);
                // Small blocks are no faster when taken apart.
                if const { !F::IS_SMALL } {
                    // SAFETY: the panels exist (`ProductPart::run`), and no row is past the part's last. (The bounds are
                    // constants, so that no code is made for tiles that an instruction set does not use.)
                    unsafe {
                        if const { S::QUANT_ROWS == 8 && S::QUANT_PANELS == 2 } && left >= 2 {
                            width = 2;
                            first_left = self.many_rows::<S, 4, 2>(simd, rows.clone(), panel);
                        } else if const { S::QUANT_ROWS == 8 } {
                            first_left = self.many_rows::<S, 8, 1>(simd, rows.clone(), panel);
                        } else if const { S::QUANT_ROWS == 4 } {
                            first_left = self.many_rows::<S, 4, 1>(simd, rows.clone(), panel);
                        } else {
                            first_left = self.many_rows::<S, 2, 1>(simd, rows.clone(), panel);
                        }
                    }
                }
                for panel in panel..panel + width {
                    // SAFETY: as above.
                    unsafe { self.rows::<S>(simd, first_left..rows.end, panel) };
                }
                panel += width;
            }
        }
    }
}

impl<F: PanelFormat> QuantKernel<'_, F> {
    /// Computes all whole tiles of `M` rows of `P` panels if the rows are many: the panels are taken apart once for all
    /// of them. Returns the first row that is left.
    ///
    /// # Safety
    /// The rows and the panels exist.
    #[inline(always)]
    unsafe fn many_rows<S: Simd, const M: usize, const P: usize>(
        &self,
        simd: S,
        rows: Range<usize>,
        panel: usize,
    ) -> usize {
        // The rows of a register tile are in one tile of the input.
        if rows.len() < self.many_rows.max(M) || !rows.start.is_multiple_of(MAX_TILE_ROWS) {
            return rows.start;
        }
        let num_rows = rows.len() / M * M;
        let layout = PanelLayout::of(F::FORMAT);
        const { assert!(F::BLOCKS == PanelLayout::of(F::FORMAT).blocks) };
        let mut results = [[[0.0_f32; LANES]; P]; BLOCK_ROWS];
        let mut space = [const { UnpackedChunk::new() }; P];
        // SAFETY: the caller's promise. A panel has `num_chunks` chunks.
        unsafe {
            for chunk in 0..layout.num_chunks(F::FORMAT, self.operands.w.k()) {
                let mut at = [std::ptr::null(); P];
                for p in 0..P {
                    let data: *const u8 = self.operands.w.panel(panel + p).data.get();
                    space[p].fill(simd, self.format, data.add(chunk * layout.chunk_bytes));
                    at[p] = space[p].as_ptr();
                }
                for first in (0..num_rows).step_by(M) {
                    let x = self.operands.x.row(F::IS_SMALL, rows.start + first);
                    let mut sums = [[simd.splat(0.0); P]; M];
                    for m in 0..M {
                        for p in 0..P {
                            sums[m][p] = simd.load(results[first + m][p].as_ptr());
                        }
                    }
                    add_chunk(simd, Unpacked(self.format), at, chunk, x, &mut sums);
                    for m in 0..M {
                        for p in 0..P {
                            simd.store(results[first + m][p].as_mut_ptr(), sums[m][p]);
                        }
                    }
                }
            }
            for first in (0..num_rows).step_by(M) {
                let mut sums = [[simd.splat(0.0); P]; M];
                for m in 0..M {
                    for p in 0..P {
                        sums[m][p] = simd.load(results[first + m][p].as_ptr());
                    }
                }
                self.store(simd, rows.start + first, panel, sums);
            }
        }
        rows.start + num_rows
    }

    /// Some rows of a panel.
    ///
    /// # Safety
    /// The rows and the panel exist.
    #[inline(always)]
    unsafe fn rows<S: Simd>(&self, simd: S, Range { start: mut row, end }: Range<usize>, panel: usize) {
        while row < end {
            // The rows of a register tile are in one tile of the input.
            let rest = (end - row).min(MAX_TILE_ROWS - row % MAX_TILE_ROWS).min(S::QUANT_ROWS);
            // SAFETY: the caller's promise; no tile is taller than the rows that are left.
            unsafe {
                // The bounds are constants, so that no code is made for tiles that an instruction set does not use.
                match rest {
                    1 => {
                        self.tile::<S, 1>(simd, row, panel);
                        row += 1;
                    }
                    8.. if const { S::QUANT_ROWS >= 8 } => {
                        self.tile::<S, 8>(simd, row, panel);
                        row += 8;
                    }
                    4.. if const { S::QUANT_ROWS >= 4 } => {
                        self.tile::<S, 4>(simd, row, panel);
                        row += 4;
                    }
                    _ => {
                        self.tile::<S, 2>(simd, row, panel);
                        row += 2;
                    }
                }
            }
        }
    }

    /// `M` rows of a panel, in registers.
    ///
    /// # Safety
    /// Rows `row .. row + M` and the panel exist.
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize>(&self, simd: S, row: usize, panel: usize) {
        let layout = PanelLayout::of(F::FORMAT);
        let mut results = [[simd.splat(0.0)]; M];
        // SAFETY: a panel has `num_chunks` chunks. A row of the input is as long, with zeros behind its end.
        unsafe {
            let mut at: *const u8 = self.operands.w.panel(panel).data.get();
            let x = self.operands.x.row(F::IS_SMALL, row);
            for chunk in 0..layout.num_chunks(F::FORMAT, self.operands.w.k()) {
                add_chunk(simd, self.format, [at], chunk, x, &mut results);
                at = at.add(layout.chunk_bytes);
            }
            self.store(simd, row, panel, results);
        }
    }

    /// Writes the results of a register tile.
    ///
    /// # Safety
    /// The rows and the panels exist.
    #[inline(always)]
    unsafe fn store<S: Simd, const M: usize, const P: usize>(
        &self,
        simd: S,
        row: usize,
        panel: usize,
        mut results: [[S::V; P]; M],
    ) {
        if const { has_pairs::<S, M>() } {
            for m in (0..M).step_by(2) {
                for p in 0..P {
                    [results[m][p], results[m + 1][p]] = simd.rows_of_pair([results[m][p], results[m + 1][p]]);
                }
            }
        }
        for m in 0..M {
            for p in 0..P {
                // SAFETY: the caller's promise.
                unsafe { self.part.store(simd, row + m, panel + p, results[m][p]) };
            }
        }
    }
}

/// Whether the rows `2i` and `2i + 1` of a register tile are a pair ([`Simd::PAIRS_ROWS`]). For two rows, bringing the
/// weights into order takes as many instructions as it saves.
const fn has_pairs<S: Simd, const M: usize>() -> bool {
    S::PAIRS_ROWS && M >= 4
}

/// Numbers of the columns, for all rows or for the two registers of each pair.
#[inline(always)]
fn for_rows<S: Simd, const M: usize>(simd: S, of_columns: S::V) -> [S::V; 2] {
    if const { has_pairs::<S, M>() } { simd.pair_rows([of_columns; 2]) } else { [of_columns; 2] }
}

/// Prefetches what a step needs of a later chunk. Where the panel is in a cache already, this costs little.
#[inline(always)]
fn prefetch<S: Simd, F: PanelFormat>(simd: S, chunk: *const u8, step: usize) {
    if F::PREFETCHED {
        let bytes = PanelLayout::of(F::FORMAT).chunk_bytes.div_ceil(8 * num_parts::<F>());
        simd.prefetch(chunk.wrapping_add(PREFETCH_BYTES + step * bytes));
    }
}

/// Adds the products of a chunk of `P` panels with `M` rows, or with pairs of rows ([`has_pairs`]). Only a panel that is
/// alone is prefetched.
///
/// # Safety
/// `at` are chunks in this format, and the input has this chunk of these rows.
#[inline(always)]
unsafe fn add_chunk<S: Simd, F: PanelFormat, const M: usize, const P: usize>(
    simd: S,
    format: F,
    at: [*const u8; P],
    chunk: usize,
    x: QuantRow,
    results: &mut [[S::V; P]; M],
) {
    for block in 0..F::BLOCKS {
        let block_in_row = chunk * F::BLOCKS + block;
        let mut sums = [[simd.splat(0.0); P]; M];
        for part in block * parts_of_block::<F>()..(block + 1) * parts_of_block::<F>() {
            // With few rows, the prefetches of a part are spread over its steps: the processor handles only a few
            // misses at a time. With many rows they are together, because the compiler moves no load of an operand
            // across one.
            let are_together = M > 2;
            for step in 0..if are_together { 8 } else { 0 } {
                prefetch::<S, F>(simd, at[0], 8 * part + step);
            }
            // Counted from the start of the row.
            let part_in_row = chunk * num_parts::<F>() + part;
            let mut ints = [[simd.splat_int(0); P]; M];
            // SAFETY: the caller's promise.
            unsafe {
                let words = x.codes.add(part_in_row * (PART / 4) * x.stride);
                macro_rules! four_steps {
                    ($half:literal: $($step:literal)*; $($even:literal $odd:literal),*) => {
                        if const { $half * HALF % F::GROUP == 0 } {
                            ints = begin::<S, F, M, P>(simd, x, 2 * part_in_row + $half);
                        }
                        if const { S::SUMS_FOUR && !F::IS_SIGNED } {
                            let mut codes = [[simd.table(&[0; LANES]); 4]; P];
                            $(
                                if !are_together {
                                    prefetch::<S, F>(simd, at[0], 8 * part + $step);
                                }
                                for p in 0..P {
                                    codes[p][$step % 4] = format.codes::<S, $step>(simd, at[p], part);
                                }
                            )*
                            for m in 0..M {
                                let word = |step: usize| *words.add((4 * $half + step) * x.stride + m);
                                let of_row = [word(0), word(1), word(2), word(3)];
                                for p in 0..P {
                                    ints[m][p] = simd.dot_four(ints[m][p], codes[p], of_row, F::LARGEST);
                                }
                            }
                        } else if const { has_pairs::<S, M>() } {
                            $(
                                for p in 0..P {
                                    let even = format.codes::<S, $even>(simd, at[p], part);
                                    let odd = format.codes::<S, $odd>(simd, at[p], part);
                                    let codes =
                                        if F::HAS_PAIRED_STEPS { [even, odd] } else { simd.pair_steps([even, odd]) };
                                    for m in (0..M).step_by(2) {
                                        let word = |step: usize| words.add(step * x.stride + m).cast::<u64>();
                                        let of_rows = [word($even).read_unaligned(), word($odd).read_unaligned()];
                                        let pair = [ints[m][p], ints[m + 1][p]];
                                        [ints[m][p], ints[m + 1][p]] = simd.dot_two_rows(pair, codes, of_rows);
                                    }
                                }
                            )*
                        } else {
                            $(
                                if !are_together {
                                    prefetch::<S, F>(simd, at[0], 8 * part + $step);
                                }
                                let mut codes = [simd.table(&[0; LANES]); P];
                                for p in 0..P {
                                    codes[p] = format.codes::<S, $step>(simd, at[p], part);
                                }
                                add_products::<S, F, M, P>(simd, &mut ints, codes, words.add($step * x.stride));
                            )*
                        }
                        if const { ($half + 1) * HALF % F::GROUP == 0 } {
                            for p in 0..P {
                                let scale = format.scale(simd, at[p], (part * PART + $half * HALF) / F::GROUP);
                                let scales = for_rows::<S, M>(simd, scale);
                                for m in 0..M {
                                    let (product, scale) = (simd.to_floats(ints[m][p]), scales[m % 2]);
                                    sums[m][p] =
                                        if F::IS_SMALL { product } else { simd.fused(product, scale, sums[m][p]) };
                                }
                            }
                        }
                    };
                }
                four_steps!(0: 0 1 2 3; 0 1, 2 3);
                four_steps!(1: 4 5 6 7; 4 5, 6 7);
            }
        }
        // SAFETY: the caller's promise.
        unsafe {
            for p in 0..P {
                let minima = minima::<S, F, M>(simd, format, at[p], block_in_row, x);
                let [factor, minimum_factor] = format.factors(simd, at[p], block);
                let factors = for_rows::<S, M>(simd, factor);
                let minimum_factors = for_rows::<S, M>(simd, minimum_factor);
                let scales = x.scales.add(block_in_row * x.stride);
                for m in 0..M {
                    let mut result = simd.mul(factors[m % 2], sums[m][p]);
                    if F::HAS_MINIMUM {
                        result = simd.fused(minimum_factors[m % 2], minima[m], result);
                    }
                    let scale = if const { has_pairs::<S, M>() } {
                        simd.as_floats(simd.splat_two_rows(*scales.cast::<u32>().add(m / 2 * 2).cast::<[u32; 2]>()))
                    } else {
                        simd.splat(*scales.add(m))
                    };
                    results[m][p] = simd.fused(result, scale, results[m][p]);
                }
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
unsafe fn begin<S: Simd, F: PanelFormat, const M: usize, const P: usize>(
    simd: S,
    x: QuantRow,
    half: usize,
) -> [[S::Ints; P]; M] {
    let bias = if F::IS_SIGNED && S::ADDS_128 { 128 } else { F::BIAS };
    let mut ints = [[simd.splat_int(0); P]; M];
    if bias != 0 {
        for m in 0..M {
            // SAFETY: the caller's promise.
            let minus_sum = unsafe {
                let minus_sums = match F::GROUP {
                    HALF => x.minus_sums_16.add(half * x.stride),
                    _ => x.minus_sums_32.add(half / 2 * x.stride),
                };
                if const { has_pairs::<S, M>() } {
                    simd.splat_two_rows(*minus_sums.add(m / 2 * 2).cast::<[u32; 2]>())
                } else {
                    simd.splat_int(*minus_sums.add(m))
                }
            };
            // A shift, because it takes its operand from memory.
            let start = simd.or_shifted(simd.splat_int(0), minus_sum, bias.trailing_zeros());
            for p in 0..P {
                ints[m][p] = start;
            }
        }
    }
    ints
}

/// Adds the products of four weights of each column.
///
/// # Safety
/// The words exist.
#[inline(always)]
unsafe fn add_products<S: Simd, F: PanelFormat, const M: usize, const P: usize>(
    simd: S,
    ints: &mut [[S::Ints; P]; M],
    codes: [S::Bytes; P],
    words: *const u32,
) {
    for m in 0..M {
        // SAFETY: the caller's promise.
        let word = unsafe { *words.add(m) };
        for p in 0..P {
            ints[m][p] = match F::IS_SIGNED {
                true => simd.dot_signed(ints[m][p], codes[p], word),
                false => simd.dot_bytes(ints[m][p], codes[p], word),
            };
        }
    }
}

/// The sums that belong to the second of [`PanelFormat::factors`], for each row or as pairs of rows.
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
) -> [S::V; M] {
    let mut floats = [simd.splat(0.0); M];
    if !F::HAS_MINIMUM {
        return floats;
    }
    let mut sums = [simd.splat_int(0); M];
    // SAFETY: the caller's promise.
    unsafe {
        if F::IS_SMALL {
            for m in 0..M {
                sums[m] = simd.splat_int(*x.minus_sums_32.add(block_in_row * x.stride + m));
            }
        } else {
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
    }
    for m in 0..M {
        floats[m] = simd.to_floats(sums[m]);
    }
    if const { has_pairs::<S, M>() } {
        for m in (0..M).step_by(2) {
            [floats[m], floats[m + 1]] = simd.pair_rows([floats[m], floats[m + 1]]);
        }
    }
    floats
}

/// Weights of a column in half of a part.
const HALF: usize = PART / 2;

/// Rows that are computed for all panels before the next ones: as many as stay in the second-level cache with the
/// panels of a task. Tiles of the input begin at multiples of it.
const BLOCK_ROWS: usize = 8 * MAX_TILE_ROWS;

/// How far ahead weights are prefetched where memory is the limit.
const PREFETCH_BYTES: usize = 4096;
