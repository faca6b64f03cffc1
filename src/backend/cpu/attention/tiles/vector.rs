//! Vector functions of the softmax.

use crate::cpu::simd::LANES;
use std::arch::x86_64::*;

/// `2^x`; 0 for -∞. `polynomial` is `2^x` on 0..1, highest power first.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn power_of_2<const N: usize>(x: __m512, polynomial: [f32; N]) -> __m512 {
    const FLOOR: i32 = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    let r = _mm512_reduce_ps::<FLOOR>(x);
    let mut p = _mm512_set1_ps(polynomial[0]);
    for c in &polynomial[1..] {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(*c));
    }
    _mm512_scalef_ps(p, x)
}

/// `2^x` to about 2 ulp: the best polynomial of the 5th degree that is 1 at 0 has an error of 8.3e-8.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) fn exp2(x: __m512) -> __m512 {
    power_of_2(x, [0.001_867_133_3, 0.009_017_023, 0.055_799_916, 0.240_164_44, 0.693_151_3, 1.0])
}

/// `2^x` for a result that is then rounded to bfloat16: the best polynomial of the 3rd degree has an error of 8.6e-5, a
/// twentieth of the largest rounding error.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) fn rough_exp2(x: __m512) -> __m512 {
    power_of_2(x, [0.077_067_12, 0.227_644_9, 0.695_116_8, 1.0])
}

/// The factor on a state whose maximum changes from `old` to `new`. It is exactly 1 if the maximum does not change, and
/// 0 if the state was empty (`old` is `-∞`).
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) fn factor(old: __m512, new: __m512) -> __m512 {
    // `max` returns the second operand if the first one is ∞ - ∞.
    exp2(_mm512_max_ps(_mm512_sub_ps(old, new), _mm512_set1_ps(-1000.0)))
}

/// The numbers of a vector.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn lanes(vector: __m512) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    // SAFETY: there is room for sixteen numbers.
    unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), vector) };
    lanes
}

/// A vector whose lane `i` is the largest of `rows[i]`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn max_of_each(rows: &[__m512; LANES]) -> __m512 {
    // Each step halves each row and puts two rows into one register.
    let halves = |a, b| _mm512_max_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
    let quarters = |a, b| _mm512_max_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
    let twos = |a, b| _mm512_max_ps(_mm512_shuffle_ps::<0x44>(a, b), _mm512_shuffle_ps::<0xee>(a, b));
    let ones = |a, b| _mm512_max_ps(_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xdd>(a, b));
    let four = |i: usize| quarters(halves(rows[i], rows[i + 4]), halves(rows[i + 8], rows[i + 12]));
    ones(twos(four(0), four(1)), twos(four(2), four(3)))
}
