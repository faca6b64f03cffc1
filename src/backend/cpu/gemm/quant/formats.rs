//! How the codes and scales of each format are read from a panel. See `pack::quant` for the places.

use super::super::super::simd::Simd;
use crate::quant::{IQ4_VALUES, MXFP4_VALUES, QuantFormat};

/// A format as the kernel reads it: in parts of 32 weights.
pub(super) trait PanelFormat: Copy {
    const FORMAT: QuantFormat;
    /// Parts of a chunk.
    const PARTS: usize;
    /// Weights that share a scale: 16 or 32.
    const GROUP: usize = 32;
    /// The input is quantised in blocks of 32, not of 256.
    const IS_SMALL: bool;
    /// What is subtracted from codes.
    const BIAS: i32 = 0;
    /// Weights have a minimum beside the scale.
    const HAS_MINIMUM: bool = false;
    /// Codes are signed bytes. Otherwise they are from 0 to 127.
    const IS_SIGNED: bool = false;
    /// What is read once for each chunk.
    type Header<S: Simd>: Copy;

    /// # Safety
    /// This and the following functions: `chunk` is a chunk of a panel in this format.
    unsafe fn header<S: Simd>(self, simd: S, chunk: *const u8) -> Self::Header<S>;
    /// Scale and minimum of a group of the chunk.
    unsafe fn scale<S: Simd>(self, simd: S, header: Self::Header<S>, chunk: *const u8, group: usize) -> (S::V, S::V);
    /// The codes of four weights of each column: `STEP`, below 8, of a part.
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes;
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
    simd.byte_bits(unsafe { simd.load_bytes(at.add(part / 2 * 512 + STEP * 64)) }, part as u32 % 2 * 4, 15)
}

/// Adds a bit to codes of `width` bits: bit `bit` of each byte of `bits`.
#[inline(always)]
fn with_bit<S: Simd>(simd: S, codes: S::Bytes, width: u32, bits: S::Bytes, bit: u32) -> S::Bytes {
    simd.or_bytes(codes, simd.byte_bits_up(simd.byte_bits(bits, bit, 1), width, 1 << width))
}

/// A float16 for each group of 32, and perhaps another one 32 bytes behind it.
#[inline(always)]
unsafe fn halves<S: Simd>(simd: S, at: *const u8) -> S::V {
    // SAFETY: the caller's promise.
    unsafe { simd.load_f16(at.cast()) }
}

/// The scale and the minimum of a group of Q4_K and Q5_K, which are 6 bits each (`get_scale_min_k4` of ggml).
#[inline(always)]
unsafe fn k_scale<S: Simd>(simd: S, [scale, minimum]: [S::V; 2], chunk: *const u8, group: usize) -> (S::V, S::V) {
    let byte = group as u32 % 4 * 8;
    // SAFETY: the caller's promise.
    let [first, second, third] =
        unsafe { [simd.load_ints(chunk.add(64)), simd.load_ints(chunk.add(128)), simd.load_ints(chunk.add(192))] };
    let (scales, minima) = if group < 4 {
        (simd.int_bits(first, byte, 63), simd.int_bits(second, byte, 63))
    } else {
        let high = |simd: S, word| simd.int_bits(word, byte + 6, 3);
        let (low_scale, low_minimum) = (simd.int_bits(third, byte, 15), simd.int_bits(third, byte + 4, 15));
        (simd.or_shifted(low_scale, high(simd, first), 4), simd.or_shifted(low_minimum, high(simd, second), 4))
    };
    (simd.mul(scale, simd.to_floats(scales)), simd.mul(minimum, simd.to_floats(minima)))
}

/// The scale, and minus the scale of minima.
#[inline(always)]
unsafe fn scale_and_minimum<S: Simd>(simd: S, chunk: *const u8) -> [S::V; 2] {
    // SAFETY: the caller's promise.
    unsafe { [halves(simd, chunk), simd.sub(simd.splat(0.0), halves(simd, chunk.add(32)))] }
}

macro_rules! format {
    ($name:ident: $($rest:tt)*) => {
        #[derive(Clone, Copy)]
        pub(in super::super) struct $name;

        // SAFETY (every block below): the caller's promise. The places are those of `PanelLayout::of`.
        impl PanelFormat for $name {
            $($rest)*
        }
    };
}

/// `header` of formats that read nothing for a chunk, and `scale` of those with a float16 for each group of 32.
macro_rules! half_scale {
    () => {
        type Header<S: Simd> = ();
        #[inline(always)]
        unsafe fn header<S: Simd>(self, _: S, _: *const u8) {}
        #[inline(always)]
        unsafe fn scale<S: Simd>(self, simd: S, (): (), chunk: *const u8, group: usize) -> (S::V, S::V) {
            (unsafe { halves(simd, chunk.add(32 * group)) }, simd.splat(0.0))
        }
    };
}

