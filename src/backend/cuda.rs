//! The CUDA backend.
//!
//! - `options`: what a backend is made for.
//! - `device`: the operations that it needs of a GPU; `driver`: a real GPU.
//! - `batch`: a step's input; `upload`: weights; `kv_pools`: the two pools of KV blocks and the copies between them.
//! - `tensors`: tensors in device memory; `linear`: products with matrices, and rows of tables.
//! - `weight_tiles`: how quantised weights lie in device memory; `quantized`: matrices of them.
//! - `few_rows`: products of few rows with what comes before and after them, and the rule for which those are;
//!   `fused`: the operations that they are tried for;
//! - `fp8_matrix`: FP8 matrices as cuBLASLt multiplies them; `fp8_products`: products whose activations are FP8 too;
//! - `rows`, `heads`, `attention`, `products`, `experts`, `sampling`, `transfers`: launches of the kernels in
//!   `kernels/`; `graphs`: recorded launches.
//!
//! All work is enqueued: a step's operations return before they are done, and the host waits only in `finish_step`.
//! Decode steps are recorded as CUDA graphs, at the start, and replayed. Graphs are recorded for a few batch sizes, the
//! buckets. A smaller batch uses the graph of the next larger bucket, in which the extra rows have no work.

pub mod attention;
pub mod batch;
pub mod copies;
pub mod device;
pub mod driver;
pub mod experts;
pub mod few_rows;
mod fp8_matrix;
mod fp8_products;
mod fused;
mod graphs;
mod heads;
mod hidden;
mod host_draws;
mod kv_pools;
mod linear;
mod options;
mod products;
pub mod quantized;
pub mod rows;
pub mod sampling;
mod start;
mod tensors;
pub mod transfers;
pub mod upload;
mod warp_groups;
mod weight_tiles;

use super::{
    Activation, AttentionShape, Backend, Batch, DType, Experts, ExpertsShape, FinishedCopy, Heads, HostTensor,
    KvLayout, LogitsRequest, LogitsResult, MAX_STEPS_IN_FLIGHT, Norm, NormedInput, Rope, TensorRole, matrix_shape,
};
use attention::{AttentionKernels, AttentionPlan};
use batch::BatchInput;
use copies::{CopyList, MAX_PAIRS, independent_groups};
use device::{
    Copy, Device, DeviceBuffer, DeviceError, DeviceEvent, DevicePtr, DeviceResult, Matmul, PinnedBuffer, Stream,
};
use experts::{CudaExpertsWorkspace, ExpertKernels, ExpertsCall};
use few_rows::{FewRowsKernels, FewRowsOperand};
use fp8_matrix::{Fp8Kernels, Fp8Matrix};
use graphs::{GraphKey, Graphs, bucket, buckets};
use heads::{HeadKernels, RopeParams};
use hidden::HiddenRows;
use kv_pools::CudaKvPools;
pub use options::{CudaOptions, FewRowsUse, check_layout};
use pagetide_base::error::StartError;
use pagetide_base::ids::{BlockId, KvPlace};
use products::Lookup;
use quantized::QuantizedModules;
use rows::{BatchRows, RowKernels};
use sampling::SamplingKernels;
pub use start::module_sources;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;
use tensors::{CudaExpertWeights, CudaWeights};
pub use tensors::{CudaMatrices, CudaMatrix, CudaRopeTable, CudaTensor, CudaVector};
use transfers::TransferKernels;
use upload::Uploader;
pub use weight_tiles::{WeightTiles, held_bytes};

