//! Sixteen lanes as two AVX registers.

use super::{LANES, Simd, SimdKernel};
use std::arch::asm;
use std::arch::x86_64::*;

/// Proof that AVX2, FMA and F16C are there, and with `VNNI` AVX-VNNI's dot products of bytes.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx2<const VNNI: bool>(());

/// # Safety
/// The processor has the features named below.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in super::super) unsafe fn run_avx2<K: SimdKernel>(kernel: K) -> K::Output {
    kernel.run(Avx2::<false>(()))
}

/// # Safety
/// The processor has the features named below.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub(in super::super) unsafe fn run_avx_vnni<K: SimdKernel>(kernel: K) -> K::Output {
    kernel.run(Avx2::<true>(()))
}

/// Lanes 0..8 and 8..16.
type Two = [__m256; 2];

/// Both halves of a result, from an expression over the half's index. Not a closure: that would be compiled without
/// the instruction set.
macro_rules! halves {
    ($i:ident => $half:expr) => {{
        let first = {
            let $i = 0;
            unsafe { $half }
        };
        let second = {
            let $i = 1;
            unsafe { $half }
        };
        [first, second]
    }};
}

/// Sum of the lanes, adding halves to halves.
///
/// # Safety
/// The processor has AVX.
#[inline(always)]
pub(super) unsafe fn sum_of_eight(v: __m256) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
    }
}

/// # Safety
/// The processor has AVX.
#[inline(always)]
pub(super) unsafe fn max_of_eight(v: __m256) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
    }
}

/// Eight rows of eight become columns.
///
/// # Safety
/// The processor has AVX.
#[inline(always)]
unsafe fn transpose_8x8(r: [__m256; 8]) -> [__m256; 8] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut t = r;
        for i in (0..8).step_by(2) {
            t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
            t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
        }
        let mut u = t;
        for i in (0..8).step_by(4) {
            u[i] = _mm256_shuffle_ps::<0x44>(t[i], t[i + 2]);
            u[i + 1] = _mm256_shuffle_ps::<0xee>(t[i], t[i + 2]);
            u[i + 2] = _mm256_shuffle_ps::<0x44>(t[i + 1], t[i + 3]);
            u[i + 3] = _mm256_shuffle_ps::<0xee>(t[i + 1], t[i + 3]);
        }
        for i in 0..4 {
            t[i] = _mm256_permute2f128_ps::<0x20>(u[i], u[i + 4]);
            t[i + 4] = _mm256_permute2f128_ps::<0x31>(u[i], u[i + 4]);
        }
        t
    }
}

