//! Where quantised rows lie in memory.

use super::super::super::simd::LANES;
use crate::quant::MAX_BLOCK_WEIGHTS;

/// Elements of the smaller blocks, and of the groups of most formats.
const SMALL: usize = 32;
/// Elements of the groups of the other formats.
const HALF: usize = SMALL / 2;

/// Rows in blocks of one length. They are stored in tiles of up to 16 rows, in which the same places of all rows are
/// side by side: `[block][place][row]`. A place is a word.
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

/// Where a row begins.
#[derive(Clone, Copy)]
pub struct QuantRow {
    /// The first place of its first block.
    pub at: *const u32,
    /// With [`TileLayout::has_codes_by_row`], the codes in segments of 64 elements: `[segment][row of the
    /// tile][element]`.
    pub by_row: *const u8,
    /// Words from place to place: as many as the tile has rows.
    pub stride: usize,
}

/// Where a block of a row is. Its places are the codes, four of neighbouring elements in each, the scale, and sums of
/// the codes of groups. In a small block the codes are last, in a large one they are first.
#[derive(Clone, Copy)]
pub struct QuantBlock {
    at: *const u32,
    stride: usize,
    first_code: usize,
    /// The place of the scale, which the sums follow.
    scale: usize,
}

/// What minus the sums of groups of 16 are multiplied with: the bias of Q6_K, whose products so begin with a load and
/// no other instruction.
pub const SUMS_16_TIMES: i32 = 32;
/// The most rows of a tile. Tiles begin at multiples of this.
pub const MAX_TILE_ROWS: usize = LANES;
/// Elements of a row that are side by side in [`QuantRow::by_row`], and bytes from there to the next ones.
pub const SEGMENT: usize = 64;
pub const SEGMENT_BYTES: usize = SEGMENT * MAX_TILE_ROWS;

impl QuantRow {
    /// A block of the row.
    ///
    /// # Safety
    /// The row has it, and `is_small` is that of its layout.
    #[inline(always)]
    pub unsafe fn block(self, is_small: bool, block: usize) -> QuantBlock {
        // SAFETY: the caller's promise.
        let at = unsafe { self.at.add(block * num_places(is_small) * self.stride) };
        let (first_code, scale) = if is_small { (MINUS_SUMS_32 + 1, 0) } else { (0, MAX_BLOCK_WEIGHTS / 4) };
        QuantBlock { at, stride: self.stride, first_code, scale }
    }

    /// The row that is `rows` behind this one in the same tile.
    ///
    /// # Safety
    /// The tile has it, or ends there.
    #[inline(always)]
    pub unsafe fn behind(self, rows: usize) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self { at: self.at.add(rows), by_row: self.by_row.wrapping_add(rows * SEGMENT), stride: self.stride } }
    }
}

// SAFETY (every block below): the block has these places.
impl QuantBlock {
    /// # Safety
    /// This and the following functions: the block has such a place.
    #[inline(always)]
    pub unsafe fn codes(self, word: usize) -> *const u32 {
        unsafe { self.at.add((self.first_code + word) * self.stride) }
    }
    #[inline(always)]
    pub unsafe fn scale(self) -> *const f32 {
        unsafe { self.behind_scale(0).cast() }
    }
    /// Minus the sum of the codes of a group of 32.
    #[inline(always)]
    pub unsafe fn minus_sum_32(self, group: usize) -> *const i32 {
        unsafe { self.behind_scale(MINUS_SUMS_32 + group).cast() }
    }
    /// Minus the sum of the codes of a group of 16, times [`SUMS_16_TIMES`]. Small blocks lack this and what follows.
    #[inline(always)]
    pub unsafe fn minus_sum_16(self, group: usize) -> *const i32 {
        unsafe { self.behind_scale(MINUS_SUMS_16 + group).cast() }
    }
    /// What is in the same place with `Simd::SUMS_IN_SHORTS`: this for the first two of each four elements in the lower
    /// half of a word, and for the last two in the upper half.
    #[inline(always)]
    pub unsafe fn minus_sum_16_in_parts(self, group: usize) -> *const u32 {
        unsafe { self.minus_sum_16(group).cast() }
    }
    /// The sums of the codes of groups `2 * pair` and `2 * pair + 1` of 16 in the halves of a word.
    #[inline(always)]
    pub unsafe fn sums_16(self, pair: usize) -> *const u32 {
        unsafe { self.behind_scale(SUMS_16 + pair) }
    }
    /// The same of groups of 32.
    #[inline(always)]
    pub unsafe fn sums_32(self, pair: usize) -> *const u32 {
        unsafe { self.behind_scale(SUMS_32 + pair) }
    }
    #[inline(always)]
    unsafe fn behind_scale(self, place: usize) -> *const u32 {
        unsafe { self.at.add((self.scale + place) * self.stride) }
    }
}

/// Places of the sums, counted from the scale.
const MINUS_SUMS_32: usize = 1;
const MINUS_SUMS_16: usize = MINUS_SUMS_32 + MAX_BLOCK_WEIGHTS / SMALL;
const SUMS_16: usize = MINUS_SUMS_16 + MAX_BLOCK_WEIGHTS / HALF;
const SUMS_32: usize = SUMS_16 + MAX_BLOCK_WEIGHTS / HALF / 2;

const fn block_len(is_small: bool) -> usize {
    if is_small { SMALL } else { MAX_BLOCK_WEIGHTS }
}

/// Places of a block.
const fn num_places(is_small: bool) -> usize {
    let sums = if is_small { 1 } else { SUMS_32 - MINUS_SUMS_32 + MAX_BLOCK_WEIGHTS / SMALL / 2 };
    block_len(is_small) / 4 + MINUS_SUMS_32 + sums
}

impl TileLayout {
    /// `on_tiles`: whether products may run on AMX tiles.
    pub fn new(start: usize, rows: usize, k: usize, is_small: bool, on_tiles: bool) -> Self {
        // A register tile may have a row more than are left, and reads it.
        let height = if rows == 1 { 1 } else { rows.next_multiple_of(2).min(MAX_TILE_ROWS) };
        let has_codes_by_row = on_tiles && height == MAX_TILE_ROWS;
        Self { start, height, k: k.next_multiple_of(MAX_BLOCK_WEIGHTS), is_small, has_codes_by_row }
    }

    pub fn block(&self) -> usize {
        block_len(self.is_small)
    }

    /// Words of the blocks of a tile.
    fn blocks_len(&self) -> usize {
        self.k / self.block() * num_places(self.is_small) * self.height
    }

    /// Words of a tile: whole cache lines.
    fn tile_len(&self) -> usize {
        let by_row = if self.has_codes_by_row { self.k / 4 * self.height } else { 0 };
        (self.blocks_len() + by_row).next_multiple_of(LANES)
    }

    pub fn end(&self, rows: usize) -> usize {
        self.start + rows.div_ceil(MAX_TILE_ROWS) * self.tile_len()
    }

    /// # Safety
    /// `words` has this row.
    #[inline(always)]
    pub unsafe fn row(&self, words: *const u32, row: usize) -> QuantRow {
        // SAFETY: the caller's promise.
        let tile = unsafe { words.add(self.start + row / MAX_TILE_ROWS * self.tile_len()) };
        let by_row = tile.wrapping_add(self.blocks_len()).cast();
        // SAFETY: the caller's promise.
        unsafe { QuantRow { at: tile, by_row, stride: self.height }.behind(row % MAX_TILE_ROWS) }
    }
}