/// The CUDA backend.
pub struct CudaBackend {
    device: Rc<dyn Device>,
    options: CudaOptions,
    row_kernels: RowKernels,
    head_kernels: HeadKernels,
    attention: AttentionKernels,
    sampling: SamplingKernels,
    transfers: Rc<TransferKernels>,
    /// `None` if the model has no experts.
    experts: Option<ExpertKernels>,
    /// `None` if the options rule them out.
    few_rows: Option<FewRowsKernels>,
    /// `None` if activations are never FP8.
    fp8: Option<Rc<Fp8Kernels>>,
    quantized: QuantizedModules,
    uploader: RefCell<Uploader>,
    kv: Option<CudaKvPools>,
    input: BatchInput,
    /// Copy-on-write pairs.
    copies: CopyList,
    step: EnqueuedStep,
    /// The end of each step that was ended but not finished.
    ended: VecDeque<DeviceEvent>,
    graphs: Graphs,
    /// Steps are recorded and not done.
    only_records: bool,
    hidden: HiddenRows,
    /// `[max_logit_rows, vocab_size]` float32.
    logits: DeviceBuffer,
    num_logit_rows: usize,
    /// Memory for a float32 operand of a product, converted to the weights' type.
    narrow: RefCell<Option<DeviceBuffer>>,
}

/// The step being enqueued.
#[derive(Default)]
struct EnqueuedStep {
    /// Rows that the operations are launched for. Rows beyond the batch have no work.
    num_rows: usize,
    /// Rows of the batch whose logits are wanted.
    num_logit_rows: usize,
    attention: AttentionPlan,
    /// Set if this step may be recorded and replayed.
    graph: Option<GraphKey>,
}

