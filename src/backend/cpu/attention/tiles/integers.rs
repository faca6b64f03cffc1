//! The integers that the codes of a KV cache are multiplied with.
//!
//! A query is a scale times integers of two digits, `254 · high + low` with digits from -127 to 127. The weights of a
//! query in a tile, times V's scales, are a scale times `256 · high + low` with digits from 0 to 255. So the largest
//! element of a query keeps 15 bits and a sign, and the largest weight of a tile 16 bits. (`kernel::bytes` does the
//! same on other instruction sets, with smaller digits.)
//!
//! A query's digits are `[high, low][dimensions]`. The digits of its weights are
//! `[high, low][2 batches of groups][4][4 groups][4 positions]`: the order in which four vectors are packed into one.

use super::codes::{LARGEST_WEIGHT, WEIGHT_BITS, load_scales};
use super::geometry::{GROUP, TILE};
use super::products::{GROUPS_AT_ONCE, QueryScale};
use super::queries::prefetch;
use super::vector::rough_exp2;
use super::{GroupAddresses, PAIR, TileItem, TiledSoftmaxState, TiledUnit};
use crate::cpu::attention::code_groups::{self, GatheredGroup, GroupCodes, LARGEST_QUERY, QUERY_BASE, SMALLEST};
use crate::cpu::simd::LANES;
use std::arch::x86_64::*;
use std::ops::Range;

// SAFETY (all blocks in this impl): `run`'s contract, as in `super`.
impl TiledUnit<'_> {
    /// Turns the queries into integers.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn encode_queries(&self) {
        for query in 0..self.num_queries {
            unsafe {
                let digits = self.scratch.queries.cast::<u8>().add(2 * query * self.dim());
                *self.scratch.query_scales.add(query) =
                    encode_query(self.query(query), self.call.shape.head_dim, digits, self.dim());
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

    /// Computes a query's weights, times V's scales as integers, and returns the sum of the weights. It overwrites the
    /// scores.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq")]
    pub(super) unsafe fn code_weights(
        &self,
        query: usize,
        item: &TileItem,
        groups: &GroupAddresses,
        scale: f32,
        state: TiledSoftmaxState,
    ) -> __m512 {
        let row = query % LANES * TILE;
        unsafe {
            let (scores, weights) = (self.scores_of(item).add(row), self.weights_of(item).add(row).cast::<u8>());
            let (scale, max) = (_mm512_set1_ps(scale), _mm512_set1_ps(*state.max.add(query)));
            let (mut sum, mut largest, mut nan) = (_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps());
            for pair in item.pairs() {
                let mask = if item.is_whole(pair) { !0 } else { self.mask(query, item, pair) };
                for half in 0..2 {
                    let (at, mask) = (scores.add(pair * PAIR + half * GROUP), (mask >> (half * GROUP)) as u16);
                    let weight = rough_exp2(_mm512_fmsub_ps(_mm512_load_ps(at), scale, max));
                    sum = _mm512_mask_add_ps(sum, mask, sum, weight);
                    let scales = load_scales(groups.value_scales[2 * pair + half]);
                    let weight = _mm512_maskz_mul_ps(mask, weight, scales);
                    // `max` returns its second operand if the first one is not a number.
                    largest = _mm512_max_ps(weight, largest);
                    nan = _mm512_fmadd_ps(weight, _mm512_setzero_ps(), nan);
                    _mm512_store_ps(at, weight);
                }
            }
            let largest = _mm512_reduce_max_ps(largest);
            let has_codes = largest >= SMALLEST;
            *self.weight_scales_of(item).add(query % LANES) = match _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(nan, nan) {
                0 if has_codes => largest / LARGEST_WEIGHT,
                0 => 0.0,
                // The V of a visible position is not finite.
                _ => f32::NAN,
            };
            let inverse = _mm512_set1_ps(if has_codes { LARGEST_WEIGHT / largest } else { 0.0 });
            for batch in item.groups.start / GROUPS_AT_ONCE..item.groups.end.div_ceil(GROUPS_AT_ONCE) {
                let at = scores.add(batch * GROUPS_AT_ONCE * GROUP);
                let mut words = [_mm512_setzero_si512(); GROUPS_AT_ONCE / 2];
                for (i, words) in words.iter_mut().enumerate() {
                    let weights = at.add(i * PAIR);
                    *words = _mm512_packus_epi32(
                        _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(weights), inverse)),
                        _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(weights.add(GROUP)), inverse)),
                    );
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
            sum
        }
    }
}

/// Turns a query into integers: the high digits at `digits`, the low ones at `digits + row_len`.
///
/// # Safety
/// `query` is a whole head, of a multiple of 16 dimensions, and there is room for the digits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn encode_query(query: *const f32, head_dim: usize, digits: *mut u8, row_len: usize) -> QueryScale {
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
    QueryScale { starts: sums.map(|sum| -128 * _mm512_reduce_add_epi32(sum)), scale, padding: 0 }
}
