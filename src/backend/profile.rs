//! Where a step's time goes: a backend around another one that counts what each operation takes and moves.
//!
//! [`Profiled`] delegates every operation and adds up, by phase of a step, calls, time, bytes and floating-point
//! operations, as far as shapes tell. It exists only where somebody asked for a profile; an engine without one has the
//! bare backend. Times are those until an operation returns, so the wrapper is of use only around a backend that works
//! in the caller's time, which [`Countable`] says.
//!
//! Bytes are the least that an operation must move: weights once, and of the KV cache what it reads and writes. The
//! activations are counted apart, because they need not leave the caches. Floating-point operations are those of
//! matrix products and of attention.

use super::{
    Activation, AttentionShape, Backend, Batch, BatchSeq, DType, Experts, ExpertsShape, Heads, HostTensor, KvLayout,
    LogitsRequest, LogitsResult, Norm, Rope, TensorRole,
};
use crate::error::StartError;
use crate::ids::BlockId;
use std::ops::{AddAssign, Range};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What a step does, in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Embedding,
    Norms,
    /// The product to Q, K and V.
    Qkv,
    /// Rotary embedding, and writing K and V into the cache.
    RopeAndKv,
    Attention,
    /// The product behind attention.
    Output,
    /// The product to gate and up.
    Up,
    Activation,
    Down,
    /// Layers of experts: router, products and mixing.
    Experts,
    Vocabulary,
    Sampling,
    /// Of KV blocks and of rows.
    Copies,
    /// What a step does besides: preparing the batch, and the calls themselves.
    Between,
}

impl Phase {
    pub const ALL: [Phase; 14] = [
        Phase::Embedding,
        Phase::Norms,
        Phase::Qkv,
        Phase::RopeAndKv,
        Phase::Attention,
        Phase::Output,
        Phase::Up,
        Phase::Activation,
        Phase::Down,
        Phase::Experts,
        Phase::Vocabulary,
        Phase::Sampling,
        Phase::Copies,
        Phase::Between,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Phase::Embedding => "embedding",
            Phase::Norms => "norms",
            Phase::Qkv => "qkv product",
            Phase::RopeAndKv => "rope + kv write",
            Phase::Attention => "attention",
            Phase::Output => "output product",
            Phase::Up => "up product",
            Phase::Activation => "activation",
            Phase::Down => "down product",
            Phase::Experts => "experts",
            Phase::Vocabulary => "vocabulary",
            Phase::Sampling => "sampling",
            Phase::Copies => "copies",
            Phase::Between => "between",
        }
    }
}

/// The work of operations, as shapes tell it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Of weights and of the KV cache.
    pub memory_bytes: u64,
    pub activation_bytes: u64,
    pub flops: u64,
}

impl AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        self.memory_bytes += other.memory_bytes;
        self.activation_bytes += other.activation_bytes;
        self.flops += other.flops;
    }
}

/// What the operations of one phase came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub calls: u64,
    pub time: Duration,
    pub work: Work,
}

impl AddAssign for Totals {
    fn add_assign(&mut self, other: Self) {
        self.calls += other.calls;
        self.time += other.time;
        self.work += other.work;
    }
}

/// What the sequences of a step do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// Each has one row.
    Decode,
    /// Each has several.
    Prefill,
    Mixed,
}

impl StepKind {
    pub const ALL: [StepKind; 3] = [StepKind::Decode, StepKind::Prefill, StepKind::Mixed];

    pub fn name(self) -> &'static str {
        match self {
            StepKind::Decode => "decode",
            StepKind::Prefill => "prefill",
            StepKind::Mixed => "mixed",
        }
    }

    fn of(seqs: &[BatchSeq]) -> Self {
        let num_single = seqs.iter().filter(|seq| seq.num_rows == 1).count();
        match num_single {
            0 => StepKind::Prefill,
            all if all == seqs.len() => StepKind::Decode,
            _ => StepKind::Mixed,
        }
    }
}

/// The steps of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTotals {
    pub steps: u64,
    /// Of all steps.
    pub rows: u64,
    /// From the first operation of each step to its end.
    pub time: Duration,
    phases: [Totals; Phase::ALL.len()],
}

impl StepTotals {
    pub fn phase(&self, phase: Phase) -> &Totals {
        &self.phases[phase as usize]
    }
}

