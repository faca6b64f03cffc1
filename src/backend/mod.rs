//! What a device does for the model: some twenty-five operations on its own tensors.
//!
//! The one forward pass (`model::decoder`) is written over this trait; a backend knows nothing of models, sequences
//! or scheduling. The choice of backend is made here and nowhere else.
//!
//! Contract of every backend: each output element is computed in an order that does not depend on the other rows of
//! the batch, on how a prompt was cut into chunks, or on the number of threads. This is what makes a resumed or
//! cached sequence return the same bytes. On a GPU it holds where `device.batch_invariant` asks for it.

pub mod cpu;
#[cfg(not(kernels_alone))]
pub mod cuda;
pub mod profile;

use crate::error::StartError;
use crate::ids::{BlockId, TokenId};
use crate::sampling::params::{PositionLogprobs, Sampled, SamplingParams, TokenLimits};
use crate::sampling::sampler::Draw;
use profile::Phase;
use std::ops::Range;

/// Element type of weights and of the KV cache. Reductions are always float32.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum DType {
    F32,
    F16,
    BF16,
}

impl DType {
    pub fn size_bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "float32",
            DType::F16 => "float16",
            DType::BF16 => "bfloat16",
        }
    }
}

/// A tensor as it lies in a checkpoint: row-major, little-endian, not necessarily aligned.
#[derive(Clone, Copy, Debug)]
pub struct HostTensor<'a> {
    pub dtype: DType,
    /// `[rows, cols]`; a vector is `[1, cols]`.
    pub rows: usize,
    pub cols: usize,
    /// `rows * cols * dtype.size_bytes()` bytes.
    pub bytes: &'a [u8],
}

impl<'a> HostTensor<'a> {
    /// The number of bytes is as the shape says.
    pub fn check_size(&self) -> Result<(), StartError> {
        let expected = self.rows.checked_mul(self.cols).and_then(|n| n.checked_mul(self.dtype.size_bytes()));
        if expected == Some(self.bytes.len()) {
            return Ok(());
        }
        let HostTensor { rows, cols, dtype, bytes } = self;
        Err(StartError::new(format!("a tensor [{rows}, {cols}] of {} has {} bytes", dtype.name(), bytes.len())))
    }

    /// The bytes of the transposed tensor.
    #[cfg(not(kernels_alone))]
    fn transposed(&self) -> Vec<u8> {
        let HostTensor { dtype, rows, cols, bytes } = *self;
        let size = dtype.size_bytes();
        let at = |row: usize, col: usize| &bytes[(row * cols + col) * size..][..size];
        (0..cols).flat_map(|col| (0..rows).flat_map(move |row| at(row, col).iter().copied())).collect()
    }

    /// The elements in float32.
    pub fn elements(&self) -> impl Iterator<Item = f32> + 'a {
        elements(self.bytes, self.dtype)
    }
}

/// Elements of `dtype`, little-endian, in float32.
pub(crate) fn elements(bytes: &[u8], dtype: DType) -> impl Iterator<Item = f32> + '_ {
    bytes.chunks_exact(dtype.size_bytes()).map(move |b| match dtype {
        DType::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        DType::F16 => half::f16::from_le_bytes([b[0], b[1]]).to_f32(),
        DType::BF16 => half::bf16::from_le_bytes([b[0], b[1]]).to_f32(),
    })
}

/// The rows of a matrix's parts: all of one width, in checkpoint order. Returns `(rows, cols)` of the whole.
pub(crate) fn matrix_shape(parts: &[HostTensor<'_>]) -> Result<(usize, usize), StartError> {
    let cols = parts.first().map_or(0, |part| part.cols);
    for part in parts {
        part.check_size()?;
        if part.cols != cols {
            return Err(StartError::new(format!("the parts of a matrix have {cols} and {} columns", part.cols)));
        }
    }
    let rows = parts.iter().map(|part| part.rows).sum();
    if rows == 0 || cols == 0 {
        return Err(StartError::new(format!("a matrix [{rows}, {cols}] has no elements")));
    }
    Ok((rows, cols))
}

/// Shape of the KV cache. One block holds `block_size` tokens of every layer and is contiguous:
/// `[num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]` of `dtype`, so that moving a block is one copy. How the
/// last two lie within a head's part is the backend's own matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    pub num_layers: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub block_size: usize,
    pub dtype: DType,
}

