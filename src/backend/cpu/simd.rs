//! Sixteen float32 lanes on every instruction set: kernels are written once over [`Simd`].
//!
//! A value of a [`Simd`] type is the proof that the processor has its instructions, because only the entry points
//! `run_*` make one. So its methods on values are safe. Loads and stores take raw pointers and are unsafe.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::{run_avx_vnni, run_avx2};
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::{run_avx512, run_avx512_base, run_avx512_vnni, transpose};
#[cfg(target_arch = "aarch64")]
pub(super) use neon::{run_neon, run_neon_dotprod, run_neon_i8mm};
pub(super) use portable::Portable;

/// Lanes of a vector, on every instruction set.
pub(super) const LANES: usize = 16;
/// How far ahead weights are prefetched, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PrefetchDistances {
    /// To the first level of caches.
    pub near: usize,
    /// To the second level.
    pub far: usize,
}

impl PrefetchDistances {
    /// The first level of caches waits for few lines at once, too few for the memory's bandwidth. So lines come to the
    /// second level early, and from there to the first one shortly before they are used.
    pub const TWO_LEVELS: Self = Self { near: 2048, far: 8192 };
    /// To one level only. The other prefetch is of a line that is being read, which costs little.
    pub const FIRST_LEVEL: Self = Self { near: 4096, far: 0 };
    pub const SECOND_LEVEL: Self = Self { near: 0, far: 8192 };
}

pub(super) trait Simd: Copy {
    /// Sixteen float32.
    type V: Copy;
    /// Sixteen pairs of bfloat16, ready for [`Simd::dot_pairs`].
    type Pairs: Copy;
    /// Sixteen integers of 32 bits.
    type Ints: Copy;
    /// Four bytes in each of sixteen lanes.
    type Bytes: Copy;

    /// Runs a kernel as a function of its own. A large function takes more than its share of the compile time.
    fn call<K: SimdKernel>(self, kernel: K) -> K::Output;

    /// Rows and panels of the register tile of a matrix product with many rows.
    const TILE_ROWS: usize;
    const TILE_PANELS: usize;
    /// The rows and weights of a matrix product with many rows become float32 first if a word has at least so many
    /// numbers.
    const WIDENED_NUMBERS: usize = usize::MAX;
    /// Rows and panels of a register tile of such a product: as many sums as the registers hold beside the columns of
    /// the panels and a number of a row.
    const WIDENED_ROWS: usize = 6;
    const WIDENED_PANELS: usize = 1;
    /// Queries of an attention unit that are computed at once, and vectors of a head at once.
    const QUERIES: usize;
    /// Panels that are computed at once if there is a single row.
    const ROW_PANELS: usize;
    /// The most rows of a register tile of a product with quantised weights.
    const QUANT_ROWS: usize;
    /// Panels that are computed at once in it if there are many rows. Then it has half as many rows for each.
    const QUANT_PANELS: usize = 1;
    /// Whether products of bytes can be added up in integers of 16 bits. Then [`Simd::dot_four`] needs fewer
    /// instructions than four times [`Simd::dot_bytes`], and there is [`Simd::dot_in_shorts`].
    const SUMS_IN_SHORTS: bool = false;
    /// Whether an instruction multiplies the bytes of two rows with those of two columns. Then products with quantised
    /// weights of four rows and more use [`Simd::dot_two_rows`], and two rows are a *pair* of registers: each quarter
    /// of a register has two columns of the first row, and the same columns of the second row.
    const PAIRS_ROWS: bool = false;
    /// Whether [`Simd::dot_signed`] takes weights that are 128 larger than they should be.
    const ADDS_128: bool;
    /// Whether attention over integer codes is faster with [`Simd::dot_shorts`] than with products of float32.
    const SHORT_DOTS: bool;

