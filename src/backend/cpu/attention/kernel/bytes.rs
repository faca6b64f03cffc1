//! Attention over integer codes with products of bytes. (On AVX-512 it is `tiles::codes`.)
//!
//! A query is a scale times integers of two digits, `254 · high + low` with digits from -127 to 127. The weights of a
//! query in a tile, times V's scales, are a scale times `128 · high + low` with digits from 0 to 127. Sums of products
//! with codes are exact, so their order does not matter. The largest element of a query keeps 15 bits and a sign, and
//! the largest weight of a tile 14 bits.

// Indices name registers here, as in `super`.
#![allow(clippy::needless_range_loop)]

use super::super::super::kv_codes::{TO_INTEGER, largest_magnitude};
use super::super::super::simd::{LANES, Simd};
use super::super::code_groups::{LARGEST_QUERY, QUERY_BASE, SMALLEST};
use super::super::unit::TILE;
use super::codes::TileCodes;
use super::elements::Code;
use super::{CacheCodes, SoftmaxState, UnitKernel};

const WEIGHT_BITS: u32 = 7;
const WEIGHT_BASE: f32 = (1 << WEIGHT_BITS) as f32;
const LARGEST_WEIGHT: f32 = WEIGHT_BASE * WEIGHT_BASE - 1.0;

/// `x` rounded to nearest even.
#[inline(always)]
fn integer(x: f32) -> i32 {
    (x + TO_INTEGER).to_bits() as i32 - TO_INTEGER.to_bits() as i32
}

