//! What a device does for a model: about twenty-five operations on tensors that the device owns.
//!
//! The forward pass (`model::decoder`) is written once over the trait [`Backend`]. A backend knows nothing of models,
//! sequences or scheduling.
//!
//! The contract of every backend: each output element is computed in an order that does not depend on the other rows of
//! the batch, on how a prompt was cut into chunks, or on the number of threads. This is what makes a resumed or cached
//! sequence return the same bytes. On a GPU it holds only with `device.batch_invariant`.

mod batch;
pub mod cpu;
pub mod cuda;
pub mod fp8;
mod kv_layout;
mod layers;
pub mod profile;
pub mod quant;
mod quantize;
mod tensors;

pub use batch::{
    Batch, BatchSeq, FinishedCopy, LogitsRequest, LogitsResult, LogitsWant, MAX_STEPS_IN_FLIGHT, NO_SOURCE,
};
pub use kv_layout::{CodeType, KV_VERSION, KvDType, KvLayout};
pub use layers::{Activation, AttentionShape, Experts, ExpertsShape, Norm, NormKind, Rope};
pub use quantize::QuantizeBlock;
pub(crate) use tensors::elements;
pub use tensors::{DType, HostTensor, TensorRole, WeightFormat, matrix_shape};

use pagetide_base::error::StartError;
use pagetide_base::ids::{BlockId, KvPlace};
use profile::StepPhase;
use std::ops::Range;

/// What to do with the heads that the QKV projection computes.
pub struct Heads<'a, B: Backend + ?Sized> {
    pub shape: &'a AttentionShape,
    /// The norms of each head of Q, and of each head of K.
    pub norms: Option<[&'a Norm<B::Vector>; 2]>,
    pub rope: Option<&'a B::RopeTable>,
    pub layer: usize,
}

/// The input of a sublayer that begins with a norm: `norm(stream + delta)`.
pub struct NormedInput<'a, B: Backend + ?Sized> {
    pub stream: &'a mut B::Tensor,
    /// What is still to be added to the stream.
    pub delta: Option<&'a B::Tensor>,
    pub norm: &'a Norm<B::Vector>,
    /// `[rows, cols]`, takes the normalised rows. A backend that normalises within a product does not write it.
    pub normed: &'a mut B::Tensor,
}

/// The operations. Tensors are `[rows, cols]`. `rows` may be less than the tensor was allocated for. Shapes that do not
/// fit are a programming error: the operation panics. It also panics when the device fails.
///
/// A step is `begin`, the forward pass, `logits` and `sample` (several times if many logits are wanted) and `end_step`.
/// Each of these may return before its work is done. `finish_step` waits for the work and returns the results. Up to
/// [`MAX_STEPS_IN_FLIGHT`] steps may have been ended but not yet finished.
pub trait Backend {
    /// Whether it reads the elements of tensors that it is given. If not, the elements may be zeros.
    const READS_ELEMENTS: bool = true;

    /// A weight matrix `[n, k]`, in the backend's own layout.
    type Matrix;
    /// A small float32 vector: a norm's weight, a bias.
    type Vector;
    /// Activations `[max_rows, cols]`.
    type Tensor;
    /// Prepared rotary tables.
    type RopeTable;
    /// Matrices of one shape, one for each expert.
    type Matrices;
    /// Memory that a layer of experts uses between its operations.
    type ExpertsWorkspace;

