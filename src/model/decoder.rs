//! The forward pass: one decoder for all families.

use crate::checkpoint::Checkpoint;
use crate::quantized::Conversions;
use crate::rope;
use crate::spec::{ModelSpec, NormPlacement, PositionSpec, RopeSpec};
use crate::tally::WeightTally;
use crate::weights::{LinearLayer, Mlp, SharedExpert, Weights, WeightsProgress};
use pagetide_backend::profile::StepPhase;
use pagetide_backend::{Backend, Batch, DType, ExpertsShape, Heads, KvLayout, Norm, NormedInput, TensorRole};
use pagetide_base::error::StartError;
use std::ops::Range;

/// A model on a device, with the memory for the activations of one step.
pub struct Decoder<B: Backend> {
    spec: ModelSpec,
    dtype: DType,
    max_rows: usize,
    max_logit_rows: usize,
    weights: Weights<B>,
    rope: Option<B::RopeTable>,
    /// The rotary table of layers with a window, if it differs from the others.
    windowed_rope: Option<B::RopeTable>,
    residual: Residual<B>,
    work: DecoderWorkspace<B>,
}

/// Activations, allocated once. `rows` is the maximum of a step.
struct DecoderWorkspace<B: Backend> {
    /// `[rows, embed]`, if embeddings are narrower than the model.
    embedding: Option<B::Tensor>,
    /// `[rows, (num_heads + 2 * num_kv_heads) * head_dim]`
    qkv: B::Tensor,
    /// `[rows, num_heads * head_dim]`
    attended: B::Tensor,
    /// `[rows, 2 * intermediate]` if the MLP is gated, else `[rows, intermediate]`.
    up: B::Tensor,
    /// `[rows, intermediate]`, if the MLP is gated.
    gated: Option<B::Tensor>,
    /// The workspace of layers with experts.
    experts: Option<(ExpertsShape, B::ExpertsWorkspace)>,
    shared_expert: Option<SharedExpertWorkspace<B>>,
    /// `[logit rows, embed]`
    gathered: B::Tensor,
}

/// The activations of a shared expert.
struct SharedExpertWorkspace<B: Backend> {
    /// `[rows, 2 * intermediate]`
    up: B::Tensor,
    /// `[rows, intermediate]`
    gated: B::Tensor,
    /// `[rows, hidden]`
    out: B::Tensor,
}

impl<B: Backend> Decoder<B> {
    /// Reads the weights of `checkpoint`, or makes random ones for `None`. Matrices have type `dtype`. Steps have up to
    /// `max_rows` tokens, in sequences of up to `max_model_len`. Logits are computed `max_logit_rows` at a time.
    /// `progress` is told the bytes read so far and in total.
    #[expect(clippy::too_many_arguments, reason = "each is a separate decision of the caller")]
    pub fn load(
        checkpoint: Option<&Checkpoint>,
        spec: ModelSpec,
        dtype: DType,
        max_rows: usize,
        max_logit_rows: usize,
        max_model_len: usize,
        backend: &B,
        progress: &mut WeightsProgress<'_>,
    ) -> Result<Self, StartError> {
        assert!(max_rows > 0 && max_logit_rows > 0, "a step has rows");
        spec.check_max_model_len(max_model_len)?;
        let table =
            |rope: &RopeSpec| backend.rope_table(&rope::rope(rope, spec.max_position_embeddings, max_model_len));
        let rope = match &spec.positions {
            PositionSpec::Rope(rope) => Some(table(rope)?),
            PositionSpec::Learned { .. } => None,
        };
        let windowed_rope = spec.windowed_rope.as_ref().map(table).transpose()?;
        let weights = Weights::load(checkpoint, &spec, dtype, backend, progress)?;
        let operand = if weights.tally.has_quantized() { DType::F32 } else { dtype };
        let residual = Residual::new(&spec, operand, max_rows, backend)?;
        let work = DecoderWorkspace::new(&spec, operand, (max_rows, max_logit_rows), backend)?;
        Ok(Self { spec, dtype, max_rows, max_logit_rows, weights, rope, windowed_rope, residual, work })
    }

    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// What the load converted.
    pub fn conversions(&self) -> &Conversions {
        &self.weights.conversions
    }

