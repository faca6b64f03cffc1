//! The tensors that the backend's operations work on, in device memory.

use super::device::{DeviceBuffer, DevicePtr};
use super::fp8_matrix::Fp8Matrix;
use super::quantized::QuantizedRows;
use crate::DType;

/// Activations `[max_rows, cols]`.
pub struct CudaTensor {
    pub(super) buffer: DeviceBuffer,
    pub(super) max_rows: usize,
    pub(super) cols: usize,
    pub(super) dtype: DType,
}

/// A weight matrix `[n, k]`.
pub struct CudaMatrix {
    pub(super) weights: CudaWeights,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) dtype: DType,
}

/// The weights of a matrix.
pub(super) enum CudaWeights {
    /// Row-major.
    Plain(DeviceBuffer),
    /// All rows, in order.
    Quantized(Vec<QuantizedRows>),
    /// For products with FP8 activations.
    Fp8(Fp8Matrix),
}

/// Weight matrices `[count, n, k]`.
pub struct CudaMatrices {
    pub(super) weights: CudaExpertWeights,
    pub(super) count: usize,
    pub(super) n: usize,
    pub(super) k: usize,
}

/// The weights of matrices of one shape.
pub(super) enum CudaExpertWeights {
    Plain(DeviceBuffer),
    Quantized(QuantizedRows),
}

/// A small vector. Norms read it in float32, and products add it in the type of their results.
pub struct CudaVector {
    pub(super) float: DeviceBuffer,
    pub(super) scalar: DeviceBuffer,
    pub(super) len: usize,
}

/// `[positions][cos, sin][rotary_dim / 2]` float32.
pub struct CudaRopeTable {
    pub(super) buffer: DeviceBuffer,
    pub(super) rotary_dim: usize,
}

impl CudaTensor {
    /// `[max_rows, cols]` of [`CudaTensor::dtype`].
    pub fn buffer(&self) -> &DeviceBuffer {
        &self.buffer
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub(super) fn ptr(&self) -> DevicePtr {
        self.buffer.ptr()
    }

    #[track_caller]
    pub(super) fn check(&self, rows: usize, cols: usize) {
        assert!(rows <= self.max_rows, "{rows} rows of a tensor of {}", self.max_rows);
        assert_eq!(self.cols, cols, "a tensor's width");
    }
}

impl CudaMatrix {
    /// `[n, k]` of the model's type. Panics if the weights are quantised.
    pub fn buffer(&self) -> &DeviceBuffer {
        match &self.weights {
            CudaWeights::Plain(buffer) => buffer,
            CudaWeights::Quantized(_) | CudaWeights::Fp8(_) => panic!("a quantised matrix has no elements in memory"),
        }
    }
}

impl CudaExpertWeights {
    pub(super) fn ptr(&self) -> DevicePtr {
        match self {
            Self::Plain(buffer) => buffer.ptr(),
            Self::Quantized(rows) => rows.ptr(),
        }
    }
}

impl CudaVector {
    /// The address of its elements in `dtype`.
    pub(super) fn of(&self, dtype: DType) -> DevicePtr {
        if dtype == DType::F32 { self.float.ptr() } else { self.scalar.ptr() }
    }
}
