//! The integers that the codes of a KV cache are multiplied with.
//!
//! A query is a scale times integers of two digits, `254 · high + low` with digits from -127 to 127. The weights of a
//! query in a tile, relative to the largest of them and times V's scales, are a scale times `256 · high + low` with
//! digits from 0 to 255. So the largest element of a query keeps 15 bits and a sign, and the largest weight of a tile
//! 16 bits if its V has the largest scale. (`kernel::shorts` does the same on other instruction sets, with integers of
//! 15 bits.)
//!
//! A query's digits are `[high, low][dimensions]`. The digits of its weights are
//! `[high, low][2 batches of groups][4][4 groups][4 positions]`: the order in which four vectors are packed into one.

use super::codes::{LARGEST_WEIGHT, WEIGHT_BITS, key_offset, load_scales};
use super::geometry::{GROUP, GROUPS, TILE};
use super::products::{GROUPS_AT_ONCE, QueryScale};
use super::queries::prefetch;
use super::vector::rough_exp2;
use super::{GroupAddresses, PAIR, TileItem, TiledUnit};
use crate::cpu::attention::code_groups::{self, GatheredGroup, GroupCodes, LARGEST_QUERY, QUERY_BASE, SMALLEST};
use crate::cpu::memory::MAX_HEAD_DIM;
use crate::cpu::rotation::rotate;
use crate::cpu::simd::LANES;
use std::arch::x86_64::*;
use std::ops::Range;

// SAFETY (all blocks in this impl): `run`'s contract, as in `super`.
impl TiledUnit<'_> {
    /// Turns the queries into integers.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn encode_queries(&self) {
        let head_dim = self.call.shape.head_dim;
        let is_rotated = self.call.is_rotated();
        let offset = key_offset(if is_rotated { 2 } else { 1 });
        let mut rotated = [0.0; MAX_HEAD_DIM];
        for query in 0..self.num_queries {
            unsafe {
                let digits = self.scratch.queries.cast::<u8>().add(2 * query * self.dim());
                let mut from = self.query(query);
                if is_rotated {
                    rotated[..head_dim].copy_from_slice(std::slice::from_raw_parts(from, head_dim));
                    rotate(&mut rotated[..head_dim]);
                    from = rotated.as_ptr();
                }
                *self.scratch.query_scales.add(query) = encode_query(from, head_dim, offset, digits, self.dim());
            }
        }
    }

    /// Finds the group that begins at position `first`, of which the positions `seen` are used.
    pub(super) unsafe fn code_group(&self, first: usize, seen: Range<usize>) -> GroupCodes {
        // Three tiles are in use at once. Codes take half of the memory of bfloat16.
        let index = first / GROUP % (3 * TILE / GROUP);
        let codes = self.scratch.keys.cast::<u8>().wrapping_add(index * 2 * GROUP * self.dim());
        let scales = self.scratch.values.cast::<u16>().wrapping_add(index * 2 * GROUP);
        let group = unsafe { code_groups::find(self.call, self.unit, first, seen, GatheredGroup { codes, scales }) };
        // Of the next tile, before its codes.
        prefetch(group.key_scales.cast());
        prefetch(group.value_scales.cast());
        group
    }

    /// V's scales of an item.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq")]
    pub(super) unsafe fn value_scales(&self, item: &TileItem, groups: &GroupAddresses) -> ValueScales {
        let mut bits = [_mm512_setzero_si512(); GROUPS];
        let seen = 2 * item.pairs().start..2 * item.pairs().end;
        for (bits, at) in bits[seen.clone()].iter_mut().zip(&groups.value_scales[seen]) {
            *bits = _mm512_castps_si512(unsafe { load_scales(*at) });
        }
        let is_whole = item.pairs().all(|pair| item.is_whole(pair));
        ValueScales { bits, of_all: is_whole.then(|| WeightScale::new(&bits)) }
    }

    /// Computes a query's weights relative to the largest of the tile, as integers, times V's scales. Multiplies the
    /// query's factor on the weighted sum by the scale of these integers. Returns the sum of the weights times the
    /// factor.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq")]
    pub(super) unsafe fn code_weights(
        &self,
        query: usize,
        item: &TileItem,
        scales: &ValueScales,
        scale: f32,
        tile_max: f32,
    ) -> __m512 {
        let row = query % LANES * TILE;
        unsafe {
            let (scores, weights) = (self.scores_of(item).add(row), self.weights_of(item).add(row).cast::<u8>());
            let of_query = scales.of_all.unwrap_or_else(|| {
                let mut seen = scales.bits;
                for pair in item.pairs() {
                    let mask = self.mask(query, item, pair);
                    seen[2 * pair] = _mm512_maskz_mov_epi32(mask as u16, seen[2 * pair]);
                    seen[2 * pair + 1] = _mm512_maskz_mov_epi32((mask >> 16) as u16, seen[2 * pair + 1]);
                }
                WeightScale::new(&seen)
            });
            let inverse = _mm512_set1_ps(of_query.inverse);
            let (scale, max) = (_mm512_set1_ps(scale), _mm512_set1_ps(tile_max));
            let mut sum = _mm512_setzero_ps();
            for batch in item.groups.start / GROUPS_AT_ONCE..item.groups.end.div_ceil(GROUPS_AT_ONCE) {
                let mut words = [_mm512_setzero_si512(); GROUPS_AT_ONCE / 2];
                for (i, words) in words.iter_mut().enumerate() {
                    let pair = batch * GROUPS_AT_ONCE / 2 + i;
                    if !item.pairs().contains(&pair) {
                        continue;
                    }
                    let at = scores.add(pair * PAIR);
                    let mut low = rough_exp2(_mm512_fmsub_ps(_mm512_load_ps(at), scale, max));
                    let mut high = rough_exp2(_mm512_fmsub_ps(_mm512_load_ps(at.add(GROUP)), scale, max));
                    let of_low = _mm512_mul_ps(_mm512_castsi512_ps(scales.bits[2 * pair]), inverse);
                    let of_high = _mm512_mul_ps(_mm512_castsi512_ps(scales.bits[2 * pair + 1]), inverse);
                    let mut codes = [
                        _mm512_cvtps_epi32(_mm512_mul_ps(low, of_low)),
                        _mm512_cvtps_epi32(_mm512_mul_ps(high, of_high)),
                    ];
                    if !item.is_whole(pair) {
                        let mask = self.mask(query, item, pair);
                        let masks = [mask as u16, (mask >> 16) as u16];
                        low = _mm512_maskz_mov_ps(masks[0], low);
                        high = _mm512_maskz_mov_ps(masks[1], high);
                        codes =
                            [_mm512_maskz_mov_epi32(masks[0], codes[0]), _mm512_maskz_mov_epi32(masks[1], codes[1])];
                    }
                    sum = _mm512_add_ps(sum, _mm512_add_ps(low, high));
                    // A code that rounding has made too large becomes the largest one.
                    *words = _mm512_packus_epi32(codes[0], codes[1]);
                }
                let high = _mm512_packus_epi16(
                    _mm512_srli_epi16::<WEIGHT_BITS>(words[0]),
                    _mm512_srli_epi16::<WEIGHT_BITS>(words[1]),
                );
                let below = _mm512_set1_epi16((1 << WEIGHT_BITS) - 1);
                let low = _mm512_packus_epi16(_mm512_and_si512(words[0], below), _mm512_and_si512(words[1], below));
                let to = weights.add(batch * GROUPS_AT_ONCE * GROUP);
                _mm512_storeu_si512(to.cast(), high);
                _mm512_storeu_si512(to.add(TILE).cast(), low);
            }
            let factor = self.weight_scales_of(item).add(query % LANES);
            let sum = _mm512_mul_ps(sum, _mm512_set1_ps(*factor));
            *factor *= of_query.scale;
            sum
        }
    }
}

