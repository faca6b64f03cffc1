//! The products of attention by AVX-512's dot products of pairs of bfloat16.
//!
//! A score is one chain of dot products over the pairs of dimensions, an element of the weighted sum one over the pairs
//! of positions. The order of a chain does not depend on how many queries or groups are computed at once, and groups
//! that a query does not see add zeros to it.

// Indices name registers here. The loops over them are unrolled, and iterators would hide which register is which.
#![allow(clippy::needless_range_loop)]

use super::geometry::{CHUNK, GROUP, GROUP_PAIRS, GROUP_TILE_BYTES, LINE_BYTES, TILE, TILE_BYTES, TILE_LEN};
use super::products::{GROUPS_AT_ONCE, Scored, Weighed};
use super::queries::{QueryProducts, batches, nth_batch, prefetch};
use crate::cpu::simd::LANES;
use std::arch::x86_64::*;
use std::ops::Range;

/// Tiles of V that are computed at once.
const TILES_AT_ONCE: usize = 4;

/// A part of the weighted sums is a batch of groups. The sums begin with the first one.
pub(super) struct DotProducts;

impl QueryProducts for DotProducts {
    fn num_weighed(weighed: &Weighed, _: usize) -> usize {
        batches(&weighed.groups).len()
    }

    #[inline(always)]
    unsafe fn score<const R: usize>(scored: &Scored, first: usize, groups: Range<usize>, head_dim: usize) {
        // SAFETY (both): the caller's promise.
        unsafe { scored.score::<R>(first, groups, head_dim.div_ceil(CHUNK)) };
    }

    #[inline(always)]
    unsafe fn weigh<const R: usize>(weighed: &Weighed, first: usize, part: usize, head_dim: usize) {
        unsafe { weighed.weigh::<R>(first, nth_batch(part, &weighed.groups), 2 * head_dim.div_ceil(CHUNK)) };
    }
}

/// `acc + a.0 * b.0 + a.1 * b.1` for sixteen pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn dot_pairs(acc: __m512, a: __m512i, b: __m512i) -> __m512 {
    // SAFETY: the types differ only in name.
    let (a, b) = unsafe { (std::mem::transmute::<__m512i, __m512bh>(a), std::mem::transmute::<__m512i, __m512bh>(b)) };
    _mm512_dpbf16_ps(acc, a, b)
}

// SAFETY (all blocks in these impls): `StepProducts::new`'s contract.
impl Scored {
    /// The scores of queries `first .. first + R`.
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn score<const R: usize>(&self, first: usize, groups: Range<usize>, num_chunks: usize) {
        unsafe {
            match groups.len() {
                1 => self.block::<R, 1>(first, groups.start, num_chunks),
                2 => self.block::<R, 2>(first, groups.start, num_chunks),
                3 => self.block::<R, 3>(first, groups.start, num_chunks),
                _ => self.block::<R, GROUPS_AT_ONCE>(first, groups.start, num_chunks),
            }
        }
    }

    /// The scores of queries `first .. first + R` for groups `group .. group + G`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn block<const R: usize, const G: usize>(&self, first: usize, group: usize, num_chunks: usize) {
        let mut acc = [[_mm512_setzero_ps(); G]; R];
        unsafe {
            for chunk in 0..num_chunks {
                let queries = self.queries.add(chunk * TILE_LEN + first * LANES);
                for pair in 0..LANES {
                    let offset = chunk * TILE_BYTES + pair * LINE_BYTES;
                    let mut keys = [_mm512_setzero_si512(); G];
                    for g in 0..G {
                        keys[g] = _mm512_load_si512(self.keys[group + g].add(offset).cast());
                    }
                    if first == 0
                        && let Some(next) = &self.next
                    {
                        for g in 0..G {
                            prefetch(next[group + g].wrapping_add(offset));
                        }
                    }
                    for r in 0..R {
                        let query = _mm512_set1_epi32(*queries.add(r * LANES + pair) as i32);
                        for g in 0..G {
                            acc[r][g] = dot_pairs(acc[r][g], keys[g], query);
                        }
                    }
                }
            }
            for r in 0..R {
                for g in 0..G {
                    _mm512_store_ps(self.out.add((first + r) * TILE + (group + g) * GROUP), acc[r][g]);
                }
            }
        }
    }
}

impl Weighed {
    /// Adds what `groups` contribute to the weighted sums of queries `first .. first + R`. The sums begin with the
    /// first group.
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn weigh<const R: usize>(&self, first: usize, groups: Range<usize>, num_tiles: usize) {
        let mut tile = 0;
        while tile < num_tiles {
            // A chunk is two tiles, so their number is even.
            unsafe {
                if tile + TILES_AT_ONCE <= num_tiles {
                    self.block::<R, TILES_AT_ONCE>(first, groups.clone(), tile, num_tiles);
                    tile += TILES_AT_ONCE;
                } else {
                    self.block::<R, 2>(first, groups.clone(), tile, num_tiles);
                    tile += 2;
                }
            }
        }
    }

    /// Does so in tiles `tile .. tile + T`. The groups take turns after each pair of positions: memory gives several
    /// streams of lines faster than one after the other.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn block<const R: usize, const T: usize>(
        &self,
        first: usize,
        groups: Range<usize>,
        tile: usize,
        num_tiles: usize,
    ) {
        let mut acc = [[_mm512_setzero_ps(); T]; R];
        unsafe {
            let out = self.out.add((first * num_tiles + tile) * LANES);
            if groups.start > self.groups.start {
                for r in 0..R {
                    for t in 0..T {
                        acc[r][t] = _mm512_load_ps(out.add((r * num_tiles + t) * LANES));
                    }
                }
            }
            for pair in 0..GROUP_PAIRS {
                for group in groups.clone() {
                    let offset = tile * GROUP_TILE_BYTES + pair * LINE_BYTES;
                    let mut values = [_mm512_setzero_si512(); T];
                    for t in 0..T {
                        let at = self.values[group].add(offset + t * GROUP_TILE_BYTES);
                        values[t] = _mm512_load_si512(at.cast());
                    }
                    if first == 0
                        && let Some(next) = &self.next
                    {
                        for t in 0..T {
                            prefetch(next[group].wrapping_add(offset + t * GROUP_TILE_BYTES));
                        }
                    }
                    let weights = self.weights.add(first * TILE + group * GROUP).cast::<i32>();
                    for r in 0..R {
                        let weight = _mm512_set1_epi32(*weights.add(r * TILE / 2 + pair));
                        for t in 0..T {
                            acc[r][t] = dot_pairs(acc[r][t], values[t], weight);
                        }
                    }
                }
            }
            for r in 0..R {
                for t in 0..T {
                    _mm512_store_ps(out.add((r * num_tiles + t) * LANES), acc[r][t]);
                }
            }
        }
    }
}
