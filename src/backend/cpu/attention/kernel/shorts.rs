//! Attention over integer codes with products of integers of 16 bits. (With AVX-512 it is `tiles::codes`.)
//!
//! The codes of a tile are widened to 16 bits once for all queries. A query is a scale times integers of 16 bits. The
//! weights of a query in a tile, relative to the largest of them and times V's scales, are a scale times integers of 15
//! bits without a sign. The scale belongs to the largest possible weight, 1, times the largest scale of V at the
//! positions that the query sees. Sums of products with codes are exact, so their order does not matter: a product has
//! 22 bits, and 256 dimensions or 32 positions of them fit into 32 bits.

// Indices name registers here, as in `super`.
#![allow(clippy::needless_range_loop)]

use super::super::super::kv_codes::{TO_INTEGER, largest_magnitude};
use super::super::super::memory::MAX_HEAD_DIM;
use super::super::super::rotation::rotate;
use super::super::super::simd::{LANES, Simd};
use super::super::code_groups::{self, LARGEST_QUERY, SMALLEST};
use super::super::unit::TILE;
use super::codes::TileCodes;
use super::elements::{Int4Code, Int8Code, IntegerCode, ShortCodes};
use super::{SoftmaxState, UnitKernel};

const LARGEST_WEIGHT: f32 = 32767.0;

/// `x` rounded to nearest even.
#[inline(always)]
fn integer(x: f32) -> i32 {
    (x + TO_INTEGER).to_bits() as i32 - TO_INTEGER.to_bits() as i32
}

/// The scale of a query's integer weights in a tile.
#[derive(Clone, Copy)]
struct ShortWeightScale {
    scale: f32,
    inverse: f32,
}

impl ShortWeightScale {
    /// `scales` are those of V at the positions that the query sees, and zeros.
    #[inline(always)]
    fn new<S: Simd>(simd: S, scales: [S::V; 2]) -> Self {
        let largest = simd.max_lane(simd.max(scales[0], scales[1]));
        let has_codes = largest >= SMALLEST;
        // NaN if the V of a position is not finite.
        let nan = simd.sum(simd.mul(simd.add(scales[0], scales[1]), simd.splat(0.0)));
        Self {
            scale: nan + if has_codes { largest / LARGEST_WEIGHT } else { 0.0 },
            inverse: if has_codes { LARGEST_WEIGHT / largest } else { 0.0 },
        }
    }
}

