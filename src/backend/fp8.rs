//! FP8 weights: E4M3 of the Open Compute Project ("OCP 8-bit Floating Point Specification", revision 1.0, section 5).
//!
//! A row is a sequence of blocks of [`FP8_BLOCK_WEIGHTS`] weights. A block has their codes and then a scale in float32,
//! little-endian: `weight = scale * E4M3_VALUES[code]`. A checkpoint whose scales are for a tensor, a channel or larger
//! blocks repeats them.

use pagetide_base::error::StartError;

/// Weights of a block.
pub const FP8_BLOCK_WEIGHTS: usize = 64;
/// Bytes of a block.
pub const FP8_BLOCK_BYTES: usize = FP8_BLOCK_WEIGHTS + 4;

/// The number that each code stands for. There are no infinities; 0x7f and 0xff are NaN.
pub const E4M3_VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = e4m3(code as u8);
        code += 1;
    }
    values
};

const fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = ((code >> 3 & 15) as u32, (code & 7) as u32);
    let size = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa as f32 / 512.0,
        _ => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
    };
    if code < 128 { size } else { -size }
}

/// Writes a block of these codes.
pub fn write_block(scale: f32, codes: &[u8], block: &mut [u8]) {
    let (to_codes, to_scale) = block.split_at_mut(FP8_BLOCK_WEIGHTS);
    to_codes.copy_from_slice(codes);
    to_scale.copy_from_slice(&scale.to_le_bytes());
}

/// The error of a matrix `[n, k]` with a weight that is NaN or infinite.
pub(crate) fn not_finite(n: usize, k: usize) -> StartError {
    StartError::new(format!("a weight of a matrix is not a number or infinite: [{n}, {k}] in FP8"))
}

/// The codes and the scale of a block.
pub(crate) fn read_block(block: &[u8]) -> (&[u8], f32) {
    let (codes, scale) = block.split_at(FP8_BLOCK_WEIGHTS);
    (codes, f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]))
}

/// The weights of a block in float32.
pub(crate) fn dequantize(block: &[u8]) -> impl Iterator<Item = f32> + '_ {
    let (codes, scale) = read_block(block);
    codes.iter().map(move |code| scale * E4M3_VALUES[usize::from(*code)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WeightFormat;

    #[test]
    fn e4m3_is_decoded_as_in_its_specification() {
        let values = [(0x00, 0.0), (0x01, 2f32.powi(-9)), (0x07, 7.0 / 512.0), (0x08, 2f32.powi(-6)), (0x38, 1.0)];
        for (byte, value) in values.into_iter().chain([(0x3c, 1.5), (0x7e, 448.0)]) {
            assert_eq!(E4M3_VALUES[byte], value, "{byte:#x}");
            assert_eq!(E4M3_VALUES[byte + 128], -value, "{byte:#x} with a sign");
        }
        assert!(E4M3_VALUES[0x7f].is_nan() && E4M3_VALUES[0xff].is_nan());
        assert_eq!(E4M3_VALUES.iter().filter(|value| value.is_nan()).count(), 2);
    }

    #[test]
    fn each_block_has_its_scale() {
        let mut row = [0; 2 * FP8_BLOCK_BYTES];
        assert_eq!(WeightFormat::Fp8.row_bytes(2 * FP8_BLOCK_WEIGHTS), Some(row.len()));
        assert_eq!(WeightFormat::Fp8.row_bytes(FP8_BLOCK_WEIGHTS / 2), None);
        let codes: Vec<u8> = (0..FP8_BLOCK_WEIGHTS as u8).map(|code| code ^ 0x80).collect();
        for (scale, block) in [0.3, 3e-7].into_iter().zip(row.chunks_exact_mut(FP8_BLOCK_BYTES)) {
            write_block(scale, &codes, block);
        }
        let expected: Vec<f32> =
            [0.3, 3e-7].iter().flat_map(|scale| codes.iter().map(move |code| scale * e4m3(*code))).collect();
        assert_eq!(WeightFormat::Fp8.to_f32(&row), expected);
    }
}
