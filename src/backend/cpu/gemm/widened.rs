//! Products of many rows that become float32 first, rows and weights, for instruction sets without products of narrower
//! numbers: no instruction of the inner loop is left but loads and multiply-adds. The blocks are those of Goto and van
//! de Geijn ("Anatomy of High-Performance Matrix Multiplication", 2008): a block of rows stays in the second-level
//! cache, and a piece of a panel in the first.
//!
//! A sum has the same multiply-adds in the same order as on the other register tiles, so it has the same bits.

// Indices name registers here, as in `kernel`.
#![allow(clippy::needless_range_loop)]

use super::super::simd::{LANES, Simd, SimdKernel};
use super::part::{PlainOperands, PlainPart};
use super::weights_format::WeightsFormat;
use std::ops::Range;

/// From how many rows on the work on the operands pays.
pub(super) const MIN_ROWS: usize = 24;
/// Rows and panels of a block. Both are whole register tiles ([`Simd::WIDENED_ROWS`], [`Simd::WIDENED_PANELS`]).
const BLOCK_ROWS: usize = 96;
const BLOCK_PANELS: usize = 16;
/// Numbers of the inner dimension times panels of a register tile: these weights stay in the first-level cache.
const BLOCK_NUMBERS: usize = 256;
/// What a row of a block is longer than its numbers, so that the rows of a tile are not in the same few sets of the
/// cache.
const ROW_GAP: usize = 4;
/// Of a line of the cache.
const LINE_BYTES: usize = 64;

/// Floats of scratch memory that a product needs.
pub(super) const SCRATCH_LEN: usize =
    BLOCK_ROWS * (BLOCK_NUMBERS + ROW_GAP) + BLOCK_NUMBERS * LANES + BLOCK_PANELS * BLOCK_ROWS * LANES;

/// A part of a product. The panels exist, and nothing else uses `scratch`, which has [`SCRATCH_LEN`] floats.
pub(super) struct WidenedProduct<'a, F> {
    pub part: &'a PlainPart<'a>,
    pub format: F,
    pub scratch: *mut f32,
}

impl<F: WeightsFormat> SimdKernel for WidenedProduct<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (rows, panels) = (&self.part.rows, &self.part.panels);
        for row in rows.clone().step_by(BLOCK_ROWS) {
            for panel in panels.clone().step_by(BLOCK_PANELS) {
                let rows = row..rows.end.min(row + BLOCK_ROWS);
                let panels = panel..panels.end.min(panel + BLOCK_PANELS);
                // SAFETY: the struct's promise.
                unsafe { self.block(simd, rows, panels) };
            }
        }
    }
}

