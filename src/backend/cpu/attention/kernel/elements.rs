//! How the KV cache's elements and codes become float32.

use crate::cpu::simd::Simd;

/// A type of codes.
pub(super) trait Code: Copy {
    const IS_INTEGER: bool;
    /// The codes in byte `index` of each lane, as float32.
    fn widen<S: Simd>(simd: S, four: S::Ints, index: u32) -> S::V;
}

#[derive(Clone, Copy)]
pub(super) struct Int8Code;
impl Code for Int8Code {
    const IS_INTEGER: bool = true;
    #[inline(always)]
    fn widen<S: Simd>(simd: S, four: S::Ints, index: u32) -> S::V {
        simd.to_floats(simd.move_signed(four, 24 - 8 * index, 24))
    }
}

#[derive(Clone, Copy)]
pub(super) struct Fp8Code;
impl Code for Fp8Code {
    const IS_INTEGER: bool = false;
    #[inline(always)]
    fn widen<S: Simd>(simd: S, four: S::Ints, index: u32) -> S::V {
        // The sign, exponent and mantissa go to their places in a float32, whose exponents count from 127 and not 7.
        let bits = simd.int_bits(simd.move_signed(four, 24 - 8 * index, 4), 0, 0x87f0_0000);
        simd.mul(simd.as_floats(bits), simd.splat(f32::from_bits((127 + 127 - 7) << 23)))
    }
}

/// Element type of the KV cache, if each element is stored by itself.
pub(super) trait CacheElement: Copy {
    const BYTES: usize;
    /// # Safety
    /// Sixteen elements can be read at `at`.
    unsafe fn widen<S: Simd>(self, simd: S, at: *const u8) -> S::V;
}

#[derive(Clone, Copy)]
pub(super) struct CacheF32;
impl CacheElement for CacheF32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn widen<S: Simd>(self, simd: S, at: *const u8) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { simd.load(at.cast()) }
    }
}

#[derive(Clone, Copy)]
pub(super) struct CacheF16;
impl CacheElement for CacheF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn widen<S: Simd>(self, simd: S, at: *const u8) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { simd.load_f16(at.cast()) }
    }
}

#[derive(Clone, Copy)]
pub(super) struct CacheBf16;
impl CacheElement for CacheBf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn widen<S: Simd>(self, simd: S, at: *const u8) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { simd.load_bf16(at.cast()) }
    }
}
