//! Profiles where a step's time goes: a backend that wraps another one and counts the time and the traffic of each
//! operation.
//!
//! [`Profiled`] delegates every operation. For each phase of a step it adds up calls, time, and the bytes and
//! floating-point operations that follow from the shapes. It is used only if a profile was asked for. An operation's
//! time ends when the operation returns. So only a backend whose operations are done when they return can be profiled;
//! the trait [`Countable`] marks such backends.
//!
//! Bytes are the least that an operation must move: all weights once, and the part of the KV cache that it reads and
//! writes. Activations are counted separately, because they may stay in the caches. Floating-point operations are those
//! of matrix products and of attention.

mod totals;

pub use totals::{OperationWork, PhaseTotals, Profile, StepKind, StepPhase, StepTotals};

use super::{
    Activation, AttentionShape, Backend, Batch, BatchSeq, DType, Experts, ExpertsShape, FinishedCopy, Heads,
    HostTensor, KvLayout, LogitsRequest, LogitsResult, Norm, Rope, TensorRole,
};
use pagetide_base::error::StartError;
use pagetide_base::ids::{BlockId, KvPlace};
use std::ops::Range;
use std::time::{Duration, Instant};

/// A backend whose operations are done when they return, and whose tensors know their sizes.
pub trait Countable: Backend {
    /// `(n, k, bytes)` of a matrix `[n, k]`, without padding.
    fn matrix_size(matrix: &Self::Matrix) -> (usize, usize, usize);
    /// Columns, and bytes of an element.
    fn tensor_size(tensor: &Self::Tensor) -> (usize, usize);
    /// The number of experts that at least one row of the last operation chose, and the bytes of all `experts`
    /// together.
    fn experts_used(work: &Self::ExpertsWorkspace, experts: &Experts<Self::Matrix, Self::Matrices>) -> (usize, usize);
}

/// A backend that counts what `inner` does.
pub struct Profiled<B: Backend> {
    inner: B,
    profile: Profile,
    /// The phase that the next products belong to.
    product: StepPhase,
    kv: Option<KvLayout>,
    seqs: Vec<BatchSeq>,
    rows: usize,
    vocab_size: usize,
    /// When the current step began.
    started: Option<Instant>,
    step: [PhaseTotals; StepPhase::ALL.len()],
}

impl<B: Countable> Profiled<B> {
    /// `profile` gets the sums of every step at its end.
    pub fn new(inner: B, profile: Profile) -> Self {
        Self {
            inner,
            profile,
            product: StepPhase::Between,
            kv: None,
            seqs: Vec::new(),
            rows: 0,
            vocab_size: 0,
            started: None,
            step: Default::default(),
        }
    }

    /// Runs `call` and counts it. Every operation of [`Backend`] must be wrapped in this.
    fn timed<T>(&mut self, phase: StepPhase, work: OperationWork, call: impl FnOnce(&mut B) -> T) -> T {
        let started = Instant::now();
        self.started.get_or_insert(started);
        let result = call(&mut self.inner);
        self.step[phase as usize] += PhaseTotals { calls: 1, time: started.elapsed(), work };
        result
    }

    /// Work over whole rows of `tensors`, each read or written once.
    fn rows_of<const N: usize>(&self, tensors: [&B::Tensor; N]) -> OperationWork {
        let bytes = tensors.map(|tensor| {
            let (cols, element_bytes) = B::tensor_size(tensor);
            (self.rows * cols * element_bytes) as u64
        });
        OperationWork { activation_bytes: bytes.iter().sum(), ..OperationWork::default() }
    }

    /// A product of `rows` rows with `w`, without activations.
    fn product_of(rows: usize, w: &B::Matrix) -> OperationWork {
        let (n, k, bytes) = B::matrix_size(w);
        OperationWork { memory_bytes: bytes as u64, flops: 2 * (rows * n * k) as u64, ..OperationWork::default() }
    }

    /// A product of the batch's rows with `w`, which reads and writes `tensors`.
    fn product<const N: usize>(&self, w: &B::Matrix, tensors: [&B::Tensor; N]) -> OperationWork {
        let mut work = Self::product_of(self.rows, w);
        work += self.rows_of(tensors);
        work
    }

    /// A lookup of one row of `table` for each row of the batch.
    fn looked_up(&self, table: &B::Matrix, out: &B::Tensor) -> OperationWork {
        let (n, _, bytes) = B::matrix_size(table);
        OperationWork { memory_bytes: (self.rows * bytes / n) as u64, ..self.rows_of([out]) }
    }

    /// Bytes of K and V of one token in one layer.
    fn token_bytes(&self) -> usize {
        self.kv.map_or(0, |kv| kv.block_bytes() / kv.num_layers / kv.block_size)
    }

