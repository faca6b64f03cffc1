//! Sixteen lanes as four NEON registers.

use super::{LANES, Simd, SimdKernel};
use std::arch::aarch64::*;
use std::arch::asm;

/// Proof that NEON is there, with `DOT` its dot products of bytes, and with `MATRIX` its matrix products of bytes too.
#[derive(Clone, Copy)]
pub(in super::super) struct Neon<const DOT: bool, const MATRIX: bool>(());

/// # Safety
/// The processor has the features named below.
#[target_feature(enable = "neon")]
pub(in super::super) unsafe fn run_neon<K: SimdKernel>(kernel: K) -> K::Output {
    kernel.run(Neon::<false, false>(()))
}

/// # Safety
/// The processor has the features named below.
#[target_feature(enable = "neon,dotprod")]
pub(in super::super) unsafe fn run_neon_dotprod<K: SimdKernel>(kernel: K) -> K::Output {
    kernel.run(Neon::<true, false>(()))
}

/// # Safety
/// The processor has the features named below.
#[target_feature(enable = "neon,dotprod,i8mm")]
pub(in super::super) unsafe fn run_neon_i8mm<K: SimdKernel>(kernel: K) -> K::Output {
    kernel.run(Neon::<true, true>(()))
}

/// Lanes 0..4, 4..8, 8..12 and 12..16.
type Four = [float32x4_t; 4];

/// The four quarters of a result, from an expression over the quarter's index. Not a closure: that would be compiled
/// without the instruction set.
macro_rules! quarters {
    ($i:ident => $quarter:expr) => {{
        macro_rules! quarter {
            ($index:literal) => {{
                let $i = $index;
                unsafe { $quarter }
            }};
        }
        [quarter!(0), quarter!(1), quarter!(2), quarter!(3)]
    }};
}

/// Four rows of four become columns.
///
/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn transpose_4x4(r: Four) -> Four {
    // SAFETY: the caller's promise.
    unsafe {
        let pairs = |a: float32x4_t, b: float32x4_t| {
            (vreinterpretq_f64_f32(vtrn1q_f32(a, b)), vreinterpretq_f64_f32(vtrn2q_f32(a, b)))
        };
        let ((even_low, odd_low), (even_high, odd_high)) = (pairs(r[0], r[1]), pairs(r[2], r[3]));
        [
            vreinterpretq_f32_f64(vtrn1q_f64(even_low, even_high)),
            vreinterpretq_f32_f64(vtrn1q_f64(odd_low, odd_high)),
            vreinterpretq_f32_f64(vtrn2q_f64(even_low, even_high)),
            vreinterpretq_f32_f64(vtrn2q_f64(odd_low, odd_high)),
        ]
    }
}

/// Widens four float16 in the low half of a register to float32. It is written in assembly because the oldest supported
/// compiler does not have the intrinsic.
///
/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn widen_f16(bits: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: the caller's promise.
    unsafe {
        asm!("fcvtl {0:v}.4s, {1:v}.4h", lateout(vreg) wide, in(vreg) bits, options(pure, nomem, nostack, preserves_flags));
    }
    wide
}

/// Adds to each lane the products of its four bytes. In assembly because the intrinsic is not stable.
///
/// # Safety
/// The processor has NEON's dot products.
#[inline(always)]
unsafe fn dot_bytes(acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    let mut out = acc;
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            ".arch_extension dotprod",
            "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inout(vreg) out,
            in(vreg) w,
            in(vreg) x,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    out
}

/// Adds the products of two rows `x` with two columns `w`, each of eight bytes: lanes 0 and 1 are the two columns of
/// the first row, lanes 2 and 3 those of the second. In assembly because the intrinsic is not stable.
///
/// # Safety
/// The processor has NEON's matrix products of bytes.
#[inline(always)]
unsafe fn multiply_bytes(acc: int32x4_t, x: int8x16_t, w: int8x16_t) -> int32x4_t {
    let mut out = acc;
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            ".arch_extension i8mm",
            "smmla {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inout(vreg) out,
            in(vreg) x,
            in(vreg) w,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    out
}

/// The low halves of two registers, and their high halves.
///
/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn zip_halves(a: float32x4_t, b: float32x4_t) -> [float32x4_t; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let (a, b) = (vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b));
        [vreinterpretq_f32_f64(vzip1q_f64(a, b)), vreinterpretq_f32_f64(vzip2q_f64(a, b))]
    }
}

