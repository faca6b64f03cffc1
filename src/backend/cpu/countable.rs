//! Sizes of what the backend works on, for a profile.

use super::tensors::Values;
use super::{CpuBackend, CpuExpertsWorkspace, CpuMatrix, CpuTensor};
use crate::Experts;
use crate::profile::Countable;

impl Countable for CpuBackend {
    fn matrix_size(w: &CpuMatrix) -> (usize, usize, usize) {
        (w.n(), w.k, w.size_bytes())
    }

    fn tensor_size(tensor: &CpuTensor) -> (usize, usize) {
        let element_bytes = match &tensor.data {
            Values::F32(_) => size_of::<f32>(),
            Values::Operand(operand) => operand.element_bytes(),
        };
        (tensor.cols, element_bytes)
    }

    fn experts_used(work: &CpuExpertsWorkspace, experts: &Experts<CpuMatrix, Vec<CpuMatrix>>) -> (usize, usize) {
        let bytes = |matrices: &[CpuMatrix]| matrices.iter().map(|w| Self::matrix_size(w).2).sum::<usize>();
        (work.num_used(), bytes(&experts.up) + bytes(&experts.down))
    }
}
