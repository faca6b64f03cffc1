//! How quantised weights lie in device memory: `kernels/include/quantized.cuh` describes it, and this packs it.

use crate::fp8::{self, FP8_BLOCK_BYTES, FP8_BLOCK_WEIGHTS};
use crate::quant::{MAX_BLOCK_WEIGHTS, QuantFormat};
use crate::{DType, WeightFormat};
use half::f16;

/// Rows and columns of a weight tile.
pub(super) const TILE_N: usize = 16;
pub(super) const TILE_K: usize = 64;
/// Columns of a lane, and the lanes of a row.
const LANE_K: usize = 16;
const ROW_LANES: usize = 4;
const WARP: usize = 32;

/// A kind of weight tiles. Several formats have the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct WeightTiles {
    /// Bits of a code: 4, 5, 6 or 8.
    bits: usize,
    /// Weights of a row that share a scale: 16, 32 or 64.
    group: usize,
    /// Without a minimum, codes have a bias of half their range.
    has_minimum: bool,
    /// Codes are E4M3, without a bias, and scales are float32.
    is_fp8: bool,
}

impl WeightTiles {
    /// All kinds, in no order.
    pub const ALL: [Self; 9] = [
        Self::of(QuantFormat::Q4_0),
        Self::of(QuantFormat::Q4_1),
        Self::of(QuantFormat::Q5_0),
        Self::of(QuantFormat::Q5_1),
        Self::of(QuantFormat::Q8_0),
        Self::of(QuantFormat::Q2_K),
        Self::of(QuantFormat::Q3_K),
        Self::of(QuantFormat::Q6_K),
        Self::FP8,
    ];

    /// The tiles that hold [`WeightFormat::Fp8`], with all bits of its scales.
    pub const FP8: Self = Self { bits: 8, group: TILE_K, has_minimum: false, is_fp8: true };

    /// The tiles that hold a format of quantised weights; `None` for plain ones.
    pub(super) fn of_weights(format: WeightFormat) -> Option<Self> {
        match format {
            WeightFormat::Plain(_) => None,
            WeightFormat::Quantized(format) => Some(Self::of(format)),
            WeightFormat::Fp8 => Some(Self::FP8),
        }
    }

    /// The tiles that hold a format. Each code and scale is held; a scale that is a product of two numbers is rounded
    /// to float16.
    pub const fn of(format: QuantFormat) -> Self {
        let (bits, group, has_minimum) = match format {
            QuantFormat::Q4_0 => (4, 32, false),
            QuantFormat::Q4_1 | QuantFormat::Q4_K => (4, 32, true),
            QuantFormat::Q5_0 => (5, 32, false),
            QuantFormat::Q5_1 | QuantFormat::Q5_K => (5, 32, true),
            QuantFormat::Q6_K => (6, 16, false),
            // Codes of 2 and 3 bits take 4.
            QuantFormat::Q2_K => (4, 16, true),
            QuantFormat::Q3_K => (4, 16, false),
            // Codes that stand for numbers of a table are replaced by these numbers.
            QuantFormat::Q8_0 | QuantFormat::IQ4_NL | QuantFormat::IQ4_XS | QuantFormat::MXFP4 => (8, 32, false),
        };
        Self { bits, group, has_minimum, is_fp8: false }
    }

    /// The macros of `kernels/quantized.cu`.
    pub(super) fn defines(self) -> Vec<(&'static str, String)> {
        let Self { bits, group, has_minimum, is_fp8 } = self;
        let mut defines = vec![
            ("BITS", bits.to_string()),
            ("SCALE_GROUP", group.to_string()),
            ("HAS_MINIMUM", u32::from(has_minimum).to_string()),
        ];
        if is_fp8 {
            defines.push(("FP8_WEIGHTS", "1".to_string()));
        }
        defines
    }

    fn code_bytes(self) -> usize {
        TILE_N * TILE_K / if self.bits == 8 { 1 } else { 2 }
    }

    fn high_bytes(self) -> usize {
        if self.bits == 8 { 0 } else { TILE_N * TILE_K * (self.bits - 4) / 8 }
    }

    fn scale_bytes(self) -> usize {
        if self.has_minimum || self.is_fp8 { 4 } else { 2 }
    }

    pub fn tile_bytes(self) -> usize {
        self.code_bytes() + self.high_bytes() + TILE_K / self.group * TILE_N * self.scale_bytes()
    }

    /// Bytes of the tiles of [`TILE_N`] rows of `k` columns.
    pub(super) fn row_bytes(self, k: usize) -> usize {
        k.div_ceil(TILE_K) * self.tile_bytes()
    }

    /// Packs up to [`TILE_N`] rows of weight blocks to `out: [row_bytes]`. Returns false if a scale is not finite in
    /// its type, or if a weight of FP8 is not a number.
    pub(super) fn pack(self, rows: &[(WeightFormat, &[u8])], out: &mut [u8]) -> bool {
        out.fill(0);
        let mut is_finite = true;
        for (row, (format, blocks)) in rows.iter().enumerate() {
            assert_eq!(Self::of_weights(*format), Some(self), "rows of another kind of tiles");
            is_finite &= match format {
                WeightFormat::Quantized(format) => self.pack_row(*format, row, blocks, out),
                _ => self.pack_fp8_row(row, blocks, out),
            };
        }
        is_finite
    }