    /// The weight matrices as the backend got them. A backend without kernels for a format converts it.
    pub fn tally(&self) -> &WeightTally {
        &self.weights.tally
    }

    /// The layout of a KV cache of the weights' type.
    pub fn kv_layout(&self, block_size: usize) -> KvLayout {
        self.spec.kv_layout(block_size, self.dtype)
    }

    /// Runs the forward pass of a step: writes K and V of all new tokens and computes the logits of `batch.logit_rows`,
    /// some at a time. `sample` is called with each range of them while they are the last logits of the backend.
    pub fn forward(&mut self, backend: &mut B, batch: &Batch, sample: &mut dyn FnMut(&mut B, Range<usize>)) {
        assert!(batch.num_rows() <= self.max_rows, "{} rows, made for {}", batch.num_rows(), self.max_rows);
        let num_logit_rows = batch.logit_rows.len();
        let first = num_logit_rows.min(self.max_logit_rows);
        backend.begin(batch);
        self.pass(backend, first);
        if first > 0 {
            sample(backend, 0..first);
        }
        for start in (first..num_logit_rows).step_by(self.max_logit_rows) {
            let rows = start..num_logit_rows.min(start + self.max_logit_rows);
            self.logits(backend, rows.clone());
            sample(backend, rows);
        }
        if !batch.hidden_rows.is_empty() {
            self.fetch(backend, batch);
        }
    }

    /// Fetches the hidden states of `batch.hidden_rows`, as they are before the vocabulary product.
    fn fetch(&mut self, backend: &mut B, batch: &Batch) {
        if batch.logit_rows.is_empty() {
            self.finish(backend);
        }
        let x = match (&self.weights.project_out, &self.work.embedding) {
            (Some(_), Some(embedding)) => embedding,
            _ => self.residual.finished(self.weights.final_norm.is_some()),
        };
        batch.hidden_rows.iter().for_each(|rows| backend.fetch_rows(x, rows.clone()));
    }

    /// Runs [`Decoder::forward`] up to the first logits `times` times, to measure it.
    pub fn repeat(&mut self, backend: &mut B, batch: &Batch, times: usize) {
        backend.begin(batch);
        for _ in 0..times {
            self.pass(backend, batch.logit_rows.len().min(self.max_logit_rows));
        }
    }

    /// Runs all layers, and computes the first `num_logit_rows` rows of logits.
    fn pass(&mut self, backend: &mut B, num_logit_rows: usize) {
        backend.replay(&mut |backend| {
            self.layers(backend);
            if num_logit_rows > 0 {
                self.finish(backend);
                self.logits(backend, 0..num_logit_rows);
            }
        });
    }

    fn layers(&mut self, backend: &mut B) {
        self.embed(backend);
        for layer in 0..self.spec.num_layers() {
            self.attention(backend, layer);
            self.mlp(backend, layer);
        }
    }

    fn embed(&mut self, backend: &mut B) {
        let (weights, x) = (&self.weights, self.residual.restart());
        let scale = round(self.spec.embed_scale, self.dtype);
        match (&weights.project_in, &mut self.work.embedding) {
            (Some(project_in), Some(embedding)) => {
                backend.embed(&weights.embeddings, scale, embedding);
                backend.mark(StepPhase::Embedding);
                backend.linear(embedding, project_in, None, x);
            }
            _ => backend.embed(&weights.embeddings, scale, x),
        }
        if let (PositionSpec::Learned { offset }, Some(table)) = (&self.spec.positions, &weights.positions) {
            backend.add_position_embedding(table, *offset, x);
        }
    }

