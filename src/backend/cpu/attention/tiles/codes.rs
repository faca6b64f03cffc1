//! The products of attention over a KV cache of integer codes, by AVX-512's products of bytes. `integers` says what the
//! codes are multiplied with. Sums of products are exact, so their order does not matter.

// Indices name registers here. The loops over them are unrolled, and iterators would hide which register is which.
#![allow(clippy::needless_range_loop)]

use super::geometry::{GROUP, LINE_BYTES, TILE};
use super::products::{GROUPS_AT_ONCE, Scored, Weighed};
use super::queries::{QueryProducts, prefetch};
use crate::cpu::attention::code_groups::QUERY_BASE;
use crate::cpu::kv_codes::LARGEST_NIBBLE;
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

/// `PARTS` codes are in a byte: one of 8 bits, or two of 4. A part of the weighted sums is [`VALUES_AT_ONCE`] vectors
/// of dimensions.
pub(super) struct CodeProducts<const PARTS: usize>;

impl<const PARTS: usize> QueryProducts for CodeProducts<PARTS> {
    fn num_weighed(_: &Weighed, head_dim: usize) -> usize {
        head_dim.div_ceil(VALUES_AT_ONCE * LANES)
    }

    #[inline(always)]
    unsafe fn score<const R: usize>(scored: &Scored, first: usize, groups: Range<usize>, head_dim: usize) {
        // SAFETY (both): the caller's promise.
        unsafe { scored.score_codes::<R, PARTS>(first, groups, head_dim) };
    }

    #[inline(always)]
    unsafe fn weigh<const R: usize>(weighed: &Weighed, first: usize, part: usize, head_dim: usize) {
        unsafe { weighed.weigh_codes::<R, PARTS>(first, part * VALUES_AT_ONCE * LANES / PARTS, head_dim) };
    }
}

/// What a K's codes are larger than they should be when they are multiplied, as the instruction takes no sign there.
pub(super) fn key_offset(parts: usize) -> i32 {
    if parts == 1 { 128 } else { LARGEST_NIBBLE }
}

/// Part `part` of 64 bytes of codes, plus the largest code if there are two parts.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn nibbles(bytes: __m512i, part: usize) -> __m512i {
    // Twice the 4 bits.
    let mask = _mm512_set1_epi8(0x1e);
    match part {
        0 => _mm512_and_si512(_mm512_slli_epi16::<1>(bytes), mask),
        _ => _mm512_and_si512(_mm512_srli_epi16::<3>(bytes), mask),
    }
}

/// Part `part` of 64 bytes of a K, plus [`key_offset`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn key_codes<const PARTS: usize>(bytes: __m512i, part: usize) -> __m512i {
    match PARTS {
        1 => _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)),
        _ => nibbles(bytes, part),
    }
}

/// Part `part` of 64 bytes of a V, with its sign.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn value_codes<const PARTS: usize>(bytes: __m512i, part: usize) -> __m512i {
    match PARTS {
        1 => bytes,
        _ => _mm512_sub_epi8(nibbles(bytes, part), _mm512_set1_epi8(LARGEST_NIBBLE as i8)),
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
    unsafe fn score_codes<const R: usize, const PARTS: usize>(
        &self,
        first: usize,
        groups: Range<usize>,
        head_dim: usize,
    ) {
        for group in groups.clone().step_by(KEY_GROUPS_AT_ONCE) {
            unsafe {
                match groups.end - group {
                    1 => self.score_code_groups::<R, 1, PARTS>(first, group, head_dim),
                    _ => self.score_code_groups::<R, KEY_GROUPS_AT_ONCE, PARTS>(first, group, head_dim),
                }
            }
        }
    }

    /// The scores of queries `first .. first + R` for groups `group .. group + G`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn score_code_groups<const R: usize, const G: usize, const PARTS: usize>(
        &self,
        first: usize,
        group: usize,
        head_dim: usize,
    ) {
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
            for line in 0..head_dim / (4 * PARTS) {
                let mut bytes = [_mm512_setzero_si512(); G];
                for g in 0..G {
                    bytes[g] = _mm512_loadu_si512(self.keys[group + g].add(line * LINE_BYTES).cast());
                }
                if first == 0
                    && let Some(next) = &self.next
                {
                    for g in 0..G {
                        prefetch(next[group + g].wrapping_add(line * LINE_BYTES));
                    }
                }
                for part in 0..PARTS {
                    let mut keys = bytes;
                    for g in 0..G {
                        keys[g] = key_codes::<PARTS>(bytes[g], part);
                    }
                    let word = line * PARTS + part;
                    for r in 0..R {
                        for digit in 0..2 {
                            let query = _mm512_set1_epi32(*queries.add((2 * r + digit) * words + word));
                            for g in 0..G {
                                sums[r][g][digit] = _mm512_dpbusd_epi32(sums[r][g][digit], keys[g], query);
                            }
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
    /// The weighted sums of queries `first .. first + R` in up to [`VALUES_AT_ONCE`] vectors of dimensions: those of
    /// the bytes of V from `byte`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn weigh_codes<const R: usize, const PARTS: usize>(&self, first: usize, byte: usize, head_dim: usize) {
        unsafe {
            match (head_dim / PARTS - byte) / LANES {
                2.. if PARTS == 1 => self.weigh_code_vectors::<R, VALUES_AT_ONCE, PARTS>(first, byte, head_dim),
                _ => self.weigh_code_vectors::<R, 1, PARTS>(first, byte, head_dim),
            }
        }
    }

    /// Does so with `C` vectors of bytes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn weigh_code_vectors<const R: usize, const C: usize, const PARTS: usize>(
        &self,
        first: usize,
        byte: usize,
        head_dim: usize,
    ) {
        let len = head_dim / PARTS;
        let mut sums = [[[[_mm512_setzero_si512(); 2]; PARTS]; C]; R];
        unsafe {
            let weights = self.weights.add(first * TILE).cast::<i32>();
            for group in self.groups.clone() {
                let batch = group / GROUPS_AT_ONCE * LANES + group % GROUPS_AT_ONCE;
                for quad in 0..GROUP / 4 {
                    let offset = 4 * (quad * len + byte);
                    let mut values = [[_mm512_setzero_si512(); PARTS]; C];
                    for c in 0..C {
                        let bytes = _mm512_loadu_si512(self.values[group].add(offset + c * LINE_BYTES).cast());
                        for part in 0..PARTS {
                            values[c][part] = value_codes::<PARTS>(bytes, part);
                        }
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
                                for part in 0..PARTS {
                                    let sum = &mut sums[r][c][part][digit];
                                    *sum = _mm512_dpbusd_epi32(*sum, weight, values[c][part]);
                                }
                            }
                        }
                    }
                }
            }
            for r in 0..R {
                let scale = _mm512_set1_ps(*self.scales.add(first + r));
                for c in 0..C {
                    for part in 0..PARTS {
                        let sum = two_digits(sums[r][c][part], WEIGHT_BASE);
                        let d = part * len + byte + c * LANES;
                        let to = self.out.add((first + r) * row_len(head_dim) + d);
                        _mm512_store_ps(to, _mm512_mul_ps(sum, scale));
                    }
                }
            }
        }
    }
}