    fn pack_row(self, format: QuantFormat, row: usize, blocks: &[u8], out: &mut [u8]) -> bool {
        // Codes of formats without a minimum are around 0.
        let bias = if self.has_minimum { 0 } else { 1 << (self.bits - 1) };
        let mut codes = [0; MAX_BLOCK_WEIGHTS];
        let mut is_finite = true;
        let (weights, group) = (format.block_weights(), format.group_weights());
        for (index, block) in blocks.chunks_exact(format.block_bytes()).enumerate() {
            format.codes(block, &mut codes[..weights]);
            for (i, code) in codes[..weights].iter().enumerate() {
                self.put_code(out, row, index * weights + i, (i32::from(*code) + bias) as u8);
            }
            for i in 0..weights / group {
                let (scale, minimum) = format.scale(block, i);
                let [scale, minimum] = [scale, minimum.unwrap_or(0.0)].map(f16::from_f32);
                is_finite &= scale.is_finite() && minimum.is_finite();
                let ([a, b], [c, d]) = (scale.to_le_bytes(), minimum.to_le_bytes());
                self.put_scale(out, row, index * weights + i * group, [a, b, c, d]);
            }
        }
        is_finite
    }

    fn pack_fp8_row(self, row: usize, blocks: &[u8], out: &mut [u8]) -> bool {
        let mut is_finite = true;
        for (index, block) in blocks.chunks_exact(FP8_BLOCK_BYTES).enumerate() {
            let (codes, scale) = fp8::read_block(block);
            let first = index * FP8_BLOCK_WEIGHTS;
            for (i, code) in codes.iter().enumerate() {
                is_finite &= code & 0x7f != 0x7f;
                self.put_code(out, row, first + i, *code);
            }
            // The kernels multiply it with 2^8 first.
            is_finite &= (scale * 256.0).is_finite();
            self.put_scale(out, row, first, scale.to_le_bytes());
        }
        is_finite
    }

    /// The tile of a column, and the lane of a row and a column in it.
    fn place(self, row: usize, column: usize) -> (usize, usize) {
        (column / TILE_K * self.tile_bytes(), row % 8 * ROW_LANES + column % TILE_K / LANE_K)
    }

    fn put_code(self, out: &mut [u8], row: usize, column: usize, code: u8) {
        let ((tile, lane), half, i) = (self.place(row, column), row / 8, column % LANE_K);
        let tile = &mut out[tile..];
        if self.bits == 8 {
            tile[(half * WARP + lane) * LANE_K + i] = code;
            return;
        }
        tile[lane * 16 + half * 8 + i / 2] |= (code & 15) << (i % 2 * 4);
        // Of both of the lane's rows.
        let high_bits = self.bits - 4;
        let bit = (half * LANE_K + i) * high_bits;
        if high_bits > 0 {
            tile[self.code_bytes() + lane * 4 * high_bits + bit / 8] |= code >> 4 << (bit % 8);
        }
    }

    /// Writes the first `scale_bytes` of `scale`.
    fn put_scale(self, out: &mut [u8], row: usize, column: usize, scale: [u8; 4]) {
        let (tile, _) = self.place(row, column);
        let entry = (column % TILE_K / self.group * 8 + row % 8) * 2 + row / 8;
        let at = tile + self.code_bytes() + self.high_bytes() + entry * self.scale_bytes();
        out[at..at + self.scale_bytes()].copy_from_slice(&scale[..self.scale_bytes()]);
    }
}

/// Bytes in which a GPU holds weights of a format, given the model's type; `None` if it converts them to that type.
/// Rows and columns that fill up tiles are not counted.
pub fn held_bytes(format: WeightFormat, dtype: DType, weights: u64) -> Option<u64> {
    let tiles = WeightTiles::of_weights(format).filter(|_| dtype != DType::F32)?;
    Some(weights * tiles.tile_bytes() as u64 / (TILE_N * TILE_K) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_have_the_bits_of_the_page() {
        for (format, bits) in [
            (QuantFormat::Q4_0, 4.5),
            (QuantFormat::Q4_1, 5.0),
            (QuantFormat::Q4_K, 5.0),
            (QuantFormat::Q5_0, 5.5),
            (QuantFormat::Q5_K, 6.0),
            (QuantFormat::Q6_K, 7.0),
            (QuantFormat::Q8_0, 8.5),
            (QuantFormat::Q2_K, 6.0),
            (QuantFormat::Q3_K, 5.0),
        ] {
            let bytes = held_bytes(WeightFormat::Quantized(format), DType::BF16, 1024).expect("they are held");
            assert_eq!(bytes as f64 * 8.0 / 1024.0, bits, "{format}");
        }
        assert_eq!(held_bytes(WeightFormat::Fp8, DType::F16, 1024), Some(1024 * 17 / 16));
        assert_eq!(held_bytes(WeightFormat::Quantized(QuantFormat::Q4_0), DType::F32, 1024), None);
        assert_eq!(held_bytes(DType::F16.into(), DType::BF16, 1024), None);
        for format in QuantFormat::ALL {
            assert!(WeightTiles::ALL.contains(&WeightTiles::of(*format)), "{format}");
        }
    }
}
