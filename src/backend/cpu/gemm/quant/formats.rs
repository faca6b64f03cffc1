//! How the codes and scales of each format are read from a panel. See `pack::quant` for the places.

use super::super::super::simd::Simd;
use crate::quant::{IQ4_VALUES, MAX_BLOCK_WEIGHTS, MXFP4_VALUES, QuantFormat};

/// A format as the kernel reads it: in parts of 32 weights. A weight is `factor · scale · (code - bias)`, where formats
/// with small blocks have no scale, and some have a minimum.
pub(super) trait PanelFormat: Copy {
    const FORMAT: QuantFormat;
    /// Weight blocks of a chunk.
    const BLOCKS: usize;
    /// The weight blocks have 32 weights and are one group, not 256. The input is quantised in such blocks too.
    const IS_SMALL: bool;
    /// Weights that share a scale: 16 or 32.
    const GROUP: usize = 32;
    /// What is subtracted from codes: 0 or a power of two.
    const BIAS: i32 = 0;
    /// Weights have a minimum beside the scale.
    const HAS_MINIMUM: bool = false;
    /// Codes are signed bytes, prepared for [`Simd::dot_signed`]. Otherwise they go from 0 to `LARGEST`.
    const IS_SIGNED: bool = false;
    /// The largest code, if codes have no sign.
    const LARGEST: u8 = 15;
    /// The sums of products of a group fit into 16 bits, because the codes of the input are
    /// [bounded](super::super::quant_input). So do the scales. Then products of both are added up as integers.
    const SUMS_FIT_SHORTS: bool = false;
    /// Chunks are in a cache, and their codes need no decoding. Those of each two steps are in the order of
    /// [`Simd::pair_steps`] where [`Simd::PAIRS_ROWS`] holds. Other chunks come from memory.
    const IS_UNPACKED: bool = false;

    /// The factors of a weight block of the chunk. The first one is for the sum of products. The second one is for the
    /// sum that [`PanelFormat::HAS_MINIMUM`] adds: minus the sum of the input in a small block, and the sum of minima
    /// times input in a large one.
    ///
    /// # Safety
    /// This and the following functions: `chunk` is a chunk of a panel in this format.
    unsafe fn factors<S: Simd>(self, simd: S, chunk: *const u8, block: usize) -> [S::V; 2];
    /// The scale of a group of a chunk with a large block. With [`PanelFormat::SUMS_FIT_SHORTS`] it is an integer for
    /// [`Simd::add_scaled`], otherwise the bits of a float32.
    #[inline(always)]
    unsafe fn scale<S: Simd>(self, simd: S, _chunk: *const u8, _group: usize) -> S::Ints {
        simd.splat_int(0)
    }
    /// The minima of groups `2 * pair` and `2 * pair + 1` of a chunk with a large block, in the halves of each lane.
    #[inline(always)]
    unsafe fn minima<S: Simd>(self, simd: S, _chunk: *const u8, _pair: usize) -> S::Ints {
        simd.splat_int(0)
    }
    /// The codes of four weights of each column: `STEP`, below 8, of a part.
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes;
}

/// Whether products are added up in integers of 16 bits.
pub(super) const fn adds_in_shorts<S: Simd, F: PanelFormat>() -> bool {
    S::SUMS_IN_SHORTS && !F::IS_SIGNED
}

/// Whether the sums of whole groups are, and are multiplied with scales as they are. Then scales are in both halves of
/// a lane. Sums may wrap around on the way: with the bias of the codes subtracted, the sum of a group fits.
pub(super) const fn scales_shorts<S: Simd, F: PanelFormat>() -> bool {
    adds_in_shorts::<S, F>() && F::SUMS_FIT_SHORTS
}

/// Weights of a column in a part.
pub(super) const PART: usize = 32;

/// Parts of a chunk.
pub(super) const fn num_parts<F: PanelFormat>() -> usize {
    F::BLOCKS * parts_of_block::<F>()
}

pub(super) const fn parts_of_block<F: PanelFormat>() -> usize {
    if F::IS_SMALL { 1 } else { MAX_BLOCK_WEIGHTS / PART }
}

/// The codes of 32 weights whose nibbles are in four registers at `at`.
#[inline(always)]
unsafe fn nibbles_of_32<S: Simd, const STEP: usize>(simd: S, at: *const u8) -> S::Bytes {
    // SAFETY: the caller's promise.
    simd.byte_bits(unsafe { simd.load_bytes(at.add(STEP % 4 * 64)) }, STEP as u32 / 4 * 4, 15)
}

