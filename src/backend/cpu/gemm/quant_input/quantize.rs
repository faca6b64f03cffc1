//! Quantises rows to bytes: sixteen vectors of sixteen elements at once, transposed, so that no lane is alone.

use super::super::super::simd::{LANES, Simd, SimdKernel};
use super::super::float_rows::FloatRows;
use super::layout::{QuantRow, SEGMENT, SEGMENT_BYTES, SUMS_16_TIMES, TileLayout};
use crate::quant::MAX_BLOCK_WEIGHTS;
use std::ops::Range;

/// The largest magnitude of a code.
const LARGEST: f32 = 127.0;
/// The most that 16 codes of a large block add up to, without their signs. So the sum of their products with codes of
/// weights from -32 to 32 fits into 16 bits, and that of 32 products with codes from 0 to 15 too.
const LARGEST_SUM: f32 = 1023.0;
/// Blocks whose elements are all smaller count as 0: the inverse of their scale would not be a float32.
const SMALLEST: f32 = 1e-30;
/// Elements of a row that are quantised at once: whole blocks.
pub(super) const STRETCH: usize = MAX_BLOCK_WEIGHTS;
/// Vectors of a stretch.
const VECTORS: usize = STRETCH / LANES;

/// Quantises a stretch of all rows of a tile.
pub(super) struct QuantizeStretch<'a> {
    pub x: FloatRows<'a>,
    pub rows: Range<usize>,
    /// Counted from the start of the rows.
    pub stretch: usize,
    pub layout: TileLayout,
    /// Where the first of the rows goes. Nothing else uses the stretch.
    pub out: QuantRow,
}

impl SimdKernel for QuantizeStretch<'_> {
    type Output = ();
    const HAS_INTEGER_PRODUCTS: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // SAFETY: the stretch is ours, and the rows have it.
        unsafe {
            if self.layout.height == LANES {
                self.side_by_side(simd);
                if self.layout.has_codes_by_row {
                    self.copy_by_row(simd);
                }
            } else {
                for row in 0..self.layout.height {
                    self.alone(simd, row);
                }
            }
        }
    }
}

