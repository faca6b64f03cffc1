//! FP8 matrices in device memory as cuBLASLt multiplies them, and the kernels for their products, which `fp8_products`
//! launches.

use super::device::{Device, DeviceBuffer, FP8_SCALE_BLOCK, Fp8Scaling, KernelId};
use super::upload::Uploader;
use crate::fp8::{self, FP8_BLOCK_BYTES, FP8_BLOCK_WEIGHTS};
use crate::{DType, HostTensor, WeightFormat};
use pagetide_base::error::StartError;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};

/// cuBLASLt multiplies matrices whose sizes are multiples of it.
const SIZE_STEP: usize = 16;

/// A matrix `[n, k]` of E4M3 codes, row-major, and its scales in float32, as [`Fp8Scaling`] has them.
pub(super) struct Fp8Matrix {
    pub kernels: Rc<Fp8Kernels>,
    pub codes: DeviceBuffer,
    pub scales: DeviceBuffer,
    pub scaling: Fp8Scaling,
    pub n: usize,
    pub k: usize,
}

/// The module's kernels, and the memory of quantised activations.
pub(super) struct Fp8Kernels {
    pub device: Rc<dyn Device>,
    pub quantize_rows: KernelId,
    pub quantize_row_blocks: KernelId,
    pub look_up: KernelId,
    /// The most rows of a product.
    pub max_rows: usize,
    pub activations: RefCell<QuantizedActivations>,
    /// Matrices that were uploaded for these products.
    pub num_matrices: Cell<usize>,
}

/// Memory for the longest rows so far.
#[derive(Default)]
pub(super) struct QuantizedActivations {
    pub codes: Option<DeviceBuffer>,
    pub scales: Option<DeviceBuffer>,
}

impl Fp8Matrix {
    /// Uploads a matrix of `parts`. `None` if cuBLASLt does not multiply it: a part is not FP8, or the sizes or the
    /// places where scales change do not fit.
    pub fn upload(
        kernels: &Rc<Fp8Kernels>,
        parts: &[HostTensor<'_>],
        uploader: &mut Uploader,
    ) -> Result<Option<Self>, StartError> {
        let (n, k) = (parts.iter().map(|part| part.rows).sum::<usize>(), parts[0].cols);
        let fits = n.is_multiple_of(SIZE_STEP) && k.is_multiple_of(FP8_BLOCK_WEIGHTS);
        if !fits || parts.iter().any(|part| part.format != WeightFormat::Fp8) {
            return Ok(None);
        }
        let row_bytes = k / FP8_BLOCK_WEIGHTS * FP8_BLOCK_BYTES;
        let rows: Vec<&[u8]> = parts.iter().flat_map(|part| part.bytes.chunks_exact(row_bytes)).collect();
        let Some((scaling, scales)) = scales(&rows) else { return Ok(None) };
        let is_finite = AtomicBool::new(scales.iter().all(|scale| scale.is_finite()));
        let copy_codes = |row: usize, out: &mut [u8]| {
            for (block, out) in rows[row].chunks_exact(FP8_BLOCK_BYTES).zip(out.chunks_exact_mut(FP8_BLOCK_WEIGHTS)) {
                let (codes, _) = fp8::read_block(block);
                out.copy_from_slice(codes);
                if codes.iter().any(|code| code & 0x7f == 0x7f) {
                    is_finite.store(false, Ordering::Relaxed);
                }
            }
        };
        let codes = uploader.upload_pieces(n, k, &copy_codes)?;
        if !is_finite.into_inner() {
            return Err(fp8::not_finite(n, k));
        }
        let bytes: &[u8] = bytemuck::cast_slice(&scales);
        let scales = HostTensor { format: DType::F32.into(), rows: 1, cols: scales.len(), bytes };
        let scales = uploader.upload(&[scales], DType::F32)?;
        kernels.num_matrices.set(kernels.num_matrices.get() + 1);
        Ok(Some(Self { kernels: kernels.clone(), codes, scales, scaling, n, k }))
    }
}

/// How the scales of a matrix can be told to cuBLASLt, and in its order. `rows` are blocks of FP8.
fn scales(rows: &[&[u8]]) -> Option<(Fp8Scaling, Vec<f32>)> {
    let of_row = |row: &[u8]| row.chunks_exact(FP8_BLOCK_BYTES).map(|block| fp8::read_block(block).1).collect();
    let all: Vec<Vec<f32>> = rows.iter().map(|row| of_row(row)).collect();
    let are_equal = |scales: &[f32]| scales.iter().all(|scale| scale.to_bits() == scales[0].to_bits());
    if all.iter().all(|scales| are_equal(scales)) {
        return Some((Fp8Scaling::Rows, all.iter().map(|scales| scales[0]).collect()));
    }
    const IN_BLOCK: usize = FP8_SCALE_BLOCK / FP8_BLOCK_WEIGHTS;
    let k = all[0].len() * FP8_BLOCK_WEIGHTS;
    if !k.is_multiple_of(FP8_SCALE_BLOCK) {
        return None;
    }
    let mut scales = Vec::new();
    for rows in all.chunks(FP8_SCALE_BLOCK) {
        let first = scales.len();
        for column in (0..rows[0].len()).step_by(IN_BLOCK) {
            let block: Vec<f32> = rows.iter().flat_map(|row| row[column..column + IN_BLOCK].iter().copied()).collect();
            if !are_equal(&block) {
                return None;
            }
            scales.push(block[0]);
        }
        scales.resize(first + Fp8Scaling::Blocks.scales_of_row(k), 0.0);
    }
    Some((Fp8Scaling::Blocks, scales))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fp8::write_block;

    /// Rows of blocks whose scales are given by row and block.
    fn rows(n: usize, blocks: usize, scale: impl Fn(usize, usize) -> f32) -> Vec<Vec<u8>> {
        let row = |row: usize| {
            let mut bytes = vec![0; blocks * FP8_BLOCK_BYTES];
            for (index, block) in bytes.chunks_exact_mut(FP8_BLOCK_BYTES).enumerate() {
                write_block(scale(row, index), &[1; FP8_BLOCK_WEIGHTS], block);
            }
            bytes
        };
        (0..n).map(row).collect()
    }

    fn scales_of(rows: &[Vec<u8>]) -> Option<(Fp8Scaling, Vec<f32>)> {
        scales(&rows.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }

    #[test]
    fn scales_of_rows_and_blocks_are_found() {
        let channels = rows(32, 3, |row, _| 1.0 + row as f32);
        let (scaling, found) = scales_of(&channels).unwrap();
        assert_eq!((scaling, found[31], found.len()), (Fp8Scaling::Rows, 32.0, 32));
        // 144 rows are two blocks, and 384 columns are three, which are filled up to four.
        let blocks = rows(144, 6, |row, block| (10 * (row / 128) + block / 2) as f32);
        let (scaling, found) = scales_of(&blocks).unwrap();
        assert_eq!((scaling, found), (Fp8Scaling::Blocks, vec![0.0, 1.0, 2.0, 0.0, 10.0, 11.0, 12.0, 0.0]));
    }

    #[test]
    fn scales_that_change_elsewhere_are_not_taken() {
        assert_eq!(scales_of(&rows(128, 6, |_, block| block as f32)), None, "within 128 columns");
        assert_eq!(scales_of(&rows(128, 5, |_, block| (block / 2) as f32)), None, "columns are no whole blocks");
        assert_eq!(scales_of(&rows(144, 4, |row, block| (row / 64 + block / 2) as f32)), None, "within 128 rows");
    }
}