    fn splat(self, x: f32) -> Self::V;
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, fused if the instruction set can.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The bits of each lane moved left by 23, the place of the exponent.
    fn shift_to_exponent(self, a: Self::V) -> Self::V;
    /// `value` in lanes where `x >= threshold`, else 0.
    fn zero_unless_ge(self, value: Self::V, x: Self::V, threshold: Self::V) -> Self::V;
    /// `value` in lanes `from..to`, else `other`.
    fn in_range_or(self, value: Self::V, from: usize, to: usize, other: Self::V) -> Self::V;
    /// `acc + w.0 * x.0 + w.1 * x.1` for each of the sixteen pairs `w` and the one pair `x` (low half first).
    fn dot_pairs(self, acc: Self::V, w: Self::Pairs, x: u32) -> Self::V;
    /// Each lane rounded to a float16, to nearest even.
    fn round_to_f16(self, a: Self::V) -> Self::V;
    /// Rows become columns.
    fn transpose(self, rows: &mut [Self::V; LANES]);

    /// # Safety
    /// Sixteen float32 can be read at `from`, at any alignment.
    unsafe fn load(self, from: *const f32) -> Self::V;
    /// # Safety
    /// Sixteen float32 can be written at `to`, at any alignment.
    unsafe fn store(self, to: *mut f32, v: Self::V);
    /// # Safety
    /// Sixteen bfloat16 can be read at `from`, at any alignment.
    unsafe fn load_bf16(self, from: *const u16) -> Self::V;
    /// # Safety
    /// Sixteen float16 can be read at `from`, at any alignment.
    unsafe fn load_f16(self, from: *const u16) -> Self::V;
    /// # Safety
    /// Sixteen pairs of bfloat16 can be read at `from`, at any alignment.
    unsafe fn load_pairs(self, from: *const u32) -> Self::Pairs;
    /// Prefetches the cache line at `address`, which may be any address.
    fn prefetch(self, address: *const u8);
    /// As [`Simd::prefetch`], but to the second level of caches if the instruction set can tell: the first one may wait
    /// for fewer lines at once.
    #[inline(always)]
    fn prefetch_far(self, address: *const u8) {
        self.prefetch(address);
    }
    /// Prefetches for a loop that reads weights from memory in order and has come to `address`.
    #[inline(always)]
    fn prefetch_weights(self, address: *const u8, PrefetchDistances { near, far }: PrefetchDistances) {
        self.prefetch(address.wrapping_add(near));
        self.prefetch_far(address.wrapping_add(far));
    }