impl QuantizeStretch<'_> {
    /// A row of the tile. It is empty behind the last row of the input, so that zeros are stored.
    #[inline(always)]
    fn row(&self, in_tile: usize) -> &[f32] {
        let row = self.rows.start + in_tile;
        if row < self.rows.end { self.x.row(row) } else { &[] }
    }

    /// Each lane is a row.
    ///
    /// # Safety
    /// The stretch is ours.
    #[inline(always)]
    unsafe fn side_by_side<S: Simd>(&self, simd: S) {
        let (out, block, zero) = (self.out, self.layout.block(), simd.splat(0.0));
        let (per_block, per_stretch) = (block / LANES, STRETCH / block);
        let mut columns = [[zero; LANES]; VECTORS];
        for index in self.stretch * per_stretch..(self.stretch + 1) * per_stretch {
            let mut range = LaneRange { largest: zero, not_finite: zero };
            for (group, columns) in columns[..per_block].iter_mut().enumerate() {
                for (lane, column) in columns.iter_mut().enumerate() {
                    *column = load(simd, self.row(lane), index * block + group * LANES);
                }
                simd.transpose(columns);
                range.add(simd, columns, self.layout.is_small);
            }
            let factors = range.factors(simd);
            // SAFETY: the caller's promise. Each place of the tile has sixteen lanes.
            unsafe {
                let out = out.block(self.layout.is_small, index);
                simd.store(out.scale().cast_mut(), factors.scale);
                // The last four, so that neighbours can be added.
                let mut minus_sums = [simd.splat_int(0); 4];
                for (place, columns) in columns[..per_block].iter().enumerate() {
                    let codes = quantize(simd, columns, factors.inverse);
                    for (step, words) in codes.words.into_iter().enumerate() {
                        simd.store_ints(out.codes(4 * place + step).cast_mut().cast(), words);
                    }
                    if !self.layout.is_small {
                        let times = codes.times_minus_sums(simd);
                        simd.store_ints(out.minus_sum_16(place).cast_mut(), times);
                    }
                    minus_sums[place % 4] = codes.minus_sum(simd);
                    if place % 2 == 0 {
                        continue;
                    }
                    let [even, odd] = [minus_sums[place % 4 - 1], minus_sums[place % 4]];
                    let of_32 = simd.add_ints(even, odd);
                    simd.store_ints(out.minus_sum_32(place / 2).cast_mut(), of_32);
                    if self.layout.is_small {
                        continue;
                    }
                    simd.store_ints(out.sums_16(place / 2).cast_mut().cast(), pairs(simd, even, odd));
                    if place % 4 == 3 {
                        let first = simd.add_ints(minus_sums[0], minus_sums[1]);
                        let both = pairs(simd, first, of_32);
                        simd.store_ints(out.sums_32(place / 4).cast_mut().cast(), both);
                    }
                }
            }
        }
    }

    /// Copies the codes to their second place.
    ///
    /// # Safety
    /// The stretch is ours, and its codes are there.
    #[inline(always)]
    unsafe fn copy_by_row<S: Simd>(&self, simd: S) {
        const PER_STRETCH: usize = STRETCH / SEGMENT;
        for segment in self.stretch * PER_STRETCH..(self.stretch + 1) * PER_STRETCH {
            // SAFETY: the caller's promise. A segment is sixteen words of sixteen rows.
            unsafe {
                let mut words = [simd.splat(0.0); LANES];
                for (place, words) in words.iter_mut().enumerate() {
                    let word = segment * LANES + place;
                    let words_of_block = self.layout.block() / 4;
                    let block = self.out.block(self.layout.is_small, word / words_of_block);
                    *words = simd.load(block.codes(word % words_of_block).cast());
                }
                simd.transpose(&mut words);
                let to = self.out.by_row.cast_mut().add(segment * SEGMENT_BYTES);
                for (row, words) in words.into_iter().enumerate() {
                    simd.store(to.add(row * SEGMENT).cast(), words);
                }
            }
        }
    }

    /// Each lane is a sixteenth of the stretch of a row.
    ///
    /// # Safety
    /// The stretch is ours.
    #[inline(always)]
    unsafe fn alone<S: Simd>(&self, simd: S, row: usize) {
        let (x, stretch) = (self.row(row), self.stretch);
        let lanes_of_block = self.layout.block() / LANES;
        let mut columns = [simd.splat(0.0); LANES];
        for (lane, column) in columns.iter_mut().enumerate() {
            *column = load(simd, x, stretch * STRETCH + lane * LANES);
        }
        simd.transpose(&mut columns);
        let mut range = LaneRange { largest: simd.splat(0.0), not_finite: simd.splat(0.0) };
        range.add(simd, &columns, self.layout.is_small);
        let factors = range.of_blocks(simd, lanes_of_block).factors(simd);
        let codes = quantize(simd, &columns, factors.inverse);
        let (mut words, mut minus_sums) = ([[0_i32; LANES]; 4], [0_i32; LANES]);
        let mut times = minus_sums;
        // SAFETY: the arrays have sixteen places, and the row has these places.
        unsafe {
            for (array, words) in words.iter_mut().zip(codes.words) {
                simd.store_ints(array.as_mut_ptr(), words);
            }
            simd.store_ints(minus_sums.as_mut_ptr(), codes.minus_sum(simd));
            simd.store_ints(times.as_mut_ptr(), codes.times_minus_sums(simd));
            let scales = simd.to_array(factors.scale);
            let out = self.out.behind(row);
            for block in 0..LANES / lanes_of_block {
                let first = block * lanes_of_block;
                let out = out.block(self.layout.is_small, stretch * LANES / lanes_of_block + block);
                *out.scale().cast_mut() = scales[first];
                for place in 0..lanes_of_block {
                    for (step, words) in words.iter().enumerate() {
                        *out.codes(4 * place + step).cast_mut() = words[first + place] as u32;
                    }
                }
                let minus_sums = &minus_sums[first..first + lanes_of_block];
                for (group, [even, odd]) in minus_sums.as_chunks().0.iter().enumerate() {
                    *out.minus_sum_32(group).cast_mut() = even + odd;
                }
                if self.layout.is_small {
                    continue;
                }
                for (group, times) in times[first..first + lanes_of_block].iter().enumerate() {
                    *out.minus_sum_16(group).cast_mut() = *times;
                }
                for (i, [even, odd]) in minus_sums.as_chunks().0.iter().enumerate() {
                    *out.sums_16(i).cast_mut() = pair(-even, -odd);
                }
                for (i, [a, b, c, d]) in minus_sums.as_chunks().0.iter().enumerate() {
                    *out.sums_32(i).cast_mut() = pair(-(a + b), -(c + d));
                }
            }
        }
    }
}

/// Sixteen elements of a row; 0 past its end.
#[inline(always)]
fn load<S: Simd>(simd: S, x: &[f32], start: usize) -> S::V {
    let rest = &x[start.min(x.len())..];
    // SAFETY: no more than the rest is read.
    unsafe { simd.load_first(rest.as_ptr(), LANES.min(rest.len())) }
}

/// The range of the elements of each lane.
#[derive(Clone, Copy)]
struct LaneRange<S: Simd> {
    /// The largest magnitude. In a large block it is raised until no 16 codes add up to more than [`LARGEST_SUM`].
    largest: S::V,
    /// NaN if an element is infinite or NaN, else 0.
    not_finite: S::V,
}

/// What elements are divided by and multiplied with.
struct Factors<S: Simd> {
    scale: S::V,
    inverse: S::V,
}

