//! Sixteen lanes as one AVX-512 register.

use super::{LANES, Simd, SimdKernel};
use std::arch::asm;
use std::arch::x86_64::*;

/// Proof that AVX-512 F, BW, DQ and VL are there, with `VNNI` also dot products of bytes, and with `BF16` also those of
/// bfloat16.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx512<const VNNI: bool, const BF16: bool>(());

/// # Safety
/// The processor has the features named below.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(in super::super) unsafe fn run_avx512_base<K: SimdKernel>(kernel: K) -> K::Output {
    kernel.run(Avx512::<false, false>(()))
}

/// # Safety
/// The processor has the features named below.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(in super::super) unsafe fn run_avx512_vnni<K: SimdKernel>(kernel: K) -> K::Output {
    kernel.run(Avx512::<true, false>(()))
}

/// # Safety
/// The processor has the features named below.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")]
pub(in super::super) unsafe fn run_avx512<K: SimdKernel>(kernel: K) -> K::Output {
    kernel.run(Avx512::<true, true>(()))
}

// SAFETY (every block below): a value of `Avx512` proves that the instructions exist; the caller vouches for pointers.
impl<const VNNI: bool, const BF16: bool> Simd for Avx512<VNNI, BF16> {
    type V = __m512;
    type Pairs = __m512i;
    type Ints = __m512i;
    type Bytes = __m512i;

    #[inline(always)]
    fn call<K: SimdKernel>(self, kernel: K) -> K::Output {
        // SAFETY: `self` is the proof.
        unsafe {
            if const { BF16 && K::HAS_BF16_PRODUCTS } {
                run_avx512(kernel)
            } else if const { VNNI && K::HAS_INTEGER_PRODUCTS } {
                run_avx512_vnni(kernel)
            } else {
                run_avx512_base(kernel)
            }
        }
    }

