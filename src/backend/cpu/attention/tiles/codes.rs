//! The products of attention over a KV cache of integer codes, by AVX-512's products of bytes. `integers` says what the
//! codes are multiplied with. Sums of products are exact, so their order does not matter.

// Indices name registers here. The loops over them are unrolled, and iterators would hide which register is which.
#![allow(clippy::needless_range_loop)]

use super::geometry::{GROUP, LINE_BYTES, TILE};
use super::products::{GROUPS_AT_ONCE, Scored, Weighed};
use super::queries::{QueryProducts, prefetch};
use crate::cpu::attention::code_groups::QUERY_BASE;
use crate::cpu::simd::LANES;
use std::arch::x86_64::*;
use std::ops::Range;

/// Bits of a digit of a weight.
pub(super) const WEIGHT_BITS: u32 = 8;
const WEIGHT_BASE: f32 = (1 << WEIGHT_BITS) as f32;
pub(super) const LARGEST_WEIGHT: f32 = WEIGHT_BASE * WEIGHT_BASE - 1.0;

/// Groups whose scores are computed at once.
const KEY_GROUPS_AT_ONCE: usize = 2;
/// Vectors of dimensions whose weighted sums are computed at once.
const VALUES_AT_ONCE: usize = 2;

/// A part of the weighted sums is [`VALUES_AT_ONCE`] vectors of dimensions.
pub(super) struct CodeProducts;

impl QueryProducts for CodeProducts {
    fn num_weighed(_: &Weighed, head_dim: usize) -> usize {
        head_dim.div_ceil(VALUES_AT_ONCE * LANES)
    }

    #[inline(always)]
    unsafe fn score<const R: usize>(scored: &Scored, first: usize, groups: Range<usize>, head_dim: usize) {
        // SAFETY (both): the caller's promise.
        unsafe { scored.score_codes::<R>(first, groups, head_dim) };
    }

    #[inline(always)]
    unsafe fn weigh<const R: usize>(weighed: &Weighed, first: usize, part: usize, head_dim: usize) {
        unsafe { weighed.weigh_codes::<R>(first, part * VALUES_AT_ONCE * LANES, head_dim) };
    }
}

/// Elements of a row of a block of queries: whole chunks.
fn row_len(head_dim: usize) -> usize {
    head_dim.next_multiple_of(2 * LANES)
}

/// Sixteen bfloat16 as float32.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn load_scales(at: *const u16) -> __m512 {
    // SAFETY: the caller's promise.
    let halves = unsafe { _mm256_loadu_si256(at.cast()) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
}

/// `base * high + low`
#[inline]
#[target_feature(enable = "avx512f")]
fn two_digits([high, low]: [__m512i; 2], base: f32) -> __m512 {
    _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(base), _mm512_cvtepi32_ps(low))
}

// SAFETY (all blocks in these impls): `StepProducts::new`'s contract.
impl Scored {
    /// The scores of queries `first .. first + R`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn score_codes<const R: usize>(&self, first: usize, groups: Range<usize>, head_dim: usize) {
        for group in groups.clone().step_by(KEY_GROUPS_AT_ONCE) {
            unsafe {
                match groups.end - group {
                    1 => self.score_code_groups::<R, 1>(first, group, head_dim),
                    _ => self.score_code_groups::<R, KEY_GROUPS_AT_ONCE>(first, group, head_dim),
                }
            }
        }
    }

    /// The scores of queries `first .. first + R` for groups `group .. group + G`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn score_code_groups<const R: usize, const G: usize>(&self, first: usize, group: usize, head_dim: usize) {
        unsafe {
            let words = row_len(head_dim) / 4;
            let queries = self.queries.cast::<i32>().add(2 * first * words);
            let mut sums = [[[_mm512_setzero_si512(); 2]; G]; R];
            for r in 0..R {
                for digit in 0..2 {
                    let start = _mm512_set1_epi32((*self.scales.add(first + r)).starts[digit]);
                    for g in 0..G {
                        sums[r][g][digit] = start;
                    }
                }
            }
            for word in 0..head_dim / 4 {
                let mut keys = [_mm512_setzero_si512(); G];
                for g in 0..G {
                    let codes = _mm512_loadu_si512(self.keys[group + g].add(word * LINE_BYTES).cast());
                    keys[g] = _mm512_xor_si512(codes, _mm512_set1_epi8(-128));
                }
                if first == 0
                    && let Some(next) = &self.next
                {
                    for g in 0..G {
                        prefetch(next[group + g].wrapping_add(word * LINE_BYTES));
                    }
                }
                for r in 0..R {
                    for digit in 0..2 {
                        let query = _mm512_set1_epi32(*queries.add((2 * r + digit) * words + word));
                        for g in 0..G {
                            sums[r][g][digit] = _mm512_dpbusd_epi32(sums[r][g][digit], keys[g], query);
                        }
                    }
                }
            }
            for g in 0..G {
                let key_scales = load_scales(self.key_scales[group + g]);
                for r in 0..R {
                    let sum = two_digits(sums[r][g], QUERY_BASE);
                    let scales = _mm512_mul_ps(key_scales, _mm512_set1_ps((*self.scales.add(first + r)).scale));
                    let to = self.out.add((first + r) * TILE + (group + g) * GROUP);
                    _mm512_store_ps(to, _mm512_mul_ps(sum, scales));
                }
            }
        }
    }
}

impl Weighed {
    /// The weighted sums of queries `first .. first + R` in up to [`VALUES_AT_ONCE`] vectors of dimensions from `d`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn weigh_codes<const R: usize>(&self, first: usize, d: usize, head_dim: usize) {
        unsafe {
            match (head_dim - d) / LANES {
                1 => self.weigh_code_vectors::<R, 1>(first, d, head_dim),
                _ => self.weigh_code_vectors::<R, VALUES_AT_ONCE>(first, d, head_dim),
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn weigh_code_vectors<const R: usize, const C: usize>(&self, first: usize, d: usize, head_dim: usize) {
        let mut sums = [[[_mm512_setzero_si512(); 2]; C]; R];
        unsafe {
            let weights = self.weights.add(first * TILE).cast::<i32>();
            for group in self.groups.clone() {
                let batch = group / GROUPS_AT_ONCE * LANES + group % GROUPS_AT_ONCE;
                for quad in 0..GROUP / 4 {
                    let offset = 4 * (quad * head_dim + d);
                    let mut values = [_mm512_setzero_si512(); C];
                    for c in 0..C {
                        values[c] = _mm512_loadu_si512(self.values[group].add(offset + c * LINE_BYTES).cast());
                    }
                    if first == 0
                        && let Some(next) = &self.next
                    {
                        for c in 0..C {
                            prefetch(next[group].wrapping_add(offset + c * LINE_BYTES));
                        }
                    }
                    for r in 0..R {
                        for digit in 0..2 {
                            let word = (2 * r + digit) * TILE / 4 + batch + quad * GROUPS_AT_ONCE;
                            let weight = _mm512_set1_epi32(*weights.add(word));
                            for c in 0..C {
                                sums[r][c][digit] = _mm512_dpbusd_epi32(sums[r][c][digit], weight, values[c]);
                            }
                        }
                    }
                }
            }
            for r in 0..R {
                let scale = _mm512_set1_ps(*self.scales.add(first + r));
                for c in 0..C {
                    let sum = two_digits(sums[r][c], WEIGHT_BASE);
                    let to = self.out.add((first + r) * row_len(head_dim) + d + c * LANES);
                    _mm512_store_ps(to, _mm512_mul_ps(sum, scale));
                }
            }
        }
    }
}
