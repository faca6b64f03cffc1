//! How the KV cache's elements and codes become float32.

use crate::cpu::kv_codes::LARGEST_NIBBLE;
use crate::cpu::simd::Simd;
use crate::{CodeType, KvDType};

/// A type of codes of one byte.
pub(super) trait ByteCode {
    /// The codes in byte `index` of each lane, as float32.
    fn widen<S: Simd>(simd: S, four: S::Ints, index: u32) -> S::V;
}

/// A type of codes that are integers.
pub(super) trait IntegerCode {
    /// Codes in a byte. The parts of four bytes are used like four codes each.
    const PER_BYTE: usize;
    /// What part `part` of each byte is larger than its code.
    const OFFSET: i32;
    /// Part `part` of each byte, as a byte with a sign.
    fn part<S: Simd>(simd: S, bytes: S::Ints, part: usize) -> S::Ints;
}

pub(super) struct Int8Code;
impl ByteCode for Int8Code {
    #[inline(always)]
    fn widen<S: Simd>(simd: S, four: S::Ints, index: u32) -> S::V {
        simd.to_floats(simd.move_signed(four, 24 - 8 * index, 24))
    }
}
impl IntegerCode for Int8Code {
    const PER_BYTE: usize = 1;
    const OFFSET: i32 = 0;
    #[inline(always)]
    fn part<S: Simd>(_: S, bytes: S::Ints, _: usize) -> S::Ints {
        bytes
    }
}

pub(super) struct Fp8Code;
impl ByteCode for Fp8Code {
    #[inline(always)]
    fn widen<S: Simd>(simd: S, four: S::Ints, index: u32) -> S::V {
        // The sign, exponent and mantissa go to their places in a float32, whose exponents count from 127 and not 7.
        let bits = simd.int_bits(simd.move_signed(four, 24 - 8 * index, 4), 0, 0x87f0_0000);
        simd.mul(simd.as_floats(bits), simd.splat(f32::from_bits((127 + 127 - 7) << 23)))
    }
}

pub(super) struct Int4Code;
impl IntegerCode for Int4Code {
    const PER_BYTE: usize = 2;
    const OFFSET: i32 = LARGEST_NIBBLE;
    #[inline(always)]
    fn part<S: Simd>(simd: S, bytes: S::Ints, part: usize) -> S::Ints {
        // Twice the 4 bits.
        const MASK: u32 = 0x1e1e_1e1e;
        if part == 0 { simd.int_bits(simd.move_signed(bytes, 1, 0), 0, MASK) } else { simd.int_bits(bytes, 3, MASK) }
    }
}

/// The types of codes that may be multiplied as integers of 16 bits.
#[derive(Clone, Copy)]
pub(super) enum ShortCodes {
    Int8,
    Int4,
}

impl ShortCodes {
    /// Those of a cache, if `S` multiplies them so.
    #[inline(always)]
    pub(super) fn of<S: Simd>(dtype: KvDType) -> Option<Self> {
        match dtype {
            KvDType::Codes(CodeType::Int8) if S::SHORT_DOTS => Some(Self::Int8),
            KvDType::Codes(CodeType::Int4) => Some(Self::Int4),
            KvDType::Codes(CodeType::Int8 | CodeType::Fp8) | KvDType::Plain(_) => None,
        }
    }

    /// See [`IntegerCode::OFFSET`].
    #[inline(always)]
    pub(super) fn offset(self) -> i32 {
        match self {
            Self::Int8 => Int8Code::OFFSET,
            Self::Int4 => Int4Code::OFFSET,
        }
    }
}

/// Element type of the KV cache, if each element is stored by itself.
pub(super) trait CacheElement {
    const BYTES: usize;
    /// # Safety
    /// Sixteen elements can be read at `at`.
    unsafe fn widen<S: Simd>(simd: S, at: *const u8) -> S::V;
}

pub(super) struct CacheF32;
impl CacheElement for CacheF32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn widen<S: Simd>(simd: S, at: *const u8) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { simd.load(at.cast()) }
    }
}

pub(super) struct CacheF16;
impl CacheElement for CacheF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn widen<S: Simd>(simd: S, at: *const u8) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { simd.load_f16(at.cast()) }
    }
}

pub(super) struct CacheBf16;
impl CacheElement for CacheBf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn widen<S: Simd>(simd: S, at: *const u8) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { simd.load_bf16(at.cast()) }
    }
}
