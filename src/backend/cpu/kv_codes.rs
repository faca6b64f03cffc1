//! Codes of the KV cache: how vectors of K and V become codes, and where these lie in a head's part of a block.
//!
//! A vector has one byte for each code of 8 bits. A byte of 4-bit codes has two of them. Such a vector is rotated first
//! ([`rotation`](super::rotation)). Byte `4 w + j` of a K has dimension `8 w + j` in its low bits and dimension
//! `8 w + 4 + j` in its high bits, for `j` below 4. Byte `i` of a V has dimensions `i` and `head_dim / 2 + i`. So the
//! low bits of four bytes, and their high bits, are used like four codes of 8 bits.
//!
//! Attention reads four bytes of a sum at once: of four dimensions of a K, or of the V of four positions. If blocks are
//! whole groups of 16 slots, these lie together: with `n` bytes for a vector, a group is `[n / 4][16 slots][4 bytes]`
//! of K, and `[4][n][4 slots]` of V. With other block sizes codes are in rows `[block_size][n]`. Scales lie behind all
//! codes: `[block_size]`.
//!
//! Codes are computed in plain Rust with operations that are rounded once, so they are the same on every instruction
//! set.

use super::memory::MAX_HEAD_DIM;
use super::rotation::rotate;
use super::simd::LANES;
use crate::{CodeType, KvLayout};

/// Slots of a group.
const GROUP: usize = LANES;
/// Adding it to a float32 of small magnitude rounds this to an integer, to nearest even, in the low bits of the sum.
pub(super) const TO_INTEGER: f32 = 12_582_912.0;
/// The largest 4-bit code. Code `i`, from 0 to 15, stands for `2 i - 15`.
pub(super) const LARGEST_NIBBLE: i32 = 15;

/// Whether the codes of a KV cache of this shape are in groups.
pub(super) fn in_groups(layout: &KvLayout) -> bool {
    layout.block_size.is_multiple_of(GROUP)
}

/// The bits of the largest magnitude; those of infinity or more if an element is not finite.
#[inline(always)]
pub(super) fn largest_magnitude(row: &[f32]) -> u32 {
    // As integers magnitudes have the same order, and NaN is above infinity.
    let mut largest = 0;
    for x in row {
        largest = largest.max(x.to_bits() & 0x7fff_ffff);
    }
    largest
}

/// The scale of a vector, as the bits of a bfloat16.
#[inline(always)]
fn scale_of(row: &[f32], codes: CodeType) -> u16 {
    let largest_code = match codes {
        CodeType::Int8 => 127.0,
        CodeType::Fp8 => 448.0,
        CodeType::Int4 => LARGEST_NIBBLE as f32,
    };
    let largest = largest_magnitude(row);
    if largest >= f32::INFINITY.to_bits() {
        return half::bf16::NAN.to_bits();
    }
    // Rounded up, so that no quotient exceeds the largest code.
    let scale = f32::from_bits(largest) / largest_code;
    ((scale.to_bits() + 0xffff) >> 16) as u16
}

/// The bits of `x` as E4M3, to nearest even, for magnitudes up to 448.
#[inline(always)]
fn e4m3_bits(x: f32) -> u8 {
    const SMALLEST_NORMAL: f32 = 1.0 / 64.0;
    let magnitude = x.to_bits() & 0x7fff_ffff;
    let rounded = (magnitude + 0x7_ffff + ((magnitude >> 20) & 1)) >> 20;
    let normal = rounded.wrapping_sub((127 - 7) << 3);
    let subnormal = (f32::from_bits(magnitude) * 512.0 + TO_INTEGER).to_bits();
    let code = if magnitude < SMALLEST_NORMAL.to_bits() { subnormal } else { normal };
    (code & 0x7f) as u8 | (x.to_bits() >> 24 & 0x80) as u8
}