/// The codes of a part of which two share eight registers: its nibbles are the low or the high ones.
#[inline(always)]
unsafe fn nibbles_of_64<S: Simd, const STEP: usize>(simd: S, at: *const u8, part: usize) -> S::Bytes {
    // SAFETY: the caller's promise.
    simd.move_bits(unsafe { simd.load_bytes(at.add(part / 2 * 512 + STEP * 64)) }, part as u32 % 2 * 4, 0, 15)
}

/// Adds a bit to codes of `width` bits: bit `bit` of each byte of `bits`.
#[inline(always)]
fn with_bit<S: Simd>(simd: S, codes: S::Bytes, width: u32, bits: S::Bytes, bit: u32) -> S::Bytes {
    simd.or_bytes(codes, simd.byte_bits_up(simd.byte_bits(bits, bit, 1), width, 1 << width))
}

/// The values of a table at the nibbles, as [`PanelFormat::codes`].
#[inline(always)]
fn values<S: Simd>(simd: S, values: &[i8; 16], nibbles: S::Bytes) -> S::Bytes {
    simd.prepare_signed(simd.lookup(simd.table(values), nibbles))
}

/// A float16 of each column.
#[inline(always)]
unsafe fn halves<S: Simd>(simd: S, at: *const u8) -> S::V {
    // SAFETY: the caller's promise.
    unsafe { simd.load_f16(at.cast()) }
}

/// The same without a second factor.
#[inline(always)]
unsafe fn one_factor<S: Simd>(simd: S, at: *const u8) -> [S::V; 2] {
    // SAFETY: the caller's promise.
    [unsafe { halves(simd, at) }, simd.splat(0.0)]
}

/// The same, and minus the float16 32 bytes behind it.
#[inline(always)]
unsafe fn two_factors<S: Simd>(simd: S, at: *const u8) -> [S::V; 2] {
    // SAFETY: the caller's promise.
    unsafe { [halves(simd, at), simd.sub(simd.splat(0.0), halves(simd, at.add(32)))] }
}

/// The scales of a group of Q4_K and Q5_K, or with `shift` 4 and the next words its minima (`get_scale_min_k4` of
/// ggml). They are 6 bits each.
#[inline(always)]
unsafe fn k_scale<S: Simd>(simd: S, words: *const u8, last: *const u8, shift: u32, group: usize) -> S::Ints {
    let byte = group as u32 % 4 * 8;
    // SAFETY: the caller's promise.
    let (words, last) = unsafe { (simd.load_ints(words), simd.load_ints(last)) };
    match group {
        0..4 => simd.int_bits(words, byte, 63),
        _ => simd.or_shifted(simd.int_bits(last, byte + shift, 15), simd.int_bits(words, byte + 6, 3), 4),
    }
}

macro_rules! format {
    ($name:ident: $($rest:tt)*) => {
        #[derive(Clone, Copy)]
        pub(super) struct $name;

        // SAFETY (every block below): the caller's promise. The places are those of `PanelLayout::of`.
        impl PanelFormat for $name {
            $($rest)*
        }
    };
}

/// `factors` of formats with small blocks and a float16 for each.
macro_rules! half_factor {
    () => {
        #[inline(always)]
        unsafe fn factors<S: Simd>(self, simd: S, chunk: *const u8, block: usize) -> [S::V; 2] {
            unsafe { one_factor(simd, chunk.add(32 * block)) }
        }
    };
}

/// `factors` of formats with two float16 at the start of a chunk.
macro_rules! two_half_factors {
    ($at:literal) => {
        #[inline(always)]
        unsafe fn factors<S: Simd>(self, simd: S, chunk: *const u8, _: usize) -> [S::V; 2] {
            unsafe { two_factors(simd, chunk.add($at)) }
        }
    };
}

/// `factors` and `minima` of Q4_K and Q5_K.
macro_rules! k_minima {
    () => {
        two_half_factors!(0);
        #[inline(always)]
        unsafe fn minima<S: Simd>(self, simd: S, chunk: *const u8, pair: usize) -> S::Ints {
            unsafe {
                let even = k_scale(simd, chunk.add(128), chunk.add(192), 4, 2 * pair);
                simd.pack_shorts(even, k_scale(simd, chunk.add(128), chunk.add(192), 4, 2 * pair + 1))
            }
        }
    };
}

/// `factors` of formats with large blocks and a float16 for the chunk.
macro_rules! chunk_factor {
    () => {
        #[inline(always)]
        unsafe fn factors<S: Simd>(self, simd: S, chunk: *const u8, _: usize) -> [S::V; 2] {
            unsafe { one_factor(simd, chunk) }
        }
    };
}

format!(Q4_0:
    const FORMAT: QuantFormat = QuantFormat::Q4_0;
    const BLOCKS: usize = 2;
    const IS_SMALL: bool = true;
    const BIAS: i32 = 8;
    half_factor!();
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        unsafe { nibbles_of_32::<S, STEP>(simd, chunk.add(64 + 256 * part)) }
    }
);