impl<F: WeightsFormat> WidenedProduct<'_, F> {
    /// Steps of a block. Like [`Self::row_stride`], this is read in the innermost loop, where a call would save and
    /// restore all vector registers.
    #[inline(always)]
    const fn steps<S: Simd>() -> usize {
        BLOCK_NUMBERS / S::WIDENED_PANELS / F::NUMBERS
    }

    /// From a row of a block to the next one.
    #[inline(always)]
    const fn row_stride<S: Simd>() -> usize {
        F::NUMBERS * Self::steps::<S>() + ROW_GAP
    }

    /// # Safety
    /// The part has these rows and panels, at most those of a block.
    #[inline(always)]
    unsafe fn block<S: Simd>(&self, simd: S, rows: Range<usize>, panels: Range<usize>) {
        const { assert!(BLOCK_ROWS.is_multiple_of(S::WIDENED_ROWS) && BLOCK_PANELS.is_multiple_of(S::WIDENED_PANELS)) };
        let PlainOperands { w, x, layout } = self.part.operands;
        let (panel_bytes, num_tiles) = (w.panel_bytes(), rows.len().div_ceil(S::WIDENED_ROWS));
        // SAFETY: the places in the scratch memory do not overlap, and are as long as what is in them. A panel has
        // `w.steps()` steps of `STEP_BYTES`, a row of the input as many words.
        unsafe {
            // `[rows][numbers of a step][steps]`, `[panels of a tile][steps][numbers][LANES]` and
            // `[panels][rows][LANES]`
            let floats = self.scratch;
            let weights = floats.add(BLOCK_ROWS * (BLOCK_NUMBERS + ROW_GAP));
            let results = weights.add(BLOCK_NUMBERS * LANES);
            for first in (0..w.steps()).step_by(Self::steps::<S>()) {
                let steps = Self::steps::<S>().min(w.steps() - first);
                for i in 0..num_tiles * S::WIDENED_ROWS {
                    // The last tile is filled up with the last row.
                    let words = x.add((rows.start + i).min(rows.end - 1) * layout.row + first);
                    for number in 0..F::NUMBERS {
                        let to = floats.add(i * Self::row_stride::<S>() + number * Self::steps::<S>());
                        let whole = steps / LANES * LANES;
                        for step in (0..whole).step_by(LANES) {
                            simd.store(to.add(step), F::numbers_of(simd, words.add(step), number));
                        }
                        for step in whole..steps {
                            *to.add(step) = F::number_of(*words.add(step), number);
                        }
                    }
                }
                for panel in (0..panels.len()).step_by(S::WIDENED_PANELS) {
                    let width = S::WIDENED_PANELS.min(panels.len() - panel);
                    let from = w.as_ptr().add((panels.start + panel) * panel_bytes + first * F::STEP_BYTES);
                    for p in 0..width {
                        for step in 0..steps {
                            let to = weights.add((p * Self::steps::<S>() + step) * F::NUMBERS * LANES);
                            self.format.widen(simd, from.add(p * panel_bytes + step * F::STEP_BYTES), to);
                        }
                    }
                    // While a tile is computed, a part of the next pieces of the weights comes to the cache.
                    let next_bytes = (steps * F::STEP_BYTES).div_ceil(num_tiles);
                    for tile in 0..num_tiles {
                        for p in width..2 * width {
                            for line in (0..next_bytes).step_by(LINE_BYTES) {
                                simd.prefetch(from.wrapping_add(p * panel_bytes + tile * next_bytes + line));
                            }
                        }
                        let operands = WidenedTile {
                            x: floats.add(tile * S::WIDENED_ROWS * Self::row_stride::<S>()),
                            weights,
                            steps,
                            results: results.add((panel * BLOCK_ROWS + tile * S::WIDENED_ROWS) * LANES),
                            is_first: first == 0,
                        };
                        match rows.len() - tile * S::WIDENED_ROWS {
                            1 | 2 if const { S::WIDENED_ROWS == 6 } => Self::tiles::<S, 2>(simd, width, operands),
                            1..=4 => Self::tiles::<S, 4>(simd, width, operands),
                            5..=8 if const { S::WIDENED_ROWS == 12 } => Self::tiles::<S, 8>(simd, width, operands),
                            _ if const { S::WIDENED_ROWS == 12 } => Self::tiles::<S, 12>(simd, width, operands),
                            _ => Self::tiles::<S, 6>(simd, width, operands),
                        }
                    }
                }
            }
            for panel in 0..panels.len() {
                for i in 0..rows.len() {
                    let result = simd.load(results.add((panel * BLOCK_ROWS + i) * LANES));
                    self.part.store(simd, rows.start + i, panels.start + panel, result);
                }
            }
        }
    }

    /// # Safety
    /// As for [`Self::tile`].
    #[inline(always)]
    unsafe fn tiles<S: Simd, const R: usize>(simd: S, width: usize, operands: WidenedTile) {
        // SAFETY: the caller's promise.
        unsafe {
            match width {
                2 if const { S::WIDENED_PANELS == 2 } => Self::tile::<S, R, 2>(simd, operands),
                _ => Self::tile::<S, R, 1>(simd, operands),
            }
        }
    }

    /// Adds the products of some steps to the results of `R` rows and `P` panels, which are 0 before the first steps.
    ///
    /// # Safety
    /// The operands have these rows, panels and steps.
    #[inline(always)]
    unsafe fn tile<S: Simd, const R: usize, const P: usize>(simd: S, operands: WidenedTile) {
        let WidenedTile { x, weights, steps, results, is_first } = operands;
        let mut sums = [[simd.splat(0.0); P]; R];
        // SAFETY: the caller's promise.
        unsafe {
            if !is_first {
                for m in 0..R {
                    for p in 0..P {
                        sums[m][p] = simd.load(results.add((p * BLOCK_ROWS + m) * LANES));
                    }
                }
            }
            for step in 0..steps {
                for number in 0..F::NUMBERS {
                    let mut columns = [simd.splat(0.0); P];
                    for p in 0..P {
                        let at = (p * Self::steps::<S>() + step) * F::NUMBERS + number;
                        columns[p] = simd.load(weights.add(at * LANES));
                    }
                    for m in 0..R {
                        let x = simd.splat(*x.add(m * Self::row_stride::<S>() + number * Self::steps::<S>() + step));
                        for p in 0..P {
                            sums[m][p] = simd.mul_add(columns[p], x, sums[m][p]);
                        }
                    }
                }
            }
            for m in 0..R {
                for p in 0..P {
                    simd.store(results.add((p * BLOCK_ROWS + m) * LANES), sums[m][p]);
                }
            }
        }
    }
}

/// The operands of a register tile, in the scratch memory of a block.
#[derive(Clone, Copy)]
struct WidenedTile {
    x: *const f32,
    weights: *const f32,
    steps: usize,
    results: *mut f32,
    /// Whether there are no results yet.
    is_first: bool,
}