    /// Bytes of the K and V that the batch's rows write.
    fn kv_written(&self) -> u64 {
        (self.rows * self.token_bytes()) as u64
    }

    fn attended(&self, shape: &AttentionShape, qkv: &B::Tensor, out: &B::Tensor) -> OperationWork {
        let (mut read, mut seen) = (0, 0);
        let window = shape.window.unwrap_or(usize::MAX);
        for seq in &self.seqs {
            let len = seq.num_computed + seq.num_rows;
            read += len.min(window.saturating_add(seq.num_rows - 1));
            seen += (seq.num_computed + 1..=len).map(|len| len.min(window)).sum::<usize>();
        }
        OperationWork {
            memory_bytes: (read * self.token_bytes()) as u64,
            // One product with K and one with V.
            flops: 4 * (seen * shape.num_heads * shape.head_dim) as u64,
            ..self.rows_of([qkv, out])
        }
    }

    fn blocks(&self, pairs: &[(BlockId, BlockId)]) -> OperationWork {
        let block_bytes = self.kv.map_or(0, |kv| kv.block_bytes());
        OperationWork { memory_bytes: 2 * (pairs.len() * block_bytes) as u64, ..OperationWork::default() }
    }
}

impl<B: Countable> Backend for Profiled<B> {
    type Matrix = B::Matrix;
    type Vector = B::Vector;
    type Tensor = B::Tensor;
    type RopeTable = B::RopeTable;
    type Matrices = B::Matrices;
    type ExpertsWorkspace = B::ExpertsWorkspace;