// SAFETY (all blocks in this impl): as in `super`. What the scratch memory has is said in `CodesScratch`.
impl<K: Code> UnitKernel<'_, CacheCodes<K>> {
    /// Turns the queries into integers.
    #[inline(always)]
    pub(super) unsafe fn encode_queries<S: Simd>(&self, _: S) {
        let (scratch, dim) = (self.scratch.codes, self.call.shape.head_dim);
        for i in 0..self.num_queries() {
            unsafe {
                let query = std::slice::from_raw_parts(self.query(i), dim);
                let high = std::slice::from_raw_parts_mut(scratch.queries.add(2 * i * dim), dim);
                let low = std::slice::from_raw_parts_mut(scratch.queries.add((2 * i + 1) * dim), dim);
                let largest = f32::from_bits(largest_magnitude(query));
                let has_codes = largest.is_finite() && largest >= SMALLEST;
                let inverse = if has_codes { LARGEST_QUERY / largest } else { 0.0 };
                let mut sums = [0; 2];
                for d in 0..dim {
                    let x = query[d] * inverse;
                    let first = integer(x * (1.0 / QUERY_BASE));
                    let second = integer(x - first as f32 * QUERY_BASE);
                    // Of an element that is not finite, any code will do.
                    (high[d], low[d]) = (first as u8, second as u8);
                    sums = [sums[0] + i32::from(first as i8), sums[1] + i32::from(second as i8)];
                }
                *scratch.query_scales.add(i) = match has_codes {
                    true => largest / LARGEST_QUERY,
                    false if largest.is_finite() => 0.0,
                    false => f32::NAN,
                };
                for digit in 0..2 {
                    *scratch.query_starts.add(2 * i + digit) = if S::ADDS_128 { -128 * sums[digit] } else { 0 };
                }
            }
        }
    }

    /// `weights[query][position] = q · k`. The K of `ahead` is prefetched.
    #[inline(always)]
    pub(super) unsafe fn byte_scores<S: Simd>(&self, simd: S, codes: &TileCodes, ahead: &TileCodes) {
        let n = self.num_queries();
        let mut i = 0;
        unsafe {
            while i < n {
                if S::QUERIES == 4 && i + 4 <= n {
                    self.byte_scores_of::<S, 4>(simd, codes, ahead, i);
                    i += 4;
                } else if S::QUERIES == 4 && i + 2 <= n {
                    self.byte_scores_of::<S, 2>(simd, codes, ahead, i);
                    i += 2;
                } else {
                    self.byte_scores_of::<S, 1>(simd, codes, ahead, i);
                    i += 1;
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn byte_scores_of<S: Simd, const R: usize>(
        &self,
        simd: S,
        codes: &TileCodes,
        ahead: &TileCodes,
        first: usize,
    ) {
        let (scratch, dim) = (self.scratch.codes, self.call.shape.head_dim);
        // Of each query and each half of the tile, the sums of both digits.
        let mut sums = [[[simd.splat_int(0); 2]; 2]; R];
        unsafe {
            let queries = scratch.queries.add(2 * first * dim).cast::<u32>();
            let words = dim / 4;
            for r in 0..R {
                for digit in 0..2 {
                    let start = simd.splat_int(*scratch.query_starts.add(2 * (first + r) + digit));
                    (sums[r][0][digit], sums[r][1][digit]) = (start, start);
                }
            }
            for word in 0..words {
                let at = word * 4 * LANES;
                if first == 0 {
                    for group in ahead {
                        simd.prefetch(group.keys.wrapping_add(at));
                    }
                }
                let k = [
                    simd.prepare_signed(simd.load_bytes(codes[0].keys.add(at))),
                    simd.prepare_signed(simd.load_bytes(codes[1].keys.add(at))),
                ];
                for r in 0..R {
                    for digit in 0..2 {
                        let q = *queries.add((2 * r + digit) * words + word);
                        for half in 0..2 {
                            sums[r][half][digit] = simd.dot_signed(sums[r][half][digit], k[half], q);
                        }
                    }
                }
            }
            for half in 0..2 {
                let key_scales = simd.load_bf16(codes[half].key_scales);
                for r in 0..R {
                    let [high, low] = sums[r][half];
                    let sum = simd.fused(simd.to_floats(high), simd.splat(QUERY_BASE), simd.to_floats(low));
                    let scales = simd.mul(key_scales, simd.splat(*scratch.query_scales.add(first + r)));
                    let to = self.scratch.weights.add((first + r) * TILE + half * LANES);
                    simd.store(to, simd.mul(sum, scales));
                }
            }
        }
    }

    /// Turns the weights times V's scales into integers.
    #[inline(always)]
    pub(super) unsafe fn encode_weights<S: Simd>(&self, simd: S, codes: &TileCodes, tile: usize) {
        let (scratch, zero) = (self.scratch.codes, simd.splat(0.0));
        unsafe {
            let scales = [simd.load_bf16(codes[0].value_scales), simd.load_bf16(codes[1].value_scales)];
            // Also of positions that no query sees: this only decides whether to look more closely.
            let all_finite = !simd.sum(simd.mul(simd.add(scales[0], scales[1]), zero)).is_nan();
            for i in 0..self.num_queries() {
                let (from, to) = self.visible_in_tile(i, tile);
                if from >= to {
                    continue;
                }
                let at = self.scratch.weights.add(i * TILE);
                let mut weights = [simd.mul(simd.load(at), scales[0]), simd.mul(simd.load(at.add(LANES)), scales[1])];
                if to - from < TILE {
                    for half in 0..2 {
                        let (from, to) = (from.max(half * LANES), to.min((half + 1) * LANES));
                        let (from, to) = (from.min((half + 1) * LANES), to.max(half * LANES));
                        weights[half] = simd.in_range_or(weights[half], from - half * LANES, to - half * LANES, zero);
                    }
                }
                let largest = simd.max_lane(simd.max(weights[0], weights[1]));
                let has_codes = largest >= SMALLEST;
                let inverse = simd.splat(if has_codes { LARGEST_WEIGHT / largest } else { 0.0 });
                // NaN if the V of a visible position is.
                let nan = match all_finite {
                    true => 0.0,
                    false => simd.sum(simd.mul(simd.add(weights[0], weights[1]), zero)),
                };
                *scratch.weight_scales.add(i) = nan + if has_codes { largest / LARGEST_WEIGHT } else { 0.0 };
                for half in 0..2 {
                    let integers = simd.round_to_ints(simd.mul(weights[half], inverse));
                    let digits = [simd.int_bits(integers, WEIGHT_BITS, 0x7f), simd.int_bits(integers, 0, 0x7f)];
                    for digit in 0..2 {
                        let mut lanes = [0; LANES];
                        simd.store_ints(lanes.as_mut_ptr(), digits[digit]);
                        let to = scratch.weights.add((2 * i + digit) * TILE + half * LANES);
                        to.cast::<[u8; LANES]>().write_unaligned(lanes.map(|lane| lane as u8));
                    }
                }
            }
        }
    }

    /// `acc = acc * factor + weights · V`. The V of `ahead` is prefetched.
    #[inline(always)]
    pub(super) unsafe fn accumulate_bytes<S: Simd>(
        &self,
        simd: S,
        codes: &TileCodes,
        ahead: &TileCodes,
        tile: usize,
        state: SoftmaxState,
    ) {
        let n = self.num_queries();
        let sees = |i: usize| {
            let (from, to) = self.visible_in_tile(i, tile);
            from < to
        };
        let mut i = 0;
        while i < n {
            if !sees(i) {
                i += 1;
                continue;
            }
            unsafe {
                if S::QUERIES == 4 && i + 1 < n && sees(i + 1) {
                    self.accumulate_bytes_of::<S, 2>(simd, codes, ahead, i, state);
                    i += 2;
                } else {
                    self.accumulate_bytes_of::<S, 1>(simd, codes, ahead, i, state);
                    i += 1;
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn accumulate_bytes_of<S: Simd, const R: usize>(
        &self,
        simd: S,
        codes: &TileCodes,
        ahead: &TileCodes,
        first: usize,
        state: SoftmaxState,
    ) {
        let dim = self.call.padded_dim();
        let mut d = 0;
        unsafe {
            while d < dim {
                if S::QUERIES == 4 && d + 4 * LANES <= dim {
                    self.accumulate_byte_block::<S, R, 4>(simd, codes, ahead, first, d, state);
                    d += 4 * LANES;
                } else {
                    self.accumulate_byte_block::<S, R, 1>(simd, codes, ahead, first, d, state);
                    d += LANES;
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn accumulate_byte_block<S: Simd, const R: usize, const C: usize>(
        &self,
        simd: S,
        codes: &TileCodes,
        ahead: &TileCodes,
        first: usize,
        d: usize,
        state: SoftmaxState,
    ) {
        let (scratch, head_dim, dim) = (self.scratch.codes, self.call.shape.head_dim, self.call.padded_dim());
        // Of each query and each vector of dimensions, the sums of both digits. Weights of hidden positions are 0.
        let mut sums = [[[simd.splat_int(0); 2]; C]; R];
        unsafe {
            let weights = scratch.weights.add(2 * first * TILE).cast::<u32>();
            for quad in 0..TILE / 4 {
                let in_group = quad % (LANES / 4) * 4 * head_dim + 4 * d;
                let group = quad / (LANES / 4);
                let at = codes[group].values.add(in_group);
                let mut v = [simd.load_bytes(at); C];
                for c in 1..C {
                    v[c] = simd.load_bytes(at.add(c * 4 * LANES));
                }
                if first == 0 {
                    for c in 0..C {
                        simd.prefetch(ahead[group].values.wrapping_add(in_group + c * 4 * LANES));
                    }
                }
                for r in 0..R {
                    for digit in 0..2 {
                        let weight = *weights.add((2 * r + digit) * (TILE / 4) + quad);
                        for c in 0..C {
                            sums[r][c][digit] = simd.dot_codes(sums[r][c][digit], v[c], weight);
                        }
                    }
                }
            }
            for r in 0..R {
                let factor = simd.splat(*self.scratch.factors.add(first + r));
                let scale = simd.splat(*scratch.weight_scales.add(first + r));
                for c in 0..C {
                    let [high, low] = sums[r][c];
                    let sum = simd.fused(simd.to_floats(high), simd.splat(WEIGHT_BASE), simd.to_floats(low));
                    let at = state.acc.add((first + r) * dim + d + c * LANES);
                    simd.store(at, simd.mul_add(sum, scale, simd.mul(simd.load(at), factor)));
                }
            }
        }
    }
}
