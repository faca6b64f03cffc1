//! The products of attention, and how AMX computes them. The compiler does not use tile registers, so their contents
//! survive from one `asm!` block of a thread to the next.

use super::geometry::{CHUNK, GROUP_TILE_BYTES, GROUPS, TILE, TILE_BYTES, TILE_LEN};
use crate::cpu::simd::LANES;
use crate::cpu::tile_registers::Tiles;
use std::arch::asm;
use std::ops::Range;

/// Groups of 16 positions whose scores are computed at once.
pub(super) const GROUPS_AT_ONCE: usize = 4;
/// Bytes of a query's scores, and of its weights.
const SCORES_BYTES: usize = 4 * TILE;
const WEIGHTS_BYTES: usize = 2 * TILE;

/// Configures the tile registers for blocks of `rows` queries: results, K, V, weights, Q.
///
/// # Safety
/// As for [`Tiles::of`].
pub(super) unsafe fn configure(rows: usize) -> Tiles {
    let result = (rows, 64);
    // SAFETY: the caller's promise.
    unsafe { Tiles::of([result, result, result, result, (LANES, 64), (LANES / 2, 64), (rows, 32), (rows, 64)]) }
}

/// Tiles of V whose products are computed at once.
const TILES_AT_ONCE: usize = 4;

/// The products of a step of the softmax, a few at a time: the weighted sum of V, `out = weights · V`, and the scores,
/// `Q · Kᵀ`. The caller does other work between them, while the processor multiplies.
pub(super) trait StepProducts {
    /// Whether they prefetch what is used next.
    const PREFETCHES: bool;

    /// # Safety
    /// Until this is dropped, the instructions are available and ready, all pointers point to as much memory as
    /// documented, and nothing else uses the memory of the results.
    unsafe fn new(weighed: Option<Weighed>, scored: Option<Scored>, head_dim: usize) -> Self;

    /// How many calls of [`Self::advance`] all products take.
    fn len(&self) -> usize;

    /// Computes the next products, if any are left.
    fn advance(&mut self);
}

/// The scale of a query's integers.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct QueryScale {
    /// What the products of both digits begin with: K's codes are multiplied with an offset added to them.
    pub starts: [i32; 2],
    pub scale: f32,
    /// Makes the size a power of two.
    pub padding: u32,
}

/// Weights of a block of queries, and V. `groups` is not empty.
pub(super) struct Weighed {
    pub num_queries: usize,
    /// Rows of [`TILE`] numbers: bfloat16, or integers as [`integers`](super::integers) lays them out.
    pub weights: *const u16,
    /// `[num_queries]`: the factors on sums of integers.
    pub scales: *const f32,
    pub values: [*const u8; GROUPS],
    /// V of groups that is prefetched meanwhile.
    pub next: Option<[*const u8; GROUPS]>,
    pub groups: Range<usize>,
    /// The sums: rows of all dimensions.
    pub out: *mut f32,
}

/// Queries of a block, and K. Scores of positions outside of `groups` may be anything.
pub(super) struct Scored {
    pub num_queries: usize,
    /// Rows of all dimensions: bfloat16 in chunks, or integers as [`integers`](super::integers) lays them out.
    pub queries: *const u32,
    /// Of integers: `[num_queries]`.
    pub scales: *const QueryScale,
    /// `[16]` of bfloat16 of each group of codes.
    pub key_scales: [*const u16; GROUPS],
    pub keys: [*const u8; GROUPS],
    /// K of groups that is prefetched meanwhile.
    pub next: Option<[*const u8; GROUPS]>,
    pub groups: Range<usize>,
    /// The scores: rows of [`TILE`] numbers.
    pub out: *mut f32,
}

/// Products on tile registers, which [`configure`] has made ready. V comes first. The sums stay in tile registers from
/// one [`StepProducts::advance`] to the next, so only one `TileProducts` can exist at a time.
pub(super) struct TileProducts {
    weighed: Option<Weighed>,
    scored: Option<Scored>,
    /// Head size in chunks.
    num_chunks: usize,
    /// The position of the next product: `(first tile, group)` for V, `(batch of groups, chunk)` for K.
    at: (usize, usize),
}

impl StepProducts for TileProducts {
    // This was slower than leaving it to the processor.
    const PREFETCHES: bool = false;

    unsafe fn new(weighed: Option<Weighed>, scored: Option<Scored>, head_dim: usize) -> Self {
        Self { weighed, scored, num_chunks: head_dim.div_ceil(CHUNK), at: (0, 0) }
    }

    fn len(&self) -> usize {
        let weighed = self.weighed.as_ref().map_or(0, |weighed| weighed.groups.len());
        let at_once = (2 * self.num_chunks).div_ceil(TILES_AT_ONCE);
        let scored = self.scored.as_ref().map_or(0, |scored| scored.batches().len());
        weighed * at_once + scored * self.num_chunks
    }