/// `acc + Σ w · x` in integers of 16 bits, for bytes `w` without a sign and `x` with one.
///
/// In assembly, because the compiler adds up in another order, for which it needs more registers than there are. The
/// products come first: on Zen 3, additions before them take the multipliers' ports.
#[inline]
#[target_feature(enable = "avx2")]
fn add_in_shorts([mut first, mut last]: [__m256i; 2], w: [__m256i; 2], x: __m256i) -> [__m256i; 2] {
    // SAFETY: instructions on registers, which AVX2 has.
    unsafe {
        asm!(
            "vpmaddubsw {of_first}, {w_first}, {x}",
            "vpmaddubsw {of_last}, {w_last}, {x}",
            "vpaddw {first}, {first}, {of_first}",
            "vpaddw {last}, {last}, {of_last}",
            first = inout(ymm_reg) first,
            last = inout(ymm_reg) last,
            of_first = out(ymm_reg) _,
            of_last = out(ymm_reg) _,
            w_first = in(ymm_reg) w[0],
            w_last = in(ymm_reg) w[1],
            x = in(ymm_reg) x,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    [first, last]
}

/// The number 1 in all integers of 16 bits. Made in a register, because the compiler loads a constant for each use.
#[inline]
#[target_feature(enable = "avx2")]
fn ones_of_16_bits() -> __m256i {
    let ones;
    // SAFETY: instructions on registers, which AVX2 has.
    unsafe {
        asm!(
            "vpcmpeqw {ones}, {ones}, {ones}",
            "vpsrlw {ones}, {ones}, 15",
            ones = out(ymm_reg) ones,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    ones
}

/// `acc + Σ w · x` in integers of 32 bits, for bytes with signs. One factor of the instruction must not have a sign, so
/// that of `w` goes to the other factor. In assembly for the same reason as [`add_in_shorts`].
#[inline]
#[target_feature(enable = "avx2")]
fn add_signed(mut acc: __m256i, w: __m256i, abs_w: __m256i, x: __m256i) -> __m256i {
    // SAFETY: instructions on registers, which AVX2 has.
    unsafe {
        asm!(
            "vpsignb {products}, {x}, {w}",
            "vpmaddubsw {products}, {abs_w}, {products}",
            "vpmaddwd {products}, {products}, {ones}",
            "vpaddd {acc}, {acc}, {products}",
            acc = inout(ymm_reg) acc,
            products = out(ymm_reg) _,
            w = in(ymm_reg) w,
            abs_w = in(ymm_reg) abs_w,
            x = in(ymm_reg) x,
            ones = in(ymm_reg) ones_of_16_bits(),
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    acc
}

// SAFETY (every block below): a value of `Avx2` proves that the instructions exist; the caller vouches for pointers.
impl<const VNNI: bool> Simd for Avx2<VNNI> {
    type V = Two;
    type Pairs = [__m256i; 2];
    type Ints = [__m256i; 2];
    type Bytes = [__m256i; 2];

    #[inline(always)]
    fn call<K: SimdKernel>(self, kernel: K) -> K::Output {
        // SAFETY: `self` is the proof.
        unsafe { if const { VNNI && K::HAS_INTEGER_PRODUCTS } { run_avx_vnni(kernel) } else { run_avx2(kernel) } }
    }

    const TILE_ROWS: usize = 4;
    const TILE_PANELS: usize = 1;
    const WIDENED_NUMBERS: usize = 1;
    const QUERIES: usize = 2;
    const ROW_PANELS: usize = 2;
    const QUANT_ROWS: usize = 4;
    const SUMS_IN_SHORTS: bool = !VNNI;
    const ADDS_128: bool = VNNI;
    const SHORT_DOTS: bool = true;

    #[inline(always)]
    fn splat(self, x: f32) -> Two {
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    fn add(self, a: Two, b: Two) -> Two {
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn sub(self, a: Two, b: Two) -> Two {
        unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn mul(self, a: Two, b: Two) -> Two {
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn div(self, a: Two, b: Two) -> Two {
        unsafe { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn max(self, a: Two, b: Two) -> Two {
        unsafe { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn min(self, a: Two, b: Two) -> Two {
        unsafe { [_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn mul_add(self, a: Two, b: Two, c: Two) -> Two {
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }
    #[inline(always)]
    fn shift_to_exponent(self, a: Two) -> Two {
        halves!(i => _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(a[i]))))
    }
    #[inline(always)]
    fn zero_unless_ge(self, value: Two, x: Two, threshold: Two) -> Two {
        halves!(i => _mm256_and_ps(value[i], _mm256_cmp_ps::<_CMP_GE_OQ>(x[i], threshold[i])))
    }
    #[inline(always)]
    fn in_range_or(self, value: Two, from: usize, to: usize, other: Two) -> Two {
        halves!(i => {
            let lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(8 * i as i32));
            let before = _mm256_cmpgt_epi32(_mm256_set1_epi32(from as i32), lane);
            let inside = _mm256_andnot_si256(before, _mm256_cmpgt_epi32(_mm256_set1_epi32(to as i32), lane));
            _mm256_blendv_ps(other[i], value[i], _mm256_castsi256_ps(inside))
        })
    }
    #[inline(always)]
    fn dot_pairs(self, acc: Two, w: [__m256i; 2], x: u32) -> Two {
        // Broadcast once and split in registers: two broadcasts would compete for the single shuffle port.
        let odd = unsafe { _mm256_set1_epi32(0xffff_0000_u32 as i32) };
        let x = unsafe { _mm256_set1_epi32(x as i32) };
        let (x0, x1) =
            unsafe { (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(x)), _mm256_castsi256_ps(_mm256_and_si256(x, odd))) };
        halves!(i => {
            let w0 = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(w[i]));
            let w1 = _mm256_castsi256_ps(_mm256_and_si256(w[i], odd));
            _mm256_fmadd_ps(w1, x1, _mm256_fmadd_ps(w0, x0, acc[i]))
        })
    }
    #[inline(always)]
    fn round_to_f16(self, a: Two) -> Two {
        halves!(i => _mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a[i])))
    }
    #[inline(always)]
    fn transpose(self, rows: &mut [Two; LANES]) {
        macro_rules! block {
            ($row:literal, $half:literal) => {{
                let mut block = [rows[0][0]; 8];
                for i in 0..8 {
                    block[i] = rows[$row + i][$half];
                }
                unsafe { transpose_8x8(block) }
            }};
        }
        let (a, b, c, d) = (block!(0, 0), block!(0, 1), block!(8, 0), block!(8, 1));
        for i in 0..8 {
            rows[i] = [a[i], c[i]];
            rows[i + 8] = [b[i], d[i]];
        }
    }
    #[inline(always)]
    fn sum(self, v: Two) -> f32 {
        unsafe { sum_of_eight(_mm256_add_ps(v[0], v[1])) }
    }
    #[inline(always)]
    fn max_lane(self, v: Two) -> f32 {
        unsafe { max_of_eight(_mm256_max_ps(v[0], v[1])) }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Two {
        unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: Two) {
        unsafe {
            _mm256_storeu_ps(to, v[0]);
            _mm256_storeu_ps(to.add(8), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Two {
        halves!(i => {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(8 * i).cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        })
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Two {
        halves!(i => _mm256_cvtph_ps(_mm_loadu_si128(from.add(8 * i).cast())))
    }
    #[inline(always)]
    unsafe fn load_pairs(self, from: *const u32) -> [__m256i; 2] {
        unsafe { [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(8).cast())] }
    }
    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
    #[inline(always)]
    fn prefetch_far(self, address: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
    }
    #[inline(always)]
    fn splat_int(self, x: i32) -> [__m256i; 2] {
        unsafe { [_mm256_set1_epi32(x); 2] }
    }
    #[inline(always)]
    fn dot_short_pairs(self, acc: [__m256i; 2], a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        if VNNI {
            return halves!(i => _mm256_dpwssd_avx_epi32(acc[i], a[i], b[i]));
        }
        halves!(i => _mm256_add_epi32(acc[i], _mm256_madd_epi16(a[i], b[i])))
    }
    #[inline(always)]
    fn pack_shorts(self, low: [__m256i; 2], high: [__m256i; 2]) -> [__m256i; 2] {
        halves!(i => _mm256_blend_epi16::<0xaa>(low[i], _mm256_slli_epi32::<16>(high[i])))
    }
    #[inline(always)]
    fn add_ints(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        halves!(i => _mm256_add_epi32(a[i], b[i]))
    }
    #[inline(always)]
    fn to_floats(self, a: [__m256i; 2]) -> Two {
        halves!(i => _mm256_cvtepi32_ps(a[i]))
    }
    #[inline(always)]
    fn as_floats(self, a: [__m256i; 2]) -> Two {
        halves!(i => _mm256_castsi256_ps(a[i]))
    }
    #[inline(always)]
    fn as_ints(self, a: Two) -> [__m256i; 2] {
        halves!(i => _mm256_castps_si256(a[i]))
    }
    #[inline(always)]
    fn round_to_ints(self, a: Two) -> [__m256i; 2] {
        halves!(i => _mm256_cvtps_epi32(a[i]))
    }
    #[inline(always)]
    fn int_bits(self, a: [__m256i; 2], shift: u32, mask: u32) -> [__m256i; 2] {
        halves!(i => {
            let shifted = _mm256_srl_epi32(a[i], _mm_cvtsi32_si128(shift as i32));
            _mm256_and_si256(shifted, _mm256_set1_epi32(mask as i32))
        })
    }
    #[inline(always)]
    fn move_signed(self, a: [__m256i; 2], up: u32, down: u32) -> [__m256i; 2] {
        halves!(i => {
            let moved = _mm256_sll_epi32(a[i], _mm_cvtsi32_si128(up as i32));
            _mm256_sra_epi32(moved, _mm_cvtsi32_si128(down as i32))
        })
    }
    #[inline(always)]
    fn or_shifted(self, a: [__m256i; 2], b: [__m256i; 2], shift: u32) -> [__m256i; 2] {
        halves!(i => _mm256_or_si256(a[i], _mm256_sll_epi32(b[i], _mm_cvtsi32_si128(shift as i32))))
    }
    // Shifts move bits between the bytes of a lane of 16 bits; the mask removes them.
    #[inline(always)]
    fn byte_bits(self, b: [__m256i; 2], shift: u32, mask: u8) -> [__m256i; 2] {
        halves!(i => {
            let shifted = _mm256_srl_epi16(b[i], _mm_cvtsi32_si128(shift as i32));
            _mm256_and_si256(shifted, _mm256_set1_epi8(mask as i8))
        })
    }
    #[inline(always)]
    fn byte_bits_up(self, b: [__m256i; 2], shift: u32, mask: u8) -> [__m256i; 2] {
        halves!(i => {
            let shifted = _mm256_sll_epi16(b[i], _mm_cvtsi32_si128(shift as i32));
            _mm256_and_si256(shifted, _mm256_set1_epi8(mask as i8))
        })
    }
    #[inline(always)]
    fn or_bytes(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        halves!(i => _mm256_or_si256(a[i], b[i]))
    }
    #[inline(always)]
    fn table(self, values: &[i8; 16]) -> [__m256i; 2] {
        unsafe { [_mm256_broadcastsi128_si256(_mm_loadu_si128(values.as_ptr().cast())); 2] }
    }
    #[inline(always)]
    fn lookup(self, table: [__m256i; 2], index: [__m256i; 2]) -> [__m256i; 2] {
        halves!(i => _mm256_shuffle_epi8(table[i], index[i]))
    }
    // AVX2's instruction adds pairs of products in 16 bits, and saturates. Neither these factors nor those of
    // `dot_signed` are large enough for that.
    #[inline(always)]
    fn dot_bytes(self, acc: [__m256i; 2], w: [__m256i; 2], x: u32) -> [__m256i; 2] {
        let x = unsafe { _mm256_set1_epi32(x as i32) };
        if VNNI {
            return halves!(i => _mm256_dpbusd_avx_epi32(acc[i], w[i], x));
        }
        halves!(i => {
            let pairs = _mm256_maddubs_epi16(w[i], x);
            _mm256_add_epi32(acc[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        })
    }
    // The pairs of several products are added up in 16 bits: four of them are at most 4 * 2 * 31 * 127 = 31,496, and
    // two at most 2 * 2 * 63 * 127 = 32,004.
    #[inline(always)]
    fn dot_four(self, acc: [__m256i; 2], w: [[__m256i; 2]; 4], x: [u32; 4], largest: u8) -> [__m256i; 2] {
        assert!(largest <= 63);
        let x = unsafe {
            let [a, b, c, d] = x;
            [
                _mm256_set1_epi32(a as i32),
                _mm256_set1_epi32(b as i32),
                _mm256_set1_epi32(c as i32),
                _mm256_set1_epi32(d as i32),
            ]
        };
        if VNNI {
            return halves!(i => {
                let acc = _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(acc[i], w[0][i], x[0]), w[1][i], x[1]);
                _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(acc, w[2][i], x[2]), w[3][i], x[3])
            });
        }
        halves!(i => {
            let ones = _mm256_set1_epi16(1);
            let first = _mm256_add_epi16(_mm256_maddubs_epi16(w[0][i], x[0]), _mm256_maddubs_epi16(w[1][i], x[1]));
            let last = _mm256_add_epi16(_mm256_maddubs_epi16(w[2][i], x[2]), _mm256_maddubs_epi16(w[3][i], x[3]));
            if largest <= 31 {
                _mm256_add_epi32(acc[i], _mm256_madd_epi16(_mm256_add_epi16(first, last), ones))
            } else {
                let acc = _mm256_add_epi32(acc[i], _mm256_madd_epi16(first, ones));
                _mm256_add_epi32(acc, _mm256_madd_epi16(last, ones))
            }
        })
    }
    #[inline(always)]
    fn dot_in_shorts(self, acc: [__m256i; 2], w: [__m256i; 2], x: u32) -> [__m256i; 2] {
        unsafe { add_in_shorts(acc, w, _mm256_set1_epi32(x as i32)) }
    }
    #[inline(always)]
    fn first_in_shorts(self, w: [__m256i; 2], x: u32) -> [__m256i; 2] {
        let x = unsafe { _mm256_set1_epi32(x as i32) };
        halves!(i => _mm256_maddubs_epi16(w[i], x))
    }
    #[inline(always)]
    fn shorts_down(self, a: [__m256i; 2], shift: u32) -> [__m256i; 2] {
        halves!(i => _mm256_sra_epi16(a[i], _mm_cvtsi32_si128(shift as i32)))
    }
    #[inline(always)]
    fn prepare_signed(self, w: [__m256i; 2]) -> [__m256i; 2] {
        if VNNI { halves!(i => _mm256_xor_si256(w[i], _mm256_set1_epi8(i8::MIN))) } else { w }
    }
    // One factor must not have a sign. With VNNI the weights are 128 larger, else the sign goes to the other factor.
    #[inline(always)]
    fn dot_signed(self, acc: [__m256i; 2], w: [__m256i; 2], x: u32) -> [__m256i; 2] {
        if VNNI {
            return self.dot_bytes(acc, w, x);
        }
        let x = unsafe { _mm256_set1_epi32(x as i32) };
        halves!(i => add_signed(acc[i], w[i], _mm256_abs_epi8(w[i]), x))
    }
    #[inline(always)]
    fn widen_bytes(self, four: [__m256i; 2]) -> [[__m256i; 2]; 2] {
        // Each byte goes to the upper half of its place, and a shift brings it down with its sign.
        let first = unsafe { _mm_setr_epi8(-1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13) };
        let last = unsafe { _mm_setr_epi8(-1, 2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15) };
        let places = [first, last].map(|places| unsafe { _mm256_broadcastsi128_si256(places) });
        [
            halves!(i => _mm256_srai_epi16::<8>(_mm256_shuffle_epi8(four[i], places[0]))),
            halves!(i => _mm256_srai_epi16::<8>(_mm256_shuffle_epi8(four[i], places[1]))),
        ]
    }
    #[inline(always)]
    unsafe fn store_ints(self, to: *mut i32, a: [__m256i; 2]) {
        halves!(i => _mm256_storeu_si256(to.add(8 * i).cast(), a[i]));
    }
    #[inline(always)]
    unsafe fn load_ints(self, from: *const u8) -> [__m256i; 2] {
        halves!(i => _mm256_loadu_si256(from.add(32 * i).cast()))
    }
    #[inline(always)]
    unsafe fn load_u8(self, from: *const u8) -> [__m256i; 2] {
        halves!(i => _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.add(8 * i).cast())))
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const u8) -> [__m256i; 2] {
        halves!(i => _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.add(8 * i).cast())))
    }
    #[inline(always)]
    unsafe fn load_bytes(self, from: *const u8) -> [__m256i; 2] {
        halves!(i => _mm256_loadu_si256(from.add(32 * i).cast()))
    }
    #[inline(always)]
    unsafe fn store_bytes(self, to: *mut u8, a: [__m256i; 2]) {
        halves!(i => _mm256_storeu_si256(to.add(32 * i).cast(), a[i]));
    }
}
