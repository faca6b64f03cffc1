//! Sixteen lanes as an array: no intrinsics, no fused multiply-add.

use super::{LANES, Simd, SimdKernel};

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
    type Ints = [i32; LANES];
    type Bytes = [[u8; 4]; LANES];

    fn call<K: SimdKernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    const TILE_ROWS: usize = 2;
    const TILE_PANELS: usize = 1;
    const QUERIES: usize = 2;
    const ROW_PANELS: usize = 1;
    const QUANT_ROWS: usize = 2;
    const ADDS_128: bool = false;
    const SHORT_DOTS: bool = false;

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
    #[inline(always)]
    fn fused(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        let mut out = c;
        for i in 0..LANES {
            out[i] = a[i].mul_add(b[i], c[i]);
        }
        out
    }
    #[inline(always)]
    fn splat_int(self, x: i32) -> Self::Ints {
        [x; LANES]
    }
    #[inline(always)]
    fn dot_short_pairs(self, acc: Self::Ints, a: Self::Ints, b: Self::Ints) -> Self::Ints {
        let mut out = acc;
        for i in 0..LANES {
            out[i] += i32::from(a[i] as i16) * i32::from(b[i] as i16) + (a[i] >> 16) * (b[i] >> 16);
        }
        out
    }
    #[inline(always)]
    fn prepare_scale(self, scale: Self::Ints) -> Self::Ints {
        scale
    }
    #[inline(always)]
    fn add_scaled(self, acc: Self::Ints, a: Self::Ints, scale: Self::Ints) -> Self::Ints {
        let mut out = acc;
        for i in 0..LANES {
            out[i] += a[i] * scale[i];
        }
        out
    }
    #[inline(always)]
    fn add_ints(self, a: Self::Ints, b: Self::Ints) -> Self::Ints {
        let mut out = a;
        for i in 0..LANES {
            out[i] += b[i];
        }
        out
    }
    #[inline(always)]
    fn to_floats(self, a: Self::Ints) -> Self::V {
        a.map(|a| a as f32)
    }
    #[inline(always)]
    fn as_floats(self, a: Self::Ints) -> Self::V {
        a.map(|a| f32::from_bits(a as u32))
    }
    #[inline(always)]
    fn as_ints(self, a: Self::V) -> Self::Ints {
        a.map(|a| a.to_bits() as i32)
    }
    #[inline(always)]
    fn round_to_ints(self, a: Self::V) -> Self::Ints {
        a.map(|a| a.round_ties_even() as i32)
    }
    #[inline(always)]
    fn int_bits(self, a: Self::Ints, shift: u32, mask: u32) -> Self::Ints {
        a.map(|a| ((a as u32 >> shift) & mask) as i32)
    }
    #[inline(always)]
    fn move_signed(self, a: Self::Ints, up: u32, down: u32) -> Self::Ints {
        a.map(|a| a << up >> down)
    }
    #[inline(always)]
    fn or_shifted(self, a: Self::Ints, b: Self::Ints, shift: u32) -> Self::Ints {
        let mut out = a;
        for i in 0..LANES {
            out[i] |= b[i] << shift;
        }
        out
    }
    #[inline(always)]
    fn byte_bits(self, b: Self::Bytes, shift: u32, mask: u8) -> Self::Bytes {
        b.map(|word| word.map(|byte| byte >> shift & mask))
    }
    #[inline(always)]
    fn byte_bits_up(self, b: Self::Bytes, shift: u32, mask: u8) -> Self::Bytes {
        b.map(|word| word.map(|byte| byte << shift & mask))
    }
    #[inline(always)]
    fn or_bytes(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes {
        let mut out = a;
        for i in 0..LANES {
            for j in 0..4 {
                out[i][j] |= b[i][j];
            }
        }
        out
    }
    #[inline(always)]
    fn table(self, values: &[i8; 16]) -> Self::Bytes {
        let mut out = [[0; 4]; LANES];
        for (i, value) in values.iter().enumerate() {
            out[i / 4][i % 4] = *value as u8;
        }
        out
    }
    #[inline(always)]
    fn lookup(self, table: Self::Bytes, index: Self::Bytes) -> Self::Bytes {
        index.map(|word| word.map(|byte| table[usize::from(byte / 4 % 4)][usize::from(byte % 4)]))
    }
    #[inline(always)]
    fn dot_bytes(self, acc: Self::Ints, w: Self::Bytes, x: u32) -> Self::Ints {
        self.dot_signed(acc, w, x)
    }
    #[inline(always)]
    fn prepare_signed(self, w: Self::Bytes) -> Self::Bytes {
        w
    }
    #[inline(always)]
    fn dot_signed(self, acc: Self::Ints, w: Self::Bytes, x: u32) -> Self::Ints {
        let (mut out, x) = (acc, x.to_le_bytes());
        for i in 0..LANES {
            for j in 0..4 {
                out[i] += i32::from(w[i][j] as i8) * i32::from(x[j] as i8);
            }
        }
        out
    }
    #[inline(always)]
    unsafe fn store_ints(self, to: *mut i32, a: Self::Ints) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<Self::Ints>().write_unaligned(a) }
    }
    #[inline(always)]
    unsafe fn load_ints(self, from: *const u8) -> Self::Ints {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<Self::Ints>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_u8(self, from: *const u8) -> Self::Ints {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<[u8; LANES]>().read_unaligned() }.map(i32::from)
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const u8) -> Self::Ints {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<[i8; LANES]>().read_unaligned() }.map(i32::from)
    }
    #[inline(always)]
    unsafe fn load_bytes(self, from: *const u8) -> Self::Bytes {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<Self::Bytes>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_bytes(self, to: *mut u8, a: Self::Bytes) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<Self::Bytes>().write_unaligned(a) }
    }
}