// SAFETY (all blocks in this impl): as in `super`. What the scratch memory has is said in `CodesScratch`.
impl UnitKernel<'_> {
    /// Adds positions `from..to` of a tile to the state. The queries were encoded.
    #[inline(always)]
    pub(super) unsafe fn short_tile<S: Simd>(
        &self,
        simd: S,
        code_type: ShortCodes,
        tile: usize,
        (from, to): (usize, usize),
        state: SoftmaxState,
    ) {
        unsafe {
            let codes = self.find(tile, from, to);
            let ahead = self.find_ahead(tile, to, codes);
            match code_type {
                ShortCodes::Int8 => self.widen_to_shorts::<S, Int8Code>(simd, &codes, &ahead),
                ShortCodes::Int4 => self.widen_to_shorts::<S, Int4Code>(simd, &codes, &ahead),
            }
            self.short_scores(simd, &codes);
            self.short_softmax(simd, code_type.offset(), &codes, tile, state);
            self.accumulate_shorts(simd, tile, state);
        }
    }

    /// Turns the queries into integers.
    #[inline(always)]
    pub(super) unsafe fn encode_queries(&self, codes: ShortCodes) {
        let (scratch, dim) = (self.scratch.codes, self.call.shape.head_dim);
        let mut rotated = [0.0; MAX_HEAD_DIM];
        for i in 0..self.num_queries() {
            unsafe {
                let mut query = std::slice::from_raw_parts(self.query(i), dim);
                if self.call.is_rotated() {
                    rotated[..dim].copy_from_slice(query);
                    rotate(&mut rotated[..dim]);
                    query = &rotated[..dim];
                }
                let integers = std::slice::from_raw_parts_mut(scratch.queries.cast::<i16>().add(i * dim), dim);
                let largest = f32::from_bits(largest_magnitude(query));
                let has_codes = largest.is_finite() && largest >= SMALLEST;
                let inverse = if has_codes { LARGEST_QUERY / largest } else { 0.0 };
                let mut sum = 0;
                for d in 0..dim {
                    // Of an element that is not finite, any integer will do.
                    integers[d] = integer(query[d] * inverse) as i16;
                    sum += i32::from(integers[d]);
                }
                *scratch.query_starts.add(i) = -codes.offset() * sum;
                *scratch.query_scales.add(i) = match has_codes {
                    true => largest / LARGEST_QUERY,
                    false if largest.is_finite() => 0.0,
                    false => f32::NAN,
                };
            }
        }
    }

    /// Reads the codes of a tile as integers of 16 bits, plus their offset, and prefetches those of `ahead`.
    #[inline(always)]
    unsafe fn widen_to_shorts<S: Simd, C: IntegerCode>(&self, simd: S, codes: &TileCodes, ahead: &TileCodes) {
        let (len, dim) = (code_groups::code_bytes(self.call), self.call.padded_dim());
        let (keys, values) = (self.scratch.keys.cast::<i32>(), self.scratch.values.cast::<i32>());
        unsafe {
            for (half, (group, ahead)) in codes.iter().zip(ahead).enumerate() {
                for word in 0..len / 4 {
                    let at = word * 4 * LANES;
                    simd.prefetch(ahead.keys.wrapping_add(at));
                    let bytes = simd.load_ints(group.keys.add(at));
                    for part in 0..C::PER_BYTE {
                        let pairs = simd.widen_bytes(C::part(simd, bytes, part));
                        for i in 0..2 {
                            let pair = 2 * (word * C::PER_BYTE + part) + i;
                            simd.store_ints(keys.add(pair * TILE + half * LANES), pairs[i]);
                        }
                    }
                }
                for quad in 0..LANES / 4 {
                    let rows = values.add((half * LANES / 2 + 2 * quad) * dim);
                    for first in (0..len).step_by(LANES) {
                        let at = 4 * (quad * len + first);
                        simd.prefetch(ahead.values.wrapping_add(at));
                        let bytes = simd.load_ints(group.values.add(at));
                        for part in 0..C::PER_BYTE {
                            let pairs = simd.widen_bytes(C::part(simd, bytes, part));
                            let num = if C::PER_BYTE == 1 { LANES } else { LANES.min(len - first) };
                            for i in 0..2 {
                                let to = rows.add(i * dim + part * len + first);
                                if num == LANES {
                                    simd.store_ints(to, pairs[i]);
                                } else {
                                    // What is behind the bytes of a V is another V.
                                    let mut lanes = [0; LANES];
                                    simd.store_ints(lanes.as_mut_ptr(), pairs[i]);
                                    to.copy_from_nonoverlapping(lanes.as_ptr(), num);
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    /// `weights[query][position] = q · k`
    #[inline(always)]
    unsafe fn short_scores<S: Simd>(&self, simd: S, codes: &TileCodes) {
        let n = self.num_queries();
        let mut i = 0;
        unsafe {
            let key_scales = [simd.load_bf16(codes[0].key_scales), simd.load_bf16(codes[1].key_scales)];
            while i < n {
                if const { S::QUERIES == 4 } && i + 4 <= n {
                    self.short_scores_of::<S, 4>(simd, key_scales, i);
                    i += 4;
                } else if i + 2 <= n {
                    self.short_scores_of::<S, 2>(simd, key_scales, i);
                    i += 2;
                } else {
                    self.short_scores_of::<S, 1>(simd, key_scales, i);
                    i += 1;
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn short_scores_of<S: Simd, const R: usize>(&self, simd: S, key_scales: [S::V; 2], first: usize) {
        let (scratch, dim) = (self.scratch.codes, self.call.shape.head_dim);
        let mut sums = [[simd.splat_int(0); 2]; R];
        unsafe {
            for r in 0..R {
                sums[r] = [simd.splat_int(*scratch.query_starts.add(first + r)); 2];
            }
            let queries = scratch.queries.add(first * dim / 2);
            for pair in 0..dim / 2 {
                let keys = self.scratch.keys.add(pair * TILE).cast::<u8>();
                let k = [simd.load_ints(keys), simd.load_ints(keys.add(4 * LANES))];
                for r in 0..R {
                    let q = *queries.add(r * dim / 2 + pair);
                    for half in 0..2 {
                        sums[r][half] = simd.dot_shorts(sums[r][half], k[half], q);
                    }
                }
            }
            for r in 0..R {
                let query_scale = simd.splat(*scratch.query_scales.add(first + r));
                for half in 0..2 {
                    let to = self.scratch.weights.add((first + r) * TILE + half * LANES);
                    let scales = simd.mul(key_scales[half], query_scale);
                    simd.store(to, simd.mul(simd.to_floats(sums[r][half]), scales));
                }
            }
        }
    }

    /// Turns scores into integer weights, and updates the maximum and the sum.
    #[inline(always)]
    unsafe fn short_softmax<S: Simd>(&self, simd: S, offset: i32, codes: &TileCodes, tile: usize, state: SoftmaxState) {
        let (scratch, n) = (self.scratch.codes, self.num_queries());
        for i in 0..n {
            unsafe { *scratch.tile_max.add(i) = self.limit_scores(simd, i, tile) };
        }
        for first in (0..n).step_by(LANES) {
            let num = LANES.min(n - first);
            unsafe {
                let (old, of_tile) =
                    (simd.load_first(state.max.add(first), num), simd.load(scratch.tile_max.add(first)));
                let max = simd.max(old, of_tile);
                simd.store_first(state.max.add(first), max, num);
                // Of queries that see nothing of the tile these are not used.
                simd.store(self.scratch.factors.add(first), simd.exp(simd.sub(old, max)));
                simd.store(scratch.weight_scales.add(first), simd.exp(simd.sub(of_tile, max)));
            }
        }
        unsafe {
            let scales = [simd.load_bf16(codes[0].value_scales), simd.load_bf16(codes[1].value_scales)];
            let mut of_all = None;
            for i in 0..n {
                let (from, to) = self.visible_in_tile(i, tile);
                if from >= to {
                    continue;
                }
                let mut seen = scales;
                // Not a closure: a closure would be compiled without the instruction set.
                let of_query = match of_all {
                    _ if to - from < TILE => {
                        seen = self.hide(simd, scales, (from, to), simd.splat(0.0));
                        ShortWeightScale::new(simd, seen)
                    }
                    Some(of_all) => of_all,
                    None => ShortWeightScale::new(simd, scales),
                };
                if to - from == TILE {
                    of_all = Some(of_query);
                }
                let at = self.scratch.weights.add(i * TILE);
                let max = simd.splat(*scratch.tile_max.add(i));
                // Hidden positions have the score -∞ and the weight 0.
                let weights =
                    [simd.exp(simd.sub(simd.load(at), max)), simd.exp(simd.sub(simd.load(at.add(LANES)), max))];
                let inverse = simd.splat(of_query.inverse);
                let mut integers = [simd.splat(0.0); 2];
                for half in 0..2 {
                    let scale = simd.mul(seen[half], inverse);
                    // Rounding may make a weight too large, where its V is not finite.
                    let weight = simd.min(simd.mul(weights[half], scale), simd.splat(LARGEST_WEIGHT));
                    let mut lanes = [0; LANES];
                    let rounded = simd.round_to_ints(weight);
                    integers[half] = simd.to_floats(rounded);
                    simd.store_ints(lanes.as_mut_ptr(), rounded);
                    let to = scratch.weights.add((i * TILE + half * LANES) / 2);
                    to.cast::<[i16; LANES]>().write_unaligned(lanes.map(|lane| lane as i16));
                }
                if offset != 0 {
                    // Below 2^24, so it is exact.
                    let sum = simd.sum(simd.add(integers[0], integers[1])) as i32;
                    *scratch.weight_starts.add(i) = -offset * sum;
                }
                let (factor, tile_factor) = (*self.scratch.factors.add(i), *scratch.weight_scales.add(i));
                let sum = simd.sum(simd.add(weights[0], weights[1]));
                *state.sum.add(i) = *state.sum.add(i) * factor + sum * tile_factor;
                *scratch.weight_scales.add(i) = tile_factor * of_query.scale;
            }
        }
    }

    /// Scales and caps the scores of query `i`, hides those of positions that it does not see, and returns the largest.
    #[inline(always)]
    unsafe fn limit_scores<S: Simd>(&self, simd: S, i: usize, tile: usize) -> f32 {
        let (from, to) = self.visible_in_tile(i, tile);
        if from >= to {
            return f32::NEG_INFINITY;
        }
        unsafe {
            let at = self.scratch.weights.add(i * TILE);
            let mut scores = [simd.load(at), simd.load(at.add(LANES))];
            for half in 0..2 {
                scores[half] = simd.mul(scores[half], simd.splat(self.call.shape.scale));
                if let Some(softcap) = self.call.shape.softcap {
                    let capped = simd.tanh(simd.mul(scores[half], simd.splat(1.0 / softcap)));
                    scores[half] = simd.mul(capped, simd.splat(softcap));
                }
            }
            if to - from < TILE {
                scores = self.hide(simd, scores, (from, to), simd.splat(f32::NEG_INFINITY));
            }
            simd.store(at, scores[0]);
            simd.store(at.add(LANES), scores[1]);
            simd.max_lane(simd.max(scores[0], scores[1]))
        }
    }

    /// Replaces what a tile has outside of positions `from..to`.
    #[inline(always)]
    fn hide<S: Simd>(&self, simd: S, tile: [S::V; 2], (from, to): (usize, usize), other: S::V) -> [S::V; 2] {
        let mut seen = tile;
        for half in 0..2 {
            let (start, end) = (half * LANES, (half + 1) * LANES);
            let (from, to) = (from.clamp(start, end) - start, to.clamp(start, end) - start);
            seen[half] = simd.in_range_or(tile[half], from, to, other);
        }
        seen
    }

    /// `acc = acc * factor + weights · V`
    #[inline(always)]
    unsafe fn accumulate_shorts<S: Simd>(&self, simd: S, tile: usize, state: SoftmaxState) {
        let n = self.num_queries();
        let mut i = 0;
        while i < n {
            let (from, to) = self.visible_in_tile(i, tile);
            let (next_from, next_to) = if i + 1 < n { self.visible_in_tile(i + 1, tile) } else { (0, 0) };
            unsafe {
                if from >= to {
                    i += 1;
                } else if next_from < next_to {
                    self.accumulate_shorts_of::<S, 2>(simd, i, state);
                    i += 2;
                } else {
                    self.accumulate_shorts_of::<S, 1>(simd, i, state);
                    i += 1;
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn accumulate_shorts_of<S: Simd, const R: usize>(&self, simd: S, first: usize, state: SoftmaxState) {
        let dim = self.call.padded_dim();
        let mut d = 0;
        unsafe {
            while d < dim {
                if d + 2 * LANES <= dim {
                    self.accumulate_short_block::<S, R, 2>(simd, first, d, state);
                    d += 2 * LANES;
                } else {
                    self.accumulate_short_block::<S, R, 1>(simd, first, d, state);
                    d += LANES;
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn accumulate_short_block<S: Simd, const R: usize, const C: usize>(
        &self,
        simd: S,
        first: usize,
        d: usize,
        state: SoftmaxState,
    ) {
        let (scratch, dim) = (self.scratch.codes, self.call.padded_dim());
        let mut sums = [[simd.splat_int(0); C]; R];
        unsafe {
            for r in 0..R {
                sums[r] = [simd.splat_int(*scratch.weight_starts.add(first + r)); C];
            }
            let weights = scratch.weights.add(first * TILE / 2);
            for pair in 0..TILE / 2 {
                let values = self.scratch.values.add(pair * dim + d).cast::<u8>();
                let mut v = [simd.splat_int(0); C];
                for c in 0..C {
                    v[c] = simd.load_ints(values.add(c * 4 * LANES));
                }
                for r in 0..R {
                    let weight = *weights.add(r * TILE / 2 + pair);
                    for c in 0..C {
                        sums[r][c] = simd.dot_shorts(sums[r][c], v[c], weight);
                    }
                }
            }
            for r in 0..R {
                let factor = simd.splat(*self.scratch.factors.add(first + r));
                let scale = simd.splat(*scratch.weight_scales.add(first + r));
                for c in 0..C {
                    let at = state.acc.add((first + r) * dim + d + c * LANES);
                    let sum = simd.to_floats(sums[r][c]);
                    simd.store(at, simd.mul_add(sum, scale, simd.mul(simd.load(at), factor)));
                }
            }
        }
    }
}
