//! A backend that allocates and computes nothing, but counts the memory of a load. Loading onto it finds tensors that
//! are missing or have the wrong shape before anything is packed.

use pagetide_backend::{
    Activation, AttentionShape, Backend, Batch, DType, Experts, ExpertsShape, FinishedCopy, HostTensor, KvLayout,
    LogitsRequest, LogitsResult, Norm, Rope, TensorRole, WeightFormat, matrix_shape,
};
use pagetide_base::error::StartError;
use pagetide_base::ids::{BlockId, KvPlace};
use std::cell::Cell;
use std::ops::Range;

/// Size of a float32 activation.
const F32_BYTES: u128 = 4;

pub struct DryBackend {
    holds_fp8: bool,
    bytes: Cell<u128>,
}

impl DryBackend {
    /// In the place of a backend that keeps FP8 weights, or of one that does not.
    pub fn new(holds_fp8: bool) -> Self {
        Self { holds_fp8, bytes: Cell::new(0) }
    }

    /// Memory of everything that was loaded so far.
    pub fn bytes(&self) -> u128 {
        self.bytes.get()
    }

    fn count(&self, sizes: &[usize], element_bytes: u128) {
        let bytes = sizes.iter().fold(element_bytes, |bytes, size| bytes.saturating_mul(*size as u128));
        self.bytes.set(self.bytes.get().saturating_add(bytes));
    }

    /// Counts a part of a matrix. Quantised weights stay as they are.
    fn count_part(&self, part: &HostTensor<'_>, dtype: DType) -> Result<(), StartError> {
        part.check_size()?;
        match part.format {
            WeightFormat::Plain(_) => self.count(&[part.rows, part.cols], dtype.size_bytes() as u128),
            WeightFormat::Quantized(_) | WeightFormat::Fp8 => self.count(&[part.bytes.len()], 1),
        }
        Ok(())
    }

    fn count_in(&self, sizes: &[usize], dtype: DType) -> Result<(), StartError> {
        self.count(sizes, dtype.size_bytes() as u128);
        Ok(())
    }
}

const COMPUTES_NOTHING: &str = "a dry backend is only loaded onto";

impl Backend for DryBackend {
    const READS_ELEMENTS: bool = false;

    type Matrix = ();
    type Vector = ();
    type Tensor = ();
    type RopeTable = ();
    type Matrices = ();
    type ExpertsWorkspace = ();

    fn holds_fp8(&self, dtype: DType) -> bool {
        self.holds_fp8 && dtype != DType::F32
    }

    fn matrix(&self, parts: &[HostTensor<'_>], dtype: DType) -> Result<(), StartError> {
        matrix_shape(parts)?;
        parts.iter().try_for_each(|part| self.count_part(part, dtype))
    }

    fn transposed_matrix(&self, parts: &[HostTensor<'_>], dtype: DType) -> Result<(), StartError> {
        for part in parts {
            part.check_size()?;
            self.count_in(&[part.rows, part.cols], dtype)?;
        }
        Ok(())
    }

    fn random_matrix(&self, n: usize, k: usize, dtype: DType, _: u64) -> Result<(), StartError> {
        self.count_in(&[n, k], dtype)
    }

    fn matrices(&self, _: usize, parts: &[HostTensor<'_>], dtype: DType) -> Result<(), StartError> {
        parts.iter().try_for_each(|part| self.count_part(part, dtype))
    }

    fn random_matrices(&self, count: usize, n: usize, k: usize, dtype: DType, _: u64) -> Result<(), StartError> {
        self.count_in(&[count, n, k], dtype)
    }

    fn vector(&self, parts: &[HostTensor<'_>]) -> Result<(), StartError> {
        for part in parts {
            part.check_size()?;
            self.count(&[part.rows, part.cols], F32_BYTES);
        }
        Ok(())
    }

    fn tensor(&self, max_rows: usize, cols: usize, _: TensorRole) -> Result<(), StartError> {
        self.count(&[max_rows, cols], F32_BYTES);
        Ok(())
    }

    fn rope_table(&self, rope: &Rope) -> Result<(), StartError> {
        self.count(&[rope.max_positions, rope.rotary_dim], F32_BYTES);
        Ok(())
    }

    fn experts_workspace(&self, max_rows: usize, shape: &ExpertsShape) -> Result<(), StartError> {
        let ExpertsShape { num_experts, num_chosen, hidden_size, intermediate_size, .. } = *shape;
        self.count(&[max_rows, num_experts], F32_BYTES);
        self.count(&[max_rows, num_chosen, hidden_size], F32_BYTES);
        self.count(&[max_rows, num_chosen, 3, intermediate_size], F32_BYTES);
        Ok(())
    }

    fn allocate_kv(&mut self, layout: KvLayout, device_blocks: usize, swap_blocks: usize) -> Result<(), StartError> {
        self.count(&[device_blocks.saturating_add(swap_blocks), layout.block_bytes()], 1);
        Ok(())
    }

    fn begin(&mut self, _: &Batch) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn embed(&mut self, (): &(), _: f32, (): &mut ()) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn add_position_embedding(&mut self, (): &(), _: usize, (): &mut ()) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn norm(&mut self, (): &(), _: &Norm<()>, (): &mut ()) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn add_norm(&mut self, (): &mut (), (): &(), _: &Norm<()>, (): &mut ()) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn add(&mut self, (): &mut (), (): &()) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn linear(&mut self, (): &(), (): &(), _: Option<&()>, (): &mut ()) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn qk_norm(&mut self, (): &mut (), _: &AttentionShape, _: &Norm<()>, _: &Norm<()>) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn rope_and_write_kv(&mut self, (): &mut (), _: &AttentionShape, _: Option<&()>, _: usize) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn attention(&mut self, (): &(), _: &AttentionShape, _: usize, (): &mut ()) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn gated_activation(&mut self, (): &(), _: Activation, (): &mut ()) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn activation(&mut self, (): &mut (), _: Activation) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn mix_experts(&mut self, (): &(), _: &Experts<(), ()>, _: &ExpertsShape, (): &mut (), (): &mut ()) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn add_gated(&mut self, (): &(), (): &(), (): &(), (): &mut ()) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn gather_rows(&mut self, (): &(), _: usize, _: usize, (): &mut ()) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn logits(&mut self, (): &(), _: usize, (): &(), _: Option<&()>) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn cap_logits(&mut self, _: f32) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn fetch_rows(&mut self, (): &(), _: Range<usize>) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn read_logits(&mut self) -> Vec<f32> {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn sample(&mut self, _: &[LogitsRequest<'_>]) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn end_step(&mut self) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn is_step_done(&mut self) -> bool {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn finish_step(&mut self) -> Vec<LogitsResult> {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn copy_blocks(&mut self, _: &[(BlockId, BlockId)]) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn swap_out(&mut self, _: &[(BlockId, BlockId)]) -> bool {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn swap_in(&mut self, _: &[(BlockId, BlockId)]) -> bool {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn read_blocks(&mut self, _: &[KvPlace], _: &mut [u8]) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn write_blocks(&mut self, _: &[BlockId], _: &[u8]) {
        unreachable!("{COMPUTES_NOTHING}")
    }

    fn finished_copies(&mut self) -> Vec<FinishedCopy> {
        unreachable!("{COMPUTES_NOTHING}")
    }
}
