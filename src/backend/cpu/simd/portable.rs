//! Sixteen lanes as an array: no intrinsics, no fused multiply-add.

use super::{LANES, Simd};

#[derive(Clone, Copy)]
pub(in super::super) struct Portable;

#[inline(always)]
fn zip(a: [f32; LANES], b: [f32; LANES], op: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    let mut out = a;
    for i in 0..LANES {
        out[i] = op(a[i], b[i]);
    }
    out
}

/// Exact, subnormals included: the exponent is moved into float32's range by a multiplication.
#[inline(always)]
fn widen_f16(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff);
    let finite = f32::from_bits(magnitude << 13) * f32::from_bits((254 - 15) << 23);
    let special = f32::from_bits((magnitude << 13) | 0x7f80_0000);
    let value = if magnitude >= 0x7c00 { special } else { finite };
    f32::from_bits(value.to_bits() | sign)
}

impl Simd for Portable {
    type V = [f32; LANES];
    type Pairs = [u32; LANES];

    const TILE_ROWS: usize = 2;
    const TILE_PANELS: usize = 1;
    const QUERIES: usize = 2;
    const ROW_PANELS: usize = 1;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        let mut out = c;
        for i in 0..LANES {
            out[i] += a[i] * b[i];
        }
        out
    }
    #[inline(always)]
    fn shift_to_exponent(self, a: Self::V) -> Self::V {
        a.map(|a| f32::from_bits(a.to_bits() << 23))
    }
    #[inline(always)]
    fn zero_unless_ge(self, value: Self::V, x: Self::V, threshold: Self::V) -> Self::V {
        let mut out = value;
        for i in 0..LANES {
            out[i] = if x[i] >= threshold[i] { value[i] } else { 0.0 };
        }
        out
    }
    #[inline(always)]
    fn in_range_or(self, value: Self::V, from: usize, to: usize, other: Self::V) -> Self::V {
        let mut out = value;
        for i in 0..LANES {
            out[i] = if (from..to).contains(&i) { value[i] } else { other[i] };
        }
        out
    }
    #[inline(always)]
    fn dot_pairs(self, acc: Self::V, w: Self::Pairs, x: u32) -> Self::V {
        let (x0, x1) = (f32::from_bits(x << 16), f32::from_bits(x & 0xffff_0000));
        let mut out = acc;
        for i in 0..LANES {
            out[i] += f32::from_bits(w[i] << 16) * x0;
        }
        for i in 0..LANES {
            out[i] += f32::from_bits(w[i] & 0xffff_0000) * x1;
        }
        out
    }
    #[inline(always)]
    fn round_to_f16(self, a: Self::V) -> Self::V {
        a.map(|a| half::f16::from_f32(a).to_f32())
    }
    #[inline(always)]
    fn transpose(self, rows: &mut [Self::V; LANES]) {
        let from = *rows;
        for i in 0..LANES {
            for j in 0..LANES {
                rows[i][j] = from[j][i];
            }
        }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::V {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<Self::V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: Self::V) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<Self::V>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Self::V {
        // SAFETY: the caller's promise.
        let bits = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Self::V {
        // SAFETY: the caller's promise.
        let bits = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(widen_f16)
    }
    #[inline(always)]
    unsafe fn load_pairs(self, from: *const u32) -> Self::Pairs {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<Self::Pairs>().read_unaligned() }
    }
    #[inline(always)]
    fn prefetch(self, _address: *const u8) {}
}