    /// `a * b + c`, rounded once. On every instruction set the result has the same bits.
    #[inline(always)]
    fn fused(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        self.mul_add(a, b, c)
    }
    fn splat_int(self, x: i32) -> Self::Ints;
    /// `acc + a.0 * b.0 + a.1 * b.1` for the two halves of each lane of `a` and `b`, each an integer of 16 bits.
    fn dot_short_pairs(self, acc: Self::Ints, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    /// [`Simd::dot_short_pairs`] with the same two numbers for all lanes.
    #[inline(always)]
    fn dot_shorts(self, acc: Self::Ints, w: Self::Ints, x: u32) -> Self::Ints {
        self.dot_short_pairs(acc, w, self.splat_int(x as i32))
    }
    /// Integers of 16 bits as the halves of lanes. The upper halves of `low` are ignored.
    #[inline(always)]
    fn pack_shorts(self, low: Self::Ints, high: Self::Ints) -> Self::Ints {
        self.or_shifted(self.int_bits(low, 0, 0xffff), high, 16)
    }
    /// Prepares integers of 16 bits for [`Simd::add_scaled`], which takes those without a sign as they are.
    #[inline(always)]
    fn prepare_scale(self, scale: Self::Ints) -> Self::Ints {
        self.int_bits(scale, 0, 0xffff)
    }
    /// `acc + a * scale` for integers `a` of 16 bits and prepared `scale`.
    #[inline(always)]
    fn add_scaled(self, acc: Self::Ints, a: Self::Ints, scale: Self::Ints) -> Self::Ints {
        self.dot_short_pairs(acc, a, scale)
    }
    fn add_ints(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    fn to_floats(self, a: Self::Ints) -> Self::V;
    /// The lanes as the bits of float32.
    fn as_floats(self, a: Self::Ints) -> Self::V;
    /// The bits of float32 as lanes.
    fn as_ints(self, a: Self::V) -> Self::Ints;
    /// To nearest even. Numbers that are too large become any integer.
    fn round_to_ints(self, a: Self::V) -> Self::Ints;
    /// `(a >> shift) & mask`, without a sign.
    fn int_bits(self, a: Self::Ints, shift: u32, mask: u32) -> Self::Ints;
    /// `(a << up) >> down`, with the sign of the lane.
    fn move_signed(self, a: Self::Ints, up: u32, down: u32) -> Self::Ints;
    /// `a | b << shift`
    fn or_shifted(self, a: Self::Ints, b: Self::Ints, shift: u32) -> Self::Ints;
    /// `(b >> shift) & mask` of each byte. `mask` has no bit that another byte could move into.
    fn byte_bits(self, b: Self::Bytes, shift: u32, mask: u8) -> Self::Bytes;
    /// `(b << shift) & mask` of each byte, likewise.
    fn byte_bits_up(self, b: Self::Bytes, shift: u32, mask: u8) -> Self::Bytes;
    /// `((b >> from) << to) & mask` of each byte, likewise, for a `from` that is not a constant.
    #[inline(always)]
    fn move_bits(self, b: Self::Bytes, from: u32, to: u32, mask: u8) -> Self::Bytes {
        self.byte_bits_up(self.byte_bits(b, from, mask >> to), to, mask)
    }
    fn or_bytes(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// A table for [`Simd::lookup`].
    fn table(self, values: &[i8; 16]) -> Self::Bytes;
    /// The values of a table at indices from 0 to 15.
    fn lookup(self, table: Self::Bytes, index: Self::Bytes) -> Self::Bytes;
    /// For each lane `acc + Σ w · x` over its four bytes: `w` from 0 to 127, the bytes of `x` from -127 to 127.
    fn dot_bytes(self, acc: Self::Ints, w: Self::Bytes, x: u32) -> Self::Ints;
    /// [`Simd::dot_bytes`] of four words after each other: `w` from 0 to `largest`, which is at most 63.
    #[inline(always)]
    fn dot_four(self, acc: Self::Ints, w: [Self::Bytes; 4], x: [u32; 4], _largest: u8) -> Self::Ints {
        let acc = self.dot_bytes(self.dot_bytes(acc, w[0], x[0]), w[1], x[1]);
        self.dot_bytes(self.dot_bytes(acc, w[2], x[2]), w[3], x[3])
    }
    /// For each half of a lane, an integer of 16 bits, `acc + Σ w · x` over its two bytes, modulo 2¹⁶: `w` from 0 to
    /// 127, the bytes of `x` from -127 to 127. This and the following two functions are for [`Simd::SUMS_IN_SHORTS`].
    fn dot_in_shorts(self, _acc: Self::Ints, _w: Self::Bytes, _x: u32) -> Self::Ints {
        unreachable!("only with SUMS_IN_SHORTS")
    }
    /// The same without `acc`.
    fn first_in_shorts(self, _w: Self::Bytes, _x: u32) -> Self::Ints {
        unreachable!("only with SUMS_IN_SHORTS")
    }
    /// Both halves of each lane, moved right by `shift` bits with their signs.
    fn shorts_down(self, _a: Self::Ints, _shift: u32) -> Self::Ints {
        unreachable!("only with SUMS_IN_SHORTS")
    }
    /// Prepares signed bytes for [`Simd::dot_signed`].
    fn prepare_signed(self, w: Self::Bytes) -> Self::Bytes;
    /// As [`Simd::dot_bytes`] for prepared bytes `w` from -128 to 127, or from 0 to 255 with [`Simd::ADDS_128`].
    fn dot_signed(self, acc: Self::Ints, w: Self::Bytes, x: u32) -> Self::Ints;
    /// The bytes of two steps as [`Simd::dot_two_rows`] takes them: each column has eight bytes side by side. This and
    /// the following four functions are for [`Simd::PAIRS_ROWS`].
    fn pair_steps(self, _steps: [Self::Bytes; 2]) -> [Self::Bytes; 2] {
        unreachable!("only with PAIRS_ROWS")
    }
    /// Adds to a pair of rows the products of two steps: `w` from -128 to 127 of [`Simd::pair_steps`], and `x` of each
    /// step with a word of the first row in its low half, and one of the second row in its high half.
    fn dot_two_rows(self, _acc: [Self::Ints; 2], _w: [Self::Bytes; 2], _x: [u64; 2]) -> [Self::Ints; 2] {
        unreachable!("only with PAIRS_ROWS")
    }
    /// A pair of which all columns of a row are the same bits. Both registers are the same.
    fn splat_two_rows(self, _x: [u32; 2]) -> Self::Ints {
        unreachable!("only with PAIRS_ROWS")
    }
    /// A pair from two rows.
    fn pair_rows(self, _rows: [Self::V; 2]) -> [Self::V; 2] {
        unreachable!("only with PAIRS_ROWS")
    }
    /// The two rows of a pair.
    fn rows_of_pair(self, _pair: [Self::V; 2]) -> [Self::V; 2] {
        unreachable!("only with PAIRS_ROWS")
    }
    /// The bytes of each lane, with a sign, as integers of 16 bits: the first two of each lane, and the last two.
    #[inline(always)]
    fn widen_bytes(self, four: Self::Ints) -> [Self::Ints; 2] {
        let [first, second] = [self.move_signed(four, 24, 24), self.move_signed(four, 16, 24)];
        let [third, fourth] = [self.move_signed(four, 8, 24), self.move_signed(four, 0, 24)];
        [self.pack_shorts(first, second), self.pack_shorts(third, fourth)]
    }

    /// # Safety
    /// Sixteen integers can be written at `to`, at any alignment.
    unsafe fn store_ints(self, to: *mut i32, a: Self::Ints);
    /// # Safety
    /// Sixteen integers can be read at `from`, at any alignment.
    unsafe fn load_ints(self, from: *const u8) -> Self::Ints;
    /// Sixteen bytes without a sign.
    ///
    /// # Safety
    /// They can be read at `from`.
    unsafe fn load_u8(self, from: *const u8) -> Self::Ints;
    /// Sixteen bytes with a sign.
    ///
    /// # Safety
    /// They can be read at `from`.
    unsafe fn load_i8(self, from: *const u8) -> Self::Ints;
    /// # Safety
    /// 64 bytes can be read at `from`, at any alignment.
    unsafe fn load_bytes(self, from: *const u8) -> Self::Bytes;
    /// # Safety
    /// 64 bytes can be written at `to`, at any alignment.
    unsafe fn store_bytes(self, to: *mut u8, a: Self::Bytes);

    #[inline(always)]
    fn to_array(self, v: Self::V) -> [f32; LANES] {
        let mut array = [0.0; LANES];
        // SAFETY: the array has sixteen places.
        unsafe { self.store(array.as_mut_ptr(), v) };
        array
    }

    /// Sum of the lanes. Halves are added to halves, in the same order on every instruction set.
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let mut array = self.to_array(v);
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                array[i] += array[i + half];
            }
        }
        array[0]
    }

