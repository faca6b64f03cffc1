//! Interleaves sixteen rows of a matrix into a panel.

use super::super::simd::{LANES, Simd, SimdKernel, bf16_bits};
use crate::{DType, elements};

/// Bytes of a row that are one vector.
const BLOCK_BYTES: usize = 4 * LANES;

/// Writes rows of the same length, which are already in `dtype`, into the lanes of a panel of zeros.
pub(super) struct Interleave<'a> {
    pub rows: [&'a [u8]; LANES],
    pub dtype: DType,
    pub panel: &'a mut [u8],
}

impl SimdKernel for Interleave<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { rows, dtype, panel } = self;
        let row_bytes = rows[0].len();
        assert!(rows.iter().all(|row| row.len() == row_bytes), "rows differ in length");
        // For every type, a block of a panel is 64 bytes of each of the sixteen rows.
        let (blocks, rest) = (row_bytes / BLOCK_BYTES, row_bytes % BLOCK_BYTES);
        let (whole, last) = panel.split_at_mut(blocks * LANES * BLOCK_BYTES);
        for (block, out) in whole.chunks_exact_mut(LANES * BLOCK_BYTES).enumerate() {
            let mut lanes = [simd.splat(0.0); LANES];
            for (lane, row) in lanes.iter_mut().zip(&rows) {
                // SAFETY: `block` is below the number of whole blocks in a row.
                *lane = unsafe { simd.load(row.as_ptr().add(block * BLOCK_BYTES).cast()) };
            }
            interleave(simd, &mut lanes, dtype, out);
        }
        if rest > 0 {
            let mut lanes = [simd.splat(0.0); LANES];
            for (lane, row) in lanes.iter_mut().zip(&rows) {
                let mut padded = [0u8; BLOCK_BYTES];
                padded[..rest].copy_from_slice(&row[row_bytes - rest..]);
                // SAFETY: the array is one vector.
                *lane = unsafe { simd.load(padded.as_ptr().cast()) };
            }
            let mut padded = [0u8; LANES * BLOCK_BYTES];
            interleave(simd, &mut lanes, dtype, &mut padded);
            // In bfloat16 a last single element is paired with a zero.
            let bytes = rest.next_multiple_of(if dtype == DType::BF16 { 4 } else { 1 }) * LANES;
            last[..bytes].copy_from_slice(&padded[..bytes]);
        }
    }
}

/// Interleaves one block of each row. Numbers are only moved, so that no bit changes.
#[inline(always)]
fn interleave<S: Simd>(simd: S, lanes: &mut [S::V; LANES], dtype: DType, out: &mut [u8]) {
    assert_eq!(out.len(), LANES * BLOCK_BYTES);
    simd.transpose(lanes);
    if dtype != DType::F16 {
        for (i, lanes) in lanes.iter().enumerate() {
            // SAFETY: `out` is as long as all lanes.
            unsafe { simd.store(out.as_mut_ptr().add(i * BLOCK_BYTES).cast(), *lanes) };
        }
        return;
    }
    for (i, lanes) in lanes.iter().enumerate() {
        // Two steps, of one element each.
        let (low, high) = out[i * BLOCK_BYTES..][..BLOCK_BYTES].split_at_mut(BLOCK_BYTES / 2);
        for (lane, pair) in simd.to_array(*lanes).iter().enumerate() {
            let [a, b, c, d] = pair.to_le_bytes();
            low[2 * lane..][..2].copy_from_slice(&[a, b]);
            high[2 * lane..][..2].copy_from_slice(&[c, d]);
        }
    }
}

/// Converts elements of another type to `to`.
pub(super) fn convert(row: &[u8], from: DType, to: DType, out: &mut [u8]) {
    match to {
        DType::F32 => put(elements(row, from).map(f32::to_le_bytes), out),
        DType::F16 => put(elements(row, from).map(|x| half::f16::from_f32(x).to_le_bytes()), out),
        DType::BF16 => put(elements(row, from).map(|x| bf16_bits(x).to_le_bytes()), out),
    }
}

pub(super) fn put<const N: usize>(values: impl Iterator<Item = [u8; N]>, out: &mut [u8]) {
    out.chunks_exact_mut(N).zip(values).for_each(|(out, value)| out.copy_from_slice(&value));
}

#[cfg(test)]
mod tests {
    use super::super::super::isa::Isa;
    use super::super::{panel_bytes, step_bytes};
    use super::*;

    #[test]
    fn each_element_comes_to_its_step_and_lane() {
        for (isa, dtype, k) in Isa::ALL
            .into_iter()
            .filter(|isa| isa.is_available())
            .flat_map(|isa| [DType::BF16, DType::F16, DType::F32].map(|dtype| (isa, dtype)))
            .flat_map(|(isa, dtype)| [1, 2, 15, 16, 31, 32, 33, 64, 101].map(|k| (isa, dtype, k)))
        {
            let size = dtype.size_bytes();
            // All bit patterns are moved unchanged, including those of signalling NaNs.
            let byte = |row: usize, i: usize| (((row * 1009 + i) * 0x9e37_79b9) >> 13) as u8;
            let rows: Vec<Vec<u8>> = (0..LANES).map(|row| (0..k * size).map(|i| byte(row, i)).collect()).collect();
            let mut panel = vec![0u8; panel_bytes(k, dtype)];
            isa.run(Interleave { rows: std::array::from_fn(|row| &*rows[row]), dtype, panel: &mut panel });

            let mut expected = vec![0u8; panel.len()];
            for (row, bytes) in rows.iter().enumerate() {
                for (i, element) in bytes.chunks_exact(size).enumerate() {
                    let (step, place) = match dtype {
                        DType::BF16 => (i / 2, 4 * row + 2 * (i % 2)),
                        DType::F16 | DType::F32 => (i, size * row),
                    };
                    expected[step * step_bytes(dtype) + place..][..size].copy_from_slice(element);
                }
            }
            assert!(panel == expected, "{isa} {dtype:?} {k}");
        }
    }
}
