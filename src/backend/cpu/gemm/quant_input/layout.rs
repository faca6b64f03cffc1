//! Where quantised rows lie in memory.

use super::super::super::simd::LANES;
use crate::quant::MAX_BLOCK_WEIGHTS;

/// Elements of the smaller blocks, and of the groups of most formats.
const SMALL: usize = 32;
/// Elements of the groups of the other formats.
const HALF: usize = SMALL / 2;

/// Rows in blocks of one length. They are stored in tiles of up to 16 rows, in which the same places of all rows are
/// side by side: `[place][row]`.
#[derive(Clone, Copy)]
pub(super) struct TileLayout {
    /// The first word of the first tile.
    pub start: usize,
    /// Rows of a tile. Those behind the last row of the input are zeros.
    pub height: usize,
    /// Elements of a row, with zeros up to a multiple of 256.
    pub k: usize,
    pub is_small: bool,
    /// A tile of 16 rows has the codes a second time, row by row, as AMX takes them.
    pub has_codes_by_row: bool,
}

/// Where the parts of a row begin. From one place to the next there are as many words as the tile has rows.
#[derive(Clone, Copy)]
pub struct QuantRow {
    /// Four codes of neighbouring elements in each word.
    pub codes: *const u32,
    /// The scale of each block.
    pub scales: *const f32,
    /// Minus the sum of the codes of each group of 16, times [`SUMS_16_TIMES`], and of each group of 32.
    pub minus_sums_16: *const i32,
    pub minus_sums_32: *const i32,
    /// The sums of the codes of two neighbouring groups of 16 and of 32 in the halves of a word. Small blocks lack
    /// them.
    pub pairs_16: *const u32,
    pub pairs_32: *const u32,
    /// With [`TileLayout::has_codes_by_row`], the codes in segments of 64 elements: `[segment][row of the
    /// tile][element]`.
    pub by_row: *const u8,
    /// Words from place to place.
    pub stride: usize,
}

/// What minus the sums of groups of 16 are multiplied with: the bias of Q6_K, whose products so begin with a load and
/// no other instruction.
pub const SUMS_16_TIMES: i32 = 32;
/// The most rows of a tile. Tiles begin at multiples of this.
pub const MAX_TILE_ROWS: usize = LANES;
/// Elements of a row that are side by side in [`QuantRow::by_row`], and bytes from there to the next ones.
pub const SEGMENT: usize = 64;
pub const SEGMENT_BYTES: usize = SEGMENT * MAX_TILE_ROWS;

impl TileLayout {
    /// `on_tiles`: whether products may run on AMX tiles.
    pub fn new(start: usize, rows: usize, k: usize, is_small: bool, on_tiles: bool) -> Self {
        // A register tile may have a row more than are left, and reads it.
        let height = if rows == 1 { 1 } else { rows.next_multiple_of(2).min(MAX_TILE_ROWS) };
        let has_codes_by_row = on_tiles && height == MAX_TILE_ROWS;
        Self { start, height, k: k.next_multiple_of(MAX_BLOCK_WEIGHTS), is_small, has_codes_by_row }
    }

    pub fn block(&self) -> usize {
        if self.is_small { SMALL } else { MAX_BLOCK_WEIGHTS }
    }

    /// Places of the parts of a row, in the order of [`QuantRow`].
    fn parts(&self) -> [usize; 7] {
        let k = self.k;
        let pairs = if self.is_small { [0, 0] } else { [k / HALF / 2, k / SMALL / 2] };
        let by_row = if self.has_codes_by_row { k / 4 } else { 0 };
        [k / 4, k / self.block(), k / HALF, k / SMALL, pairs[0], pairs[1], by_row]
    }

    /// Words of a tile: whole cache lines.
    fn tile_len(&self) -> usize {
        (self.parts().iter().sum::<usize>() * self.height).next_multiple_of(LANES)
    }

    pub fn end(&self, rows: usize) -> usize {
        self.start + rows.div_ceil(MAX_TILE_ROWS) * self.tile_len()
    }

    /// # Safety
    /// `words` has this row.
    #[inline(always)]
    pub unsafe fn row(&self, words: *const u32, row: usize) -> QuantRow {
        let [codes, scales, minus_16, minus_32, pairs_16, pairs_32, _] = self.parts();
        let height = self.height;
        // SAFETY: the caller's promise.
        unsafe {
            let codes_at = words.add(self.start + row / MAX_TILE_ROWS * self.tile_len() + row % MAX_TILE_ROWS);
            let scales_at = codes_at.add(codes * height);
            let minus_16_at = scales_at.add(scales * height);
            let minus_32_at = minus_16_at.add(minus_16 * height);
            let pairs_16_at = minus_32_at.add(minus_32 * height);
            let pairs_32_at = pairs_16_at.add(pairs_16 * height);
            // Rows of this part are not one word but a segment apart.
            let in_tile = row % MAX_TILE_ROWS;
            let by_row = pairs_32_at.wrapping_add(pairs_32 * height).wrapping_sub(in_tile).cast::<u8>();
            QuantRow {
                codes: codes_at,
                scales: scales_at.cast(),
                minus_sums_16: minus_16_at.cast(),
                minus_sums_32: minus_32_at.cast(),
                pairs_16: pairs_16_at,
                pairs_32: pairs_32_at,
                by_row: by_row.wrapping_add(in_tile * SEGMENT),
                stride: height,
            }
        }
    }
}