    #[inline(always)]
    fn max_lane(self, v: Self::V) -> f32 {
        let mut array = self.to_array(v);
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                array[i] = if array[i] > array[i + half] { array[i] } else { array[i + half] };
            }
        }
        array[0]
    }

    /// Loads `n <= 16` numbers; the other lanes are 0.
    ///
    /// # Safety
    /// `n` float32 can be read at `from`.
    #[inline(always)]
    unsafe fn load_first(self, from: *const f32, n: usize) -> Self::V {
        if n == LANES {
            // SAFETY: the caller's promise.
            return unsafe { self.load(from) };
        }
        let mut array = [0.0f32; LANES];
        // SAFETY: the caller's promise; `n` is below 16 here.
        unsafe {
            std::ptr::copy_nonoverlapping(from, array.as_mut_ptr(), n.min(LANES));
            self.load(array.as_ptr())
        }
    }

    /// Stores the first `n <= 16` lanes.
    ///
    /// # Safety
    /// `n` float32 can be written at `to`.
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, v: Self::V, n: usize) {
        if n == LANES {
            // SAFETY: the caller's promise.
            return unsafe { self.store(to, v) };
        }
        let array = self.to_array(v);
        // SAFETY: the caller's promise; `n` is below 16 here.
        unsafe { std::ptr::copy_nonoverlapping(array.as_ptr(), to, n.min(LANES)) };
    }

    /// `e^x` to about 1 ulp; 0 below -87.3 (where float32 would be subnormal), finite above 88.
    #[inline(always)]
    fn exp(self, x: Self::V) -> Self::V {
        let lowest = self.splat(-87.336);
        let clamped = self.min(self.max(x, lowest), self.splat(88.3));
        // Adding 1.5 * 2^23 rounds to an integer; 127 more makes the low bits the biased exponent of 2^n.
        let magic = self.splat(12_582_912.0 + 127.0);
        let shifted = self.mul_add(clamped, self.splat(std::f32::consts::LOG2_E), magic);
        let n = self.sub(shifted, magic);
        // ln 2 in two parts, the first short enough for n * part to be exact.
        let r = self.mul_add(n, self.splat(-0.693_359_4), clamped);
        let r = self.mul_add(n, self.splat(2.121_944_4e-4), r);
        // Taylor to the 7th power: |r| <= ln 2 / 2, so the rest is below 6e-9.
        let mut p = self.splat(1.0 / 5040.0);
        for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            p = self.mul_add(p, r, self.splat(c));
        }
        let power = self.mul(p, self.shift_to_exponent(shifted));
        self.zero_unless_ge(power, x, lowest)
    }

    /// Within 2e-7 of the hyperbolic tangent.
    #[inline(always)]
    fn tanh(self, x: Self::V) -> Self::V {
        let (one, two) = (self.splat(1.0), self.splat(2.0));
        self.sub(one, self.div(two, self.add(one, self.exp(self.mul(x, two)))))
    }
}