/// Rounds to nearest even. In assembly for the same reason as [`widen_f16`].
///
/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn narrow_f16(x: float32x4_t) -> uint16x4_t {
    let bits: uint16x4_t;
    // SAFETY: the caller's promise.
    unsafe {
        asm!("fcvtn {0:v}.4h, {1:v}.4s", lateout(vreg) bits, in(vreg) x, options(pure, nomem, nostack, preserves_flags));
    }
    bits
}

// SAFETY (every block below): a value of `Neon` proves that the instructions exist; the caller vouches for pointers.
impl<const DOT: bool, const MATRIX: bool> Simd for Neon<DOT, MATRIX> {
    type V = Four;
    type Pairs = [uint32x4_t; 4];
    type Ints = [int32x4_t; 4];
    type Bytes = [uint8x16_t; 4];

    #[inline(always)]
    fn call<K: SimdKernel>(self, kernel: K) -> K::Output {
        // SAFETY: `self` is the proof.
        unsafe {
            if const { MATRIX && K::HAS_INTEGER_PRODUCTS } {
                run_neon_i8mm(kernel)
            } else if const { DOT && K::HAS_INTEGER_PRODUCTS } {
                run_neon_dotprod(kernel)
            } else {
                run_neon(kernel)
            }
        }
    }