/// The same for those with one group in a chunk, which has a minimum.
macro_rules! half_scale_and_minimum {
    () => {
        type Header<S: Simd> = ();
        #[inline(always)]
        unsafe fn header<S: Simd>(self, _: S, _: *const u8) {}
        #[inline(always)]
        unsafe fn scale<S: Simd>(self, simd: S, (): (), chunk: *const u8, _: usize) -> (S::V, S::V) {
            unsafe { (halves(simd, chunk), halves(simd, chunk.add(32))) }
        }
    };
}

/// The same for Q4_K and Q5_K.
macro_rules! k_scales {
    () => {
        type Header<S: Simd> = [S::V; 2];
        #[inline(always)]
        unsafe fn header<S: Simd>(self, simd: S, chunk: *const u8) -> [S::V; 2] {
            unsafe { scale_and_minimum(simd, chunk) }
        }
        #[inline(always)]
        unsafe fn scale<S: Simd>(self, simd: S, header: [S::V; 2], chunk: *const u8, group: usize) -> (S::V, S::V) {
            unsafe { k_scale(simd, header, chunk, group) }
        }
    };
}

/// The same for formats with a float16 for the chunk and a signed byte for each group.
macro_rules! byte_scales {
    () => {
        type Header<S: Simd> = S::V;
        #[inline(always)]
        unsafe fn header<S: Simd>(self, simd: S, chunk: *const u8) -> S::V {
            unsafe { halves(simd, chunk) }
        }
        #[inline(always)]
        unsafe fn scale<S: Simd>(self, simd: S, scale: S::V, chunk: *const u8, group: usize) -> (S::V, S::V) {
            let scales = simd.to_floats(unsafe { simd.load_i8(chunk.add(64 + 16 * group)) });
            (simd.mul(scale, scales), simd.splat(0.0))
        }
    };
}

format!(Q4_0:
    const FORMAT: QuantFormat = QuantFormat::Q4_0;
    const PARTS: usize = 2;
    const IS_SMALL: bool = true;
    const BIAS: i32 = 8;
    half_scale!();
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        unsafe { nibbles_of_32::<S, STEP>(simd, chunk.add(64 + 256 * part)) }
    }
);

format!(Q4_1:
    const FORMAT: QuantFormat = QuantFormat::Q4_1;
    const PARTS: usize = 1;
    const IS_SMALL: bool = true;
    const HAS_MINIMUM: bool = true;
    half_scale_and_minimum!();
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, _: usize) -> S::Bytes {
        unsafe { nibbles_of_32::<S, STEP>(simd, chunk.add(64)) }
    }
);

format!(Q5_0:
    const FORMAT: QuantFormat = QuantFormat::Q5_0;
    const PARTS: usize = 2;
    const IS_SMALL: bool = true;
    const BIAS: i32 = 16;
    half_scale!();
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
    const PARTS: usize = 1;
    const IS_SMALL: bool = true;
    const HAS_MINIMUM: bool = true;
    half_scale_and_minimum!();
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
    const PARTS: usize = 2;
    const IS_SMALL: bool = true;
    const IS_SIGNED: bool = true;
    half_scale!();
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        unsafe { simd.load_bytes(chunk.add(64 + 512 * part + 64 * STEP)) }
    }
);

format!(Q2K:
    const FORMAT: QuantFormat = QuantFormat::Q2_K;
    const PARTS: usize = 8;
    const GROUP: usize = 16;
    const IS_SMALL: bool = false;
    const HAS_MINIMUM: bool = true;
    type Header<S: Simd> = [S::V; 2];
    #[inline(always)]
    unsafe fn header<S: Simd>(self, simd: S, chunk: *const u8) -> [S::V; 2] {
        unsafe { scale_and_minimum(simd, chunk) }
    }
    #[inline(always)]
    unsafe fn scale<S: Simd>(
        self,
        simd: S,
        [scale, minimum]: [S::V; 2],
        chunk: *const u8,
        group: usize,
    ) -> (S::V, S::V) {
        let both = unsafe { simd.load_u8(chunk.add(64 + 16 * group)) };
        let (scales, minima) = (simd.int_bits(both, 0, 15), simd.int_bits(both, 4, 15));
        (simd.mul(scale, simd.to_floats(scales)), simd.mul(minimum, simd.to_floats(minima)))
    }
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        let bytes = unsafe { simd.load_bytes(chunk.add(320 + part / 4 * 512 + STEP * 64)) };
        simd.byte_bits(bytes, part as u32 % 4 * 2, 3)
    }
);