/// The sums of a [`Profiled`] backend, shared with those who want to see them.
#[derive(Clone, Debug, Default)]
pub struct Profile(Arc<Mutex<[StepTotals; StepKind::ALL.len()]>>);

impl Profile {
    /// What all steps of a kind came to since the last [`Profile::reset`].
    pub fn steps(&self, kind: StepKind) -> StepTotals {
        self.kinds()[kind as usize]
    }

    /// Starts at nothing, with the next step.
    pub fn reset(&self) {
        *self.kinds() = Default::default();
    }

    /// Sums are whole even where a step panicked: it is added as the last thing that is done.
    fn kinds(&self) -> MutexGuard<'_, [StepTotals; StepKind::ALL.len()]> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A backend whose operations are done when they return, and whose tensors tell their sizes.
pub trait Countable: Backend {
    /// `(n, k, bytes)` of a matrix `[n, k]`, without padding.
    fn matrix_size(matrix: &Self::Matrix) -> (usize, usize, usize);
    /// Columns, and bytes of an element.
    fn tensor_size(tensor: &Self::Tensor) -> (usize, usize);
    /// Number of experts that some row of the last operation chose, and the bytes of all `experts` together.
    fn experts_used(work: &Self::ExpertsWorkspace, experts: &Experts<Self::Matrix, Self::Matrices>) -> (usize, usize);
}

/// A backend that counts what `inner` does.
pub struct Profiled<B: Backend> {
    inner: B,
    profile: Profile,
    /// What the next products are for.
    product: Phase,
    kv: Option<KvLayout>,
    seqs: Vec<BatchSeq>,
    rows: usize,
    vocab_size: usize,
    /// When the step at hand began.
    started: Option<Instant>,
    step: [Totals; Phase::ALL.len()],
}

impl<B: Countable> Profiled<B> {
    /// `profile` gets the sums of every step at its end.
    pub fn new(inner: B, profile: Profile) -> Self {
        Self {
            inner,
            profile,
            product: Phase::Between,
            kv: None,
            seqs: Vec::new(),
            rows: 0,
            vocab_size: 0,
            started: None,
            step: Default::default(),
        }
    }

    /// Does `call` and counts it. Whoever adds an operation to [`Backend`] adds a call of this here.
    fn timed<T>(&mut self, phase: Phase, work: Work, call: impl FnOnce(&mut B) -> T) -> T {
        let started = Instant::now();
        self.started.get_or_insert(started);
        let result = call(&mut self.inner);
        self.step[phase as usize] += Totals { calls: 1, time: started.elapsed(), work };
        result
    }

    /// Work over whole rows of `tensors`, each read or written once.
    fn rows_of<const N: usize>(&self, tensors: [&B::Tensor; N]) -> Work {
        let bytes = tensors.map(|tensor| {
            let (cols, element_bytes) = B::tensor_size(tensor);
            (self.rows * cols * element_bytes) as u64
        });
        Work { activation_bytes: bytes.iter().sum(), ..Work::default() }
    }

    /// A product of `rows` rows with `w`.
    fn product_of(rows: usize, x: &B::Tensor, w: &B::Matrix) -> Work {
        let ((n, k, bytes), (_, element_bytes)) = (B::matrix_size(w), B::tensor_size(x));
        Work {
            memory_bytes: bytes as u64,
            activation_bytes: (rows * (n + k) * element_bytes) as u64,
            flops: 2 * (rows * n * k) as u64,
        }
    }

    /// Rows of `table` that are looked up, one for each of the batch's.
    fn looked_up(&self, table: &B::Matrix, out: &B::Tensor) -> Work {
        let (n, _, bytes) = B::matrix_size(table);
        Work { memory_bytes: (self.rows * bytes / n) as u64, ..self.rows_of([out]) }
    }

    /// Bytes of K and V of one token in one layer.
    fn token_bytes(&self) -> usize {
        self.kv.map_or(0, |kv| kv.block_bytes() / kv.num_layers / kv.block_size)
    }

    fn kv_written(&self, qkv: &B::Tensor) -> Work {
        Work { memory_bytes: (self.rows * self.token_bytes()) as u64, ..self.rows_of([qkv, qkv]) }
    }