    // Of 32 registers, 16 hold results; the weights take four, or eight where they are pairs.
    const TILE_ROWS: usize = 4;
    const TILE_PANELS: usize = 1;
    const QUERIES: usize = 2;
    const ROW_PANELS: usize = 4;
    const QUANT_ROWS: usize = 4;
    const PAIRS_ROWS: bool = MATRIX;
    const ADDS_128: bool = false;
    const SHORT_DOTS: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Four {
        unsafe { [vdupq_n_f32(x); 4] }
    }
    #[inline(always)]
    fn add(self, a: Four, b: Four) -> Four {
        quarters!(i => vaddq_f32(a[i], b[i]))
    }
    #[inline(always)]
    fn sub(self, a: Four, b: Four) -> Four {
        quarters!(i => vsubq_f32(a[i], b[i]))
    }
    #[inline(always)]
    fn mul(self, a: Four, b: Four) -> Four {
        quarters!(i => vmulq_f32(a[i], b[i]))
    }
    #[inline(always)]
    fn div(self, a: Four, b: Four) -> Four {
        quarters!(i => vdivq_f32(a[i], b[i]))
    }
    // Comparisons instead of FMAX and FMIN: with a NaN the second operand is the result, as on the other instruction
    // sets.
    #[inline(always)]
    fn max(self, a: Four, b: Four) -> Four {
        quarters!(i => vbslq_f32(vcgtq_f32(a[i], b[i]), a[i], b[i]))
    }
    #[inline(always)]
    fn min(self, a: Four, b: Four) -> Four {
        quarters!(i => vbslq_f32(vcltq_f32(a[i], b[i]), a[i], b[i]))
    }
    #[inline(always)]
    fn mul_add(self, a: Four, b: Four, c: Four) -> Four {
        quarters!(i => vfmaq_f32(c[i], a[i], b[i]))
    }
    #[inline(always)]
    fn shift_to_exponent(self, a: Four) -> Four {
        quarters!(i => vreinterpretq_f32_u32(vshlq_n_u32::<23>(vreinterpretq_u32_f32(a[i]))))
    }
    #[inline(always)]
    fn zero_unless_ge(self, value: Four, x: Four, threshold: Four) -> Four {
        quarters!(i => {
            let kept = vandq_u32(vreinterpretq_u32_f32(value[i]), vcgeq_f32(x[i], threshold[i]));
            vreinterpretq_f32_u32(kept)
        })
    }
    #[inline(always)]
    fn in_range_or(self, value: Four, from: usize, to: usize, other: Four) -> Four {
        const LANE: [u32; LANES] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
        quarters!(i => {
            let lane = vld1q_u32(LANE.as_ptr().add(4 * i));
            let inside =
                vandq_u32(vcgeq_u32(lane, vdupq_n_u32(from as u32)), vcltq_u32(lane, vdupq_n_u32(to as u32)));
            vbslq_f32(inside, value[i], other[i])
        })
    }
    #[inline(always)]
    fn dot_pairs(self, acc: Four, w: [uint32x4_t; 4], x: u32) -> Four {
        let (x0, x1) = unsafe { (vdupq_n_f32(f32::from_bits(x << 16)), vdupq_n_f32(f32::from_bits(x & 0xffff_0000))) };
        quarters!(i => {
            let w0 = vreinterpretq_f32_u32(vshlq_n_u32::<16>(w[i]));
            let w1 = vreinterpretq_f32_u32(vandq_u32(w[i], vdupq_n_u32(0xffff_0000)));
            vfmaq_f32(vfmaq_f32(acc[i], w0, x0), w1, x1)
        })
    }
    #[inline(always)]
    fn round_to_f16(self, a: Four) -> Four {
        quarters!(i => widen_f16(narrow_f16(a[i])))
    }
    #[inline(always)]
    fn transpose(self, rows: &mut [Four; LANES]) {
        let from = *rows;
        for i in 0..4 {
            for j in 0..4 {
                let block = [from[4 * i][j], from[4 * i + 1][j], from[4 * i + 2][j], from[4 * i + 3][j]];
                let block = unsafe { transpose_4x4(block) };
                for (column, block) in block.into_iter().enumerate() {
                    rows[4 * j + column][i] = block;
                }
            }
        }
    }
    #[inline(always)]
    fn sum(self, v: Four) -> f32 {
        unsafe {
            let four = vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3]));
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
    }
    #[inline(always)]
    fn max_lane(self, v: Four) -> f32 {
        let larger = |a: float32x4_t, b: float32x4_t| unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) };
        let four = larger(larger(v[0], v[2]), larger(v[1], v[3]));
        unsafe {
            let (low, high) = (vget_low_f32(four), vget_high_f32(four));
            let two = vbsl_f32(vcgt_f32(low, high), low, high);
            let (a, b) = (vget_lane_f32::<0>(two), vget_lane_f32::<1>(two));
            if a > b { a } else { b }
        }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Four {
        quarters!(i => vld1q_f32(from.add(4 * i)))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: Four) {
        quarters!(i => vst1q_f32(to.add(4 * i), v[i]));
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Four {
        quarters!(i => vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from.add(4 * i)))))
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Four {
        quarters!(i => widen_f16(vld1_u16(from.add(4 * i))))
    }
    #[inline(always)]
    unsafe fn load_pairs(self, from: *const u32) -> [uint32x4_t; 4] {
        quarters!(i => vld1q_u32(from.add(4 * i)))
    }
    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        unsafe {
            asm!("prfm pldl1keep, [{}]", in(reg) address, options(readonly, nostack, preserves_flags));
        }
    }
    #[inline(always)]
    fn prefetch_far(self, address: *const u8) {
        unsafe {
            asm!("prfm pldl2keep, [{}]", in(reg) address, options(readonly, nostack, preserves_flags));
        }
    }
    #[inline(always)]
    fn splat_int(self, x: i32) -> [int32x4_t; 4] {
        unsafe { [vdupq_n_s32(x); 4] }
    }
    #[inline(always)]
    fn dot_short_pairs(self, acc: [int32x4_t; 4], a: [int32x4_t; 4], b: [int32x4_t; 4]) -> [int32x4_t; 4] {
        quarters!(i => {
            let (a, b) = (vreinterpretq_s16_s32(a[i]), vreinterpretq_s16_s32(b[i]));
            let (low, high) = (vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
            vaddq_s32(acc[i], vpaddq_s32(low, high))
        })
    }
    #[inline(always)]
    fn pack_shorts(self, low: [int32x4_t; 4], high: [int32x4_t; 4]) -> [int32x4_t; 4] {
        quarters!(i => vsliq_n_s32::<16>(low[i], high[i]))
    }
    #[inline(always)]
    fn prepare_scale(self, scale: [int32x4_t; 4]) -> [int32x4_t; 4] {
        scale
    }
    // One instruction instead of four.
    #[inline(always)]
    fn add_scaled(self, acc: [int32x4_t; 4], a: [int32x4_t; 4], scale: [int32x4_t; 4]) -> [int32x4_t; 4] {
        quarters!(i => vmlaq_s32(acc[i], a[i], scale[i]))
    }
    #[inline(always)]
    fn add_ints(self, a: [int32x4_t; 4], b: [int32x4_t; 4]) -> [int32x4_t; 4] {
        quarters!(i => vaddq_s32(a[i], b[i]))
    }
    #[inline(always)]
    fn to_floats(self, a: [int32x4_t; 4]) -> Four {
        quarters!(i => vcvtq_f32_s32(a[i]))
    }
    #[inline(always)]
    fn as_floats(self, a: [int32x4_t; 4]) -> Four {
        quarters!(i => vreinterpretq_f32_s32(a[i]))
    }
    #[inline(always)]
    fn as_ints(self, a: Four) -> [int32x4_t; 4] {
        quarters!(i => vreinterpretq_s32_f32(a[i]))
    }
    #[inline(always)]
    fn round_to_ints(self, a: Four) -> [int32x4_t; 4] {
        quarters!(i => vcvtnq_s32_f32(a[i]))
    }
    #[inline(always)]
    fn int_bits(self, a: [int32x4_t; 4], shift: u32, mask: u32) -> [int32x4_t; 4] {
        quarters!(i => {
            let shifted = vshlq_u32(vreinterpretq_u32_s32(a[i]), vdupq_n_s32(-(shift as i32)));
            vreinterpretq_s32_u32(vandq_u32(shifted, vdupq_n_u32(mask)))
        })
    }
    #[inline(always)]
    fn move_signed(self, a: [int32x4_t; 4], up: u32, down: u32) -> [int32x4_t; 4] {
        quarters!(i => vshlq_s32(vshlq_s32(a[i], vdupq_n_s32(up as i32)), vdupq_n_s32(-(down as i32))))
    }
    #[inline(always)]
    fn or_shifted(self, a: [int32x4_t; 4], b: [int32x4_t; 4], shift: u32) -> [int32x4_t; 4] {
        quarters!(i => vorrq_s32(a[i], vshlq_s32(b[i], vdupq_n_s32(shift as i32))))
    }
    #[inline(always)]
    fn byte_bits(self, b: [uint8x16_t; 4], shift: u32, mask: u8) -> [uint8x16_t; 4] {
        quarters!(i => vandq_u8(vshlq_u8(b[i], vdupq_n_s8(-(shift as i8))), vdupq_n_u8(mask)))
    }
    #[inline(always)]
    fn byte_bits_up(self, b: [uint8x16_t; 4], shift: u32, mask: u8) -> [uint8x16_t; 4] {
        quarters!(i => vandq_u8(vshlq_u8(b[i], vdupq_n_s8(shift as i8)), vdupq_n_u8(mask)))
    }
    #[inline(always)]
    fn move_bits(self, b: [uint8x16_t; 4], from: u32, to: u32, mask: u8) -> [uint8x16_t; 4] {
        quarters!(i => vandq_u8(vshlq_u8(b[i], vdupq_n_s8(to as i8 - from as i8)), vdupq_n_u8(mask)))
    }
    #[inline(always)]
    fn or_bytes(self, a: [uint8x16_t; 4], b: [uint8x16_t; 4]) -> [uint8x16_t; 4] {
        quarters!(i => vorrq_u8(a[i], b[i]))
    }
    #[inline(always)]
    fn table(self, values: &[i8; 16]) -> [uint8x16_t; 4] {
        unsafe { [vreinterpretq_u8_s8(vld1q_s8(values.as_ptr())); 4] }
    }
    #[inline(always)]
    fn lookup(self, table: [uint8x16_t; 4], index: [uint8x16_t; 4]) -> [uint8x16_t; 4] {
        quarters!(i => vqtbl1q_u8(table[i], index[i]))
    }
    #[inline(always)]
    fn dot_bytes(self, acc: [int32x4_t; 4], w: [uint8x16_t; 4], x: u32) -> [int32x4_t; 4] {
        self.dot_signed(acc, w, x)
    }
    #[inline(always)]
    fn prepare_signed(self, w: [uint8x16_t; 4]) -> [uint8x16_t; 4] {
        w
    }
    #[inline(always)]
    fn dot_signed(self, acc: [int32x4_t; 4], w: [uint8x16_t; 4], x: u32) -> [int32x4_t; 4] {
        let x = unsafe { vreinterpretq_s8_u32(vdupq_n_u32(x)) };
        if DOT {
            return quarters!(i => dot_bytes(acc[i], vreinterpretq_s8_u8(w[i]), x));
        }
        quarters!(i => {
            let w = vreinterpretq_s8_u8(w[i]);
            let low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)));
            let high = vpaddlq_s16(vmull_high_s8(w, x));
            vaddq_s32(acc[i], vpaddq_s32(low, high))
        })
    }
    #[inline(always)]
    fn pair_steps(self, steps: [[uint8x16_t; 4]; 2]) -> [[uint8x16_t; 4]; 2] {
        let [even, odd] = steps.map(|step| step.map(|quarter| unsafe { vreinterpretq_u32_u8(quarter) }));
        [0, 2].map(|q| unsafe {
            [
                vreinterpretq_u8_u32(vzip1q_u32(even[q], odd[q])),
                vreinterpretq_u8_u32(vzip2q_u32(even[q], odd[q])),
                vreinterpretq_u8_u32(vzip1q_u32(even[q + 1], odd[q + 1])),
                vreinterpretq_u8_u32(vzip2q_u32(even[q + 1], odd[q + 1])),
            ]
        })
    }
    #[inline(always)]
    fn dot_two_rows(self, acc: [[int32x4_t; 4]; 2], w: [[uint8x16_t; 4]; 2], x: [u64; 2]) -> [[int32x4_t; 4]; 2] {
        // The first row's words of both steps, and the second row's.
        let x = unsafe {
            let [even, odd] = [vcreate_u32(x[0]), vcreate_u32(x[1])];
            vreinterpretq_s8_u32(vzip1q_u32(vcombine_u32(even, even), vcombine_u32(odd, odd)))
        };
        [
            quarters!(i => multiply_bytes(acc[0][i], x, vreinterpretq_s8_u8(w[0][i]))),
            quarters!(i => multiply_bytes(acc[1][i], x, vreinterpretq_s8_u8(w[1][i]))),
        ]
    }
    #[inline(always)]
    fn splat_two_rows(self, x: [u32; 2]) -> [int32x4_t; 4] {
        unsafe { [vreinterpretq_s32_u32(vcombine_u32(vdup_n_u32(x[0]), vdup_n_u32(x[1]))); 4] }
    }
    #[inline(always)]
    fn pair_rows(self, [a, b]: [Four; 2]) -> [Four; 2] {
        unsafe {
            let [[p0, p1], [p2, p3]] = [zip_halves(a[0], b[0]), zip_halves(a[1], b[1])];
            let [[p4, p5], [p6, p7]] = [zip_halves(a[2], b[2]), zip_halves(a[3], b[3])];
            [[p0, p1, p2, p3], [p4, p5, p6, p7]]
        }
    }
    #[inline(always)]
    fn rows_of_pair(self, [a, b]: [Four; 2]) -> [Four; 2] {
        unsafe {
            let [[x0, y0], [x1, y1]] = [zip_halves(a[0], a[1]), zip_halves(a[2], a[3])];
            let [[x2, y2], [x3, y3]] = [zip_halves(b[0], b[1]), zip_halves(b[2], b[3])];
            [[x0, x1, x2, x3], [y0, y1, y2, y3]]
        }
    }
    #[inline(always)]
    unsafe fn store_ints(self, to: *mut i32, a: [int32x4_t; 4]) {
        quarters!(i => vst1q_s32(to.add(4 * i), a[i]));
    }
    #[inline(always)]
    unsafe fn load_ints(self, from: *const u8) -> [int32x4_t; 4] {
        quarters!(i => vreinterpretq_s32_u8(vld1q_u8(from.add(16 * i))))
    }
    #[inline(always)]
    unsafe fn load_u8(self, from: *const u8) -> [int32x4_t; 4] {
        let wide = unsafe {
            let bytes = vld1q_u8(from);
            [vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes))]
        };
        quarters!(i => {
            let half = wide[i / 2];
            let quarter = if i % 2 == 0 { vget_low_u16(half) } else { vget_high_u16(half) };
            vreinterpretq_s32_u32(vmovl_u16(quarter))
        })
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const u8) -> [int32x4_t; 4] {
        let wide = unsafe {
            let bytes = vld1q_s8(from.cast());
            [vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes))]
        };
        quarters!(i => {
            let half = wide[i / 2];
            vmovl_s16(if i % 2 == 0 { vget_low_s16(half) } else { vget_high_s16(half) })
        })
    }
    #[inline(always)]
    unsafe fn load_bytes(self, from: *const u8) -> [uint8x16_t; 4] {
        quarters!(i => vld1q_u8(from.add(16 * i)))
    }
    #[inline(always)]
    unsafe fn store_bytes(self, to: *mut u8, a: [uint8x16_t; 4]) {
        quarters!(i => vst1q_u8(to.add(16 * i), a[i]));
    }
}