    const TILE_ROWS: usize = 12;
    const TILE_PANELS: usize = 2;
    const WIDENED_NUMBERS: usize = if BF16 { usize::MAX } else { 2 };
    const WIDENED_ROWS: usize = 12;
    const WIDENED_PANELS: usize = 2;
    const QUERIES: usize = 4;
    const ROW_PANELS: usize = 4;
    const QUANT_ROWS: usize = 8;
    const QUANT_PANELS: usize = 2;
    const SUMS_IN_SHORTS: bool = !VNNI;
    const ADDS_128: bool = VNNI;
    const SHORT_DOTS: bool = true;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn shift_to_exponent(self, a: __m512) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(a))) }
    }
    #[inline(always)]
    fn zero_unless_ge(self, value: __m512, x: __m512, threshold: __m512) -> __m512 {
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(x, threshold), value) }
    }
    #[inline(always)]
    fn in_range_or(self, value: __m512, from: usize, to: usize, other: __m512) -> __m512 {
        let below = |n: usize| ((1u32 << n) - 1) as u16;
        unsafe { _mm512_mask_mov_ps(other, below(to) & !below(from), value) }
    }
    #[inline(always)]
    fn dot_pairs(self, acc: __m512, w: __m512i, x: u32) -> __m512 {
        unsafe {
            let x = _mm512_set1_epi32(x as i32);
            if BF16 {
                return _mm512_dpbf16_ps(
                    acc,
                    std::mem::transmute::<__m512i, __m512bh>(w),
                    std::mem::transmute::<__m512i, __m512bh>(x),
                );
            }
            let odd = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            let (x0, x1) = (_mm512_slli_epi32::<16>(x), _mm512_and_si512(x, odd));
            let (w0, w1) = (_mm512_slli_epi32::<16>(w), _mm512_and_si512(w, odd));
            let acc = _mm512_fmadd_ps(_mm512_castsi512_ps(w0), _mm512_castsi512_ps(x0), acc);
            _mm512_fmadd_ps(_mm512_castsi512_ps(w1), _mm512_castsi512_ps(x1), acc)
        }
    }
    #[inline(always)]
    fn round_to_f16(self, a: __m512) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a)) }
    }
    #[inline(always)]
    fn transpose(self, rows: &mut [__m512; LANES]) {
        unsafe { transpose(rows) }
    }
    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        unsafe {
            let v = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            super::avx2::sum_of_eight(v)
        }
    }
    #[inline(always)]
    fn max_lane(self, v: __m512) -> f32 {
        unsafe {
            let v = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            super::avx2::max_of_eight(v)
        }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: __m512) {
        unsafe { _mm512_storeu_ps(to, v) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> __m512 {
        unsafe {
            let bits = _mm256_loadu_si256(from.cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_pairs(self, from: *const u32) -> __m512i {
        unsafe { _mm512_loadu_si512(from.cast()) }
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
    fn splat_int(self, x: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(x) }
    }
    #[inline(always)]
    fn dot_short_pairs(self, acc: __m512i, a: __m512i, b: __m512i) -> __m512i {
        unsafe { if VNNI { _mm512_dpwssd_epi32(acc, a, b) } else { _mm512_add_epi32(acc, _mm512_madd_epi16(a, b)) } }
    }
    #[inline(always)]
    fn pack_shorts(self, low: __m512i, high: __m512i) -> __m512i {
        unsafe { _mm512_mask_blend_epi16(0xaaaa_aaaa, low, _mm512_slli_epi32::<16>(high)) }
    }
    #[inline(always)]
    fn add_ints(self, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    fn to_floats(self, a: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(a) }
    }
    #[inline(always)]
    fn as_floats(self, a: __m512i) -> __m512 {
        unsafe { _mm512_castsi512_ps(a) }
    }
    #[inline(always)]
    fn as_ints(self, a: __m512) -> __m512i {
        unsafe { _mm512_castps_si512(a) }
    }
    #[inline(always)]
    fn round_to_ints(self, a: __m512) -> __m512i {
        unsafe { _mm512_cvtps_epi32(a) }
    }
    #[inline(always)]
    fn int_bits(self, a: __m512i, shift: u32, mask: u32) -> __m512i {
        unsafe {
            let shifted = _mm512_srl_epi32(a, _mm_cvtsi32_si128(shift as i32));
            _mm512_and_si512(shifted, _mm512_set1_epi32(mask as i32))
        }
    }
    #[inline(always)]
    fn move_signed(self, a: __m512i, up: u32, down: u32) -> __m512i {
        unsafe {
            let moved = _mm512_sll_epi32(a, _mm_cvtsi32_si128(up as i32));
            _mm512_sra_epi32(moved, _mm_cvtsi32_si128(down as i32))
        }
    }
    #[inline(always)]
    fn or_shifted(self, a: __m512i, b: __m512i, shift: u32) -> __m512i {
        unsafe { _mm512_or_si512(a, _mm512_sll_epi32(b, _mm_cvtsi32_si128(shift as i32))) }
    }
    // Shifts move bits between the bytes of a lane of 16 bits; the mask removes them.
    #[inline(always)]
    fn byte_bits(self, b: __m512i, shift: u32, mask: u8) -> __m512i {
        unsafe {
            let shifted = _mm512_srl_epi16(b, _mm_cvtsi32_si128(shift as i32));
            _mm512_and_si512(shifted, _mm512_set1_epi8(mask as i8))
        }
    }
    #[inline(always)]
    fn byte_bits_up(self, b: __m512i, shift: u32, mask: u8) -> __m512i {
        unsafe {
            let shifted = _mm512_sll_epi16(b, _mm_cvtsi32_si128(shift as i32));
            _mm512_and_si512(shifted, _mm512_set1_epi8(mask as i8))
        }
    }
    #[inline(always)]
    fn move_bits(self, b: __m512i, from: u32, to: u32, mask: u8) -> __m512i {
        unsafe {
            // (The shift is below 32, which the compiler is to know.)
            let shifts = _mm512_and_si512(hidden_splat(from as i32), _mm512_set1_epi32(31));
            let moved = _mm512_sll_epi32(_mm512_srlv_epi32(b, shifts), _mm_cvtsi32_si128(to as i32));
            _mm512_and_si512(moved, _mm512_set1_epi8(mask as i8))
        }
    }
    #[inline(always)]
    fn or_bytes(self, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    fn table(self, values: &[i8; 16]) -> __m512i {
        unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(values.as_ptr().cast())) }
    }
    #[inline(always)]
    fn lookup(self, table: __m512i, index: __m512i) -> __m512i {
        unsafe { _mm512_shuffle_epi8(table, index) }
    }
    // Without VNNI, products of bytes are as with AVX2, which says why they do not saturate.
    #[inline(always)]
    fn dot_bytes(self, acc: __m512i, w: __m512i, x: u32) -> __m512i {
        unsafe {
            let x = _mm512_set1_epi32(x as i32);
            if VNNI { _mm512_dpbusd_epi32(acc, w, x) } else { add_pairs(acc, _mm512_maddubs_epi16(w, x)) }
        }
    }
    #[inline(always)]
    fn dot_four(self, acc: __m512i, w: [__m512i; 4], x: [u32; 4], largest: u8) -> __m512i {
        assert!(largest <= 63);
        if VNNI {
            let acc = self.dot_bytes(self.dot_bytes(acc, w[0], x[0]), w[1], x[1]);
            return self.dot_bytes(self.dot_bytes(acc, w[2], x[2]), w[3], x[3]);
        }
        let none = self.splat_int(0);
        let first = self.dot_in_shorts(self.dot_in_shorts(none, w[0], x[0]), w[1], x[1]);
        unsafe {
            if largest <= 31 {
                add_pairs(acc, self.dot_in_shorts(self.dot_in_shorts(first, w[2], x[2]), w[3], x[3]))
            } else {
                let last = self.dot_in_shorts(self.dot_in_shorts(none, w[2], x[2]), w[3], x[3]);
                add_pairs(add_pairs(acc, first), last)
            }
        }
    }
    #[inline(always)]
    fn dot_in_shorts(self, acc: __m512i, w: __m512i, x: u32) -> __m512i {
        unsafe { _mm512_add_epi16(acc, _mm512_maddubs_epi16(w, _mm512_set1_epi32(x as i32))) }
    }
    #[inline(always)]
    fn first_in_shorts(self, w: __m512i, x: u32) -> __m512i {
        unsafe { _mm512_maddubs_epi16(w, _mm512_set1_epi32(x as i32)) }
    }
    #[inline(always)]
    fn shorts_down(self, a: __m512i, shift: u32) -> __m512i {
        unsafe { _mm512_sra_epi16(a, _mm_cvtsi32_si128(shift as i32)) }
    }
    #[inline(always)]
    fn prepare_signed(self, w: __m512i) -> __m512i {
        if VNNI { unsafe { _mm512_xor_si512(w, _mm512_set1_epi8(i8::MIN)) } } else { w }
    }
    #[inline(always)]
    fn dot_signed(self, acc: __m512i, w: __m512i, x: u32) -> __m512i {
        if VNNI {
            return self.dot_bytes(acc, w, x);
        }
        unsafe {
            let x = _mm512_set1_epi32(x as i32);
            let x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
            add_pairs(acc, _mm512_maddubs_epi16(_mm512_abs_epi8(w), x))
        }
    }
    #[inline(always)]
    fn widen_bytes(self, four: __m512i) -> [__m512i; 2] {
        // As with AVX2.
        unsafe {
            let first = _mm_setr_epi8(-1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13);
            let last = _mm_setr_epi8(-1, 2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15);
            [
                _mm512_srai_epi16::<8>(_mm512_shuffle_epi8(four, _mm512_broadcast_i32x4(first))),
                _mm512_srai_epi16::<8>(_mm512_shuffle_epi8(four, _mm512_broadcast_i32x4(last))),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_ints(self, to: *mut i32, a: __m512i) {
        unsafe { _mm512_storeu_si512(to.cast(), a) }
    }
    #[inline(always)]
    unsafe fn load_ints(self, from: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn load_u8(self, from: *const u8) -> __m512i {
        unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const u8) -> __m512i {
        unsafe { _mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bytes(self, from: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn store_bytes(self, to: *mut u8, a: __m512i) {
        unsafe { _mm512_storeu_si512(to.cast(), a) }
    }
}

/// Adds the two integers of 16 bits of each lane to `acc`.
///
/// # Safety
/// The processor has AVX-512 BW.
#[inline(always)]
unsafe fn add_pairs(acc: __m512i, pairs: __m512i) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe { _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1))) }
}

/// `x` in all lanes, but the compiler does not know that they are equal. If it knows, it shifts all lanes by one scalar
/// register. That takes two operations on Intel, and on Zen 4 the place of a multiplication.
///
/// # Safety
/// The processor has AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn hidden_splat(x: i32) -> __m512i {
    let mut lanes = _mm512_set1_epi32(x);
    // SAFETY: there is no instruction, only a comment.
    unsafe { asm!("/* {} */", inout(zmm_reg) lanes, options(pure, nomem, nostack, preserves_flags)) };
    lanes
}

/// Rows become columns.
///
/// # Safety
/// The processor has AVX-512 F.
#[inline(always)]
pub(in super::super) unsafe fn transpose(rows: &mut [__m512; LANES]) {
    // Pairs of rows, then fours, each within 128-bit lanes; then the lanes themselves.
    // SAFETY: the caller's promise.
    unsafe {
        let mut t = *rows;
        for i in (0..LANES).step_by(2) {
            t[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
            t[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
        }
        let mut u = t;
        for i in (0..LANES).step_by(4) {
            u[i] = _mm512_shuffle_ps::<0x44>(t[i], t[i + 2]);
            u[i + 1] = _mm512_shuffle_ps::<0xee>(t[i], t[i + 2]);
            u[i + 2] = _mm512_shuffle_ps::<0x44>(t[i + 1], t[i + 3]);
            u[i + 3] = _mm512_shuffle_ps::<0xee>(t[i + 1], t[i + 3]);
        }
        for i in 0..4 {
            let low = _mm512_shuffle_f32x4::<0x88>(u[i], u[i + 4]);
            let high = _mm512_shuffle_f32x4::<0x88>(u[i + 8], u[i + 12]);
            let low_odd = _mm512_shuffle_f32x4::<0xdd>(u[i], u[i + 4]);
            let high_odd = _mm512_shuffle_f32x4::<0xdd>(u[i + 8], u[i + 12]);
            rows[i] = _mm512_shuffle_f32x4::<0x88>(low, high);
            rows[i + 8] = _mm512_shuffle_f32x4::<0xdd>(low, high);
            rows[i + 4] = _mm512_shuffle_f32x4::<0x88>(low_odd, high_odd);
            rows[i + 12] = _mm512_shuffle_f32x4::<0xdd>(low_odd, high_odd);
        }
    }
}