    fn attended(&self, shape: &AttentionShape, qkv: &B::Tensor, out: &B::Tensor) -> Work {
        let (mut read, mut seen) = (0, 0);
        let window = shape.window.unwrap_or(usize::MAX);
        for seq in &self.seqs {
            let len = seq.num_computed + seq.num_rows;
            read += len.min(window.saturating_add(seq.num_rows - 1));
            seen += (seq.num_computed + 1..=len).map(|len| len.min(window)).sum::<usize>();
        }
        Work {
            memory_bytes: (read * self.token_bytes()) as u64,
            // A product with K and one with V.
            flops: 4 * (seen * shape.num_heads * shape.head_dim) as u64,
            ..self.rows_of([qkv, out])
        }
    }

    fn blocks(&self, pairs: &[(BlockId, BlockId)]) -> Work {
        let block_bytes = self.kv.map_or(0, |kv| kv.block_bytes());
        Work { memory_bytes: 2 * (pairs.len() * block_bytes) as u64, ..Work::default() }
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
    fn mark(&mut self, phase: Phase) {
        self.product = phase;
    }

    fn embed(&mut self, table: &B::Matrix, scale: f32, out: &mut B::Tensor) {
        let work = self.looked_up(table, out);
        self.timed(Phase::Embedding, work, |inner| inner.embed(table, scale, out));
    }
    fn add_position_embedding(&mut self, table: &B::Matrix, offset: usize, out: &mut B::Tensor) {
        let work = self.looked_up(table, out);
        self.timed(Phase::Embedding, work, |inner| inner.add_position_embedding(table, offset, out));
    }
    fn norm(&mut self, x: &B::Tensor, norm: &Norm<B::Vector>, out: &mut B::Tensor) {
        let work = self.rows_of([x, out]);
        self.timed(Phase::Norms, work, |inner| inner.norm(x, norm, out));
    }
    fn add_norm(&mut self, x: &mut B::Tensor, delta: &B::Tensor, norm: &Norm<B::Vector>, out: &mut B::Tensor) {
        let work = self.rows_of([x, x, delta, out]);
        self.timed(Phase::Norms, work, |inner| inner.add_norm(x, delta, norm, out));
    }
    fn add(&mut self, x: &mut B::Tensor, delta: &B::Tensor) {
        let work = self.rows_of([x, x, delta]);
        self.timed(Phase::Norms, work, |inner| inner.add(x, delta));
    }
    fn linear(&mut self, x: &B::Tensor, w: &B::Matrix, bias: Option<&B::Vector>, out: &mut B::Tensor) {
        let work = Self::product_of(self.rows, x, w);
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
        let mut work = Self::product_of(self.rows, x, w);
        work += self.kv_written(qkv);
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
        let work = Self::product_of(self.rows, x, w);
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
        let work = Self::product_of(self.rows, x, w);
        self.timed(self.product, work, |inner| inner.residual_linear(x, w, bias, stream, delta))
    }
    fn qk_norm(&mut self, qkv: &mut B::Tensor, shape: &AttentionShape, q: &Norm<B::Vector>, k: &Norm<B::Vector>) {
        let work = self.rows_of([qkv, qkv]);
        self.timed(Phase::Norms, work, |inner| inner.qk_norm(qkv, shape, q, k));
    }
    fn rope_and_write_kv(
        &mut self,
        qkv: &mut B::Tensor,
        shape: &AttentionShape,
        rope: Option<&B::RopeTable>,
        layer: usize,
    ) {
        let work = self.kv_written(qkv);
        self.timed(Phase::RopeAndKv, work, |inner| inner.rope_and_write_kv(qkv, shape, rope, layer));
    }
    fn attention(&mut self, qkv: &B::Tensor, shape: &AttentionShape, layer: usize, out: &mut B::Tensor) {
        let work = self.attended(shape, qkv, out);
        self.timed(Phase::Attention, work, |inner| inner.attention(qkv, shape, layer, out));
    }
    fn gated_activation(&mut self, gate_up: &B::Tensor, kind: Activation, out: &mut B::Tensor) {
        let work = self.rows_of([gate_up, out]);
        self.timed(Phase::Activation, work, |inner| inner.gated_activation(gate_up, kind, out));
    }
    fn activation(&mut self, x: &mut B::Tensor, kind: Activation) {
        let work = self.rows_of([x, x]);
        self.timed(Phase::Activation, work, |inner| inner.activation(x, kind));
    }
    fn mix_experts(
        &mut self,
        x: &B::Tensor,
        experts: &Experts<B::Matrix, B::Matrices>,
        shape: &ExpertsShape,
        work: &mut B::ExpertsWorkspace,
        out: &mut B::Tensor,
    ) {
        self.timed(Phase::Experts, Work::default(), |inner| inner.mix_experts(x, experts, shape, work, out));
        // Which experts were read is known only now.
        let mut counted = Self::product_of(self.rows, x, &experts.router);
        let (used, bytes) = B::experts_used(work, experts);
        counted.memory_bytes += (bytes / shape.num_experts * used) as u64;
        // Gate, up and down of the experts that a row goes through.
        let of_row = shape.num_chosen * 3 * shape.intermediate_size * shape.hidden_size;
        counted.flops += 2 * (self.rows * of_row) as u64;
        counted += self.rows_of([x, out]);
        self.step[Phase::Experts as usize].work += counted;
    }
    fn gather_rows(&mut self, x: &B::Tensor, first: usize, num_rows: usize, out: &mut B::Tensor) {
        let (cols, element_bytes) = B::tensor_size(x);
        let work = Work { activation_bytes: 2 * (num_rows * cols * element_bytes) as u64, ..Work::default() };
        self.timed(Phase::Copies, work, |inner| inner.gather_rows(x, first, num_rows, out));
    }
    fn logits(&mut self, x: &B::Tensor, num_rows: usize, w: &B::Matrix, bias: Option<&B::Vector>) {
        (self.vocab_size, _, _) = B::matrix_size(w);
        let work = Self::product_of(num_rows, x, w);
        self.timed(Phase::Vocabulary, work, |inner| inner.logits(x, num_rows, w, bias));
    }
    fn cap_logits(&mut self, cap: f32) {
        self.timed(Phase::Vocabulary, Work::default(), |inner| inner.cap_logits(cap));
    }
    fn fetch_rows(&mut self, x: &B::Tensor, rows: Range<usize>) {
        self.timed(Phase::Copies, Work::default(), |inner| inner.fetch_rows(x, rows));
    }
    fn read_logits(&mut self) -> Vec<f32> {
        self.inner.read_logits()
    }
    fn sample(&mut self, requests: &[LogitsRequest<'_>]) {
        let activation_bytes = (requests.len() * self.vocab_size * size_of::<f32>()) as u64;
        let work = Work { activation_bytes, ..Work::default() };
        self.timed(Phase::Sampling, work, |inner| inner.sample(requests));
    }

    fn end_step(&mut self) {
        self.inner.end_step();
        let mut step = std::mem::take(&mut self.step);
        // A plan of copies alone is no step.
        let (Some(started), false) = (self.started.take(), self.seqs.is_empty()) else { return };
        let time = started.elapsed();
        let counted: Duration = step.iter().map(|totals| totals.time).sum();
        step[Phase::Between as usize] += Totals { calls: 1, time: time.saturating_sub(counted), ..Totals::default() };
        let mut kinds = self.profile.kinds();
        let kind = &mut kinds[StepKind::of(&self.seqs) as usize];
        kind.steps += 1;
        kind.rows += self.rows as u64;
        kind.time += time;
        kind.phases.iter_mut().zip(step).for_each(|(sum, of_step)| *sum += of_step);
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
        self.timed(Phase::Copies, work, |inner| inner.copy_blocks(pairs));
    }
    fn swap_out(&mut self, pairs: &[(BlockId, BlockId)]) {
        let work = self.blocks(pairs);
        self.timed(Phase::Copies, work, |inner| inner.swap_out(pairs));
    }
    fn swap_in(&mut self, pairs: &[(BlockId, BlockId)]) {
        let work = self.blocks(pairs);
        self.timed(Phase::Copies, work, |inner| inner.swap_in(pairs));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::{CpuBackend, CpuOptions, CpuTensor};
    use crate::backend::{NO_SOURCE, NormKind};

    const HEADS: AttentionShape =
        AttentionShape { num_heads: 4, num_kv_heads: 2, head_dim: 8, scale: 0.3, window: None, softcap: None };
    const LAYOUT: KvLayout =
        KvLayout { num_layers: 2, num_kv_heads: 2, head_dim: 8, block_size: 4, dtype: DType::BF16 };
    const QKV: usize = 64;

    fn profiled() -> (Profiled<CpuBackend>, Profile) {
        let profile = Profile::default();
        let mut backend = Profiled::new(bare(), profile.clone());
        backend.allocate_kv(LAYOUT, 8, 2).unwrap();
        (backend, profile)
    }

    fn bare() -> CpuBackend {
        CpuBackend::new(CpuOptions { threads: Some(2), isa: None }).unwrap()
    }

    /// Sequences as `(computed, rows)`, each with four blocks of its own.
    fn batch(seqs: &[(usize, usize)]) -> Batch {
        let mut batch = Batch::default();
        for (index, (num_computed, num_rows)) in seqs.iter().copied().enumerate() {
            let first_row = batch.num_rows();
            batch.seqs.push(BatchSeq { first_row, num_rows, num_computed, first_block: 4 * index, num_blocks: 4 });
            batch.block_tables.extend((4 * index as u32)..(4 * index as u32 + 4));
            for position in num_computed..num_computed + num_rows {
                batch.positions.push(position as u32);
                batch.slots.push((16 * index + position) as u32);
                batch.tokens.push(position as u32);
                batch.token_sources.push(NO_SOURCE);
            }
        }
        batch
    }

    fn tensor<B: Backend<Tensor = CpuTensor>>(backend: &B, cols: usize) -> CpuTensor {
        let mut x = backend.tensor(16, cols, TensorRole::Activation).unwrap();
        x.as_mut_slice().iter_mut().enumerate().for_each(|(i, x)| *x = (i % 13) as f32 / 13.0 - 0.4);
        x
    }

    /// A small layer: what a step calls, and what it leaves.
    fn layer<B: Backend<Tensor = CpuTensor>>(backend: &mut B, batch: &Batch) -> Vec<f32> {
        let w = backend.random_matrix(QKV, 32, DType::BF16, 3).unwrap();
        let (x, mut qkv, mut out) = (tensor(backend, 32), tensor(backend, QKV), tensor(backend, 32));
        backend.begin(batch);
        backend.mark(Phase::Qkv);
        backend.linear(&x, &w, None, &mut qkv);
        backend.rope_and_write_kv(&mut qkv, &HEADS, None, 1);
        backend.attention(&qkv, &HEADS, 1, &mut out);
        backend.logits(&out, 1, &w, None);
        let logits = backend.read_logits();
        backend.end_step();
        backend.finish_step();
        logits
    }

    #[test]
    fn operations_are_done_and_counted_as_their_shapes_say() {
        let (mut backend, profile) = profiled();
        let step = batch(&[(5, 3), (0, 4)]);
        let logits = layer(&mut backend, &step);
        let mut bare = bare();
        bare.allocate_kv(LAYOUT, 8, 2).unwrap();
        assert_eq!(layer(&mut bare, &step), logits, "counting changes nothing");

        let totals = profile.steps(StepKind::Prefill);
        assert_eq!((totals.steps, totals.rows), (1, 7));
        let work = |phase| (totals.phase(phase).calls, totals.phase(phase).work);
        let product = |rows: u64| Work {
            memory_bytes: 64 * 32 * 2,
            activation_bytes: rows * (64 + 32) * 4,
            flops: 2 * rows * 64 * 32,
        };
        assert_eq!(work(Phase::Qkv), (1, product(7)));
        assert_eq!(work(Phase::Vocabulary), (1, product(1)));
        // K and V of 2 heads of 8 in bfloat16 are 64 bytes of a token.
        let written = Work { memory_bytes: 7 * 64, activation_bytes: 2 * 7 * 64 * 4, flops: 0 };
        assert_eq!(work(Phase::RopeAndKv), (1, written));
        // Rows see 6, 7 and 8 tokens, and 1 to 4.
        let flops = 4 * (6 + 7 + 8 + 1 + 2 + 3 + 4) * 4 * 8;
        let attended = Work { memory_bytes: (8 + 4) * 64, activation_bytes: 7 * (64 + 32) * 4, flops };
        assert_eq!(work(Phase::Attention), (1, attended));
        let counted: Duration = Phase::ALL.iter().map(|phase| totals.phase(*phase).time).sum();
        assert_eq!(counted, totals.time, "what is in no phase is between them");
        assert!(totals.phase(Phase::Qkv).time > Duration::ZERO);
    }

    #[test]
    fn a_window_bounds_what_attention_reads() {
        let (mut backend, profile) = profiled();
        let (qkv, mut out) = (tensor(&backend, QKV), tensor(&backend, 32));
        backend.begin(&batch(&[(9, 2)]));
        backend.attention(&qkv, &AttentionShape { window: Some(3), ..HEADS }, 0, &mut out);
        backend.end_step();
        let work = profile.steps(StepKind::Prefill).phase(Phase::Attention).work;
        // Two rows see three tokens each, two of them together.
        assert_eq!((work.memory_bytes, work.flops), (4 * 64, 4 * (3 + 3) * 4 * 8));
    }

    #[test]
    fn steps_are_told_apart_and_copies_belong_to_the_step_behind_them() {
        let (mut backend, profile) = profiled();
        backend.swap_out(&[(BlockId(0), BlockId(1)), (BlockId(1), BlockId(0))]);
        layer(&mut backend, &batch(&[(3, 1), (7, 1)]));
        layer(&mut backend, &batch(&[(3, 1), (0, 2)]));
        let [decode, prefill, mixed] = StepKind::ALL.map(|kind| profile.steps(kind));
        assert_eq!([decode.steps, prefill.steps, mixed.steps], [1, 0, 1]);
        assert_eq!([decode.rows, prefill.rows, mixed.rows], [2, 0, 3]);
        let copied = decode.phase(Phase::Copies).work.memory_bytes;
        assert_eq!(copied, 2 * 2 * LAYOUT.block_bytes() as u64, "read and written");
        assert_eq!(mixed.phase(Phase::Copies).calls, 0);
        profile.reset();
        assert_eq!(profile.steps(StepKind::Decode), StepTotals::default());
    }

    #[test]
    fn row_by_row_operations_count_activations_alone() {
        let (mut backend, profile) = profiled();
        let ones: Vec<u8> = [1f32; 32].into_iter().flat_map(f32::to_le_bytes).collect();
        let weight = backend.vector(&[HostTensor { dtype: DType::F32, rows: 1, cols: 32, bytes: &ones }]).unwrap();
        let norm = Norm { kind: NormKind::Rms { eps: 1e-5 }, weight, bias: None };
        let (mut x, delta, mut out) = (tensor(&backend, 32), tensor(&backend, 32), tensor(&backend, 32));
        backend.begin(&batch(&[(0, 5)]));
        backend.add_norm(&mut x, &delta, &norm, &mut out);
        backend.norm(&x, &norm, &mut out);
        backend.end_step();
        let norms = *profile.steps(StepKind::Prefill).phase(Phase::Norms);
        let work = Work { activation_bytes: (4 + 2) * 5 * 32 * 4, ..Work::default() };
        assert_eq!((norms.calls, norms.work), (2, work));
    }

    #[test]
    fn experts_count_those_that_were_chosen() {
        let (mut backend, profile) = profiled();
        let shape = ExpertsShape {
            num_experts: 4,
            num_chosen: 2,
            hidden_size: 32,
            intermediate_size: 16,
            activation: Activation::Silu,
            renormalize: true,
        };
        let experts = Experts {
            router: backend.random_matrix(4, 32, DType::BF16, 1).unwrap(),
            up: backend.random_matrices(4, 32, 32, DType::BF16, 2).unwrap(),
            down: backend.random_matrices(4, 32, 16, DType::BF16, 3).unwrap(),
        };
        let mut work = backend.experts_workspace(16, &shape).unwrap();
        let (x, mut out) = (tensor(&backend, 32), tensor(&backend, 32));
        backend.begin(&batch(&[(0, 1)]));
        backend.mix_experts(&x, &experts, &shape, &mut work, &mut out);
        backend.end_step();
        let counted = profile.steps(StepKind::Decode).phase(Phase::Experts).work;
        let (router, of_expert) = (4 * 32, 32 * 32 + 32 * 16);
        assert_eq!(counted.memory_bytes, 2 * (router + 2 * of_expert), "one row reads two of the four");
        assert_eq!(counted.flops, 2 * (router + 2 * of_expert));
    }
}
