//! Matrix products of the emulated device.

use pagetide::backend::DType;
use pagetide::backend::cuda::device::{DevicePtr, Matmul};

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

/// Tests are compiled without optimisation, where a plain loop is several times as fast as an iterator.
fn dot(x: &[f32], w: &[f32]) -> f32 {
    let (mut sum, mut i) = (-0.0, 0);
    while i < x.len() {
        sum += x[i] * w[i];
        i += 1;
    }
    sum
}

fn read(from: DevicePtr, len: usize, dtype: DType) -> Vec<f32> {
    // SAFETY: the caller that enqueued the operation promised the range.
    let bytes = unsafe { std::slice::from_raw_parts(from.0 as *const u8, len * dtype.size_bytes()) };
    dtype.decode(bytes)
}