/// Panics if the device has failed, which ends the step. The executor reports the failure and starts over.
#[track_caller]
fn must<T>(result: DeviceResult<T>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

/// Whether a copy between the tiers was started. If the device refuses it, only this copy fails.
fn has_started(result: DeviceResult<()>) -> bool {
    match result {
        Err(DeviceError::Lost(_)) => must(result.map(|()| true)),
        Err(error) => {
            tracing::warn!("a copy between the GPU and the swap pool failed: {error}");
            false
        }
        Ok(()) => true,
    }
}

impl CudaBackend {
    /// The numbers of sequences of the decode steps that are replayed. Steps of other numbers use the next larger one.
    /// Empty if no steps are.
    pub fn decode_sizes(&self) -> Vec<usize> {
        let CudaOptions { graphs, max_seqs, max_logit_rows, .. } = self.options;
        if graphs { buckets(max_seqs.min(max_logit_rows)) } else { Vec::new() }
    }

    /// Records the decode step that `step` enqueues, without doing it. The pools are allocated, and steps of the
    /// largest size have been done. The batch's block tables may be missing.
    pub fn record(&mut self, step: impl FnOnce(&mut Self)) {
        self.only_records = true;
        step(self);
        self.only_records = false;
    }

    /// How many matrices are multiplied with FP8 activations. `None` without `fp8_activations`.
    pub fn num_fp8_products(&self) -> Option<usize> {
        self.fp8.as_ref().map(|kernels| kernels.num_matrices())
    }

    /// How many results of chunks of attention are there: `u32` counters, all 0 between steps. `None` without tensor
    /// cores.
    pub fn attention_arrivals(&self) -> Option<&DeviceBuffer> {
        self.attention.arrivals()
    }

    /// The attention of the step that was begun last.
    pub fn attention_plan(&self) -> &AttentionPlan {
        &self.step.attention
    }

    /// The memory of the device pool.
    pub fn kv_pool(&self) -> Option<&DeviceBuffer> {
        self.kv.as_ref().map(CudaKvPools::on_device)
    }

    fn kv(&mut self) -> &mut CudaKvPools {
        self.kv.as_mut().expect("the KV pools are allocated before they are used")
    }

    fn rows(&self) -> BatchRows {
        let EnqueuedStep { num_rows, graph, .. } = &self.step;
        BatchRows { header: self.input.ptr(), num_rows: *num_rows, is_replayed: graph.is_some() }
    }

    fn rope_params(&self, qkv: &CudaTensor, rope: Option<&CudaRopeTable>, layer: usize) -> RopeParams {
        let table = rope.map_or((DevicePtr::NULL, 0), |rope| (rope.buffer.ptr(), rope.rotary_dim));
        let pool = self.kv.as_ref().expect("the KV pools are allocated before they are used").ptr();
        RopeParams::new(self.rows(), qkv, table, pool, layer)
    }

    /// The key of this batch's graph, if such steps are replayed: each sequence has one row, and the logits of each row
    /// are wanted.
    fn graph_key(&self, batch: &Batch) -> Option<GraphKey> {
        let CudaOptions { graphs, max_seqs, max_logit_rows, .. } = self.options;
        let rows = batch.num_rows();
        let is_decode = rows == batch.seqs.len() && rows == batch.logit_rows.len() && rows > 0;
        let num_rows = bucket(rows, max_seqs.min(max_logit_rows));
        (graphs && is_decode && rows <= num_rows).then_some(GraphKey { num_rows })
    }

    fn add_and_norm(&self, x: &CudaTensor, delta: Option<&CudaTensor>, norm: &Norm<CudaVector>, out: &CudaTensor) {
        let rows = self.rows();
        x.check(rows.num_rows, norm.weight.len);
        out.check(rows.num_rows, x.cols);
        assert!(delta.is_none_or(|delta| delta.cols == x.cols && delta.dtype == self.options.dtype));
        assert_eq!(x.dtype, DType::F32, "the residual stream is float32");
        let bias = norm.bias.as_ref().map_or(DevicePtr::NULL, |bias| bias.float.ptr());
        must(self.row_kernels.add_norm(rows, x, delta, (norm.kind, norm.weight.float.ptr(), bias), out));
    }
}

impl Backend for CudaBackend {
    type Matrix = CudaMatrix;
    type Vector = CudaVector;
    type Tensor = CudaTensor;
    type RopeTable = CudaRopeTable;
    type Matrices = CudaMatrices;
    type ExpertsWorkspace = CudaExpertsWorkspace;

    fn holds_fp8(&self, dtype: DType) -> bool {
        dtype != DType::F32
    }

    fn matrix(&self, parts: &[HostTensor<'_>], dtype: DType) -> Result<CudaMatrix, StartError> {
        let (n, k) = matrix_shape(parts)?;
        let uploader = &mut self.uploader.borrow_mut();
        let fp8 = self.fp8.as_ref().map(|kernels| Fp8Matrix::upload(kernels, parts, uploader)).transpose()?;
        let weights = match fp8.flatten() {
            Some(matrix) => CudaWeights::Fp8(matrix),
            None => match self.quantized.upload(parts, uploader)? {
                Some(rows) => CudaWeights::Quantized(rows),
                None => CudaWeights::Plain(upload::converted(uploader, parts, dtype)?),
            },
        };
        Ok(CudaMatrix { weights, n, k, dtype })
    }

    fn random_matrix(&self, n: usize, k: usize, dtype: DType, seed: u64) -> Result<CudaMatrix, StartError> {
        assert_eq!(dtype, self.options.dtype, "kernels are made for one type");
        let buffer = DeviceBuffer::new(&self.device, n * k * dtype.size_bytes())?;
        self.row_kernels.fill_random(buffer.ptr(), n * k, seed, 0.02)?;
        // Products of few rows load weights before they wait for earlier kernels.
        self.device.synchronize()?;
        Ok(CudaMatrix { weights: CudaWeights::Plain(buffer), n, k, dtype })
    }

    fn matrices(&self, count: usize, parts: &[HostTensor<'_>], dtype: DType) -> Result<CudaMatrices, StartError> {
        let (rows, k) = matrix_shape(parts)?;
        assert!(count > 0 && rows.is_multiple_of(count), "{rows} rows of {count} matrices");
        let uploader = &mut self.uploader.borrow_mut();
        let weights = match self.quantized.upload_experts(count, parts, uploader)? {
            Some(rows) => CudaExpertWeights::Quantized(rows),
            None => CudaExpertWeights::Plain(upload::converted(uploader, parts, dtype)?),
        };
        Ok(CudaMatrices { weights, count, n: rows / count, k })
    }

    fn random_matrices(
        &self,
        count: usize,
        n: usize,
        k: usize,
        dtype: DType,
        seed: u64,
    ) -> Result<CudaMatrices, StartError> {
        let weights = match self.random_matrix(count * n, k, dtype, seed)?.weights {
            CudaWeights::Plain(buffer) => CudaExpertWeights::Plain(buffer),
            CudaWeights::Quantized(_) | CudaWeights::Fp8(_) => unreachable!("random matrices are plain"),
        };
        Ok(CudaMatrices { weights, count, n, k })
    }

    fn vector(&self, parts: &[HostTensor<'_>]) -> Result<CudaVector, StartError> {
        parts.iter().try_for_each(HostTensor::check_size)?;
        let mut uploader = self.uploader.borrow_mut();
        let (float, scalar) = (uploader.upload(parts, DType::F32)?, uploader.upload(parts, self.options.dtype)?);
        Ok(CudaVector { float, scalar, len: parts.iter().map(|part| part.rows * part.cols).sum() })
    }

    fn tensor(&self, max_rows: usize, cols: usize, role: TensorRole) -> Result<CudaTensor, StartError> {
        let dtype = match role {
            TensorRole::Residual => DType::F32,
            TensorRole::Activation | TensorRole::Operand(_) | TensorRole::Unfused => self.options.dtype,
        };
        let buffer = DeviceBuffer::new(&self.device, max_rows * cols * dtype.size_bytes())?;
        Ok(CudaTensor { buffer, max_rows, cols, dtype })
    }

    fn rope_table(&self, rope: &Rope) -> Result<CudaRopeTable, StartError> {
        let table = rope.table()?;
        let bytes = bytemuck::cast_slice(&table);
        let table = HostTensor { format: DType::F32.into(), rows: rope.max_positions, cols: rope.rotary_dim, bytes };
        let buffer = self.uploader.borrow_mut().upload(&[table], DType::F32)?;
        Ok(CudaRopeTable { buffer, rotary_dim: rope.rotary_dim })
    }

    fn experts_workspace(&self, max_rows: usize, shape: &ExpertsShape) -> Result<CudaExpertsWorkspace, StartError> {
        CudaExpertsWorkspace::new(&self.device, self.options.dtype, max_rows, shape)
    }

    fn allocate_kv(
        &mut self,
        layout: KvLayout,
        num_device_blocks: usize,
        num_swap_blocks: usize,
    ) -> Result<(), StartError> {
        assert_eq!(layout, self.options.kv, "the kernels are made for one KV layout");
        // The old pools are freed first: there may not be room for both.
        self.kv = None;
        self.ended.clear();
        self.graphs.clear();
        self.sampling.clear();
        self.hidden.clear();
        self.kv = Some(CudaKvPools::new(&self.device, layout, num_device_blocks, num_swap_blocks)?);
        Ok(())
    }

    fn begin(&mut self, batch: &Batch) {
        let mut attention = std::mem::take(&mut self.step.attention);
        if self.only_records {
            self.attention.plan(batch, &mut attention);
            let key = self.graph_key(batch).expect("it is of a kind that is replayed");
            self.step = EnqueuedStep {
                num_rows: key.num_rows,
                num_logit_rows: batch.logit_rows.len(),
                attention,
                graph: Some(key),
            };
            return;
        }
        must(self.kv().begin_step(batch));
        self.attention.plan(batch, &mut attention);
        let graph = self.graph_key(batch);
        let (input, has_moved) = must(self.input.write(batch, &attention));
        if has_moved {
            self.graphs.clear();
        }
        // SAFETY: the buffers live as long as `self`, and freeing them waits for the device. The steps that used this
        // pinned memory and these tokens are done or enqueued before.
        must(unsafe { self.transfers.copy_both([input, self.sampling.begin_step()]) });
        // Numbers of rows are rounded up to a few sizes, so that few algorithms have to be found for products.
        let num_rows = graph.map_or(bucket(batch.num_rows(), self.options.max_rows), |key| key.num_rows);
        self.step = EnqueuedStep { num_rows, num_logit_rows: batch.logit_rows.len(), attention, graph };
    }

    fn replay(&mut self, body: &mut dyn FnMut(&mut Self)) {
        let Some(key) = self.step.graph else { return body(self) };
        let mut graphs = std::mem::replace(&mut self.graphs, Graphs::new(&self.device));
        if self.only_records {
            must(graphs.record(key, || body(self)));
        } else {
            must(graphs.step(key, || body(self)));
        }
        self.graphs = graphs;
        // Set here because a replay does not run the body.
        self.num_logit_rows = self.step.num_logit_rows;
    }

    fn embed(&mut self, table: &CudaMatrix, scale: f32, out: &mut CudaTensor) {
        let rows = self.rows();
        out.check(rows.num_rows, table.k);
        let sampled = self.sampling.last_sampled();
        match &table.weights {
            CudaWeights::Plain(weights) => {
                must(self.row_kernels.embed(rows, (weights.ptr(), table.n), scale, sampled, out));
            }
            weights => self.look_up(weights, &Lookup::Tokens { scale, sampled }, out),
        }
    }

    fn add_position_embedding(&mut self, table: &CudaMatrix, offset: usize, out: &mut CudaTensor) {
        let rows = self.rows();
        out.check(rows.num_rows, table.k);
        assert_eq!(out.dtype, DType::F32, "positions are added to the residual stream");
        match &table.weights {
            CudaWeights::Plain(weights) => must(self.row_kernels.add_position(rows, weights.ptr(), offset, out)),
            weights => self.look_up(weights, &Lookup::Positions { offset }, out),
        }
    }

    fn norm(&mut self, x: &CudaTensor, norm: &Norm<CudaVector>, out: &mut CudaTensor) {
        self.add_and_norm(x, None, norm, out);
    }

    fn add_norm(&mut self, x: &mut CudaTensor, delta: &CudaTensor, norm: &Norm<CudaVector>, out: &mut CudaTensor) {
        self.add_and_norm(x, Some(delta), norm, out);
    }

    fn add(&mut self, x: &mut CudaTensor, delta: &CudaTensor) {
        let rows = self.rows();
        x.check(rows.num_rows, delta.cols);
        must(self.row_kernels.add(rows, x, delta));
    }

    fn linear(&mut self, x: &CudaTensor, w: &CudaMatrix, bias: Option<&CudaVector>, out: &mut CudaTensor) {
        let rows = self.step.num_rows;
        out.check(rows, w.n);
        self.product(x, rows, w, bias, (out.ptr(), out.dtype));
    }

    fn qkv_linear(
        &mut self,
        x: &CudaTensor,
        w: &CudaMatrix,
        bias: Option<&CudaVector>,
        heads: &Heads<'_, Self>,
        qkv: &mut CudaTensor,
    ) {
        x.check(self.step.num_rows, w.k);
        if self.try_qkv(FewRowsOperand::Plain(x), w, bias, heads, qkv) {
            return;
        }
        self.linear(x, w, bias, qkv);
        if let Some([q, k]) = heads.norms {
            self.qk_norm(qkv, heads.shape, q, k);
        }
        self.rope_and_write_kv(qkv, heads.shape, heads.rope, heads.layer);
    }

    fn normed_qkv_linear(
        &mut self,
        input: NormedInput<'_, Self>,
        w: &CudaMatrix,
        bias: Option<&CudaVector>,
        heads: &Heads<'_, Self>,
        qkv: &mut CudaTensor,
    ) {
        if !self.try_qkv(Self::norm_operand(&input), w, bias, heads, qkv) {
            let x = self.normed(input);
            self.qkv_linear(x, w, bias, heads, qkv);
        }
    }

    fn gated_linear(
        &mut self,
        x: &CudaTensor,
        w: &CudaMatrix,
        bias: Option<&CudaVector>,
        kind: Activation,
        gate_up: &mut CudaTensor,
        out: &mut CudaTensor,
    ) {
        x.check(self.step.num_rows, w.k);
        if !self.try_gated(FewRowsOperand::Plain(x), w, bias, kind, out) {
            self.linear(x, w, bias, gate_up);
            self.gated_activation(gate_up, kind, out);
        }
    }

    fn normed_gated_linear(
        &mut self,
        input: NormedInput<'_, Self>,
        w: &CudaMatrix,
        bias: Option<&CudaVector>,
        kind: Activation,
        gate_up: &mut CudaTensor,
        out: &mut CudaTensor,
    ) {
        if !self.try_gated(Self::norm_operand(&input), w, bias, kind, out) {
            let x = self.normed(input);
            self.gated_linear(x, w, bias, kind, gate_up, out);
        }
    }

    fn residual_linear(
        &mut self,
        x: &CudaTensor,
        w: &CudaMatrix,
        bias: Option<&CudaVector>,
        stream: &mut CudaTensor,
        delta: &mut CudaTensor,
    ) -> bool {
        let rows = self.step.num_rows;
        x.check(rows, w.k);
        stream.check(rows, w.n);
        if self.try_few_rows(FewRowsOperand::Plain(x), rows, w, bias, |few, product| few.add(product, stream)) {
            return false;
        }
        self.linear(x, w, bias, delta);
        true
    }

    fn qk_norm(&mut self, qkv: &mut CudaTensor, shape: &AttentionShape, q: &Norm<CudaVector>, k: &Norm<CudaVector>) {
        heads::check_shape(&self.options, shape);
        let eps = heads::head_norm_eps(q.kind, k.kind);
        must(self.head_kernels.head_norm(self.rows(), qkv, eps, q.weight.float.ptr(), k.weight.float.ptr()));
    }

    fn rope_and_write_kv(
        &mut self,
        qkv: &mut CudaTensor,
        shape: &AttentionShape,
        rope: Option<&CudaRopeTable>,
        layer: usize,
    ) {
        heads::check_shape(&self.options, shape);
        must(self.head_kernels.rope_and_write_kv(self.rows(), self.rope_params(qkv, rope, layer)));
    }

    fn attention(&mut self, qkv: &CudaTensor, shape: &AttentionShape, layer: usize, out: &mut CudaTensor) {
        heads::check_shape(&self.options, shape);
        let (rows, pool) = (self.rows(), self.kv().ptr());
        must(self.attention.launch(rows, &self.step.attention, shape, (pool, layer), qkv.ptr(), out.ptr()));
    }

    fn gated_activation(&mut self, gate_up: &CudaTensor, kind: Activation, out: &mut CudaTensor) {
        gate_up.check(self.step.num_rows, 2 * out.cols);
        must(self.row_kernels.activation(self.rows(), gate_up.ptr(), kind, true, out));
    }

    fn activation(&mut self, x: &mut CudaTensor, kind: Activation) {
        must(self.row_kernels.activation(self.rows(), x.ptr(), kind, false, x));
    }

    fn mix_experts(
        &mut self,
        x: &CudaTensor,
        experts: &Experts<CudaMatrix, CudaMatrices>,
        shape: &ExpertsShape,
        work: &mut CudaExpertsWorkspace,
        out: &mut CudaTensor,
    ) {
        let kernels = self.experts.as_ref().expect("the options say that the model has experts");
        let batch_invariant = self.options.batch_invariant;
        must(kernels.mix(self.rows(), &ExpertsCall { shape, experts, work, x, out, batch_invariant }));
    }

    fn add_gated(&mut self, x: &CudaTensor, gate: &CudaVector, from: &CudaTensor, out: &mut CudaTensor) {
        let rows = self.rows();
        x.check(rows.num_rows, gate.len);
        out.check(rows.num_rows, from.cols);
        must(self.row_kernels.add_gated(rows, x, gate.float.ptr(), from, out));
    }

    fn gather_rows(&mut self, x: &CudaTensor, first: usize, num_rows: usize, out: &mut CudaTensor) {
        let num_rows = self.step.graph.map_or(num_rows, |key| key.num_rows);
        out.check(num_rows, x.cols);
        must(self.row_kernels.gather_rows(self.input.ptr(), x, first, num_rows, out));
    }

    fn logits(&mut self, x: &CudaTensor, num_rows: usize, w: &CudaMatrix, bias: Option<&CudaVector>) {
        let rows = self.step.graph.map_or(bucket(num_rows, self.options.max_logit_rows), |key| key.num_rows);
        assert!(rows <= self.options.max_logit_rows && w.n == self.options.vocab_size, "made for fewer logits");
        self.product(x, rows, w, bias, (self.logits.ptr(), DType::F32));
        self.num_logit_rows = num_rows;
    }

    fn cap_logits(&mut self, cap: f32) {
        let rows = self.step.graph.map_or(self.num_logit_rows, |key| key.num_rows);
        must(self.row_kernels.cap_logits(self.logits.ptr(), rows * self.options.vocab_size, cap));
    }

    fn fetch_rows(&mut self, x: &CudaTensor, rows: Range<usize>) {
        x.check(self.step.num_rows, x.cols);
        assert!(rows.end <= self.step.num_rows, "rows beyond the batch");
        let row_bytes = x.cols * x.dtype.size_bytes();
        let (from, bytes) = (x.ptr() + rows.start * row_bytes, rows.len() * row_bytes);
        // SAFETY: the rows belong to the tensor, which lives as long as the model.
        must(unsafe { self.hidden.fetch(from, bytes, x.dtype, self.options.max_rows * row_bytes) });
    }

    fn read_logits(&mut self) -> Vec<f32> {
        let bytes = self.num_logit_rows * self.options.vocab_size * 4;
        let host = must(PinnedBuffer::new(&self.device, bytes));
        let copy = Copy { to: host.ptr(), from: self.logits.ptr(), bytes };
        // SAFETY: both live until the device has done the copy.
        must(unsafe { self.transfers.copy(copy) });
        must(self.device.synchronize());
        // SAFETY: the copy is done.
        unsafe { host.as_slice() }.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()
    }

    fn sample(&mut self, requests: &[LogitsRequest<'_>]) {
        must(self.sampling.sample(self.logits.ptr(), requests));
    }

    fn end_step(&mut self) {
        assert!(self.ended.len() < MAX_STEPS_IN_FLIGHT, "more than {MAX_STEPS_IN_FLIGHT} steps in flight");
        self.sampling.end_step();
        self.hidden.end_step();
        let end = must(self.device.record(Stream::Compute));
        must(self.kv().end_step(end));
        self.ended.push_back(end);
    }

    fn is_step_done(&mut self) -> bool {
        self.ended.front().is_some_and(|end| must(self.device.is_done(*end)))
    }

    fn finish_step(&mut self) -> Vec<LogitsResult> {
        let end = *self.ended.front().expect("a step was ended that is not finished");
        while !must(self.device.is_done(end)) {
            std::thread::yield_now();
        }
        self.ended.pop_front();
        let mut results = self.sampling.finish_step();
        results.extend(self.hidden.finish_step().map(LogitsResult::Rows));
        results
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) {
        if pairs.is_empty() {
            return;
        }
        must(self.kv().begin_copies(pairs));
        let pool = self.kv().ptr();
        for pairs in independent_groups(pairs).into_iter().flat_map(|group| group.chunks(MAX_PAIRS)) {
            let copy_blocks = |list| self.head_kernels.copy_blocks(pool, list, pairs.len());
            must(self.copies.launch(pairs, copy_blocks));
        }
    }

    fn swap_out(&mut self, pairs: &[(BlockId, BlockId)]) -> bool {
        has_started(self.kv().swap_out(pairs))
    }

    fn swap_in(&mut self, pairs: &[(BlockId, BlockId)]) -> bool {
        has_started(self.kv().swap_in(pairs))
    }

    fn read_blocks(&mut self, places: &[KvPlace], into: &mut [u8]) {
        must(self.kv().read(places, into));
    }

    fn write_blocks(&mut self, blocks: &[BlockId], from: &[u8]) {
        must(self.kv().write(blocks, from));
    }

    fn finished_copies(&mut self) -> Vec<FinishedCopy> {
        must(self.kv().finished())
    }
}