format!(Q4_1:
    const FORMAT: QuantFormat = QuantFormat::Q4_1;
    const BLOCKS: usize = 1;
    const IS_SMALL: bool = true;
    const HAS_MINIMUM: bool = true;
    two_half_factors!(0);
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, _: usize) -> S::Bytes {
        unsafe { nibbles_of_32::<S, STEP>(simd, chunk.add(64)) }
    }
);

format!(Q5_0:
    const FORMAT: QuantFormat = QuantFormat::Q5_0;
    const BLOCKS: usize = 2;
    const LARGEST: u8 = 31;
    const IS_SMALL: bool = true;
    const BIAS: i32 = 16;
    half_factor!();
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        unsafe {
            let codes = nibbles_of_32::<S, STEP>(simd, chunk.add(192 + 256 * part));
            with_bit(simd, codes, 4, simd.load_bytes(chunk.add(64 + 64 * part)), STEP as u32)
        }
    }
);

format!(Q5_1:
    const FORMAT: QuantFormat = QuantFormat::Q5_1;
    const BLOCKS: usize = 1;
    const LARGEST: u8 = 31;
    const IS_SMALL: bool = true;
    const HAS_MINIMUM: bool = true;
    two_half_factors!(0);
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, _: usize) -> S::Bytes {
        unsafe {
            let codes = nibbles_of_32::<S, STEP>(simd, chunk.add(128));
            with_bit(simd, codes, 4, simd.load_bytes(chunk.add(64)), STEP as u32)
        }
    }
);

format!(Q8_0:
    const FORMAT: QuantFormat = QuantFormat::Q8_0;
    const BLOCKS: usize = 2;
    const IS_SMALL: bool = true;
    const IS_SIGNED: bool = true;
    half_factor!();
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        simd.prepare_signed(unsafe { simd.load_bytes(chunk.add(64 + 512 * part + 64 * STEP)) })
    }
);

format!(Q2K:
    const FORMAT: QuantFormat = QuantFormat::Q2_K;
    const BLOCKS: usize = 1;
    const LARGEST: u8 = 3;
    const IS_SMALL: bool = false;
    const GROUP: usize = 16;
    const HAS_MINIMUM: bool = true;
    const SUMS_FIT_SHORTS: bool = true;
    two_half_factors!(0);
    #[inline(always)]
    unsafe fn scale<S: Simd>(self, simd: S, chunk: *const u8, group: usize) -> S::Ints {
        simd.int_bits(unsafe { simd.load_u8(chunk.add(64 + 16 * group)) }, 0, 15)
    }
    #[inline(always)]
    unsafe fn minima<S: Simd>(self, simd: S, chunk: *const u8, pair: usize) -> S::Ints {
        let [even, odd] = unsafe { [simd.load_u8(chunk.add(64 + 32 * pair)), simd.load_u8(chunk.add(80 + 32 * pair))] };
        simd.pack_shorts(simd.int_bits(even, 4, 15), simd.int_bits(odd, 4, 15))
    }
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        let bytes = unsafe { simd.load_bytes(chunk.add(320 + part / 4 * 512 + STEP * 64)) };
        simd.move_bits(bytes, part as u32 % 4 * 2, 0, 3)
    }
);

format!(Q3K:
    const FORMAT: QuantFormat = QuantFormat::Q3_K;
    const BLOCKS: usize = 1;
    const LARGEST: u8 = 7;
    const IS_SMALL: bool = false;
    const GROUP: usize = 16;
    const BIAS: i32 = 4;
    const SUMS_FIT_SHORTS: bool = true;
    chunk_factor!();
    #[inline(always)]
    unsafe fn scale<S: Simd>(self, simd: S, chunk: *const u8, group: usize) -> S::Ints {
        let (byte, four) = (group as u32 % 4 * 8, group as u32 / 4);
        let (low, high) =
            unsafe { (simd.load_ints(chunk.add(64 + group / 4 % 2 * 64)), simd.load_ints(chunk.add(192))) };
        let low = simd.int_bits(low, byte + four / 2 * 4, 15);
        let scales = simd.or_shifted(low, simd.int_bits(high, byte + 2 * four, 3), 4);
        simd.prepare_scale(simd.dot_shorts(simd.splat_int(-32), scales, 1))
    }
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        let (low, high) = unsafe {
            let low = simd.load_bytes(chunk.add(768 + part / 4 * 512 + STEP * 64));
            (low, simd.load_bytes(chunk.add(256 + STEP * 64)))
        };
        simd.or_bytes(simd.move_bits(low, part as u32 % 4 * 2, 0, 3), simd.move_bits(high, part as u32, 2, 4))
    }
);

