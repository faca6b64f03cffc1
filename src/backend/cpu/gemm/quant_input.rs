//! The left side of a product with quantised weights: rows quantised to bytes.
//!
//! A row is divided into blocks of 32 or 256 elements, as ggml's Q8_0 and Q8_K. An element is `scale · code` with a
//! code from -127 to 127, and the scale of a block is its largest magnitude divided by 127. Weights in formats with
//! blocks of 256 are multiplied with rows in blocks of 256, all others with rows in blocks of 32.
//!
//! In most formats with blocks of 256, the sum of the products of a group is an integer of 16 bits when it is scaled
//! (`PanelFormat::SUMS_FIT_SHORTS`). So that it fits, the scale of a block of 256 elements is larger if 16 of its codes
//! would add up to more than 1,023, without their signs. That is rare: if the elements are distributed normally, 16
//! codes add up to about 600, and 3 of 1,000 blocks get a larger scale.

mod layout;
mod quantize;

use super::super::isa::Isa;
use super::super::memory::{Buffer, Shared};
use super::super::pack::QuantPanels;
use super::super::rows::{ALONE_BELOW, for_runs};
use super::super::team::Team;
use super::float_rows::FloatRows;
use crate::quant::{MAX_BLOCK_WEIGHTS, QuantFormat};
use layout::TileLayout;
pub use layout::{MAX_TILE_ROWS, QuantBlock, QuantRow, SUMS_16_TIMES};
#[cfg(target_arch = "x86_64")]
pub use layout::{SEGMENT, SEGMENT_BYTES};
use pagetide_base::error::StartError;
use quantize::{QuantizeStretch, STRETCH};

/// The quantised rows of the current product. The next product reuses the memory.
pub struct QuantInput {
    words: Buffer<u32>,
    small: Option<TileLayout>,
    large: Option<TileLayout>,
}

impl QuantInput {
    pub fn new() -> Result<Self, StartError> {
        Ok(Self { words: Buffer::zeroed(0, "the quantised input of a linear layer")?, small: None, large: None })
    }

    /// Quantises `rows` rows of `x` for the weights of `w`.
    pub fn fill(&mut self, isa: Isa, team: &Team, x: FloatRows<'_>, rows: usize, w: &QuantPanels) {
        let takes_large = |format: QuantFormat| format.block_weights() == MAX_BLOCK_WEIGHTS;
        let on_tiles = isa == Isa::Amx;
        let small = w.any(|format| !takes_large(format)).then(|| TileLayout::new(0, rows, x.k, true, on_tiles));
        let start = small.map_or(0, |small| small.end(rows));
        let large = w.any(takes_large).then(|| TileLayout::new(start, rows, x.k, false, on_tiles));
        let len = large.map_or(start, |large| large.end(rows));
        if self.words.len() < len {
            self.words =
                Buffer::zeroed(len, "the quantised input of a linear layer").unwrap_or_else(|error| panic!("{error}"));
        }
        (self.small, self.large) = (small, large);
        let words = Shared::new(self.words.as_mut_ptr());
        for layout in [small, large].into_iter().flatten() {
            let stretches = layout.k / STRETCH;
            // Rows of a tile share cache lines, so one member quantises all of them.
            let quantize = |part: usize| {
                let first = part / stretches * MAX_TILE_ROWS;
                // SAFETY: there is room for `rows` rows, and each stretch of a tile belongs to one task.
                let out = unsafe { layout.row(words.get(), first) };
                let rows = first..rows.min(first + MAX_TILE_ROWS);
                isa.run(QuantizeStretch { x, rows, stretch: part % stretches, layout, out });
            };
            let num_parts = rows.div_ceil(MAX_TILE_ROWS) * stretches;
            if rows * x.k < ALONE_BELOW {
                (0..num_parts).for_each(quantize);
            } else {
                for_runs(team, num_parts, |_, parts| parts.for_each(quantize));
            }
        }
    }

    /// A row for weights in formats of small or large blocks.
    ///
    /// # Safety
    /// [`QuantInput::fill`] quantised this row for a matrix with such weights.
    #[inline(always)]
    pub unsafe fn row(&self, is_small: bool, row: usize) -> QuantRow {
        // SAFETY: the caller's promise.
        unsafe { self.layout(is_small).row(self.words.as_ptr(), row) }
    }

    /// Rows of a tile.
    #[inline(always)]
    pub fn tile_height(&self, is_small: bool) -> usize {
        self.layout(is_small).height
    }

    #[inline(always)]
    fn layout(&self, is_small: bool) -> TileLayout {
        let layout = if is_small { self.small } else { self.large };
        layout.expect("rows are quantised for all formats of a matrix")
    }
}
