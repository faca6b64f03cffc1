//! A product, and a part of it that one member computes.

use super::super::memory::Shared;
use super::super::pack::CpuMatrix;
use super::super::simd::{LANES, Simd};
use super::input::InputLayout;
use std::ops::Range;

/// A product, to be cut by rows and panels of `w`.
pub(super) struct Product<'a> {
    pub w: &'a CpuMatrix,
    pub bias: Option<&'a [f32]>,
    /// `w.steps()` words of each row.
    pub x: *const u32,
    pub layout: InputLayout,
}

// SAFETY: `x` is only read.
unsafe impl Sync for Product<'_> {}

/// Where results go: `[rows, stride]`, from `row` and `panel` of the product on.
#[derive(Clone, Copy)]
pub(super) struct ProductTarget {
    pub at: Shared<f32>,
    pub stride: usize,
    pub row: usize,
    pub panel: usize,
    /// Columns there are, counted from the first of `panel`; a multiple of 16 where the rest may be written too.
    pub cols: usize,
    /// Results are added to what is there.
    pub adds: bool,
}

/// Rows and panels of a product, and where they go.
pub(super) struct ProductPart<'a> {
    pub product: &'a Product<'a>,
    pub rows: Range<usize>,
    pub panels: Range<usize>,
    pub target: ProductTarget,
}

impl ProductPart<'_> {
    /// Adds the bias, and what is there if the target wants it, and writes 16 columns of a row.
    ///
    /// # Safety
    /// Row and panel are the part's; otherwise as for [`ProductPart::run`].
    #[inline(always)]
    pub unsafe fn store<S: Simd>(&self, simd: S, row: usize, panel: usize, acc: S::V) {
        // SAFETY: the caller's.
        unsafe {
            let (at, width) = self.at(row, panel);
            let sum = self.with_bias(simd, panel, acc);
            let sum = if self.target.adds { simd.add(simd.load_first(at, width), sum) } else { sum };
            simd.store_first(at, sum, width);
        }
    }

    /// 16 columns and their bias.
    ///
    /// # Safety
    /// The panel is the part's.
    #[inline(always)]
    pub unsafe fn with_bias<S: Simd>(&self, simd: S, panel: usize, sum: S::V) -> S::V {
        let Some(bias) = self.product.bias else { return sum };
        let (column, width) = self.product.w.columns(panel);
        // SAFETY: the bias has an element for each column.
        unsafe { simd.add(sum, simd.load_first(bias.as_ptr().add(column), width)) }
    }

    /// Where 16 columns of a row go, and how many of them there are.
    ///
    /// # Safety
    /// As for [`ProductPart::store`].
    #[inline(always)]
    pub unsafe fn at(&self, row: usize, panel: usize) -> (*mut f32, usize) {
        let target = &self.target;
        let first = (panel - target.panel) * LANES;
        // SAFETY: the target has room for the part.
        let at = unsafe { target.at.get().add((row - target.row) * target.stride + first) };
        (at, LANES.min(target.cols - first))
    }
}
