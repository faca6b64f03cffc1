//! How K, V, queries and scores are split for tile registers.

pub(super) use crate::cpu::attention::groups::{GROUP, GROUP_PAIRS, LINE_BYTES};
use crate::cpu::simd::LANES;

/// Positions per step of the online softmax. A partition is a multiple of it.
pub(super) const TILE: usize = 128;
pub(super) const GROUPS: usize = TILE / GROUP;
/// Dimensions of one product of a tile of Q with a tile of K.
pub(super) const CHUNK: usize = 2 * LANES;
/// Numbers of 32 bits in a tile register.
pub(super) const TILE_LEN: usize = LANES * LANES;
/// Bytes of a tile register.
pub(super) const TILE_BYTES: usize = 4 * TILE_LEN;
/// Bytes of a tile of V: 8 rows.
pub(super) const GROUP_TILE_BYTES: usize = TILE_BYTES / 2;

/// A mask of the first `n` of 32 lanes.
pub(super) fn first_lanes(n: usize) -> u32 {
    if n >= 32 { !0 } else { (1 << n) - 1 }
}
