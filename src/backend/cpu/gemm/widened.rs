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
/// Rows of a register tile. Its sums take 12 of the 16 registers of AVX2, the columns of a panel two, and a number of a
/// row one.
const TILE_ROWS: usize = 6;
/// Rows and panels of a block, and numbers of the inner dimension.
const BLOCK_ROWS: usize = 16 * TILE_ROWS;
const BLOCK_PANELS: usize = 16;
const BLOCK_LEN: usize = 256;
/// From a row of a block to the next one. It is not a power of two, so that the rows of a tile are not in the same few
/// sets of the cache.
const ROW_STRIDE: usize = BLOCK_LEN + 4;
/// Of a line of the cache.
const LINE_BYTES: usize = 64;

/// Floats of scratch memory that a product needs.
pub(super) const SCRATCH_LEN: usize = BLOCK_ROWS * ROW_STRIDE + BLOCK_LEN * LANES + BLOCK_PANELS * BLOCK_ROWS * LANES;

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
    /// Steps of a block.
    const STEPS: usize = BLOCK_LEN / F::NUMBERS;

    /// # Safety
    /// The part has these rows and panels, at most those of a block.
    #[inline(always)]
    unsafe fn block<S: Simd>(&self, simd: S, rows: Range<usize>, panels: Range<usize>) {
        let PlainOperands { w, x, layout } = self.part.operands;
        let (panel_bytes, num_tiles) = (w.panel_bytes(), rows.len().div_ceil(TILE_ROWS));
        // SAFETY: the places in the scratch memory do not overlap, and are as long as what is in them. A panel has
        // `w.steps()` steps of `STEP_BYTES`, a row of the input as many words.
        unsafe {
            // `[rows][numbers of a step][steps]`, `[steps][numbers][LANES]` and `[panels][rows][LANES]`
            let floats = self.scratch;
            let weights = floats.add(BLOCK_ROWS * ROW_STRIDE);
            let results = weights.add(BLOCK_LEN * LANES);
            for first in (0..w.steps()).step_by(Self::STEPS) {
                let steps = Self::STEPS.min(w.steps() - first);
                for i in 0..num_tiles * TILE_ROWS {
                    // The last tile is filled up with the last row.
                    let words = x.add((rows.start + i).min(rows.end - 1) * layout.row + first);
                    for number in 0..F::NUMBERS {
                        let to = floats.add(i * ROW_STRIDE + number * Self::STEPS);
                        for step in 0..steps {
                            *to.add(step) = F::number_of(*words.add(step), number);
                        }
                    }
                }
                for panel in 0..panels.len() {
                    let from = w.as_ptr().add((panels.start + panel) * panel_bytes + first * F::STEP_BYTES);
                    // While a tile is computed, a part of the next piece of the weights comes to the cache.
                    let next = from.wrapping_add(panel_bytes);
                    let next_bytes = (steps * F::STEP_BYTES).div_ceil(num_tiles);
                    for step in 0..steps {
                        let to = weights.add(step * F::NUMBERS * LANES);
                        self.format.widen(simd, from.add(step * F::STEP_BYTES), to);
                    }
                    for tile in 0..num_tiles {
                        for line in (0..next_bytes).step_by(LINE_BYTES) {
                            simd.prefetch(next.wrapping_add(tile * next_bytes + line));
                        }
                        let results = results.add((panel * BLOCK_ROWS + tile * TILE_ROWS) * LANES);
                        let x = floats.add(tile * TILE_ROWS * ROW_STRIDE);
                        match rows.len() - tile * TILE_ROWS {
                            1 | 2 => Self::tile::<S, 2>(simd, x, weights, steps, results, first == 0),
                            3 | 4 => Self::tile::<S, 4>(simd, x, weights, steps, results, first == 0),
                            _ => Self::tile::<S, TILE_ROWS>(simd, x, weights, steps, results, first == 0),
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

    /// Adds the products of some steps to the results of `R` rows and a panel, which are 0 before the first steps.
    ///
    /// # Safety
    /// The operands have these steps, and the results `R` rows.
    #[inline(always)]
    unsafe fn tile<S: Simd, const R: usize>(
        simd: S,
        x: *const f32,
        weights: *const f32,
        steps: usize,
        results: *mut f32,
        is_first: bool,
    ) {
        let mut sums = [simd.splat(0.0); R];
        // SAFETY: the caller's promise.
        unsafe {
            if !is_first {
                for m in 0..R {
                    sums[m] = simd.load(results.add(m * LANES));
                }
            }
            for step in 0..steps {
                for number in 0..F::NUMBERS {
                    let columns = simd.load(weights.add((step * F::NUMBERS + number) * LANES));
                    for m in 0..R {
                        let x = *x.add(m * ROW_STRIDE + number * Self::STEPS + step);
                        sums[m] = simd.mul_add(columns, simd.splat(x), sums[m]);
                    }
                }
            }
            for m in 0..R {
                simd.store(results.add(m * LANES), sums[m]);
            }
        }
    }
}