/// Code that is written once over [`Simd`] and compiled for each instruction set. `run` and everything on its hot path
/// must be `#[inline(always)]` and must not be a closure: only code that is inlined into the entry point is compiled
/// with its target features.
pub(super) trait SimdKernel {
    type Output;
    /// Whether it has products of integers. Other kernels are not compiled for instruction sets that differ in these
    /// alone.
    const HAS_INTEGER_PRODUCTS: bool = false;
    /// Whether it has products of bfloat16, likewise.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only x86-64 has them"))]
    const HAS_BF16_PRODUCTS: bool = false;
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Rounds to bfloat16, to nearest even. A NaN stays a NaN.
#[inline(always)]
pub(super) fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet_nan = (bits >> 16) | 0x40;
    (if bits & 0x7fff_ffff > 0x7f80_0000 { quiet_nan } else { rounded }) as u16
}

#[cfg(test)]
mod tests {
    use super::super::isa::Isa;
    use super::*;

    struct Exp([f32; LANES]);
    impl SimdKernel for Exp {
        type Output = [f32; LANES];
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> [f32; LANES] {
            // SAFETY: the array has sixteen places.
            simd.to_array(simd.exp(unsafe { simd.load(self.0.as_ptr()) }))
        }
    }

    fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available())
    }

    #[test]
    fn exp_is_accurate_and_ends_well() {
        for isa in available() {
            let mut x = -87.3f32;
            while x < 88.0 {
                let xs: [f32; LANES] = std::array::from_fn(|i| x + i as f32 * 0.001);
                for (x, y) in xs.iter().zip(isa.run(Exp(xs))) {
                    let expected = f64::from(*x).exp();
                    assert!((f64::from(y) / expected - 1.0).abs() < 3e-7, "{isa}: exp({x}) = {y}, not {expected}");
                }
                x += 0.0531;
            }
            let ends = [f32::NEG_INFINITY, -1e30, -90.0, 0.0, 100.0, f32::INFINITY];
            let ends = isa.run(Exp(std::array::from_fn(|i| ends[i.min(5)])));
            assert_eq!(&ends[..4], &[0.0, 0.0, 0.0, 1.0], "{isa}");
            assert!(ends[4].is_finite() && ends[4] > 1e38 && ends[5].is_finite(), "{isa}: {ends:?}");
        }
    }

    struct Halves([u16; LANES]);
    impl SimdKernel for Halves {
        type Output = ([f32; LANES], [f32; LANES]);
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> Self::Output {
            // SAFETY: the array has sixteen places.
            unsafe { (simd.to_array(simd.load_bf16(self.0.as_ptr())), simd.to_array(simd.load_f16(self.0.as_ptr()))) }
        }
    }

    #[test]
    fn halves_widen_exactly() {
        for isa in available() {
            for first in (0..=u16::MAX).step_by(LANES) {
                let bits: [u16; LANES] = std::array::from_fn(|i| first + i as u16);
                let (bf16, f16) = isa.run(Halves(bits));
                for i in 0..LANES {
                    let same = |got: f32, expected: f32| {
                        got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan()
                    };
                    assert!(same(bf16[i], half::bf16::from_bits(bits[i]).to_f32()), "{isa} bf16 {:#x}", bits[i]);
                    assert!(same(f16[i], half::f16::from_bits(bits[i]).to_f32()), "{isa} f16 {:#x}", bits[i]);
                }
            }
        }
    }

    #[test]
    fn bf16_rounds_as_the_half_crate() {
        for bits in (0..u32::MAX - 7919).step_by(7919) {
            let x = f32::from_bits(bits);
            let (ours, expected) = (half::bf16::from_bits(bf16_bits(x)), half::bf16::from_f32(x));
            assert!(ours == expected || x.is_nan() && ours.is_nan(), "{x}");
        }
    }

    struct Moves([[f32; LANES]; LANES]);
    impl SimdKernel for Moves {
        type Output = ([[f32; LANES]; LANES], [f32; LANES], f32, f32);
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> Self::Output {
            // SAFETY: the arrays have sixteen places.
            let mut rows = self.0.map(|row| unsafe { simd.load(row.as_ptr()) });
            let first = rows[0];
            simd.transpose(&mut rows);
            let masked = simd.in_range_or(first, 3, 11, simd.splat(-1.0));
            (rows.map(|row| simd.to_array(row)), simd.to_array(masked), simd.sum(first), simd.max_lane(first))
        }
    }

    /// Adds halves to halves.
    fn sum_by_halves(lanes: &[f32; LANES]) -> f32 {
        let mut sums = lanes.to_vec();
        while sums.len() > 1 {
            let (low, high) = sums.split_at(sums.len() / 2);
            sums = low.iter().zip(high).map(|(low, high)| low + high).collect();
        }
        sums[0]
    }

    #[test]
    fn lanes_move_where_they_should() {
        let matrix: [[f32; LANES]; LANES] =
            std::array::from_fn(|i| std::array::from_fn(|j| ((i * 16 + j) * 37 % 256) as f32 * 1.1f32.powi(j as i32)));
        for isa in available() {
            let (transposed, masked, sum, max) = isa.run(Moves(matrix));
            for i in 0..LANES {
                for j in 0..LANES {
                    assert_eq!(transposed[i][j], matrix[j][i], "{isa} {i} {j}");
                }
                assert_eq!(masked[i], if (3..11).contains(&i) { matrix[0][i] } else { -1.0 }, "{isa} {i}");
            }
            // The order of the sum is part of the contract. With these numbers any other order gives another sum.
            let expected = sum_by_halves(&matrix[0]);
            assert_eq!(sum.to_bits(), expected.to_bits(), "{isa}");
            assert_eq!(max, matrix[0].iter().copied().fold(0.0, f32::max));
        }
    }
}
