//! Quantised weights: the formats of ggml, as GGUF files hold them.
//!
//! A row is a sequence of *weight blocks* of 32 or 256 weights. Each block holds a small integer, a *code*, for each of
//! its weights, and scales that turn codes into weights. Within a block, the weights of a *group* share a scale:
//! `weight = scale · (code - bias) + minimum`. The formats are those of ggml's `ggml-common.h` and `ggml-quants.c`.

use half::f16;
use pagetide_base::choice;

choice!(
    /// A format of ggml for quantised weights.
    #[allow(non_camel_case_types, reason = "ggml's own names")]
    QuantFormat {
        Q4_0 = "Q4_0",
        Q4_1 = "Q4_1",
        Q5_0 = "Q5_0",
        Q5_1 = "Q5_1",
        Q8_0 = "Q8_0",
        Q2_K = "Q2_K",
        Q3_K = "Q3_K",
        Q4_K = "Q4_K",
        Q5_K = "Q5_K",
        Q6_K = "Q6_K",
        IQ4_NL = "IQ4_NL",
        IQ4_XS = "IQ4_XS",
        MXFP4 = "MXFP4",
    }
);

/// The most weights of a block.
pub const MAX_BLOCK_WEIGHTS: usize = 256;

/// The weights that the codes of IQ4_NL and IQ4_XS stand for, before the scale.
pub(crate) const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Twice the weights that the codes of MXFP4 stand for (E2M1 of the OCP Microscaling specification, section 5.3.3),
/// before the scale.
pub(crate) const MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

impl QuantFormat {
    /// Weights of a block.
    pub const fn block_weights(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::IQ4_NL | Self::MXFP4 => 32,
            Self::Q2_K | Self::Q3_K | Self::Q4_K | Self::Q5_K | Self::Q6_K | Self::IQ4_XS => MAX_BLOCK_WEIGHTS,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::Q4_0 | Self::IQ4_NL => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2_K => 84,
            Self::Q3_K => 110,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
            Self::IQ4_XS => 136,
            Self::MXFP4 => 17,
        }
    }

    /// Weights that share a scale.
    pub fn group_weights(self) -> usize {
        match self {
            Self::Q2_K | Self::Q3_K | Self::Q6_K => 16,
            _ => 32,
        }
    }

    /// Bytes of a row of `cols` weights; `None` if blocks do not fill the row.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        cols.is_multiple_of(self.block_weights()).then(|| cols / self.block_weights() * self.block_bytes())
    }

    /// The weights of a block in float32, as ggml's reference computes them.
    pub fn dequantize(self, block: &[u8], weights: &mut [f32]) {
        assert!(
            block.len() == self.block_bytes() && weights.len() == self.block_weights(),
            "a weight block of {self} has another size"
        );
        let mut codes = [0; MAX_BLOCK_WEIGHTS];
        let codes = &mut codes[..weights.len()];
        self.codes(block, codes);
        let group = self.group_weights();
        for (index, (weights, codes)) in weights.chunks_exact_mut(group).zip(codes.chunks_exact(group)).enumerate() {
            let (scale, minimum) = self.scale(block, index);
            for (weight, code) in weights.iter_mut().zip(codes) {
                let scaled = scale * f32::from(*code);
                *weight = minimum.map_or(scaled, |minimum| scaled + minimum);
            }
        }
    }

    /// The codes of a block's weights, without the format's bias.
    pub(crate) fn codes(self, block: &[u8], codes: &mut [i8]) {
        let bits = |byte: u8, shift: usize, count: u32| (byte >> shift) & ((1 << count) - 1);
        // Of 32 weights whose nibbles are in 16 bytes.
        let nibble_of_32 = |bytes: &[u8], i: usize| bits(bytes[i % 16], i / 16 * 4, 4);
        for (i, code) in codes.iter_mut().enumerate() {
            // Place within 64 and within 128 weights.
            let (half, in_half) = (i / 128, i % 128);
            *code = match self {
                Self::Q4_0 => nibble_of_32(&block[2..], i) as i8 - 8,
                Self::Q4_1 => nibble_of_32(&block[4..], i) as i8,
                Self::Q5_0 => (nibble_of_32(&block[6..], i) | bits(block[2 + i / 8], i % 8, 1) << 4) as i8 - 16,
                Self::Q5_1 => (nibble_of_32(&block[8..], i) | bits(block[4 + i / 8], i % 8, 1) << 4) as i8,
                Self::Q8_0 => block[2 + i] as i8,
                Self::Q2_K => bits(block[16 + 32 * half + in_half % 32], in_half / 32 * 2, 2) as i8,
                Self::Q3_K => {
                    let low = bits(block[32 + 32 * half + in_half % 32], in_half / 32 * 2, 2);
                    (low | bits(block[in_half % 32], i / 32, 1) << 2) as i8 - 4
                }
                Self::Q4_K => bits(block[16 + i / 64 * 32 + i % 32], i % 64 / 32 * 4, 4) as i8,
                Self::Q5_K => {
                    let low = bits(block[48 + i / 64 * 32 + i % 32], i % 64 / 32 * 4, 4);
                    (low | bits(block[16 + i % 32], i / 32, 1) << 4) as i8
                }
                Self::Q6_K => {
                    let low = bits(block[64 * half + in_half % 64], in_half / 64 * 4, 4);
                    (low | bits(block[128 + 32 * half + in_half % 32], in_half / 32 * 2, 2) << 4) as i8 - 32
                }
                Self::IQ4_NL => IQ4_VALUES[usize::from(nibble_of_32(&block[2..], i))],
                Self::IQ4_XS => IQ4_VALUES[usize::from(nibble_of_32(&block[8 + i / 32 * 16..], i % 32))],
                Self::MXFP4 => MXFP4_VALUES[usize::from(nibble_of_32(&block[1..], i))],
            };
        }
    }

    /// The scale of a group of a block, and its minimum if the format has one.
    pub(crate) fn scale(self, block: &[u8], group: usize) -> (f32, Option<f32>) {
        let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
        match self {
            Self::Q4_0 | Self::Q5_0 | Self::Q8_0 | Self::IQ4_NL => (half(0), None),
            Self::Q4_1 | Self::Q5_1 => (half(0), Some(half(2))),
            Self::Q2_K => {
                let packed = block[group];
                (half(80) * f32::from(packed & 15), Some(-(half(82) * f32::from(packed >> 4))))
            }
            Self::Q3_K => (half(108) * f32::from(q3_k_scale(&block[96..108], group)), None),
            Self::Q4_K | Self::Q5_K => {
                let (scale, minimum) = k_scale(&block[4..16], group);
                (half(0) * f32::from(scale), Some(-(half(2) * f32::from(minimum))))
            }
            Self::Q6_K => (half(208) * f32::from(block[192 + group] as i8), None),
            Self::IQ4_XS => (half(0) * f32::from(iq4_xs_scale(&block[2..8], group)), None),
            Self::MXFP4 => (half_power(block[0]), None),
        }
    }
}

