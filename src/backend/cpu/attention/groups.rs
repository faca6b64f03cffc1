//! The layout of a KV cache of bfloat16 in groups of 16 positions.
//!
//! The K of a group is `[head_dim / 2][16 positions][2 dimensions]`, and its V is
//! `[head_dim / 16][8][16 dimensions][2 positions]`. So a line holds the same pair of dimensions of all positions, and
//! K need not be transposed when it is read. Two numbers that a product of bfloat16 adds up lie together.

use crate::cpu::simd::{LANES, Simd, bf16_bits};
use crate::{DType, KvLayout};

/// Positions of a group.
pub(super) const GROUP: usize = LANES;
/// Pairs of positions in a group.
pub(super) const GROUP_PAIRS: usize = GROUP / 2;
/// Sixteen pairs of bfloat16.
pub(super) const LINE_BYTES: usize = 4 * LANES;
/// Numbers of a line.
const LINE_LEN: usize = 2 * LANES;

/// Whether the blocks of a KV cache are whole groups, so that the cache is written in this layout. (Heads are whole
/// tiles of AMX.)
pub(in super::super) fn is_grouped(layout: &KvLayout) -> bool {
    layout.dtype == DType::BF16 && layout.block_size.is_multiple_of(GROUP) && layout.head_dim.is_multiple_of(LINE_LEN)
}

/// Writes a position's K or V, rounded to bfloat16, to slot `slot` of the head's part of a block.
///
/// # Safety
/// The cache [`is_grouped`], and `row` is a whole head. Nothing else uses the slot now.
pub(super) unsafe fn write_row(row: &[f32], value: bool, slot: usize, head: *mut u8) {
    let (group, slot) = (slot / GROUP, slot % GROUP);
    // SAFETY (here and below): the caller's promise; a group is `GROUP` numbers for each dimension.
    let group = unsafe { head.cast::<u16>().add(group * GROUP * row.len()) };
    for (d, x) in row.iter().enumerate() {
        let at = if value {
            (d / LANES * GROUP_PAIRS + slot / 2) * LINE_LEN + d % LANES * 2 + slot % 2
        } else {
            d / 2 * LINE_LEN + slot * 2 + d % 2
        };
        unsafe { *group.add(at) = bf16_bits(*x) };
    }
}

/// Reads K and V of a group as float32: K to sixteen columns of `[dim][ROW_LEN]`, V to `[16][dim]`. K and V of the
/// group `next` are prefetched meanwhile: blocks lie apart in memory, where the processor does not foresee the next
/// line.
///
/// # Safety
/// `group` are the K and V of a whole group, and there is room for the results.
#[inline(always)]
pub(super) unsafe fn load<S: Simd, const ROW_LEN: usize>(
    simd: S,
    dim: usize,
    group: [*const u8; 2],
    next: [*const u8; 2],
    keys: *mut f32,
    values: *mut f32,
) {
    // SAFETY (all): the caller's promise. K and V are `dim / 2` lines each.
    for pair in 0..dim / 2 {
        let line = pair * LINE_BYTES;
        simd.prefetch_far(next[0].wrapping_add(line));
        unsafe {
            let [even, odd] = widen_pairs(simd, group[0].add(line));
            let to = keys.add(2 * pair * ROW_LEN);
            simd.store(to, even);
            simd.store(to.add(ROW_LEN), odd);
        }
    }
    for i in 0..dim / 2 {
        let (part, pair) = (i / GROUP_PAIRS, i % GROUP_PAIRS);
        simd.prefetch_far(next[1].wrapping_add(i * LINE_BYTES));
        unsafe {
            let [even, odd] = widen_pairs(simd, group[1].add(i * LINE_BYTES));
            let to = values.add(2 * pair * dim + part * LANES);
            simd.store(to, even);
            simd.store(to.add(dim), odd);
        }
    }
}

/// The first and the second number of each of sixteen pairs.
///
/// # Safety
/// A line can be read at `at`.
#[inline(always)]
unsafe fn widen_pairs<S: Simd>(simd: S, at: *const u8) -> [S::V; 2] {
    // SAFETY: the caller's promise.
    let pairs = unsafe { simd.load_ints(at) };
    let first = simd.or_shifted(simd.splat_int(0), pairs, 16);
    [simd.as_floats(first), simd.as_floats(simd.int_bits(pairs, 0, 0xffff_0000))]
}
