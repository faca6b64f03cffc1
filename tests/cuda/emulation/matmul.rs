//! Matrix products of the emulated device.

use pagetide::backend::DType;
use pagetide::backend::cuda::device::{DevicePtr, FP8_SCALE_BLOCK, Fp8Matmul, Fp8Operands, Fp8Scaling, Matmul};
use pagetide::backend::fp8::E4M3_VALUES;

/// As cublasLt: products of the operands' type, summed in float32, in an order that does not depend on `m`.
pub(super) fn multiply(matmul: &Matmul, x: DevicePtr, w: DevicePtr, bias: DevicePtr) -> Vec<u8> {
    let Matmul { m, n, k, dtype, out: out_dtype, bias: has_bias } = *matmul;
    let (x, w) = (read(x, m * k, dtype), read(w, n * k, dtype));
    let bias = if has_bias { read(bias, n, out_dtype) } else { vec![0.0; n] };
    let mut result = Vec::with_capacity(m * n);
    for x in x.chunks_exact(k) {
        for (w, bias) in w.chunks_exact(k).zip(&bias) {
            result.push(dot(x, w) + bias);
        }
    }
    out_dtype.encode(&result)
}

/// As cublasLt: products of codes, which are exact in float32, are summed for each pair of scales. The sums are scaled
/// and added up.
pub(super) fn multiply_fp8(matmul: &Fp8Matmul, operands: &Fp8Operands) -> Vec<u8> {
    let Fp8Matmul { m, n, k, scaling, out, bias: has_bias } = *matmul;
    let (x, w) = (read_codes(operands.x, m * k), read_codes(operands.w, n * k));
    let x_scales = read(operands.x_scales, m * scaling.scales_of_activations(k), DType::F32);
    let w_scales = read(operands.w_scales, scaling.rows(n) * scaling.scales_of_row(k), DType::F32);
    let bias = if has_bias { read(operands.bias, n, out) } else { vec![0.0; n] };
    let columns = if scaling == Fp8Scaling::Rows { k } else { FP8_SCALE_BLOCK };
    let mut result = Vec::with_capacity(m * n);
    for (row, x) in x.chunks_exact(k).enumerate() {
        for (column, (w, bias)) in w.chunks_exact(k).zip(&bias).enumerate() {
            let mut sum = 0.0;
            for (block, (x, w)) in x.chunks(columns).zip(w.chunks(columns)).enumerate() {
                let w_row = if scaling == Fp8Scaling::Rows { column } else { column / FP8_SCALE_BLOCK };
                sum += dot(x, w) * x_scales[block * m + row] * w_scales[w_row * scaling.scales_of_row(k) + block];
            }
            result.push(sum + bias);
        }
    }
    out.encode(&result)
}

fn dot(x: &[f32], w: &[f32]) -> f32 {
    x.iter().zip(w).fold(-0.0, |sum, (x, w)| sum + x * w)
}

fn read_codes(from: DevicePtr, len: usize) -> Vec<f32> {
    // SAFETY: as below.
    let codes = unsafe { std::slice::from_raw_parts(from.0 as *const u8, len) };
    codes.iter().map(|code| E4M3_VALUES[usize::from(*code)]).collect()
}

fn read(from: DevicePtr, len: usize, dtype: DType) -> Vec<f32> {
    // SAFETY: the caller that enqueued the operation promised the range.
    let bytes = unsafe { std::slice::from_raw_parts(from.0 as *const u8, len * dtype.size_bytes()) };
    dtype.decode(bytes)
}