format!(Q4K:
    const FORMAT: QuantFormat = QuantFormat::Q4_K;
    const BLOCKS: usize = 1;
    const IS_SMALL: bool = false;
    const HAS_MINIMUM: bool = true;
    const SUMS_FIT_SHORTS: bool = true;
    k_minima!();
    #[inline(always)]
    unsafe fn scale<S: Simd>(self, simd: S, chunk: *const u8, group: usize) -> S::Ints {
        unsafe { k_scale(simd, chunk.add(64), chunk.add(192), 0, group) }
    }
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        unsafe { nibbles_of_64::<S, STEP>(simd, chunk.add(256), part) }
    }
);

format!(Q5K:
    const FORMAT: QuantFormat = QuantFormat::Q5_K;
    const BLOCKS: usize = 1;
    const LARGEST: u8 = 31;
    const IS_SMALL: bool = false;
    const HAS_MINIMUM: bool = true;
    k_minima!();
    #[inline(always)]
    unsafe fn scale<S: Simd>(self, simd: S, chunk: *const u8, group: usize) -> S::Ints {
        simd.as_ints(simd.to_floats(unsafe { k_scale(simd, chunk.add(64), chunk.add(192), 0, group) }))
    }
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        unsafe {
            let (low, high) =
                (nibbles_of_64::<S, STEP>(simd, chunk.add(768), part), simd.load_bytes(chunk.add(256 + STEP * 64)));
            simd.or_bytes(low, simd.move_bits(high, part as u32, 4, 16))
        }
    }
);

format!(Q6K:
    const FORMAT: QuantFormat = QuantFormat::Q6_K;
    const BLOCKS: usize = 1;
    const LARGEST: u8 = 63;
    const IS_SMALL: bool = false;
    const GROUP: usize = 16;
    const BIAS: i32 = 32;
    const SUMS_FIT_SHORTS: bool = true;
    chunk_factor!();
    #[inline(always)]
    unsafe fn scale<S: Simd>(self, simd: S, chunk: *const u8, group: usize) -> S::Ints {
        simd.prepare_scale(unsafe { simd.load_i8(chunk.add(64 + 16 * group)) })
    }
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        let (half, quarter) = (part / 4, part % 4);
        let (low, high) = unsafe {
            let low = simd.load_bytes(chunk.add(320 + half * 1024 + quarter % 2 * 512 + STEP * 64));
            (low, simd.load_bytes(chunk.add(2368 + half * 512 + STEP * 64)))
        };
        let low = simd.move_bits(low, quarter as u32 / 2 * 4, 0, 15);
        simd.or_bytes(low, simd.move_bits(high, quarter as u32 * 2, 4, 48))
    }
);

format!(Iq4Nl:
    const FORMAT: QuantFormat = QuantFormat::IQ4_NL;
    const BLOCKS: usize = 2;
    const IS_SMALL: bool = true;
    const IS_SIGNED: bool = true;
    half_factor!();
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        values(simd, &IQ4_VALUES, unsafe { nibbles_of_32::<S, STEP>(simd, chunk.add(64 + 256 * part)) })
    }
);

format!(Iq4Xs:
    const FORMAT: QuantFormat = QuantFormat::IQ4_XS;
    const BLOCKS: usize = 1;
    const IS_SMALL: bool = false;
    const IS_SIGNED: bool = true;
    chunk_factor!();
    #[inline(always)]
    unsafe fn scale<S: Simd>(self, simd: S, chunk: *const u8, group: usize) -> S::Ints {
        simd.as_ints(simd.to_floats(unsafe { simd.load_i8(chunk.add(64 + 16 * group)) }))
    }
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        values(simd, &IQ4_VALUES, unsafe { nibbles_of_32::<S, STEP>(simd, chunk.add(192 + 256 * part)) })
    }
);

format!(Mxfp4:
    const FORMAT: QuantFormat = QuantFormat::MXFP4;
    const BLOCKS: usize = 4;
    const IS_SMALL: bool = true;
    const IS_SIGNED: bool = true;
    #[inline(always)]
    unsafe fn factors<S: Simd>(self, simd: S, chunk: *const u8, block: usize) -> [S::V; 2] {
        // Half of the power of two: see `MXFP4_VALUES`. Here exponent 0 means 0 and not 2^-127, and exponent 255, which
        // is no number in the format, means infinity.
        let exponents = simd.as_floats(unsafe { simd.load_u8(chunk.add(16 * block)) });
        [simd.mul(simd.shift_to_exponent(exponents), simd.splat(0.5)), simd.splat(0.0)]
    }
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        values(simd, &MXFP4_VALUES, unsafe { nibbles_of_32::<S, STEP>(simd, chunk.add(64 + 256 * part)) })
    }
);
