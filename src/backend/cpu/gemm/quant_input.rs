//! The left side of a product with quantised weights: rows quantised to bytes.
//!
//! A row is divided into blocks of 32 or 256 elements, as ggml's Q8_0 and Q8_K. An element is `scale · code` with a
//! code from -127 to 127, and the scale of a block is its largest magnitude divided by 127. Weights in formats with
//! blocks of 256 are multiplied with rows in blocks of 256, all others with rows in blocks of 32.

mod quantize;

use super::super::isa::Isa;
use super::super::memory::{Buffer, Shared};
use super::super::pack::QuantPanels;
use super::super::rows::{ALONE_BELOW, for_runs};
use super::super::simd::LANES;
use super::super::team::Team;
use super::float_rows::FloatRows;
use crate::quant::{MAX_BLOCK_WEIGHTS, QuantFormat};
use pagetide_base::error::StartError;
use quantize::QuantizeRows;

/// Elements of the smaller blocks, and of the groups of most formats.
const SMALL: usize = 32;
/// Elements of the groups of the other formats.
const HALF: usize = SMALL / 2;

/// The quantised rows of the current product. The next product reuses the memory.
pub struct QuantInput {
    words: Buffer<u32>,
    small: Option<TileLayout>,
    large: Option<TileLayout>,
}

/// Rows in blocks of one length. They are stored in tiles of up to 16 rows, in which the same places of all rows are
/// side by side: `[place][row]`.
#[derive(Clone, Copy)]
struct TileLayout {
    /// The first word of the first tile.
    start: usize,
    /// Rows of a tile.
    height: usize,
    /// Elements of a row, with zeros up to a multiple of 256.
    k: usize,
    is_small: bool,
}

/// Where the parts of a row begin. From one place to the next there are as many words as the tile has rows.
#[derive(Clone, Copy)]
pub struct QuantRow {
    /// Four codes of neighbouring elements in each word.
    pub codes: *const u32,
    /// The scale of each block.
    pub scales: *const f32,
    /// Minus the sum of the codes of each group of 16 and of 32.
    pub minus_sums_16: *const i32,
    pub minus_sums_32: *const i32,
    /// The sums of the codes of two neighbouring groups of 16 and of 32 in the halves of a word. Small blocks lack
    /// them.
    pub pairs_16: *const u32,
    pub pairs_32: *const u32,
    /// Words from place to place.
    pub stride: usize,
}

/// The most rows of a tile. Tiles begin at multiples of this.
pub const MAX_TILE_ROWS: usize = LANES;

impl TileLayout {
    fn new(start: usize, rows: usize, k: usize, is_small: bool) -> Self {
        Self { start, height: rows.min(MAX_TILE_ROWS), k: k.next_multiple_of(MAX_BLOCK_WEIGHTS), is_small }
    }

    fn block(&self) -> usize {
        if self.is_small { SMALL } else { MAX_BLOCK_WEIGHTS }
    }

    /// Places of the parts of a row, in the order of [`QuantRow`].
    fn parts(&self) -> [usize; 6] {
        let k = self.k;
        let pairs = if self.is_small { [0, 0] } else { [k / HALF / 2, k / SMALL / 2] };
        [k / 4, k / self.block(), k / HALF, k / SMALL, pairs[0], pairs[1]]
    }

    /// Words of a tile: whole cache lines.
    fn tile_len(&self) -> usize {
        (self.parts().iter().sum::<usize>() * self.height).next_multiple_of(LANES)
    }

    fn end(&self, rows: usize) -> usize {
        self.start + rows.div_ceil(MAX_TILE_ROWS) * self.tile_len()
    }

    /// # Safety
    /// `words` has this row.
    #[inline(always)]
    unsafe fn row(&self, words: *const u32, row: usize) -> QuantRow {
        let [codes, scales, minus_16, minus_32, pairs_16, _] = self.parts();
        let height = self.height;
        // SAFETY: the caller's promise.
        unsafe {
            let codes_at = words.add(self.start + row / MAX_TILE_ROWS * self.tile_len() + row % MAX_TILE_ROWS);
            let scales_at = codes_at.add(codes * height);
            let minus_16_at = scales_at.add(scales * height);
            let minus_32_at = minus_16_at.add(minus_16 * height);
            let pairs_16_at = minus_32_at.add(minus_32 * height);
            QuantRow {
                codes: codes_at,
                scales: scales_at.cast(),
                minus_sums_16: minus_16_at.cast(),
                minus_sums_32: minus_32_at.cast(),
                pairs_16: pairs_16_at,
                pairs_32: pairs_16_at.add(pairs_16 * height),
                stride: height,
            }
        }
    }
}

impl QuantInput {
    pub fn new() -> Result<Self, StartError> {
        Ok(Self { words: Buffer::zeroed(0, "the quantised input of a linear layer")?, small: None, large: None })
    }

    /// Quantises `rows` rows of `x` for the weights of `w`.
    pub fn fill(&mut self, isa: Isa, team: &Team, x: FloatRows<'_>, rows: usize, w: &QuantPanels) {
        let takes_large = |format: QuantFormat| format.block_weights() == MAX_BLOCK_WEIGHTS;
        let small = w.any(|format| !takes_large(format)).then(|| TileLayout::new(0, rows, x.k, true));
        let start = small.map_or(0, |small| small.end(rows));
        let large = w.any(takes_large).then(|| TileLayout::new(start, rows, x.k, false));
        let len = large.map_or(start, |large| large.end(rows));
        if self.words.len() < len {
            self.words =
                Buffer::zeroed(len, "the quantised input of a linear layer").unwrap_or_else(|error| panic!("{error}"));
        }
        (self.small, self.large) = (small, large);
        let words = Shared::new(self.words.as_mut_ptr());
        for layout in [small, large].into_iter().flatten() {
            // Rows of a full tile are quantised together.
            let at_once = if layout.height == LANES { LANES } else { 1 };
            let quantize = |index: usize| {
                let first = index * at_once;
                // SAFETY: there is room for `rows` rows, and each belongs to one task.
                let out = unsafe { layout.row(words.get(), first) };
                isa.run(QuantizeRows { x, rows: first..rows.min(first + at_once), layout, out });
            };
            let num_tasks = rows.div_ceil(at_once);
            if rows * x.k < ALONE_BELOW {
                (0..num_tasks).for_each(quantize);
            } else {
                for_runs(team, num_tasks, |_, tasks| tasks.for_each(quantize));
            }
        }
    }

    /// A row for weights in formats of small or large blocks.
    ///
    /// # Safety
    /// [`QuantInput::fill`] quantised this row for a matrix with such weights.
    #[inline(always)]
    pub unsafe fn row(&self, is_small: bool, row: usize) -> QuantRow {
        let layout = if is_small { self.small } else { self.large };
        let layout = layout.expect("rows are quantised for all formats of a matrix");
        // SAFETY: the caller's promise.
        unsafe { layout.row(self.words.as_ptr(), row) }
    }
}
