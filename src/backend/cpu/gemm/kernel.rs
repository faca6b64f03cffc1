//! Products on register tiles, written once over [`Simd`].

// Indices name registers here. The loops over them are unrolled, and iterators would hide which register is which.
#![allow(clippy::needless_range_loop)]

use super::super::isa::Isa;
use super::super::processor::WeightPrefetch;
use super::super::simd::{Simd, SimdKernel};
use super::part::{PlainOperands, PlainPart, ProductOperands, ProductPart};
use super::quant;
use super::weights_format::{WeightsBf16, WeightsF16, WeightsF32, WeightsFormat};
use super::widened::{self, WidenedProduct};
use crate::DType;
use std::ops::Range;

impl ProductPart<'_> {
    /// Computes the part. `scratch` is for unfinished results and for operands in another form.
    ///
    /// # Safety
    /// The target and `scratch` are large enough, and nothing else uses them.
    pub unsafe fn run(&self, isa: Isa, scratch: *mut f32) {
        assert!(self.panels.end <= self.product.columns.num_panels());
        let operands = match &self.product.operands {
            ProductOperands::Plain(operands) => *operands,
            // SAFETY: the caller's promise; the panels exist.
            ProductOperands::Quantized(operands) => return unsafe { quant::run(self, *operands, isa) },
        };
        let part = &PlainPart { part: self, operands };
        match operands.w.dtype {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller's promise; the panels exist, and the instruction set was checked when it was chosen.
            DType::BF16 if isa == Isa::Amx => unsafe { super::amx::run(part, scratch) },
            DType::BF16 => isa.run(ProductKernel { part, format: WeightsBf16, scratch }),
            DType::F16 => isa.run(ProductKernel { part, format: WeightsF16, scratch }),
            DType::F32 => isa.run(ProductKernel { part, format: WeightsF32, scratch }),
        }
    }
}

struct ProductKernel<'a, F> {
    part: &'a PlainPart<'a>,
    format: F,
    scratch: *mut f32,
}

impl<F: WeightsFormat> SimdKernel for ProductKernel<'_, F> {
    type Output = ();
    const HAS_BF16_PRODUCTS: bool = F::NUMBERS == 2;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        if const { F::NUMBERS >= S::WIDENED_NUMBERS } && self.part.rows.len() >= widened::MIN_ROWS {
            let Self { part, format, scratch } = self;
            return simd.call(WidenedProduct { part, format, scratch });
        }
        let Range { start: mut panel, end } = self.part.panels;
        let width = if self.part.rows.len() == 1 { S::ROW_PANELS } else { S::TILE_PANELS };
        while panel < end {
            // SAFETY: the panels exist (`ProductPart::run`), and no row is past the part's last.
            unsafe {
                if panel + width > end {
                    self.rows::<S, 1>(simd, panel);
                    panel += 1;
                } else {
                    match width {
                        4 if const { has_width::<S>(4) } => self.rows::<S, 4>(simd, panel),
                        2 if const { has_width::<S>(2) } => self.rows::<S, 2>(simd, panel),
                        _ => self.rows::<S, 1>(simd, panel),
                    }
                    panel += width;
                }
            }
        }
    }
}

impl<F: WeightsFormat> ProductKernel<'_, F> {
    /// All rows of `P` panels.
    ///
    /// # Safety
    /// Panels `panel .. panel + P` exist.
    #[inline(always)]
    unsafe fn rows<S: Simd, const P: usize>(&self, simd: S, panel: usize) {
        let Range { start: mut row, end: rows } = self.part.rows;
        while row < rows {
            // SAFETY: the caller's promise; no tile is taller than the rows that are left.
            unsafe {
                macro_rules! tile {
                    ($height:literal) => {{
                        self.tile::<S, $height, P>(simd, row, panel);
                        row += $height;
                    }};
                }
                if const { P > S::TILE_PANELS } {
                    tile!(1);
                    continue;
                }
                match (rows - row).min(S::TILE_ROWS) {
                    1 => tile!(1),
                    3 if const { S::TILE_ROWS > 2 } => tile!(3),
                    4 if const { S::TILE_ROWS > 2 } => tile!(4),
                    5 if const { S::TILE_ROWS > 4 } => tile!(5),
                    6 if const { S::TILE_ROWS > 4 } => tile!(6),
                    7 if const { S::TILE_ROWS > 4 } => tile!(7),
                    12 if const { S::TILE_ROWS > 4 } => tile!(12),
                    8.. if const { S::TILE_ROWS > 4 } => tile!(8),
                    _ => tile!(2),
                }
            }
        }
    }

    /// `M` rows by `P` panels, in registers.
    ///
    /// # Safety
    /// Rows `row .. row + M` and panels `panel .. panel + P` exist.
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize, const P: usize>(&self, simd: S, row: usize, panel: usize) {
        let PlainOperands { w, x, layout } = self.part.operands;
        let (steps, panel_bytes) = (w.steps(), w.panel_bytes());
        let distances = WeightPrefetch::best().plain;
        let mut acc = [[simd.splat(0.0); P]; M];
        // SAFETY: a panel has `steps` steps of `STEP_BYTES`, a row of the input `steps` words.
        unsafe {
            let weights = w.as_ptr().add(panel * panel_bytes);
            let x = x.add(row * layout.row);
            for step in 0..steps {
                let at = |p: usize| weights.add(p * panel_bytes + step * F::STEP_BYTES);
                let mut column = [self.format.load(simd, at(0)); P];
                for p in 0..P {
                    column[p] = self.format.load(simd, at(p));
                    if M <= 4 {
                        simd.prefetch_weights(at(p), distances);
                    } else if M <= 8 {
                        simd.prefetch(at(p).wrapping_add(PREFETCH_BYTES));
                    }
                }
                for m in 0..M {
                    let word = *x.add(m * layout.row + step);
                    for p in 0..P {
                        acc[m][p] = self.format.mul_add(simd, acc[m][p], column[p], word);
                    }
                }
            }
            for (m, acc) in acc.iter().enumerate() {
                for (p, acc) in acc.iter().enumerate() {
                    self.part.store(simd, row + m, panel + p, *acc);
                }
            }
        }
    }
}

/// Whether tiles of this many panels are used. Branches on it are constants (`const { .. }`). So the compiler makes no
/// code for tiles that an instruction set does not use.
const fn has_width<S: Simd>(panels: usize) -> bool {
    panels == S::ROW_PANELS || panels == S::TILE_PANELS
}

/// How far ahead weights are prefetched where the products limit as much as the memory does. There,
/// [`Simd::prefetch_weights`] takes too many instructions.
const PREFETCH_BYTES: usize = 2048;