    fn attention(&mut self, backend: &mut B, layer: usize) {
        let (weights, shape) = (&self.weights.layers[layer], self.spec.attention_shape(layer));
        let DecoderWorkspace { qkv, attended, .. } = &mut self.work;

        let input = self.residual.enter(&weights.attention_norm);
        let windowed = self.windowed_rope.as_ref().filter(|_| shape.window.is_some());
        let heads = Heads {
            shape: &shape,
            norms: weights.head_norms.as_ref().map(|norms| [&norms.q, &norms.k]),
            rope: windowed.or(self.rope.as_ref()),
            layer,
        };
        backend.mark(StepPhase::Qkv);
        let (w, bias) = (&weights.qkv.weight, weights.qkv.bias.as_ref());
        match input {
            SublayerInput::Stream(x) => backend.qkv_linear(x, w, bias, &heads, qkv),
            SublayerInput::Normed(input) => backend.normed_qkv_linear(input, w, bias, &heads, qkv),
        }
        backend.attention(qkv, &shape, layer, attended);
        self.residual.add(backend, StepPhase::Output, attended, &weights.out);
        self.residual.leave(backend, &weights.attention_norm, weights.attention_post_norm.as_ref());
    }

    fn mlp(&mut self, backend: &mut B, layer: usize) {
        let (weights, kind) = (&self.weights.layers[layer], self.spec.mlp.activation);
        let DecoderWorkspace { up: up_out, gated, experts: experts_work, shared_expert, .. } = &mut self.work;

        let input = self.residual.enter(&weights.mlp_norm);
        match (&weights.mlp, experts_work) {
            (Mlp::Dense { up, down }, _) => {
                backend.mark(StepPhase::Up);
                let (w, bias) = (&up.weight, up.bias.as_ref());
                let activated = match (gated, input) {
                    (Some(gated), SublayerInput::Stream(x)) => {
                        backend.gated_linear(x, w, bias, kind, up_out, gated);
                        gated
                    }
                    (Some(gated), SublayerInput::Normed(input)) => {
                        backend.normed_gated_linear(input, w, bias, kind, up_out, gated);
                        gated
                    }
                    (None, input) => {
                        let x = input.rows(backend);
                        backend.linear(x, w, bias, up_out);
                        backend.activation(up_out, kind);
                        up_out
                    }
                };
                self.residual.add(backend, StepPhase::Down, activated, down);
            }
            (Mlp::Sparse { experts, shared }, Some((shape, work))) => {
                input.rows(backend);
                let (x, delta) = self.residual.sublayer();
                backend.mix_experts(x, experts, shape, work, delta);
                if let (Some(SharedExpert { up, down, gate }), Some(work)) = (shared, shared_expert) {
                    backend.mark(StepPhase::Up);
                    backend.gated_linear(x, &up.weight, None, kind, &mut work.up, &mut work.gated);
                    backend.mark(StepPhase::Down);
                    backend.linear(&work.gated, &down.weight, None, &mut work.out);
                    backend.add_gated(x, gate, &work.out, delta);
                }
            }
            (Mlp::Sparse { .. }, None) => unreachable!("the workspace is made for models with experts"),
        }
        self.residual.leave(backend, &weights.mlp_norm, weights.mlp_post_norm.as_ref());
    }

    /// Runs everything between the last layer and the vocabulary product, for all rows.
    fn finish(&mut self, backend: &mut B) {
        let x = self.residual.finish(backend, self.weights.final_norm.as_ref());
        if let (Some(project_out), Some(embedding)) = (&self.weights.project_out, &mut self.work.embedding) {
            backend.mark(StepPhase::Vocabulary);
            backend.linear(x, project_out, None, embedding);
        }
    }

    /// The logits of `batch.logit_rows[rows]`, after [`Decoder::finish`].
    fn logits(&mut self, backend: &mut B, rows: Range<usize>) {
        let (weights, work) = (&self.weights, &mut self.work);
        let x = match (&weights.project_out, &work.embedding) {
            (Some(_), Some(embedding)) => embedding,
            _ => self.residual.finished(weights.final_norm.is_some()),
        };
        backend.gather_rows(x, rows.start, rows.len(), &mut work.gathered);
        backend.logits(&work.gathered, rows.len(), weights.head(), None);
        if let Some(cap) = self.spec.logit_softcap {
            backend.cap_logits(cap);
        }
    }
}

/// `x` in the precision of the weights, in which transformers keeps the factor of embeddings.
fn round(x: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F32 => x,
        DType::F16 => half::f16::from_f32(x).to_f32(),
        DType::BF16 => half::bf16::from_f32(x).to_f32(),
    }
}

