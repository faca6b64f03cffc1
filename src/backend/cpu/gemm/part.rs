//! A product, and a part of it that one member computes.

use super::super::memory::Shared;
use super::super::pack::{Columns, PlainPanels, QuantPanels};
use super::super::simd::{LANES, Simd};
use super::input::InputLayout;
use super::many_rows::ManyRows;
use super::quant_input::QuantInput;
use std::ops::{Deref, Range};

/// A product, which is split by rows and by panels of the matrix.
pub(super) struct Product<'a> {
    pub columns: Columns,
    pub bias: Option<&'a [f32]>,
    pub operands: ProductOperands<'a>,
}

/// What is multiplied.
pub(super) enum ProductOperands<'a> {
    Plain(PlainOperands<'a>),
    Quantized(QuantOperands<'a>),
}

/// Weights that are stored by themselves, and rows that are rounded to their type.
#[derive(Clone, Copy)]
pub(super) struct PlainOperands<'a> {
    pub w: &'a PlainPanels,
    /// `w.steps()` words of each row.
    pub x: *const u32,
    pub layout: InputLayout,
}

// SAFETY: `x` is only read.
unsafe impl Sync for PlainOperands<'_> {}

/// Quantised weights, and rows that are quantised for them.
#[derive(Clone, Copy)]
pub(super) struct QuantOperands<'a> {
    pub w: &'a QuantPanels,
    pub x: &'a QuantInput,
    /// How many rows are many. `None`: as measured.
    pub many_rows: Option<ManyRows>,
}

/// Where results go: `[rows, stride]`, starting with `row` and `panel` of the product.
#[derive(Clone, Copy)]
pub(super) struct ProductTarget {
    pub at: Shared<f32>,
    pub stride: usize,
    pub row: usize,
    pub panel: usize,
    /// The number of columns, counted from the first of `panel`. It is rounded up to a multiple of 16 if the rest may
    /// be written too.
    pub cols: usize,
    /// Whether results are added to the previous contents.
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
    /// Adds the bias, and the previous contents if the target adds, and writes 16 columns of a row.
    ///
    /// # Safety
    /// As for [`ProductPart::run`], and the part has this row and panel.
    #[inline(always)]
    pub unsafe fn store<S: Simd>(&self, simd: S, row: usize, panel: usize, acc: S::V) {
        // SAFETY: the caller's promise.
        unsafe {
            let (at, width) = self.at(row, panel);
            let sum = self.with_bias(simd, panel, acc);
            let sum = if self.target.adds { simd.add(simd.load_first(at, width), sum) } else { sum };
            simd.store_first(at, sum, width);
        }
    }

    /// The same for neighbouring rows.
    ///
    /// # Safety
    /// As for [`ProductPart::store`], for all these rows.
    #[inline(always)]
    pub unsafe fn store_rows<'r, S: Simd>(
        &self,
        simd: S,
        row: usize,
        panel: usize,
        results: impl Iterator<Item = &'r [f32; LANES]>,
    ) {
        // SAFETY: the caller's promise; a register is as long as a row of results.
        unsafe {
            let (mut at, width) = self.at(row, panel);
            for result in results {
                let sum = self.with_bias(simd, panel, simd.load(result.as_ptr()));
                let sum = if self.target.adds { simd.add(simd.load_first(at, width), sum) } else { sum };
                simd.store_first(at, sum, width);
                at = at.wrapping_add(self.target.stride);
            }
        }
    }

    /// Adds the bias to 16 columns.
    ///
    /// # Safety
    /// The part has this panel.
    #[inline(always)]
    pub unsafe fn with_bias<S: Simd>(&self, simd: S, panel: usize, sum: S::V) -> S::V {
        let Some(bias) = self.product.bias else { return sum };
        let (column, width) = self.product.columns.of_panel(panel);
        // SAFETY: the bias has an element for each column.
        unsafe { simd.add(sum, simd.load_first(bias.as_ptr().add(column), width)) }
    }

    /// The address of 16 columns of a row, and how many of them exist.
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

/// A part of a product with plain weights.
pub(super) struct PlainPart<'a> {
    pub part: &'a ProductPart<'a>,
    pub operands: PlainOperands<'a>,
}

impl<'a> Deref for PlainPart<'a> {
    type Target = ProductPart<'a>;

    fn deref(&self) -> &ProductPart<'a> {
        self.part
    }
}