    fn matrix(&self, parts: &[HostTensor<'_>], dtype: DType) -> Result<B::Matrix, StartError> {
        self.inner.matrix(parts, dtype)
    }
    fn random_matrix(&self, n: usize, k: usize, dtype: DType, seed: u64) -> Result<B::Matrix, StartError> {
        self.inner.random_matrix(n, k, dtype, seed)
    }
    fn gate_up_matrix(&self, parts: &[HostTensor<'_>], dtype: DType) -> Result<B::Matrix, StartError> {
        self.inner.gate_up_matrix(parts, dtype)
    }
    fn random_gate_up_matrix(&self, n: usize, k: usize, dtype: DType, seed: u64) -> Result<B::Matrix, StartError> {
        self.inner.random_gate_up_matrix(n, k, dtype, seed)
    }
    fn matrices(&self, count: usize, parts: &[HostTensor<'_>], dtype: DType) -> Result<B::Matrices, StartError> {
        self.inner.matrices(count, parts, dtype)
    }
    fn random_matrices(
        &self,
        count: usize,
        n: usize,
        k: usize,
        dtype: DType,
        seed: u64,
    ) -> Result<B::Matrices, StartError> {
        self.inner.random_matrices(count, n, k, dtype, seed)
    }
    fn vector(&self, parts: &[HostTensor<'_>]) -> Result<B::Vector, StartError> {
        self.inner.vector(parts)
    }
    fn tensor(&self, max_rows: usize, cols: usize, role: TensorRole) -> Result<B::Tensor, StartError> {
        self.inner.tensor(max_rows, cols, role)
    }
    fn rope_table(&self, rope: &Rope) -> Result<B::RopeTable, StartError> {
        self.inner.rope_table(rope)
    }
    fn experts_workspace(&self, max_rows: usize, shape: &ExpertsShape) -> Result<B::ExpertsWorkspace, StartError> {
        self.inner.experts_workspace(max_rows, shape)
    }

    fn allocate_kv(
        &mut self,
        layout: KvLayout,
        num_device_blocks: usize,
        num_swap_blocks: usize,
    ) -> Result<(), StartError> {
        (self.kv, self.started, self.step) = (Some(layout), None, Default::default());
        self.inner.allocate_kv(layout, num_device_blocks, num_swap_blocks)
    }

    fn begin(&mut self, batch: &Batch) {
        self.started.get_or_insert_with(Instant::now);
        self.rows = batch.num_rows();
        self.seqs.clone_from(&batch.seqs);
        self.inner.begin(batch);
    }
    fn mark(&mut self, phase: StepPhase) {
        self.product = phase;
    }

    fn embed(&mut self, table: &B::Matrix, scale: f32, out: &mut B::Tensor) {
        let work = self.looked_up(table, out);
        self.timed(StepPhase::Embedding, work, |inner| inner.embed(table, scale, out));
    }
    fn add_position_embedding(&mut self, table: &B::Matrix, offset: usize, out: &mut B::Tensor) {
        let work = self.looked_up(table, out);
        self.timed(StepPhase::Embedding, work, |inner| inner.add_position_embedding(table, offset, out));
    }
    fn norm(&mut self, x: &B::Tensor, norm: &Norm<B::Vector>, out: &mut B::Tensor) {
        let work = self.rows_of([x, out]);
        self.timed(StepPhase::Norms, work, |inner| inner.norm(x, norm, out));
    }
    fn add_norm(&mut self, x: &mut B::Tensor, delta: &B::Tensor, norm: &Norm<B::Vector>, out: &mut B::Tensor) {
        let work = self.rows_of([x, x, delta, out]);
        self.timed(StepPhase::Norms, work, |inner| inner.add_norm(x, delta, norm, out));
    }
    fn add(&mut self, x: &mut B::Tensor, delta: &B::Tensor) {
        let work = self.rows_of([x, x, delta]);
        self.timed(StepPhase::Norms, work, |inner| inner.add(x, delta));
    }
    fn linear(&mut self, x: &B::Tensor, w: &B::Matrix, bias: Option<&B::Vector>, out: &mut B::Tensor) {
        let work = self.product(w, [x, out]);
        self.timed(self.product, work, |inner| inner.linear(x, w, bias, out));
    }
    fn qkv_linear(
        &mut self,
        x: &B::Tensor,
        w: &B::Matrix,
        bias: Option<&B::Vector>,
        heads: &Heads<'_, Self>,
        qkv: &mut B::Tensor,
    ) {
        let Heads { shape, norms, rope, layer } = *heads;
        let heads = Heads::<B> { shape, norms, rope, layer };
        let mut work = self.product(w, [x, qkv]);
        work.memory_bytes += self.kv_written();
        self.timed(self.product, work, |inner| inner.qkv_linear(x, w, bias, &heads, qkv));
    }
    fn gated_linear(
        &mut self,
        x: &B::Tensor,
        w: &B::Matrix,
        bias: Option<&B::Vector>,
        kind: Activation,
        gate_up: &mut B::Tensor,
        out: &mut B::Tensor,
    ) {
        let work = self.product(w, [x, out]);
        self.timed(self.product, work, |inner| inner.gated_linear(x, w, bias, kind, gate_up, out));
    }
    fn residual_linear(
        &mut self,
        x: &B::Tensor,
        w: &B::Matrix,
        bias: Option<&B::Vector>,
        stream: &mut B::Tensor,
        delta: &mut B::Tensor,
    ) -> bool {
        let work = self.product(w, [x, stream, stream]);
        self.timed(self.product, work, |inner| inner.residual_linear(x, w, bias, stream, delta))
    }
    fn qk_norm(&mut self, qkv: &mut B::Tensor, shape: &AttentionShape, q: &Norm<B::Vector>, k: &Norm<B::Vector>) {
        let work = self.rows_of([qkv, qkv]);
        self.timed(StepPhase::Norms, work, |inner| inner.qk_norm(qkv, shape, q, k));
    }
    fn rope_and_write_kv(
        &mut self,
        qkv: &mut B::Tensor,
        shape: &AttentionShape,
        rope: Option<&B::RopeTable>,
        layer: usize,
    ) {
        let work = OperationWork { memory_bytes: self.kv_written(), ..self.rows_of([qkv, qkv]) };
        self.timed(StepPhase::RopeAndKv, work, |inner| inner.rope_and_write_kv(qkv, shape, rope, layer));
    }
    fn attention(&mut self, qkv: &B::Tensor, shape: &AttentionShape, layer: usize, out: &mut B::Tensor) {
        let work = self.attended(shape, qkv, out);
        self.timed(StepPhase::Attention, work, |inner| inner.attention(qkv, shape, layer, out));
    }
    fn gated_activation(&mut self, gate_up: &B::Tensor, kind: Activation, out: &mut B::Tensor) {
        let work = self.rows_of([gate_up, out]);
        self.timed(StepPhase::Activation, work, |inner| inner.gated_activation(gate_up, kind, out));
    }
    fn activation(&mut self, x: &mut B::Tensor, kind: Activation) {
        let work = self.rows_of([x, x]);
        self.timed(StepPhase::Activation, work, |inner| inner.activation(x, kind));
    }
    fn mix_experts(
        &mut self,
        x: &B::Tensor,
        experts: &Experts<B::Matrix, B::Matrices>,
        shape: &ExpertsShape,
        work: &mut B::ExpertsWorkspace,
        out: &mut B::Tensor,
    ) {
        self.timed(StepPhase::Experts, OperationWork::default(), |inner| {
            inner.mix_experts(x, experts, shape, work, out)
        });
        // Only now is it known which experts were read.
        let mut counted = self.product(&experts.router, [x, out]);
        let (used, bytes) = B::experts_used(work, experts);
        counted.memory_bytes += (bytes / shape.num_experts * used) as u64;
        // Gate, up and down of the experts that a row goes through.
        let of_row = shape.num_chosen * 3 * shape.intermediate_size * shape.hidden_size;
        counted.flops += 2 * (self.rows * of_row) as u64;
        self.step[StepPhase::Experts as usize].work += counted;
    }
    fn add_gated(&mut self, x: &B::Tensor, gate: &B::Vector, from: &B::Tensor, out: &mut B::Tensor) {
        let work = self.rows_of([x, from, out, out]);
        self.timed(StepPhase::Experts, work, |inner| inner.add_gated(x, gate, from, out));
    }
    fn gather_rows(&mut self, x: &B::Tensor, first: usize, num_rows: usize, out: &mut B::Tensor) {
        let (cols, element_bytes) = B::tensor_size(x);
        let work = OperationWork {
            activation_bytes: 2 * (num_rows * cols * element_bytes) as u64,
            ..OperationWork::default()
        };
        self.timed(StepPhase::Copies, work, |inner| inner.gather_rows(x, first, num_rows, out));
    }
    fn logits(&mut self, x: &B::Tensor, num_rows: usize, w: &B::Matrix, bias: Option<&B::Vector>) {
        let ((n, k, _), (_, element_bytes)) = (B::matrix_size(w), B::tensor_size(x));
        self.vocab_size = n;
        let activation_bytes = (num_rows * (k * element_bytes + n * size_of::<f32>())) as u64;
        let work = OperationWork { activation_bytes, ..Self::product_of(num_rows, w) };
        self.timed(StepPhase::Vocabulary, work, |inner| inner.logits(x, num_rows, w, bias));
    }
    fn cap_logits(&mut self, cap: f32) {
        self.timed(StepPhase::Vocabulary, OperationWork::default(), |inner| inner.cap_logits(cap));
    }
    fn fetch_rows(&mut self, x: &B::Tensor, rows: Range<usize>) {
        self.timed(StepPhase::Copies, OperationWork::default(), |inner| inner.fetch_rows(x, rows));
    }
    fn read_logits(&mut self) -> Vec<f32> {
        self.inner.read_logits()
    }
    fn sample(&mut self, requests: &[LogitsRequest<'_>]) {
        let activation_bytes = (requests.len() * self.vocab_size * size_of::<f32>()) as u64;
        let work = OperationWork { activation_bytes, ..OperationWork::default() };
        self.timed(StepPhase::Sampling, work, |inner| inner.sample(requests));
    }

    fn end_step(&mut self) {
        self.inner.end_step();
        let mut step = std::mem::take(&mut self.step);
        // A plan that only copies blocks is not a step.
        let (Some(started), false) = (self.started.take(), self.seqs.is_empty()) else { return };
        let time = started.elapsed();
        let counted: Duration = step.iter().map(|totals| totals.time).sum();
        step[StepPhase::Between as usize] +=
            PhaseTotals { calls: 1, time: time.saturating_sub(counted), ..PhaseTotals::default() };
        self.profile.add(StepKind::of(&self.seqs), self.rows, time, &step);
        self.seqs.clear();
    }
    fn is_step_done(&mut self) -> bool {
        self.inner.is_step_done()
    }
    fn finish_step(&mut self) -> Vec<LogitsResult> {
        self.inner.finish_step()
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) {
        let work = self.blocks(pairs);
        self.timed(StepPhase::Copies, work, |inner| inner.copy_blocks(pairs));
    }
    // Copies between the tiers run beside the steps, so their time is not part of the steps.
    fn swap_out(&mut self, pairs: &[(BlockId, BlockId)]) -> bool {
        self.inner.swap_out(pairs)
    }
    fn swap_in(&mut self, pairs: &[(BlockId, BlockId)]) -> bool {
        self.inner.swap_in(pairs)
    }
    fn discard_swap_blocks(&mut self, blocks: &[BlockId]) {
        self.inner.discard_swap_blocks(blocks);
    }
    fn read_blocks(&mut self, places: &[KvPlace], into: &mut [u8]) {
        self.inner.read_blocks(places, into);
    }
    fn write_blocks(&mut self, blocks: &[BlockId], from: &[u8]) {
        self.inner.write_blocks(blocks, from);
    }
    fn finished_copies(&mut self) -> Vec<FinishedCopy> {
        self.inner.finished_copies()
    }
    fn waited_for_copies(&mut self) -> f64 {
        self.inner.waited_for_copies()
    }
}