/// The residual stream, with the norms before or after each sublayer. If a backend fuses the addition of a sublayer's
/// output with the next norm, the addition waits for that norm.
struct Residual<B: Backend> {
    placement: NormPlacement,
    /// The stream; without `delta` while its addition is pending.
    x: B::Tensor,
    /// The input of a sublayer, if norms come before it.
    normed: B::Tensor,
    /// The final result, or the next stream if norms come after sublayers.
    finished: B::Tensor,
    /// The last sublayer's output.
    delta: B::Tensor,
    /// The normalised output of the last sublayer, if there are norms on both sides.
    normed_delta: Option<B::Tensor>,
    delta_is_pending: bool,
}

/// The input of a sublayer.
enum SublayerInput<'a, B: Backend> {
    /// The stream itself, if norms come after sublayers.
    Stream(&'a B::Tensor),
    Normed(NormedInput<'a, B>),
}

impl<'a, B: Backend> SublayerInput<'a, B> {
    /// The rows, in memory.
    fn rows(self, backend: &mut B) -> &'a B::Tensor {
        match self {
            Self::Stream(x) => x,
            Self::Normed(input) => backend.normed(input),
        }
    }
}

impl<B: Backend> Residual<B> {
    /// `operand`: the type of activations that only products read.
    fn new(spec: &ModelSpec, operand: DType, max_rows: usize, backend: &B) -> Result<Self, StartError> {
        let tensor = |role| backend.tensor(max_rows, spec.hidden_size, role);
        // Experts read their input row by row, and do not add to the stream.
        let has_experts = spec.experts.is_some();
        let operand = if has_experts { TensorRole::Activation } else { TensorRole::Operand(operand) };
        let unfused = if has_experts { TensorRole::Activation } else { TensorRole::Unfused };
        let (normed, finished, delta) = match spec.norm.placement {
            NormPlacement::Before => (operand, TensorRole::Activation, unfused),
            // The normed sum becomes the stream.
            NormPlacement::After => (TensorRole::Unfused, TensorRole::Residual, unfused),
            // Norms read float32.
            NormPlacement::Both => (operand, TensorRole::Activation, TensorRole::Residual),
        };
        let has_post_norms = spec.norm.placement == NormPlacement::Both;
        Ok(Self {
            placement: spec.norm.placement,
            x: tensor(TensorRole::Residual)?,
            normed: tensor(normed)?,
            finished: tensor(finished)?,
            delta: tensor(delta)?,
            normed_delta: has_post_norms.then(|| tensor(TensorRole::Activation)).transpose()?,
            delta_is_pending: false,
        })
    }

    /// The tensor of the stream, for the embeddings of a new step.
    fn restart(&mut self) -> &mut B::Tensor {
        self.delta_is_pending = false;
        &mut self.x
    }

    /// The input of a sublayer. `norm` is its own norm.
    fn enter<'a>(&'a mut self, norm: &'a Norm<B::Vector>) -> SublayerInput<'a, B> {
        if self.placement == NormPlacement::After {
            return SublayerInput::Stream(&self.x);
        }
        let is_pending = std::mem::take(&mut self.delta_is_pending);
        let delta = is_pending.then_some(self.normed_delta.as_ref().unwrap_or(&self.delta));
        SublayerInput::Normed(NormedInput { stream: &mut self.x, delta, norm, normed: &mut self.normed })
    }

    /// The input of a sublayer, and the tensor for its output.
    fn sublayer(&mut self) -> (&B::Tensor, &mut B::Tensor) {
        let x = if self.placement == NormPlacement::After { &self.x } else { &self.normed };
        self.delta_is_pending = true;
        (x, &mut self.delta)
    }

    /// Runs the matrix product at the end of a sublayer.
    fn add(&mut self, backend: &mut B, phase: StepPhase, x: &B::Tensor, linear: &LinearLayer<B>) {
        let LinearLayer { weight, bias } = linear;
        backend.mark(phase);
        self.delta_is_pending = match self.placement {
            NormPlacement::Both => {
                backend.linear(x, weight, bias.as_ref(), &mut self.delta);
                true
            }
            _ => backend.residual_linear(x, weight, bias.as_ref(), &mut self.x, &mut self.delta),
        };
    }