/// V's scales of an item.
pub(super) struct ValueScales {
    /// The bits of float32. Scales are not negative.
    bits: [__m512i; GROUPS],
    /// The scale of the weights if all queries see all positions of the tile that any of them sees.
    of_all: Option<WeightScale>,
}

/// The scale of a query's integer weights in a tile. It belongs to the largest possible weight, 1, times the largest
/// scale of V at the positions that the query sees.
#[derive(Clone, Copy)]
struct WeightScale {
    scale: f32,
    inverse: f32,
}

impl WeightScale {
    /// `bits` are the scales of V that the query sees, and zeros.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn new(bits: &[__m512i; GROUPS]) -> Self {
        // As integers they have the same order, and NaN is above infinity.
        let mut largest = bits[0];
        for bits in &bits[1..] {
            largest = _mm512_max_epu32(largest, *bits);
        }
        let largest = f32::from_bits(_mm512_reduce_max_epu32(largest));
        match largest {
            // The V of a position is not finite.
            _ if largest.is_nan() => Self { scale: f32::NAN, inverse: 0.0 },
            _ if largest >= SMALLEST => Self { scale: largest / LARGEST_WEIGHT, inverse: LARGEST_WEIGHT / largest },
            _ => Self { scale: 0.0, inverse: 0.0 },
        }
    }
}

/// Turns a query into integers: the high digits at `digits`, the low ones at `digits + row_len`. The codes of K are
/// multiplied with `offset` added to them.
///
/// # Safety
/// `query` is a whole head, of a multiple of 16 dimensions, and there is room for the digits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn encode_query(query: *const f32, head_dim: usize, offset: i32, digits: *mut u8, row_len: usize) -> QueryScale {
    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    // SAFETY (both): the caller's promise.
    let load = |d: usize| unsafe { _mm512_loadu_ps(query.add(d)) };
    // As integers magnitudes have the same order, and NaN is above infinity.
    let mut largest = _mm512_setzero_si512();
    for d in (0..head_dim).step_by(LANES) {
        largest = _mm512_max_epu32(largest, _mm512_castps_si512(_mm512_abs_ps(load(d))));
    }
    let largest = f32::from_bits(_mm512_reduce_max_epu32(largest));
    let has_codes = largest.is_finite() && largest >= SMALLEST;
    let inverse = _mm512_set1_ps(if has_codes { LARGEST_QUERY / largest } else { 0.0 });
    let mut sums = [_mm512_setzero_si512(); 2];
    for d in (0..head_dim).step_by(LANES) {
        let x = _mm512_mul_ps(load(d), inverse);
        let high = _mm512_roundscale_ps::<NEAREST>(_mm512_mul_ps(x, _mm512_set1_ps(1.0 / QUERY_BASE)));
        let low = _mm512_fnmadd_ps(high, _mm512_set1_ps(QUERY_BASE), x);
        // Of an element that is not finite, any code will do.
        for (digit, x) in [high, low].into_iter().enumerate() {
            let codes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x));
            sums[digit] = _mm512_add_epi32(sums[digit], _mm512_cvtepi8_epi32(codes));
            unsafe { _mm_storeu_si128(digits.add(digit * row_len + d).cast(), codes) };
        }
    }
    let scale = match has_codes {
        true => largest / LARGEST_QUERY,
        false if largest.is_finite() => 0.0,
        false => f32::NAN,
    };
    QueryScale { starts: sums.map(|sum| -offset * _mm512_reduce_add_epi32(sum)), scale, padding: 0 }
}