    #[inline]
    fn advance(&mut self) {
        // SAFETY (both): `new`'s contract.
        if let Some(weighed) = &self.weighed {
            unsafe { weighed.multiply(self.at, 2 * self.num_chunks) };
            self.at.1 += 1;
            if self.at.1 == weighed.groups.len() {
                self.at = (self.at.0 + TILES_AT_ONCE, 0);
                if self.at.0 >= 2 * self.num_chunks {
                    (self.weighed, self.at) = (None, (0, 0));
                }
            }
        } else if let Some(scored) = &self.scored {
            let batches = scored.batches();
            unsafe { scored.multiply((batches.start + self.at.0, self.at.1), self.num_chunks) };
            self.at.1 += 1;
            if self.at.1 == self.num_chunks {
                self.at = (self.at.0 + 1, 0);
                if self.at.0 == batches.len() {
                    self.scored = None;
                }
            }
        }
    }
}

impl Weighed {
    /// Computes the products of the `index`th group with up to four tiles of V, starting at `first`.
    ///
    /// # Safety
    /// `TileProducts::new`'s contract; the groups are taken in order.
    #[inline]
    unsafe fn multiply(&self, (first, index): (usize, usize), num_tiles: usize) {
        let all = first + TILES_AT_ONCE <= num_tiles;
        let group = self.groups.start + index;
        let value = self.values[group].wrapping_add(first * GROUP_TILE_BYTES);
        let weights = self.weights.wrapping_add(group * LANES);
        // SAFETY: the caller's promise.
        unsafe {
            if index == 0 {
                asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
            }
            asm!(
                "tileloadd tmm6, [{weights} + {row}]",
                "tileloadd tmm5, [{value} + {line}]",
                "tdpbf16ps tmm0, tmm6, tmm5",
                "tileloadd tmm5, [{value} + {line} + {tile}]",
                "tdpbf16ps tmm1, tmm6, tmm5",
                line = in(reg) 64usize,
                row = in(reg) WEIGHTS_BYTES,
                tile = const GROUP_TILE_BYTES,
                value = in(reg) value,
                weights = in(reg) weights,
                options(nostack, readonly, preserves_flags),
            );
            if all {
                asm!(
                    "tileloadd tmm5, [{value} + {line} + 2 * {tile}]",
                    "tdpbf16ps tmm2, tmm6, tmm5",
                    "tileloadd tmm5, [{value} + {line} + 3 * {tile}]",
                    "tdpbf16ps tmm3, tmm6, tmm5",
                    line = in(reg) 64usize,
                    tile = const GROUP_TILE_BYTES,
                    value = in(reg) value,
                    options(nostack, readonly, preserves_flags),
                );
            }
            if group + 1 < self.groups.end {
                return;
            }
            let (out, row) = (self.out.add(first * LANES), 4 * num_tiles * LANES);
            asm!(
                "tilestored [{out} + {row}], tmm0",
                "tilestored [{out} + {row} + 64], tmm1",
                out = in(reg) out,
                row = in(reg) row,
                options(nostack, preserves_flags),
            );
            if all {
                asm!(
                    "tilestored [{out} + {row} + 128], tmm2",
                    "tilestored [{out} + {row} + 192], tmm3",
                    out = in(reg) out,
                    row = in(reg) row,
                    options(nostack, preserves_flags),
                );
            }
        }
    }
}

impl Scored {
    /// Groups are taken in batches of [`GROUPS_AT_ONCE`].
    fn batches(&self) -> Range<usize> {
        self.groups.start / GROUPS_AT_ONCE..self.groups.end.div_ceil(GROUPS_AT_ONCE)
    }

    /// Computes the products of a chunk of dimensions with a batch of groups.
    ///
    /// # Safety
    /// `TileProducts::new`'s contract; the chunks are taken in order.
    #[inline]
    unsafe fn multiply(&self, (batch, chunk): (usize, usize), num_chunks: usize) {
        let key = |i: usize| self.keys[batch * GROUPS_AT_ONCE + i].wrapping_add(chunk * TILE_BYTES);
        // SAFETY: the caller's promise.
        unsafe {
            if chunk == 0 {
                asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
            }
            asm!(
                "tileloadd tmm7, [{queries} + {line}]",
                "tileloadd tmm4, [{k0} + {line}]",
                "tdpbf16ps tmm0, tmm7, tmm4",
                "tileloadd tmm4, [{k1} + {line}]",
                "tdpbf16ps tmm1, tmm7, tmm4",
                "tileloadd tmm4, [{k2} + {line}]",
                "tdpbf16ps tmm2, tmm7, tmm4",
                "tileloadd tmm4, [{k3} + {line}]",
                "tdpbf16ps tmm3, tmm7, tmm4",
                line = in(reg) 64usize,
                queries = in(reg) self.queries.add(chunk * TILE_LEN),
                k0 = in(reg) key(0),
                k1 = in(reg) key(1),
                k2 = in(reg) key(2),
                k3 = in(reg) key(3),
                options(nostack, readonly, preserves_flags),
            );
            if chunk + 1 == num_chunks {
                asm!(
                    "tilestored [{out} + {row}], tmm0",
                    "tilestored [{out} + {row} + 64], tmm1",
                    "tilestored [{out} + {row} + 128], tmm2",
                    "tilestored [{out} + {row} + 192], tmm3",
                    out = in(reg) self.out.add(batch * GROUPS_AT_ONCE * LANES),
                    row = in(reg) SCORES_BYTES,
                    options(nostack, preserves_flags),
                );
            }
        }
    }
}
