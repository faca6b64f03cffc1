//! The tensors that the backend's operations work on.

use super::gemm::{Operand, Source};
use super::memory::Buffer;

/// Activations `[max_rows, cols]`.
pub struct CpuTensor {
    pub(super) data: Values,
    pub(super) max_rows: usize,
    pub(super) cols: usize,
}

/// The layout of activations in memory.
pub(super) enum Values {
    /// Row-major.
    F32(Buffer<f32>),
    /// In the layout that products read.
    Operand(Operand),
}

/// A small float32 vector.
pub struct CpuVector(pub(super) Vec<f32>);

impl CpuTensor {
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// `[max_rows * cols]`
    pub fn as_slice(&self) -> &[f32] {
        match &self.data {
            Values::F32(data) => data.as_slice(),
            Values::Operand(_) => panic!("only products read this tensor"),
        }
    }

    /// `[max_rows * cols]`
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        match &mut self.data {
            Values::F32(data) => data.as_mut_slice(),
            Values::Operand(_) => panic!("only norms and gated products write this tensor"),
        }
    }

    /// The left side of a product.
    pub(super) fn source(&self, rows: usize) -> Source<'_> {
        match &self.data {
            Values::F32(_) => Source::Rows(self.rows(rows)),
            Values::Operand(operand) => Source::Operand(operand),
        }
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