    /// Ends a sublayer. `norm` is its own norm, and `post_norm` the second one if there are two.
    fn leave(&mut self, backend: &mut B, norm: &Norm<B::Vector>, post_norm: Option<&Norm<B::Vector>>) {
        if let (Some(post_norm), Some(normed)) = (post_norm, &mut self.normed_delta) {
            backend.norm(&self.delta, post_norm, normed);
        }
        if self.placement == NormPlacement::After {
            self.finish_with(backend, norm);
            std::mem::swap(&mut self.x, &mut self.finished);
        }
    }

    /// The stream after the last sublayer, normalised if the model ends with a norm.
    fn finish(&mut self, backend: &mut B, final_norm: Option<&Norm<B::Vector>>) -> &B::Tensor {
        if let Some(norm) = final_norm {
            self.finish_with(backend, norm);
            return &self.finished;
        }
        if std::mem::take(&mut self.delta_is_pending) {
            let delta = self.normed_delta.as_ref().unwrap_or(&self.delta);
            backend.add(&mut self.x, delta);
        }
        &self.x
    }

    /// The result of [`Residual::finish`].
    fn finished(&self, is_normed: bool) -> &B::Tensor {
        if is_normed { &self.finished } else { &self.x }
    }

    /// Adds the pending residual, and normalises the sum into [`Residual::finished`].
    fn finish_with(&mut self, backend: &mut B, norm: &Norm<B::Vector>) {
        let is_pending = std::mem::take(&mut self.delta_is_pending);
        let delta = is_pending.then_some(self.normed_delta.as_ref().unwrap_or(&self.delta));
        backend.normed(NormedInput { stream: &mut self.x, delta, norm, normed: &mut self.finished });
    }
}

impl<B: Backend> DecoderWorkspace<B> {
    /// `operand`: as in [`Residual::new`]. The sizes are `(max_rows, max_logit_rows)`.
    fn new(
        spec: &ModelSpec,
        operand: DType,
        (max_rows, max_logit_rows): (usize, usize),
        backend: &B,
    ) -> Result<Self, StartError> {
        let (attention, mlp) = (&spec.attention, &spec.mlp);
        let experts = spec.experts_shape().map(|shape| {
            let work = backend.experts_workspace(max_rows, &shape)?;
            Ok::<_, StartError>((shape, work))
        });
        let tensor = |cols, role| backend.tensor(max_rows, cols, role);
        let only = |condition: bool, cols, role| condition.then(|| tensor(cols, role)).transpose();
        let shared_width = spec.experts.as_ref().and_then(|experts| experts.shared_intermediate_size);
        let shared_expert = shared_width.map(|width| {
            Ok::<_, StartError>(SharedExpertWorkspace {
                up: tensor(2 * width, TensorRole::Unfused)?,
                gated: tensor(width, TensorRole::Operand(operand))?,
                out: tensor(spec.hidden_size, TensorRole::Activation)?,
            })
        });
        let (qkv, attended) = (attention.num_heads + 2 * attention.num_kv_heads, attention.num_heads);
        Ok(Self {
            embedding: only(spec.embed_size != spec.hidden_size, spec.embed_size, TensorRole::Activation)?,
            qkv: tensor(qkv * attention.head_dim, TensorRole::Activation)?,
            attended: tensor(attended * attention.head_dim, TensorRole::Activation)?,
            up: match mlp.gated {
                true => tensor(2 * mlp.intermediate_size, TensorRole::Unfused)?,
                false => tensor(mlp.intermediate_size, TensorRole::Activation)?,
            },
            gated: only(mlp.gated, mlp.intermediate_size, TensorRole::Operand(operand))?,
            experts: experts.transpose()?,
            shared_expert: shared_expert.transpose()?,
            gathered: backend.tensor(max_logit_rows, spec.embed_size, TensorRole::Activation)?,
        })
    }
}