    /// Whether matrices of [`WeightFormat::Fp8`] stay as they are in a model of type `dtype`. If not, a load converts
    /// them to `dtype`.
    fn holds_fp8(&self, _dtype: DType) -> bool {
        false
    }
    /// Packs a matrix `[n, k]`. Its rows are those of `parts`, in order; a fused QKV has three parts. It is converted
    /// to `dtype`, except that quantised parts stay as they are where the backend has kernels for their format.
    fn matrix(&self, parts: &[HostTensor<'_>], dtype: DType) -> Result<Self::Matrix, StartError>;
    /// [`Backend::matrix`] of parts that are stored as `[k, n]`.
    fn transposed_matrix(&self, parts: &[HostTensor<'_>], dtype: DType) -> Result<Self::Matrix, StartError> {
        let turned: Vec<_> = parts.iter().map(HostTensor::transposed).collect();
        let both = parts.iter().zip(&turned);
        let tensors: Vec<_> =
            both.map(|(part, bytes)| HostTensor { rows: part.cols, cols: part.rows, bytes, ..*part }).collect();
        self.matrix(&tensors, dtype)
    }
    /// A matrix of uniformly distributed random numbers with standard deviation 0.02. The same seed gives the same
    /// numbers.
    fn random_matrix(&self, n: usize, k: usize, dtype: DType, seed: u64) -> Result<Self::Matrix, StartError>;
    /// [`Backend::matrix`] for [`Backend::gated_linear`]: the first half of the rows is the gate, the second half is
    /// up.
    fn gate_up_matrix(&self, parts: &[HostTensor<'_>], dtype: DType) -> Result<Self::Matrix, StartError> {
        self.matrix(parts, dtype)
    }
    /// As [`Backend::random_matrix`].
    fn random_gate_up_matrix(&self, n: usize, k: usize, dtype: DType, seed: u64) -> Result<Self::Matrix, StartError> {
        self.random_matrix(n, k, dtype, seed)
    }
    /// Packs `count` matrices `[n, k]`. Each is made of the same number of `parts`.
    fn matrices(&self, count: usize, parts: &[HostTensor<'_>], dtype: DType) -> Result<Self::Matrices, StartError>;
    /// As [`Backend::random_matrix`].
    fn random_matrices(
        &self,
        count: usize,
        n: usize,
        k: usize,
        dtype: DType,
        seed: u64,
    ) -> Result<Self::Matrices, StartError>;
    /// A float32 copy of all `parts`, concatenated.
    fn vector(&self, parts: &[HostTensor<'_>]) -> Result<Self::Vector, StartError>;
    fn tensor(&self, max_rows: usize, cols: usize, role: TensorRole) -> Result<Self::Tensor, StartError>;
    fn rope_table(&self, rope: &Rope) -> Result<Self::RopeTable, StartError>;
    fn experts_workspace(&self, max_rows: usize, shape: &ExpertsShape) -> Result<Self::ExpertsWorkspace, StartError>;

    /// Allocates the two pools of KV blocks: one on the device, and a pinned one on the host. A second call, after a
    /// failure, starts over with empty pools and no step in flight.
    fn allocate_kv(
        &mut self,
        layout: KvLayout,
        num_device_blocks: usize,
        num_swap_blocks: usize,
    ) -> Result<(), StartError>;

    /// Starts a step: sets the batch that the operations after it work on. All tensors have as many rows as the batch.
    fn begin(&mut self, batch: &Batch);
    /// Runs `body`: the operations between `begin` and the first `sample`. A device may record them. For a later batch
    /// of the same kind it may then replay the recording instead of calling `body`.
    fn replay(&mut self, body: &mut dyn FnMut(&mut Self)) {
        body(self);
    }
    /// Names the phase that the next [`Backend::linear`] belongs to. Only [`profile::Profiled`] uses it.
    fn mark(&mut self, _: StepPhase) {}

    /// `out[row] = table[tokens[row]] * scale`; `table: [vocab, cols]`.
    fn embed(&mut self, table: &Self::Matrix, scale: f32, out: &mut Self::Tensor);
    /// `out[row] += table[positions[row] + offset]`, learned positions.
    fn add_position_embedding(&mut self, table: &Self::Matrix, offset: usize, out: &mut Self::Tensor);
    /// `out = norm(x)`.
    fn norm(&mut self, x: &Self::Tensor, norm: &Norm<Self::Vector>, out: &mut Self::Tensor);
    /// `x += delta; out = norm(x)`: the residual connection and the norm after it.
    fn add_norm(
        &mut self,
        x: &mut Self::Tensor,
        delta: &Self::Tensor,
        norm: &Norm<Self::Vector>,
        out: &mut Self::Tensor,
    );
    /// `x += delta`.
    fn add(&mut self, x: &mut Self::Tensor, delta: &Self::Tensor);
    /// `out = x · wᵀ + bias`; `w: [n, k]`, `x: [rows, k]`, `out: [rows, n]`. `x` is rounded to the weight's type.
    fn linear(&mut self, x: &Self::Tensor, w: &Self::Matrix, bias: Option<&Self::Vector>, out: &mut Self::Tensor);
    /// The QKV projection, then [`Backend::qk_norm`] and [`Backend::rope_and_write_kv`]. Afterwards only the Q part of
    /// `qkv` may be read.
    fn qkv_linear(
        &mut self,
        x: &Self::Tensor,
        w: &Self::Matrix,
        bias: Option<&Self::Vector>,
        heads: &Heads<'_, Self>,
        qkv: &mut Self::Tensor,
    ) {
        self.linear(x, w, bias, qkv);
        if let Some([q, k]) = heads.norms {
            self.qk_norm(qkv, heads.shape, q, k);
        }
        self.rope_and_write_kv(qkv, heads.shape, heads.rope, heads.layer);
    }
    /// `out = act(gate) * up` for `[gate | up] = x · wᵀ + bias`, with a matrix of [`Backend::gate_up_matrix`].
    /// `gate_up: [rows, n]` is [`TensorRole::Unfused`].
    fn gated_linear(
        &mut self,
        x: &Self::Tensor,
        w: &Self::Matrix,
        bias: Option<&Self::Vector>,
        kind: Activation,
        gate_up: &mut Self::Tensor,
        out: &mut Self::Tensor,
    ) {
        self.linear(x, w, bias, gate_up);
        self.gated_activation(gate_up, kind, out);
    }
    /// [`Backend::norm`] or [`Backend::add_norm`]. Returns the normalised rows.
    fn normed<'a>(&mut self, input: NormedInput<'a, Self>) -> &'a Self::Tensor {
        let NormedInput { stream, delta, norm, normed } = input;
        match delta {
            Some(delta) => self.add_norm(stream, delta, norm, normed),
            None => self.norm(stream, norm, normed),
        }
        normed
    }
    /// [`Backend::normed`], then [`Backend::qkv_linear`].
    fn normed_qkv_linear(
        &mut self,
        input: NormedInput<'_, Self>,
        w: &Self::Matrix,
        bias: Option<&Self::Vector>,
        heads: &Heads<'_, Self>,
        qkv: &mut Self::Tensor,
    ) {
        let x = self.normed(input);
        self.qkv_linear(x, w, bias, heads, qkv);
    }
    /// [`Backend::normed`], then [`Backend::gated_linear`].
    fn normed_gated_linear(
        &mut self,
        input: NormedInput<'_, Self>,
        w: &Self::Matrix,
        bias: Option<&Self::Vector>,
        kind: Activation,
        gate_up: &mut Self::Tensor,
        out: &mut Self::Tensor,
    ) {
        let x = self.normed(input);
        self.gated_linear(x, w, bias, kind, gate_up, out);
    }
    /// The product at the end of a sublayer. It computes either `stream += x · wᵀ + bias` and returns false, or only
    /// `delta = x · wᵀ + bias` and returns true: then the caller still has to add `delta`, which a backend may do
    /// faster together with the norm that follows. `delta` is [`TensorRole::Unfused`].
    fn residual_linear(
        &mut self,
        x: &Self::Tensor,
        w: &Self::Matrix,
        bias: Option<&Self::Vector>,
        _stream: &mut Self::Tensor,
        delta: &mut Self::Tensor,
    ) -> bool {
        self.linear(x, w, bias, delta);
        true
    }
    /// Normalises each head of Q and K in `qkv` separately (Qwen3): `weight: [head_dim]`.
    fn qk_norm(
        &mut self,
        qkv: &mut Self::Tensor,
        shape: &AttentionShape,
        q: &Norm<Self::Vector>,
        k: &Norm<Self::Vector>,
    );
    /// Rotates Q and K in `qkv` by their positions if there is a table. Writes K and V of `layer` into the KV cache at
    /// the batch's slots. Q stays in `qkv`.
    fn rope_and_write_kv(
        &mut self,
        qkv: &mut Self::Tensor,
        shape: &AttentionShape,
        rope: Option<&Self::RopeTable>,
        layer: usize,
    );
    /// Causal attention of each row's Q over the K and V of its sequence in `layer`, read through the block table.
    /// `out: [rows, num_heads * head_dim]`. GQA: query head `h` reads KV head `h / (num_heads / num_kv_heads)`.
    fn attention(&mut self, qkv: &Self::Tensor, shape: &AttentionShape, layer: usize, out: &mut Self::Tensor);
    /// `out = act(gate) * up` for `gate_up: [rows, 2 * cols]` = `[gate | up]`.
    fn gated_activation(&mut self, gate_up: &Self::Tensor, kind: Activation, out: &mut Self::Tensor);
    /// `x = act(x)`.
    fn activation(&mut self, x: &mut Self::Tensor, kind: Activation);
    /// `out[row] = Σ weight · down(act(gate(x)) · up(x))` over the experts that the router chooses for this row. The
    /// router's logits are `x · routerᵀ`, and the weights are their softmax over all experts. Only the chosen experts
    /// are computed. They are added in descending order of their weights.
    fn mix_experts(
        &mut self,
        x: &Self::Tensor,
        experts: &Experts<Self::Matrix, Self::Matrices>,
        shape: &ExpertsShape,
        work: &mut Self::ExpertsWorkspace,
        out: &mut Self::Tensor,
    );
    /// `out[row] += sigmoid(x[row] · gate) · from[row]` for `gate: [cols of x]`: a shared expert, whose part in a row
    /// its gate decides.
    fn add_gated(&mut self, x: &Self::Tensor, gate: &Self::Vector, from: &Self::Tensor, out: &mut Self::Tensor);
    /// `out[i] = x[logit_rows[first + i]]` for `i < num_rows`.
    fn gather_rows(&mut self, x: &Self::Tensor, first: usize, num_rows: usize, out: &mut Self::Tensor);
    /// Computes `x[0..num_rows] · wᵀ`, `[num_rows, vocab]` in float32. The logits stay on the device and replace the
    /// previous ones.
    fn logits(&mut self, x: &Self::Tensor, num_rows: usize, w: &Self::Matrix, bias: Option<&Self::Vector>);
    /// The last logits become `cap · tanh(logit / cap)`.
    fn cap_logits(&mut self, cap: f32);
    /// Adds rows of `x` to the step's results, after those of all samples: [`LogitsResult::Rows`].
    fn fetch_rows(&mut self, x: &Self::Tensor, rows: Range<usize>);
    /// Waits for the last logits and copies them to the host: `[num_rows, vocab]`.
    fn read_logits(&mut self) -> Vec<f32>;
    /// Answers requests about the last logits. A request's index counts the requests of all calls in a step.
    fn sample(&mut self, requests: &[LogitsRequest<'_>]);

    /// Ends the step.
    fn end_step(&mut self);
    /// Whether [`Backend::finish_step`] would return at once.
    fn is_step_done(&mut self) -> bool;
    /// The results of the oldest step that was ended but not finished: first those of its requests, in order, then the
    /// fetched rows.
    fn finish_step(&mut self) -> Vec<LogitsResult>;

    /// Copies blocks within the device pool, for copy-on-write: pairs are `(from, to)`.
    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]);
    /// Starts to copy blocks from the device to the host: pairs are `(device block, swap block)`, at least one. The
    /// copies run beside the steps. An operation that is started later and touches one of these blocks waits for that
    /// block's copy; no other operation waits. Returns false if the copies could not be started: then the contents of
    /// the targets are undefined.
    fn swap_out(&mut self, pairs: &[(BlockId, BlockId)]) -> bool;
    /// Starts to copy blocks back to the device: pairs are `(swap block, device block)`. Otherwise the same.
    fn swap_in(&mut self, pairs: &[(BlockId, BlockId)]) -> bool;
    /// Says that the contents of these swap blocks are not needed once the copies started so far have ended. The
    /// backend may return their memory to the system until they are written again. A backend with pinned memory keeps
    /// it.
    fn discard_swap_blocks(&mut self, _: &[BlockId]) {}
    /// Copies the contents of blocks into `into`, one behind the other, as the operations and copies that were started
    /// before leave them. Waits for these.
    fn read_blocks(&mut self, places: &[KvPlace], into: &mut [u8]);
    /// Replaces the contents of blocks of the device pool by those of `from`, one behind the other. Waits for all
    /// operations and copies that were started before.
    fn write_blocks(&mut self, blocks: &[BlockId], from: &[u8]);
    /// The calls of [`Backend::swap_out`] and [`Backend::swap_in`] that have ended since the last call of this. Those
    /// of one direction are in order.
    fn finished_copies(&mut self) -> Vec<FinishedCopy>;
    /// Seconds that the host has waited for copies since the last call.
    fn waited_for_copies(&mut self) -> f64 {
        0.0
    }
}