/// Writes the codes of a vector to `codes`, a byte for each, and returns its scale as the bits of a bfloat16.
#[inline(always)]
fn encode(row: &[f32], dtype: CodeType, codes: &mut [u8]) -> u16 {
    let scale_bits = scale_of(row, dtype);
    let scale = f32::from_bits(u32::from(scale_bits) << 16);
    let has_codes = scale > 0.0;
    match dtype {
        _ if !has_codes => codes.fill(0),
        CodeType::Int8 => {
            for (code, x) in codes.iter_mut().zip(row) {
                *code = (x / scale + TO_INTEGER).to_bits() as u8;
            }
        }
        CodeType::Fp8 => {
            for (code, x) in codes.iter_mut().zip(row) {
                *code = e4m3_bits(x / scale);
            }
        }
        CodeType::Int4 => {
            // Quotients are from -15 to 15, so the integers are from 0 to 15.
            for (code, x) in codes.iter_mut().zip(row) {
                *code = ((x / scale + LARGEST_NIBBLE as f32) * 0.5 + TO_INTEGER).to_bits() as u8 & 15;
            }
        }
    }
    scale_bits
}

/// Puts two codes of 4 bits into each byte. The codes of K or V of a head become `codes.len() / 2` bytes at its begin.
#[inline(always)]
fn pack_nibbles(codes: &mut [u8], value: bool) {
    let num_bytes = codes.len() / 2;
    if value {
        let (low, high) = codes.split_at_mut(num_bytes);
        for (low, high) in low.iter_mut().zip(high) {
            *low |= *high << 4;
        }
    } else {
        for i in 0..num_bytes {
            let low = i / 4 * 8 + i % 4;
            codes[i] = codes[low] | codes[low + 4] << 4;
        }
    }
}

