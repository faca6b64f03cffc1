//! What a device does for the model: some twenty-five operations on its own tensors.
//!
//! The one forward pass (`model::decoder`) is written over this trait; a backend knows nothing of models, sequences
//! or scheduling. The choice of backend is made here and nowhere else.
//!
//! Contract of every backend: each output element is computed in an order that does not depend on the other rows of
//! the batch, on how a prompt was cut into chunks, or on the number of threads. This is what makes a resumed or
//! cached sequence return the same bytes. On a GPU it holds where `device.batch_invariant` asks for it.

mod batch;
pub mod cpu;
#[cfg(not(kernels_alone))]
pub mod cuda;
mod layers;
pub mod profile;
mod tensors;

pub use batch::{
    Batch, BatchSeq, FinishedCopy, KvLayout, LogitsRequest, LogitsResult, LogitsWant, MAX_STEPS_IN_FLIGHT, NO_SOURCE,
};
pub use layers::{Activation, AttentionShape, Experts, ExpertsShape, Norm, NormKind, Rope};
pub use tensors::{DType, HostTensor, TensorRole};
pub(crate) use tensors::{elements, matrix_shape};

use crate::error::StartError;
use crate::ids::BlockId;
use profile::StepPhase;
use std::ops::Range;

/// What becomes of the heads that a product to Q, K and V gives.
pub struct Heads<'a, B: Backend + ?Sized> {
    pub shape: &'a AttentionShape,
    /// Of each head of Q, and of K.
    pub norms: Option<[&'a Norm<B::Vector>; 2]>,
    pub rope: Option<&'a B::RopeTable>,
    pub layer: usize,
}

/// The operations. Tensors are `[rows, cols]`; `rows` may be less than the tensor was made for. Shapes that do not fit
/// are a programming error and panic; so does a device that fails.
///
/// A step is `begin`, the forward pass, `logits` and `sample` (several times, where many logits are wanted) and
/// `end_step`. All of these may return before they are done; `finish_step` waits, and gives the results. Up to
/// [`MAX_STEPS_IN_FLIGHT`] steps may have been ended and not finished.
pub trait Backend {
    /// A weight matrix `[n, k]`, packed as the backend likes.
    type Matrix;
    /// A small float32 vector: a norm's weight, a bias.
    type Vector;
    /// Activations `[max_rows, cols]`.
    type Tensor;
    /// Prepared rotary tables.
    type RopeTable;
    /// Several matrices of one shape, the same of each expert.
    type Matrices;
    /// What layers of experts keep between their operations.
    type ExpertsWorkspace;

