//! Sizes of what the backend works on, for a profile.

use super::{CpuBackend, CpuExpertsWorkspace, CpuMatrix, CpuTensor};
use crate::backend::Experts;
use crate::backend::profile::Countable;

impl Countable for CpuBackend {
    fn matrix_size(w: &CpuMatrix) -> (usize, usize, usize) {
        (w.n, w.k, w.n * w.k * w.dtype.size_bytes())
    }

    fn tensor_size(tensor: &CpuTensor) -> (usize, usize) {
        (tensor.cols, size_of::<f32>())
    }

    fn experts_used(work: &CpuExpertsWorkspace, experts: &Experts<CpuMatrix, Vec<CpuMatrix>>) -> (usize, usize) {
        let bytes = |matrices: &[CpuMatrix]| matrices.iter().map(|w| Self::matrix_size(w).2).sum::<usize>();
        (work.num_used(), bytes(&experts.up) + bytes(&experts.down))
    }
}