/// Writes the K or V of one token to slot `slot` of a head's part of a block, which lies at `head`.
///
/// # Safety
/// `head` points to the head's part of a block of this shape. Nothing else uses the slot now.
#[inline(always)]
pub(super) unsafe fn write(row: &[f32], dtype: CodeType, value: bool, layout: &KvLayout, slot: usize, head: *mut u8) {
    let KvLayout { head_dim, block_size, .. } = *layout;
    let mut codes = [0; MAX_HEAD_DIM];
    let codes = &mut codes[..head_dim];
    let scale = if dtype == CodeType::Int4 {
        let mut rotated = [0.0; MAX_HEAD_DIM];
        let rotated = &mut rotated[..head_dim];
        rotated.copy_from_slice(row);
        rotate(rotated);
        let scale = encode(rotated, dtype, codes);
        pack_nibbles(codes, value);
        scale
    } else {
        encode(row, dtype, codes)
    };
    let num_bytes = dtype.code_bytes(head_dim);
    let codes = &codes[..num_bytes];
    // SAFETY: the caller's promise. The slot is below the block size.
    unsafe {
        if !in_groups(layout) {
            head.add(slot * num_bytes).copy_from_nonoverlapping(codes.as_ptr(), num_bytes);
        } else if value {
            let quad = head.add(slot / 4 * 4 * num_bytes + slot % 4);
            for (d, code) in codes.iter().enumerate() {
                *quad.add(4 * d) = *code;
            }
        } else {
            let group = head.add(slot / GROUP * GROUP * num_bytes + slot % GROUP * 4);
            for (quad, four) in codes.as_chunks::<4>().0.iter().enumerate() {
                group.add(quad * 4 * GROUP).cast::<[u8; 4]>().write_unaligned(*four);
            }
        }
        head.add(block_size * num_bytes).cast::<u16>().add(slot).write_unaligned(scale);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number that an E4M3 stands for, from its definition.
    fn e4m3(code: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let magnitude = if exponent == 0 {
            mantissa / 8.0 * 2f64.powi(-6)
        } else {
            (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7)
        };
        if code & 0x80 == 0 { magnitude } else { -magnitude }
    }

    #[test]
    fn e4m3_is_the_nearest_number_and_even_between_two() {
        let check = |x: f32| {
            let error = |code: u8| (e4m3(code) - f64::from(x)).abs();
            // 0x7f is NaN.
            let nearest = (0..0x7f).min_by(|a, b| error(*a).total_cmp(&error(*b)).then((a & 1).cmp(&(b & 1)))).unwrap();
            assert_eq!(e4m3_bits(x), nearest, "{x}");
            assert_eq!(e4m3_bits(-x), nearest | 0x80, "-{x}");
        };
        for code in 0..0x7e {
            let (this, next) = (e4m3(code) as f32, e4m3(code + 1) as f32);
            let middle = (this + next) / 2.0;
            [this, next, middle, middle.next_down(), middle.next_up()].into_iter().for_each(check);
        }
        for bits in (0..448f32.to_bits()).step_by(100_003) {
            check(f32::from_bits(bits));
        }
    }

    #[test]
    fn a_vector_is_its_codes_times_its_scale_up_to_half_a_step() {
        let mut bits = 1u32;
        let mut next = || {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (bits >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        for dtype in [CodeType::Int8, CodeType::Fp8, CodeType::Int4] {
            // Scales below 2^-126 have fewer bits.
            for exponent in -100..120 {
                let row: Vec<f32> = (0..40).map(|_| next() * 2f32.powi(exponent)).collect();
                let mut codes = [0; 40];
                let scale = half::bf16::from_bits(encode(&row, dtype, &mut codes)).to_f64();
                let largest = row.iter().fold(0f64, |largest, x| largest.max(f64::from(x.abs())));
                for (x, code) in row.iter().zip(codes) {
                    let x = f64::from(*x);
                    let (value, half_step) = match dtype {
                        CodeType::Int8 => (f64::from(code as i8), 0.5),
                        CodeType::Fp8 => (e4m3(code), (x / scale).abs().max(2f64.powi(-6)) / 16.0),
                        CodeType::Int4 => (f64::from(2 * i32::from(code) - 15), 1.0),
                    };
                    assert!((value * scale - x).abs() <= half_step * scale * 1.000_001, "{dtype:?}: {x} as {code}");
                }
                let largest_code = match dtype {
                    CodeType::Int8 => 127.0,
                    CodeType::Fp8 => 448.0,
                    CodeType::Int4 => 15.0,
                };
                assert!((1.0..1.01).contains(&(scale * largest_code / largest)), "{dtype:?}: {scale} for {largest}");
            }
        }
    }

    #[test]
    fn nibbles_are_packed_as_said() {
        let all: [u8; 16] = std::array::from_fn(|i| i as u8);
        let mut keys = all;
        pack_nibbles(&mut keys, false);
        assert_eq!(keys[..8], [0x40, 0x51, 0x62, 0x73, 0xc8, 0xd9, 0xea, 0xfb]);
        let mut values = all;
        pack_nibbles(&mut values, true);
        assert_eq!(values[..8], [0x80, 0x91, 0xa2, 0xb3, 0xc4, 0xd5, 0xe6, 0xf7]);
    }

    #[test]
    fn vectors_of_zeros_and_of_numbers_that_are_not_finite_have_no_codes() {
        for dtype in [CodeType::Int8, CodeType::Fp8, CodeType::Int4] {
            let mut codes = [7; 8];
            assert_eq!(encode(&[0.0; 8], dtype, &mut codes), 0);
            assert_eq!(codes, [0; 8]);
            for x in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                codes.fill(7);
                let scale = encode(&[1.0, 2.0, 3.0, x, 5.0, 6.0, 7.0, 8.0], dtype, &mut codes);
                assert!(half::bf16::from_bits(scale).is_nan(), "{x}");
                assert_eq!(codes, [0; 8]);
            }
            // The largest and the smallest numbers.
            for x in [f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1)] {
                let scale = half::bf16::from_bits(encode(&[x, -x, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], dtype, &mut codes));
                assert!(scale.is_finite(), "{x}");
                // 4 bits have no code for 0.
                assert!(dtype == CodeType::Int4 || codes[2..] == [0; 6]);
            }
        }
    }
}