    /// Packs `[n, k]`, the rows of `parts` one after the other (a fused QKV is three parts), converted to `dtype`.
    fn matrix(&self, parts: &[HostTensor<'_>], dtype: DType) -> Result<Self::Matrix, StartError>;
    /// [`Backend::matrix`] of parts that are stored as `[k, n]`.
    #[cfg(not(kernels_alone))]
    fn transposed_matrix(&self, parts: &[HostTensor<'_>], dtype: DType) -> Result<Self::Matrix, StartError> {
        let turned: Vec<_> = parts.iter().map(HostTensor::transposed).collect();
        let both = parts.iter().zip(&turned);
        let tensors: Vec<_> =
            both.map(|(part, bytes)| HostTensor { rows: part.cols, cols: part.rows, bytes, ..*part }).collect();
        self.matrix(&tensors, dtype)
    }
    /// A matrix of random numbers, uniform, with standard deviation 0.02; the same for the same seed.
    fn random_matrix(&self, n: usize, k: usize, dtype: DType, seed: u64) -> Result<Self::Matrix, StartError>;
    /// [`Backend::matrix`] for [`Backend::gated_linear`]: half of the rows are of the gate, half of up.
    fn gate_up_matrix(&self, parts: &[HostTensor<'_>], dtype: DType) -> Result<Self::Matrix, StartError> {
        self.matrix(parts, dtype)
    }
    /// As [`Backend::random_matrix`].
    fn random_gate_up_matrix(&self, n: usize, k: usize, dtype: DType, seed: u64) -> Result<Self::Matrix, StartError> {
        self.random_matrix(n, k, dtype, seed)
    }
    /// Packs `count` matrices `[n, k]`, each of as many of `parts`.
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
    /// A float32 copy of all `parts`, one after the other.
    fn vector(&self, parts: &[HostTensor<'_>]) -> Result<Self::Vector, StartError>;
    fn tensor(&self, max_rows: usize, cols: usize, role: TensorRole) -> Result<Self::Tensor, StartError>;
    fn rope_table(&self, rope: &Rope) -> Result<Self::RopeTable, StartError>;
    fn experts_workspace(&self, max_rows: usize, shape: &ExpertsShape) -> Result<Self::ExpertsWorkspace, StartError>;

    /// Makes the two pools of KV blocks: on the device and, pinned, on the host. Called again after a failure, it
    /// starts over with empty pools and no step in flight.
    fn allocate_kv(
        &mut self,
        layout: KvLayout,
        num_device_blocks: usize,
        num_swap_blocks: usize,
    ) -> Result<(), StartError>;

    /// Starts a step: sets the batch that the following operations work on; `num_rows` of all tensors is the batch's.
    fn begin(&mut self, batch: &Batch);
    /// Does `body`, the operations between `begin` and the first `sample`. A device may record them and, for a later
    /// batch of the same kind, replay the recording instead of calling `body`.
    fn replay(&mut self, body: &mut dyn FnMut(&mut Self)) {
        body(self);
    }
    /// Says what the next [`Backend::linear`] is for, to a backend that counts ([`profile::Profiled`]).
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
    /// The product to `qkv`, then [`Backend::qk_norm`] and [`Backend::rope_and_write_kv`]. Of `qkv` only Q is read
    /// afterwards.
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
    /// The product at the end of a sublayer: `stream += x · wᵀ + bias`, or, where the sum is sooner done together with
    /// the norm that follows, only `delta = x · wᵀ + bias`. Returns whether `delta` has yet to be added; it is
    /// [`TensorRole::Unfused`].
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
    /// Normalises each head of Q and of K of `qkv` on its own (Qwen3): `weight: [head_dim]`.
    fn qk_norm(
        &mut self,
        qkv: &mut Self::Tensor,
        shape: &AttentionShape,
        q: &Norm<Self::Vector>,
        k: &Norm<Self::Vector>,
    );
    /// Turns Q and K of `qkv` by their positions (where there is a table) and writes K and V of `layer` into the KV
    /// cache at the batch's slots. Q stays in `qkv`.
    fn rope_and_write_kv(
        &mut self,
        qkv: &mut Self::Tensor,
        shape: &AttentionShape,
        rope: Option<&Self::RopeTable>,
        layer: usize,
    );
    /// Causal attention of every row's Q over its sequence's K and V of `layer`, read through the block table.
    /// `out: [rows, num_heads * head_dim]`. GQA: query head `h` reads KV head `h / (num_heads / num_kv_heads)`.
    fn attention(&mut self, qkv: &Self::Tensor, shape: &AttentionShape, layer: usize, out: &mut Self::Tensor);
    /// `out = act(gate) * up` for `gate_up: [rows, 2 * cols]` = `[gate | up]`.
    fn gated_activation(&mut self, gate_up: &Self::Tensor, kind: Activation, out: &mut Self::Tensor);
    /// `x = act(x)`.
    fn activation(&mut self, x: &mut Self::Tensor, kind: Activation);
    /// `out[row] = Σ weight · down(act(gate(x)) · up(x))` over the experts that the router chooses for this row. The
    /// router's logits are `x · routerᵀ`, the weights their softmax over all experts. Only the chosen experts are
    /// computed, and added in the order of their weights, the largest first.
    fn mix_experts(
        &mut self,
        x: &Self::Tensor,
        experts: &Experts<Self::Matrix, Self::Matrices>,
        shape: &ExpertsShape,
        work: &mut Self::ExpertsWorkspace,
        out: &mut Self::Tensor,
    );
    /// `out[i] = x[logit_rows[first + i]]` for `i < num_rows`.
    fn gather_rows(&mut self, x: &Self::Tensor, first: usize, num_rows: usize, out: &mut Self::Tensor);
    /// `x[0..num_rows] · wᵀ`, `[num_rows, vocab]` float32, which stay on the device and replace those before.
    fn logits(&mut self, x: &Self::Tensor, num_rows: usize, w: &Self::Matrix, bias: Option<&Self::Vector>);
    /// The last logits become `cap · tanh(logit / cap)`.
    fn cap_logits(&mut self, cap: f32);
    /// Has rows of `x` among the step's results, after those of all samples: [`LogitsResult::Rows`].
    fn fetch_rows(&mut self, x: &Self::Tensor, rows: Range<usize>);
    /// A copy of the last logits on the host, `[num_rows, vocab]`; waits for them.
    fn read_logits(&mut self) -> Vec<f32>;
    /// Answers requests about the last logits. A request's place is counted over all calls of a step.
    fn sample(&mut self, requests: &[LogitsRequest<'_>]);

    /// Ends the step.
    fn end_step(&mut self);
    /// Whether [`Backend::finish_step`] would return at once.
    fn is_step_done(&mut self) -> bool;
    /// The results of the oldest step that was ended, in the order of its requests, then the rows that were fetched.
    fn finish_step(&mut self) -> Vec<LogitsResult>;

    /// Copy-on-write: `(from, to)` within the device pool.
    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]);
    /// Starts copies `(device block, swap block)`, at least one, which go on beside the steps. Whatever is started after
    /// this and touches one of these blocks waits for its copy, and nothing else does. False where they could not be
    /// started: then what the targets hold means nothing.
    fn swap_out(&mut self, pairs: &[(BlockId, BlockId)]) -> bool;
    /// The same, `(swap block, device block)`.
    fn swap_in(&mut self, pairs: &[(BlockId, BlockId)]) -> bool;
    /// Nobody needs what these swap blocks hold once the copies that were started have ended: their memory may go back to
    /// the system, and comes again when they are written. A backend whose memory is pinned keeps it.
    fn discard_swap_blocks(&mut self, _: &[BlockId]) {}
    /// Calls of [`Backend::swap_out`] and [`Backend::swap_in`] that were started and have ended since the last time: those
    /// of one direction in their order.
    fn finished_copies(&mut self) -> Vec<FinishedCopy>;
    /// Seconds that the host has waited for copies since the last call.
    fn waited_for_copies(&mut self) -> f64 {
        0.0
    }
}