format!(Q3K:
    const FORMAT: QuantFormat = QuantFormat::Q3_K;
    const PARTS: usize = 8;
    const GROUP: usize = 16;
    const IS_SMALL: bool = false;
    const BIAS: i32 = 4;
    type Header<S: Simd> = S::V;
    #[inline(always)]
    unsafe fn header<S: Simd>(self, simd: S, chunk: *const u8) -> S::V {
        unsafe { halves(simd, chunk) }
    }
    #[inline(always)]
    unsafe fn scale<S: Simd>(self, simd: S, scale: S::V, chunk: *const u8, group: usize) -> (S::V, S::V) {
        let (byte, four) = (group as u32 % 4 * 8, group as u32 / 4);
        let (low, high) =
            unsafe { (simd.load_ints(chunk.add(64 + group / 4 % 2 * 64)), simd.load_ints(chunk.add(192))) };
        let low = simd.int_bits(low, byte + four / 2 * 4, 15);
        let scales = simd.or_shifted(low, simd.int_bits(high, byte + 2 * four, 3), 4);
        (simd.mul(scale, simd.sub(simd.to_floats(scales), simd.splat(32.0))), simd.splat(0.0))
    }
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        let (low, high) = unsafe {
            let low = simd.load_bytes(chunk.add(768 + part / 4 * 512 + STEP * 64));
            (low, simd.load_bytes(chunk.add(256 + STEP * 64)))
        };
        with_bit(simd, simd.byte_bits(low, part as u32 % 4 * 2, 3), 2, high, part as u32)
    }
);

format!(Q4K:
    const FORMAT: QuantFormat = QuantFormat::Q4_K;
    const PARTS: usize = 8;
    const IS_SMALL: bool = false;
    const HAS_MINIMUM: bool = true;
    k_scales!();
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        unsafe { nibbles_of_64::<S, STEP>(simd, chunk.add(256), part) }
    }
);

format!(Q5K:
    const FORMAT: QuantFormat = QuantFormat::Q5_K;
    const PARTS: usize = 8;
    const IS_SMALL: bool = false;
    const HAS_MINIMUM: bool = true;
    k_scales!();
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        unsafe {
            let codes = nibbles_of_64::<S, STEP>(simd, chunk.add(768), part);
            with_bit(simd, codes, 4, simd.load_bytes(chunk.add(256 + STEP * 64)), part as u32)
        }
    }
);

format!(Q6K:
    const FORMAT: QuantFormat = QuantFormat::Q6_K;
    const PARTS: usize = 8;
    const GROUP: usize = 16;
    const IS_SMALL: bool = false;
    const BIAS: i32 = 32;
    byte_scales!();
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        let (half, quarter) = (part / 4, part % 4);
        let (low, high) = unsafe {
            let low = simd.load_bytes(chunk.add(320 + half * 1024 + quarter % 2 * 512 + STEP * 64));
            (low, simd.load_bytes(chunk.add(2368 + half * 512 + STEP * 64)))
        };
        let high = simd.byte_bits_up(simd.byte_bits(high, quarter as u32 * 2, 3), 4, 48);
        simd.or_bytes(simd.byte_bits(low, quarter as u32 / 2 * 4, 15), high)
    }
);

format!(Iq4Nl:
    const FORMAT: QuantFormat = QuantFormat::IQ4_NL;
    const PARTS: usize = 2;
    const IS_SMALL: bool = true;
    const IS_SIGNED: bool = true;
    half_scale!();
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        let nibbles = unsafe { nibbles_of_32::<S, STEP>(simd, chunk.add(64 + 256 * part)) };
        simd.lookup(simd.table(&IQ4_VALUES), nibbles)
    }
);

format!(Iq4Xs:
    const FORMAT: QuantFormat = QuantFormat::IQ4_XS;
    const PARTS: usize = 8;
    const IS_SMALL: bool = false;
    const IS_SIGNED: bool = true;
    byte_scales!();
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        let nibbles = unsafe { nibbles_of_32::<S, STEP>(simd, chunk.add(192 + 256 * part)) };
        simd.lookup(simd.table(&IQ4_VALUES), nibbles)
    }
);

format!(Mxfp4:
    const FORMAT: QuantFormat = QuantFormat::MXFP4;
    const PARTS: usize = 4;
    const IS_SMALL: bool = true;
    const IS_SIGNED: bool = true;
    type Header<S: Simd> = ();
    #[inline(always)]
    unsafe fn header<S: Simd>(self, _: S, _: *const u8) {}
    #[inline(always)]
    unsafe fn scale<S: Simd>(self, simd: S, (): (), chunk: *const u8, group: usize) -> (S::V, S::V) {
        // Half of the power of two: see `MXFP4_VALUES`. Here exponent 0 means 0 and not 2^-127, and exponent 255, which
        // is no number in the format, means infinity.
        let exponents = simd.as_floats(unsafe { simd.load_u8(chunk.add(16 * group)) });
        (simd.mul(simd.shift_to_exponent(exponents), simd.splat(0.5)), simd.splat(0.0))
    }
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        let nibbles = unsafe { nibbles_of_32::<S, STEP>(simd, chunk.add(64 + 256 * part)) };
        simd.lookup(simd.table(&MXFP4_VALUES), nibbles)
    }
);
