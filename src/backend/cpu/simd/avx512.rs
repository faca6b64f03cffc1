//! Sixteen lanes as one AVX-512 register, with dot products of BF16 and of bytes (VNNI).

use super::{LANES, Simd, SimdKernel};
use std::arch::x86_64::*;

/// Proof that AVX-512 F, BW, DQ, VL, BF16 and VNNI are there.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx512(());

/// # Safety
/// The processor has the features named below.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")]
pub(in super::super) unsafe fn run_avx512<K: SimdKernel>(kernel: K) -> K::Output {
    kernel.run(Avx512(()))
}

// SAFETY (every block below): a value of `Avx512` proves that the instructions exist; the caller vouches for pointers.
impl Simd for Avx512 {
    type V = __m512;
    type Pairs = __m512i;
    type Ints = __m512i;
    type Bytes = __m512i;

    #[inline(always)]
    fn call<K: SimdKernel>(self, kernel: K) -> K::Output {
        // SAFETY: `self` is the proof.
        unsafe { run_avx512(kernel) }
    }

    const TILE_ROWS: usize = 12;
    const TILE_PANELS: usize = 2;
    const QUERIES: usize = 4;
    const ROW_PANELS: usize = 4;
    const QUANT_ROWS: usize = 8;
    const QUANT_PANELS: usize = 2;
    const ADDS_128: bool = true;
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
            _mm512_dpbf16_ps(
                acc,
                std::mem::transmute::<__m512i, __m512bh>(w),
                std::mem::transmute::<__m512i, __m512bh>(x),
            )
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
    fn splat_int(self, x: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(x) }
    }
    #[inline(always)]
    fn dot_shorts(self, acc: __m512i, w: __m512i, x: u32) -> __m512i {
        unsafe { _mm512_dpwssd_epi32(acc, w, _mm512_set1_epi32(x as i32)) }
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
    #[inline(always)]
    fn dot_bytes(self, acc: __m512i, w: __m512i, x: u32) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x as i32)) }
    }
    #[inline(always)]
    fn prepare_signed(self, w: __m512i) -> __m512i {
        unsafe { _mm512_xor_si512(w, _mm512_set1_epi8(i8::MIN)) }
    }
    #[inline(always)]
    fn dot_signed(self, acc: __m512i, w: __m512i, x: u32) -> __m512i {
        self.dot_bytes(acc, w, x)
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