/// The scale and the minimum, of 6 bits each, of a group of Q4_K and Q5_K.
fn k_scale(scales: &[u8], group: usize) -> (u8, u8) {
    match group {
        0..4 => (scales[group] & 63, scales[group + 4] & 63),
        _ => (scales[group + 4] & 15 | scales[group - 4] >> 6 << 4, scales[group + 4] >> 4 | scales[group] >> 6 << 4),
    }
}

/// The scale of a group of Q3_K, of 6 bits with a bias of 32.
pub(crate) fn q3_k_scale(scales: &[u8], group: usize) -> i8 {
    let low = (scales[group % 8] >> (group / 8 * 4)) & 15;
    let high = (scales[8 + group % 4] >> (group / 4 * 2)) & 3;
    (low | high << 4) as i8 - 32
}

/// The scale of a group of IQ4_XS, of 6 bits with a bias of 32. `scales` are the high bits of all groups, two bytes,
/// and then the low bits.
pub(crate) fn iq4_xs_scale(scales: &[u8], group: usize) -> i8 {
    let low = (scales[2 + group / 2] >> (group % 2 * 4)) & 15;
    let high = u16::from_le_bytes([scales[0], scales[1]]) >> (2 * group) & 3;
    low as i8 + (high << 4) as i8 - 32
}

/// Half of the power of two that an E8M0 scale stands for (`2^(exponent - 127)`): [`MXFP4_VALUES`] are doubled.
pub(crate) fn half_power(exponent: u8) -> f32 {
    match exponent {
        0 | 1 => f32::from_bits(0x0020_0000 << exponent),
        _ => f32::from_bits((u32::from(exponent) - 1) << 23),
    }
}