impl KvLayout {
    pub fn block_bytes(&self) -> usize {
        self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.size_bytes()
    }
}

/// Steps that a device works on at once: one that runs, and one behind it so that the device never waits for the host.
pub const MAX_STEPS_IN_FLIGHT: usize = 2;

/// One sequence's part of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSeq {
    /// Rows `first_row .. first_row + num_rows` of the batch are this sequence's new tokens, in order.
    pub first_row: usize,
    pub num_rows: usize,
    /// Tokens whose KV is in the cache before this step; the first new token has this position.
    pub num_computed: usize,
    /// `block_tables[first_block .. first_block + num_blocks]` is its block table, long enough for all its tokens.
    pub first_block: usize,
    pub num_blocks: usize,
}

/// Entry of [`Batch::token_sources`] where the token is known.
pub const NO_SOURCE: u32 = u32::MAX;

/// A step's input: the new tokens of all its sequences, one row each.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// `[num_rows]`
    pub tokens: Vec<u32>,
    /// `[num_rows]`: [`NO_SOURCE`], or the place among the requests of the step before (see [`Backend::sample`]) whose
    /// sampled token is this row's, whatever `tokens` says: the host may not know it yet.
    pub token_sources: Vec<u32>,
    /// `[num_rows]` position of each token in its sequence.
    pub positions: Vec<u32>,
    /// `[num_rows]` where each token's K and V go: `block_id * block_size + offset`.
    pub slots: Vec<u32>,
    pub seqs: Vec<BatchSeq>,
    /// Block tables of all sequences, one after the other.
    pub block_tables: Vec<u32>,
    /// Rows whose logits are wanted.
    pub logit_rows: Vec<u32>,
    /// Rows whose final hidden states are wanted.
    pub hidden_rows: Vec<Range<usize>>,
}

impl Batch {
    pub fn num_rows(&self) -> usize {
        self.tokens.len()
    }
}

/// Something wanted of one row of logits.
#[derive(Clone, Copy, Debug)]
pub struct LogitsRequest<'a> {
    /// Row of the logits, counted from the first of the last [`Backend::logits`]. Several requests may have one row.
    pub row: usize,
    pub want: LogitsWant<'a>,
}

#[derive(Clone, Copy, Debug)]
pub enum LogitsWant<'a> {
    /// The next token, as `sampling::sampler` says.
    Sample {
        params: &'a SamplingParams,
        /// Where they are more than what `params` says.
        limits: Option<&'a TokenLimits>,
        /// Of the parameters' penalties; where there are none, these may be empty.
        prompt: &'a [TokenId],
        output: &'a [TokenId],
        /// The last token of the output, where `output` lacks it because the host does not know it yet: the place
        /// among the requests of the step before whose sampled token it is.
        pending: Option<u32>,
        draw: Draw,
    },
    /// The log-probabilities at a prompt's position: of `target`, which stands there, and of the most likely.
    PromptLogprobs { target: TokenId, num_top: u32 },
}

#[derive(Clone, Debug, PartialEq)]
pub enum LogitsResult {
    Sampled(Sampled),
    PromptLogprobs(PositionLogprobs),
    /// Of [`Backend::fetch_rows`], `[rows, cols]`.
    Rows(Vec<f32>),
}

/// What a tensor is for. A device may hold activations in the weights' type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TensorRole {
    /// The residual stream: float32.
    Residual,
    /// Between two operations of a layer.
    Activation,
    /// The same, where only products with weights of this type read it: in whatever order suits them.
    Operand(DType),
    /// Handed over between the parts of a fused operation. A backend that does them at once has no use for it.
    Unfused,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    Silu,
    /// Exact, with erf.
    Gelu,
    /// The tanh approximation (`gelu_new`, `gelu_pytorch_tanh`).
    GeluTanh,
    Relu,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NormKind {
    /// `x / rms(x) * weight`
    Rms { eps: f32 },
    /// `(x - mean(x)) / std(x) * weight + bias`
    Layer { eps: f32 },
}

/// A norm's parameters on the device: `weight: [cols]`, `bias: [cols]` where the kind has one.
pub struct Norm<V> {
    pub kind: NormKind,
    pub weight: V,
    pub bias: Option<V>,
}