impl<S: Simd> LaneRange<S> {
    #[inline(always)]
    fn add(&mut self, simd: S, columns: &[S::V; LANES], is_small: bool) {
        // Rounding adds at most a half to each code.
        const RAISE: f32 = LANES as f32 * LARGEST / (LARGEST_SUM - LANES as f32 / 2.0);
        let (zero, share) = (simd.splat(0.0), simd.splat(1.0 / LANES as f32));
        let mut mean = zero;
        for v in columns {
            let magnitude = simd.max(*v, simd.sub(zero, *v));
            self.largest = simd.max(magnitude, self.largest);
            self.not_finite = simd.add(self.not_finite, simd.mul(*v, zero));
            mean = simd.fused(magnitude, share, mean);
        }
        if !is_small {
            self.largest = simd.max(simd.mul(mean, simd.splat(RAISE)), self.largest);
        }
    }

    /// The same for blocks of some neighbouring lanes.
    #[inline(always)]
    fn of_blocks(self, simd: S, lanes: usize) -> Self {
        if lanes == LANES {
            let largest = simd.splat(simd.max_lane(self.largest));
            return Self { largest, not_finite: simd.splat(simd.sum(self.not_finite)) };
        }
        let (mut largest, mut not_finite) = (simd.to_array(self.largest), simd.to_array(self.not_finite));
        for (largest, not_finite) in largest.chunks_exact_mut(lanes).zip(not_finite.chunks_exact_mut(lanes)) {
            let (mut most, mut sum) = (0.0, 0.0);
            for lane in 0..lanes {
                most = if largest[lane] > most { largest[lane] } else { most };
                sum += not_finite[lane];
            }
            largest.fill(most);
            not_finite.fill(sum);
        }
        // SAFETY: the arrays have sixteen places.
        unsafe { Self { largest: simd.load(largest.as_ptr()), not_finite: simd.load(not_finite.as_ptr()) } }
    }

    #[inline(always)]
    fn factors(self, simd: S) -> Factors<S> {
        let (most, least) = (simd.splat(LARGEST), simd.splat(SMALLEST));
        let scale = simd.zero_unless_ge(simd.div(self.largest, most), self.largest, least);
        let inverse = simd.zero_unless_ge(simd.div(most, self.largest), self.largest, least);
        // NaN if an element is infinite or NaN, so that the results are.
        Factors { scale: simd.add(scale, self.not_finite), inverse }
    }
}

/// Sixteen codes of each lane.
struct LaneCodes<S: Simd> {
    /// Four codes in each word.
    words: [S::Ints; 4],
    /// Minus the sum of the first two of each four, and of the last two.
    minus_sums: [S::Ints; 2],
}

impl<S: Simd> LaneCodes<S> {
    /// Minus the sum of all.
    #[inline(always)]
    fn minus_sum(&self, simd: S) -> S::Ints {
        simd.add_ints(self.minus_sums[0], self.minus_sums[1])
    }

    /// The same [`SUMS_16_TIMES`], or with [`Simd::SUMS_IN_SHORTS`] both parts in the halves of each lane.
    #[inline(always)]
    fn times_minus_sums(&self, simd: S) -> S::Ints {
        let (zero, shift) = (simd.splat_int(0), SUMS_16_TIMES.trailing_zeros());
        if S::SUMS_IN_SHORTS {
            let [first, last] = self.minus_sums;
            simd.pack_shorts(simd.or_shifted(zero, first, shift), simd.or_shifted(zero, last, shift))
        } else {
            simd.or_shifted(zero, self.minus_sum(simd), shift)
        }
    }
}

/// Quantises sixteen columns. Of an element that is not finite, any code will do.
#[inline(always)]
fn quantize<S: Simd>(simd: S, columns: &[S::V; LANES], inverse: S::V) -> LaneCodes<S> {
    let (mut words, mut minus_sums) = ([simd.splat_int(0); 4], [simd.splat_int(0); 2]);
    for (word, columns) in words.iter_mut().zip(columns.as_chunks::<4>().0) {
        for (byte, v) in columns.iter().enumerate() {
            let codes = simd.round_to_ints(simd.mul(*v, inverse));
            *word = simd.or_shifted(*word, simd.int_bits(codes, 0, 0xff), 8 * byte as u32);
            minus_sums[byte / 2] = simd.dot_shorts(minus_sums[byte / 2], codes, MINUS_ONE);
        }
    }
    LaneCodes { words, minus_sums }
}

/// A factor of [`Simd::dot_shorts`] for the lower halves of lanes.
const MINUS_ONE: u32 = 0xffff;

/// `-low` and `-high` in the halves of each lane. Both fit into 16 bits.
#[inline(always)]
fn pairs<S: Simd>(simd: S, low: S::Ints, high: S::Ints) -> S::Ints {
    let zero = simd.splat_int(0);
    let [low, high] = [simd.dot_shorts(zero, low, MINUS_ONE), simd.dot_shorts(zero, high, MINUS_ONE)];
    simd.or_shifted(simd.int_bits(low, 0, 0xffff), high, 16)
}

/// Two sums of up to 32 codes in the halves of a word.
#[inline(always)]
fn pair(low: i32, high: i32) -> u32 {
    u32::from(low as u16) | u32::from(high as u16) << 16
}
