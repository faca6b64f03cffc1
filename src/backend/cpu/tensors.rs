//! What the backend's operations work on.

use super::memory::Buffer;

/// Activations `[max_rows, cols]`, row-major, float32.
pub struct CpuTensor {
    pub(super) data: Buffer<f32>,
    pub(super) max_rows: usize,
    pub(super) cols: usize,
}

/// A small float32 vector.
pub struct CpuVector(pub(super) Vec<f32>);

impl CpuTensor {
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// `[max_rows * cols]`
    pub fn as_slice(&self) -> &[f32] {
        self.data.as_slice()
    }

    /// `[max_rows * cols]`
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        self.data.as_mut_slice()
    }

    pub(super) fn rows(&self, rows: usize) -> &[f32] {
        assert!(rows <= self.max_rows, "{rows} rows of a tensor of {}", self.max_rows);
        &self.as_slice()[..rows * self.cols]
    }

    pub(super) fn rows_mut(&mut self, rows: usize) -> &mut [f32] {
        assert!(rows <= self.max_rows, "{rows} rows of a tensor of {}", self.max_rows);
        let len = rows * self.cols;
        &mut self.as_mut_slice()[..len]
    }
}

impl CpuVector {
    pub fn as_slice(&self) -> &[f32] {
        &self.0
    }
}