/// The weights of a layer of experts.
pub struct Experts<Matrix, Matrices> {
    /// `[num_experts, hidden]`
    pub router: Matrix,
    /// Of each expert `[2 * intermediate, hidden]`: gate and up.
    pub up: Matrices,
    /// Of each expert `[hidden, intermediate]`.
    pub down: Matrices,
}

/// Which rows and heads a fused `[Q | K | V]` projection holds: `qkv: [num_rows, (num_heads + 2 * num_kv_heads) * head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// Factor on q·k, usually `head_dim^-0.5`.
    pub scale: f32,
    /// Scores, after the factor, become `cap · tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// A token sees itself and the `window - 1` before it.
    pub window: Option<usize>,
}

impl AttentionShape {
    /// Columns of a row of `qkv`.
    pub fn qkv_cols(&self) -> usize {
        (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
    }
}

/// What becomes of the heads that a product to Q, K and V gives.
pub struct Heads<'a, B: Backend + ?Sized> {
    pub shape: &'a AttentionShape,
    /// Of each head of Q, and of K.
    pub norms: Option<[&'a Norm<B::Vector>; 2]>,
    pub rope: Option<&'a B::RopeTable>,
    pub layer: usize,
}

/// A layer of experts: for each row a router chooses some of several gated MLPs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsShape {
    pub num_experts: usize,
    /// Experts that a row goes through.
    pub num_chosen: usize,
    pub hidden_size: usize,
    /// Width within an expert.
    pub intermediate_size: usize,
    pub activation: Activation,
    /// The chosen experts' weights are divided by their sum.
    pub renormalize: bool,
}

/// Rotary embedding in the half-split ("NeoX") layout: dimension `i` turns with `i + rotary_dim / 2`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Leading dimensions of a head that turn; the rest pass through. Even.
    pub rotary_dim: usize,
    /// `[rotary_dim / 2]` radians per position.
    pub inv_freq: Vec<f32>,
    /// Factor on cos and sin (YaRN's attention factor), else 1.
    pub attention_factor: f32,
    /// Positions are below this.
    pub max_positions: usize,
}

impl Rope {
    /// `[max_positions][cos, sin][rotary_dim / 2]`, with the factor.
    #[cfg(not(kernels_alone))]
    pub(crate) fn table(&self) -> Result<Vec<f32>, StartError> {
        let mut table = self.empty_table()?;
        table.chunks_exact_mut(self.rotary_dim).enumerate().for_each(|(position, row)| self.write_row(position, row));
        Ok(table)
    }

    /// [`Rope::table`], of zeros.
    pub(crate) fn empty_table(&self) -> Result<Vec<f32>, StartError> {
        let half = self.inv_freq.len();
        if self.rotary_dim != 2 * half || half == 0 {
            return Err(StartError::new(format!(
                "rotary embedding of {} dimensions with {half} frequencies: one is needed for every two dimensions",
                self.rotary_dim
            )));
        }
        let len = self.max_positions.saturating_mul(self.rotary_dim);
        let mut table = Vec::new();
        table.try_reserve_exact(len).map_err(|error| {
            StartError::new(format!("the rotary table of {} positions does not fit: {error}", self.max_positions))
        })?;
        table.resize(len, 0.0);
        Ok(table)
    }

    /// A position's row of [`Rope::table`].
    pub(crate) fn write_row(&self, position: usize, row: &mut [f32]) {
        let (cos, sin) = row.split_at_mut(self.inv_freq.len());
        for ((cos, sin), freq) in cos.iter_mut().zip(sin).zip(&self.inv_freq) {
            // In float64: the angle grows with the position, and float32 would lose its fraction.
            let angle = position as f64 * f64::from(*freq);
            *cos = (angle.cos() * f64::from(self.attention_factor)) as f32;
            *sin = (angle.sin() * f64::from(self.attention_factor)) as f32;
        }
    }
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
    fn mark(&mut self, _: Phase) {}

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

/// A call of [`Backend::swap_out`] or [`Backend::swap_in`] that has ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FinishedCopy {
    pub to_device: bool,
    /// From when it was its turn to its end.
    pub seconds: f64,
}
