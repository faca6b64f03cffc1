//! Products with quantised weights on register tiles, written once over [`Simd`].
//!
//! Sums of products of bytes within a group are exact integers. They are multiplied with scales and added up in
//! float32, group after group, with operations that are rounded once. So a result has the same bits on every
//! instruction set, and for any number of rows.

// Indices name registers here, as in `kernel`.
#![allow(clippy::needless_range_loop)]

mod formats;

use super::super::isa::Isa;
use super::super::pack::PanelLayout;
use super::super::simd::{Simd, SimdKernel};
use super::part::{ProductPart, QuantOperands};
use super::quant_input::{MAX_TILE_ROWS, QuantRow};
use crate::quant::QuantFormat;
use formats::{Iq4Nl, Iq4Xs, Mxfp4, PanelFormat, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
use std::ops::Range;

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
        macro_rules! run {
            ($format:ident) => {
                isa.run(QuantKernel { part, operands, panels: panels_of_format, format: $format })
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
    format: F,
}

impl<F: PanelFormat> SimdKernel for QuantKernel<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Range { start, end } = self.part.rows;
        for row in (start..end).step_by(BLOCK_ROWS) {
            for panel in self.panels.clone() {
                // SAFETY: the panel exists (`ProductPart::run`), and no row is past the part's last.
                unsafe { self.rows::<S>(simd, row..end.min(row + BLOCK_ROWS), panel) };
            }
        }
    }
}

impl<F: PanelFormat> QuantKernel<'_, F> {
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
                match rest {
                    1 => {
                        self.tile::<S, 1>(simd, row, panel);
                        row += 1;
                    }
                    2 | 3 => {
                        self.tile::<S, 2>(simd, row, panel);
                        row += 2;
                    }
                    8.. if S::QUANT_ROWS >= 8 => {
                        self.tile::<S, 8>(simd, row, panel);
                        row += 8;
                    }
                    _ if S::QUANT_ROWS >= 4 => {
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
        const { assert!(F::PARTS * PART == PanelLayout::of(F::FORMAT).blocks * F::FORMAT.block_weights()) };
        let layout = PanelLayout::of(F::FORMAT);
        let num_chunks = layout.num_chunks(F::FORMAT, self.operands.w.k());
        // With many rows, the panel is in a cache from the second tile on.
        let few_rows = self.part.rows.len() <= MAX_TILE_ROWS;
        // Spread over the steps: the processor handles only a few misses at a time.
        let per_step = layout.chunk_bytes.div_ceil(8 * F::PARTS);
        let zero = simd.splat(0.0);
        let mut results = [zero; M];
        // SAFETY: a panel has `num_chunks` chunks. A row of the input is as long, with zeros behind its end.
        unsafe {
            let mut at: *const u8 = self.operands.w.panel(panel).data.get();
            let x = self.operands.x.row(F::IS_SMALL, row);
            for chunk in 0..num_chunks {
                let header = self.format.header(simd, at);
                let mut sums = [zero; M];
                for part in 0..F::PARTS {
                    // Counted from the start of the row.
                    let part_in_row = chunk * F::PARTS + part;
                    let words = x.codes.add(part_in_row * (PART / 4) * x.stride);
                    let ahead = at.wrapping_add(PREFETCH_BYTES + 8 * part * per_step);
                    let mut ints = [simd.splat_int(0); M];
                    macro_rules! four_steps {
                        ($half:literal: $($step:literal)*) => {
                            if $half * HALF % F::GROUP == 0 {
                                ints = self.begin::<S, M>(simd, x, 2 * part_in_row + $half);
                            }
                            $(
                                if few_rows {
                                    simd.prefetch(ahead.wrapping_add($step * per_step));
                                }
                                let four = words.add($step * x.stride);
                                self.step::<S, M, $step>(simd, &mut ints, at, part, four);
                            )*
                            if ($half + 1) * HALF % F::GROUP == 0 {
                                let group = (part * PART + $half * HALF) / F::GROUP;
                                let group_in_row = (part_in_row * PART + $half * HALF) / F::GROUP;
                                let (scale, minimum) = self.format.scale(simd, header, at, group);
                                for m in 0..M {
                                    let sum = if F::IS_SMALL { &mut results[m] } else { &mut sums[m] };
                                    let product = simd.to_floats(ints[m]);
                                    *sum =
                                        add_group::<S, F>(simd, *sum, product, scale, minimum, x, group_in_row, m);
                                }
                            }
                        };
                    }
                    four_steps!(0: 0 1 2 3);
                    four_steps!(1: 4 5 6 7);
                }
                if !F::IS_SMALL {
                    for m in 0..M {
                        let scale = simd.splat(*x.scales.add(chunk * x.stride + m));
                        results[m] = simd.fused(sums[m], scale, results[m]);
                    }
                }
                at = at.add(layout.chunk_bytes);
            }
            for m in 0..M {
                self.part.store(simd, row + m, panel, results[m]);
            }
        }
    }

    /// The integer sums of a group before its first step: they make up for the bias of the codes. The group begins with
    /// half a part, counted from the start of the row.
    ///
    /// # Safety
    /// The input has these rows.
    #[inline(always)]
    unsafe fn begin<S: Simd, const M: usize>(&self, simd: S, x: QuantRow, half: usize) -> [S::Ints; M] {
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
                ints[m] = simd.splat_int(minus_sum * bias);
            }
        }
        ints
    }

    /// Four weights of each column.
    ///
    /// # Safety
    /// The chunk and the words exist.
    #[inline(always)]
    unsafe fn step<S: Simd, const M: usize, const STEP: usize>(
        &self,
        simd: S,
        ints: &mut [S::Ints; M],
        chunk: *const u8,
        part: usize,
        words: *const u32,
    ) {
        // SAFETY: the caller's promise.
        let codes = unsafe { self.format.codes::<S, STEP>(simd, chunk, part) };
        let codes = if F::IS_SIGNED { simd.prepare_signed(codes) } else { codes };
        for m in 0..M {
            // SAFETY: the caller's promise.
            let word = unsafe { *words.add(m) };
            ints[m] = match F::IS_SIGNED {
                true => simd.dot_signed(ints[m], codes, word),
                false => simd.dot_bytes(ints[m], codes, word),
            };
        }
    }
}

/// Adds the results of a group.
///
/// # Safety
/// The input has this group and row.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "all of them are in registers")]
unsafe fn add_group<S: Simd, F: PanelFormat>(
    simd: S,
    sum: S::V,
    product: S::V,
    scale: S::V,
    minimum: S::V,
    x: QuantRow,
    group: usize,
    row: usize,
) -> S::V {
    // SAFETY: the caller's promise.
    unsafe {
        let scale = match F::IS_SMALL {
            true => simd.mul(scale, simd.splat(*x.scales.add(group * x.stride + row))),
            false => scale,
        };
        let sum = simd.fused(product, scale, sum);
        if !F::HAS_MINIMUM {
            return sum;
        }
        let sums = if F::GROUP == HALF { x.sums_16 } else { x.sums_32 };
        simd.fused(minimum, simd.splat(*sums.add(group * x.stride + row)), sum)
    }
}

/// Weights of a column in a part, and in half of it.
const PART: usize = 32;
const HALF: usize = PART / 2;

/// Rows that are computed for all panels before the next ones: as many as stay in the second-level cache with the
/// panels of a task. Tiles of the input begin at multiples of it.
const BLOCK_ROWS: usize = 4 * MAX_TILE_ROWS;

/// How far ahead weights are prefetched where memory is the limit.
const PREFETCH_BYTES: usize = 4096;
