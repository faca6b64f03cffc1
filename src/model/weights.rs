//! Converts the tensors of a checkpoint, which each family names differently, to the fused matrices of the forward
//! pass.

use crate::checkpoint::Checkpoint;
use crate::names::{TensorNames, TensorNaming};
use crate::quantized::scheme::QuantScheme;
use crate::quantized::{self, Conversions, QuantModule};
use crate::quantizer::kept::KeptPlace;
use crate::quantizer::{MatrixUse, Quantizing};
use crate::spec::{ExpertsSpec, Family, ModelSpec, NormPlacement, PositionSpec};
use crate::tally::WeightTally;
use pagetide_backend::{Backend, DType, Experts, HostTensor, Norm, NormKind, WeightFormat};
use pagetide_base::error::StartError;
use std::borrow::Cow;
use std::collections::BTreeSet;

/// Is told the bytes read so far and in total, after each tensor. If it fails, so does the load.
pub type WeightsProgress<'a> = dyn FnMut(u64, u64) -> Result<(), StartError> + 'a;

/// A matrix `[out, in]` with its bias `[out]`.
pub struct LinearLayer<B: Backend> {
    pub weight: B::Matrix,
    pub bias: Option<B::Vector>,
}

/// Norms `[head_dim]` of each head of Q and of K.
pub struct HeadNorms<B: Backend> {
    pub q: Norm<B::Vector>,
    pub k: Norm<B::Vector>,
}

pub struct LayerWeights<B: Backend> {
    pub attention_norm: Norm<B::Vector>,
    /// The norm after the sublayer, if there are norms on both sides.
    pub attention_post_norm: Option<Norm<B::Vector>>,
    /// `[(num_heads + 2 * num_kv_heads) * head_dim, hidden]`: Q, K and V.
    pub qkv: LinearLayer<B>,
    pub head_norms: Option<HeadNorms<B>>,
    /// `[hidden, num_heads * head_dim]`
    pub out: LinearLayer<B>,
    pub mlp_norm: Norm<B::Vector>,
    pub mlp_post_norm: Option<Norm<B::Vector>>,
    pub mlp: Mlp<B>,
}

pub enum Mlp<B: Backend> {
    Dense {
        /// `[2 * intermediate, hidden]`, gate and up, if the MLP is gated; else `[intermediate, hidden]`.
        up: LinearLayer<B>,
        /// `[hidden, intermediate]`
        down: LinearLayer<B>,
    },
    Sparse {
        experts: Experts<B::Matrix, B::Matrices>,
        shared: Option<SharedExpert<B>>,
    },
}

/// An expert that all rows go through.
pub struct SharedExpert<B: Backend> {
    /// `[2 * intermediate, hidden]`: gate and up.
    pub up: LinearLayer<B>,
    /// `[hidden, intermediate]`
    pub down: LinearLayer<B>,
    /// `[hidden]`: its output in a row is multiplied by the sigmoid of the row's product with this.
    pub gate: B::Vector,
}

pub struct Weights<B: Backend> {
    /// `[vocab, embed]`
    pub embeddings: B::Matrix,
    /// `[max_position_embeddings + offset, hidden]`: learned positions.
    pub positions: Option<B::Matrix>,
    /// `[hidden, embed]` and `[embed, hidden]`, if the two widths differ.
    pub project_in: Option<B::Matrix>,
    pub project_out: Option<B::Matrix>,
    pub layers: Vec<LayerWeights<B>>,
    pub final_norm: Option<Norm<B::Vector>>,
    /// `[vocab, embed]`. `None`: the embeddings are used.
    pub lm_head: Option<B::Matrix>,
    pub conversions: Conversions,
    pub tally: WeightTally,
}

impl<B: Backend> Weights<B> {
    /// The matrix of the vocabulary product.
    pub fn head(&self) -> &B::Matrix {
        self.lm_head.as_ref().unwrap_or(&self.embeddings)
    }

    /// Packs every tensor of `checkpoint`, with matrices in `dtype`. Without a checkpoint, matrices are random, norms
    /// are 1 and biases 0.
    ///
    /// Fails if a tensor is missing or has another shape than `spec` says, or if a layer has tensors that the forward
    /// pass would ignore.
    pub fn load(
        checkpoint: Option<&Checkpoint>,
        spec: &ModelSpec,
        dtype: DType,
        backend: &B,
        progress: &mut WeightsProgress<'_>,
    ) -> Result<Self, StartError> {
        let naming = checkpoint.map_or(TensorNaming::Transformers, Checkpoint::naming);
        let names = TensorNames::of(spec.family, naming);
        let plan = checkpoint.and_then(Checkpoint::quantize_plan);
        let place = plan.filter(|_| B::READS_ELEMENTS).and_then(|plan| plan.place.as_ref());
        let kept = place.and_then(KeptPlace::read);
        let quantizing = plan.map(|plan| Quantizing::new(plan, kept.as_ref()));
        let mut loader = Loader::new(checkpoint, quantizing, names, spec, dtype, backend, progress);
        let (vocab, hidden, embed) = (spec.vocab_size, spec.hidden_size, spec.embed_size);
        let projected = embed != hidden;

        let embeddings = loader.matrix(&[(names.embeddings, vocab)], embed)?;
        let positions = match spec.positions {
            PositionSpec::Rope(_) => None,
            PositionSpec::Learned { offset } => {
                Some(loader.matrix(&[(names.positions, spec.max_position_embeddings + offset)], hidden)?)
            }
        };
        let project_in = projected.then(|| loader.matrix(&[(names.project_in, hidden)], embed)).transpose()?;
        let layers = (0..spec.num_layers()).map(|layer| loader.layer(spec, layer)).collect::<Result<_, _>>()?;
        loader.enter(None);
        let final_norm = spec.norm.is_final.then(|| loader.norm(spec, names.final_norm)).transpose()?;
        let project_out = projected.then(|| loader.matrix(&[(names.project_out, embed)], hidden)).transpose()?;
        let lm_head = (!spec.tied_embeddings).then(|| loader.matrix(&[(names.lm_head, vocab)], embed)).transpose()?;
        let (conversions, tally) = loader.finish()?;
        Ok(Self { embeddings, positions, project_in, project_out, layers, final_norm, lm_head, conversions, tally })
    }
}

/// The prefix of the text part in a model for text and images.
const LANGUAGE_MODEL: &str = "language_model.";

/// `(name, rows)` of a fused matrix: each part under its own name, or all of it under one.
fn parts<'n>(names: &[&'n str], rows: &[usize]) -> Vec<(&'n str, usize)> {
    match names {
        [all] => vec![(*all, rows.iter().sum())],
        _ => names.iter().copied().zip(rows.iter().copied()).collect(),
    }
}

/// A tensor of the checkpoint, with the rows in our order, and in a format that backends read.
struct OrderedTensor<'a> {
    stored: HostTensor<'a>,
    bytes: Cow<'a, [u8]>,
}

impl<'a> From<HostTensor<'a>> for OrderedTensor<'a> {
    fn from(stored: HostTensor<'a>) -> Self {
        Self { stored, bytes: Cow::Borrowed(stored.bytes) }
    }
}

impl OrderedTensor<'_> {
    fn tensor(&self) -> HostTensor<'_> {
        HostTensor { bytes: &self.bytes, ..self.stored }
    }
}

/// The rows of a tensor whose heads have the dimensions that turn together side by side, in the order in which they are
/// half a head apart.
fn half_split(tensor: &HostTensor<'_>, head_dim: usize) -> Vec<u8> {
    let row_bytes = tensor.bytes.len() / tensor.rows;
    let mut split = Vec::with_capacity(tensor.bytes.len());
    for head in tensor.bytes.chunks_exact(head_dim * row_bytes) {
        for dim in 0..head_dim {
            let row = dim % (head_dim / 2) * 2 + dim / (head_dim / 2);
            split.extend_from_slice(&head[row * row_bytes..][..row_bytes]);
        }
    }
    split
}

struct Loader<'a, B: Backend> {
    checkpoint: Option<&'a Checkpoint>,
    /// `None`: matrices are taken as they are stored.
    quantizing: Option<Quantizing<'a>>,
    names: &'static TensorNames,
    spec: &'a ModelSpec,
    dtype: DType,
    backend: &'a B,
    progress: &'a mut WeightsProgress<'a>,
    /// The prefix of all names except that of the vocabulary product.
    prefix: &'static str,
    /// The part after the prefix: `layers.N.` while a layer is read.
    scope: String,
    used: BTreeSet<String>,
    done_bytes: u64,
    total_bytes: u64,
    /// Number of random matrices so far. Each has its own seed.
    num_random: u64,
    conversions: Conversions,
    tally: WeightTally,
}

impl<'a, B: Backend> Loader<'a, B> {
    fn new(
        checkpoint: Option<&'a Checkpoint>,
        quantizing: Option<Quantizing<'a>>,
        names: &'static TensorNames,
        spec: &'a ModelSpec,
        dtype: DType,
        backend: &'a B,
        progress: &'a mut WeightsProgress<'a>,
    ) -> Self {
        let holds_embeddings = |prefix: &&&str| {
            checkpoint.is_some_and(|checkpoint| checkpoint.contains(&format!("{prefix}{}.weight", names.embeddings)))
        };
        let prefix = names.prefixes.iter().find(holds_embeddings).unwrap_or(&names.prefixes[0]);
        let size = |checkpoint: &Checkpoint| checkpoint.names().map(|name| checkpoint.size_bytes(name) as u64).sum();
        let total_bytes = checkpoint.map_or(0, size);
        let (scope, used) = (String::new(), BTreeSet::new());
        Self {
            checkpoint,
            quantizing,
            names,
            spec,
            dtype,
            backend,
            progress,
            prefix,
            scope,
            used,
            done_bytes: 0,
            total_bytes,
            num_random: 0,
            conversions: Conversions::default(),
            tally: WeightTally::default(),
        }
    }

    /// Sets the layer whose tensors are read next; `None` for tensors outside of layers.
    fn enter(&mut self, layer: Option<usize>) {
        self.scope = layer.map_or(String::new(), |layer| format!("{}.{layer}.", self.names.layers));
    }

    fn layer(&mut self, spec: &ModelSpec, layer: usize) -> Result<LayerWeights<B>, StartError> {
        self.enter(Some(layer));
        let names = self.names;
        let (attention, hidden) = (&spec.attention, spec.hidden_size);
        let q_rows = attention.num_heads * attention.head_dim;
        let kv_rows = attention.num_kv_heads * attention.head_dim;
        let qkv = parts(names.qkv, &[q_rows, kv_rows, kv_rows]);
        let has_post_norms = spec.norm.placement == NormPlacement::Both;
        let mut post_norm = |name| has_post_norms.then(|| self.norm(spec, name)).transpose();
        let (attention_post_norm, mlp_post_norm) =
            (post_norm(names.attention_post_norm)?, post_norm(names.mlp_post_norm)?);
        Ok(LayerWeights {
            attention_norm: self.norm(spec, names.attention_norm)?,
            attention_post_norm,
            qkv: self.linear(&qkv, hidden, attention.qkv_bias)?,
            head_norms: if attention.qk_norm { Some(self.head_norms(spec)?) } else { None },
            out: self.linear(&[(names.out, hidden)], q_rows, attention.out_bias)?,
            mlp_norm: self.norm(spec, names.mlp_norm)?,
            mlp_post_norm,
            mlp: match &spec.experts {
                Some(experts) if experts.layers[layer] => {
                    let shared = experts.shared_intermediate_size;
                    Mlp::Sparse {
                        experts: self.experts(spec, experts)?,
                        shared: shared.map(|width| self.shared_expert(width)).transpose()?,
                    }
                }
                _ => self.mlp(spec)?,
            },
        })
    }

    fn mlp(&mut self, spec: &ModelSpec) -> Result<Mlp<B>, StartError> {
        let (names, mlp, hidden) = (self.names, &spec.mlp, spec.hidden_size);
        let num_parts = if mlp.gated { 2 } else { 1 };
        let up = parts(names.up, &vec![mlp.intermediate_size; num_parts]);
        Ok(Mlp::Dense {
            up: if mlp.gated { self.gate_up(&up, hidden, mlp.bias)? } else { self.linear(&up, hidden, mlp.bias)? },
            down: self.linear(&[(names.down, hidden)], mlp.intermediate_size, mlp.bias)?,
        })
    }

    fn experts(
        &mut self,
        spec: &ModelSpec,
        experts: &ExpertsSpec,
    ) -> Result<Experts<B::Matrix, B::Matrices>, StartError> {
        let (names, count, hidden, width) =
            (self.names, experts.num_experts, spec.hidden_size, experts.intermediate_size);
        let [gate, up, down] = names.of_expert;
        Ok(Experts {
            router: self.matrix(&[(names.router, count)], hidden)?,
            up: self.matrices(count, &[(gate, width), (up, width)], hidden)?,
            down: self.matrices(count, &[(down, hidden)], width)?,
        })
    }

    fn shared_expert(&mut self, width: usize) -> Result<SharedExpert<B>, StartError> {
        let (names, hidden) = (self.names, self.spec.hidden_size);
        let [gate, up, down] = names.shared_expert;
        Ok(SharedExpert {
            up: self.gate_up(&[(gate, width), (up, width)], hidden, false)?,
            down: self.linear(&[(down, hidden)], width, false)?,
            gate: self.row_vector(names.shared_expert_gate, hidden)?,
        })
    }

    /// A vector that checkpoints also store as a matrix of one row.
    fn row_vector(&mut self, name: &str, cols: usize) -> Result<B::Vector, StartError> {
        let full_name = self.full_name(name, "weight");
        let is_matrix =
            |checkpoint: &&Checkpoint| checkpoint.stored(&full_name).is_some_and(|stored| stored.shape.len() == 2);
        let Some(checkpoint) = self.checkpoint.filter(is_matrix) else { return self.vector(&[(name, cols)], "weight") };
        let vector = self.backend.vector(&[checkpoint.tensor(&full_name, &[1, cols])?])?;
        self.finish_tensors(checkpoint, vec![full_name])?;
        Ok(vector)
    }

    /// One matrix for each of `count` experts, from `parts` stacked vertically.
    fn matrices(&mut self, count: usize, parts: &[(&str, usize)], cols: usize) -> Result<B::Matrices, StartError> {
        let Some(checkpoint) = self.checkpoint else {
            let rows = parts.iter().map(|(_, rows)| rows).sum();
            self.num_random += 1;
            for (_, rows) in (0..count).flat_map(|_| parts) {
                self.tally.add(self.dtype.into(), *rows, cols);
            }
            return self.backend.random_matrices(count, rows, cols, self.dtype, self.num_random);
        };
        let (mut names, mut tensors) = (Vec::new(), Vec::new());
        for expert in 0..count {
            for (name, rows) in parts {
                if self.names.stacked_experts {
                    let name = self.full_name(name, "weight");
                    let all = checkpoint.tensor(&name, &[count, *rows, cols])?;
                    tensors.push(all.row_range(expert * rows..(expert + 1) * rows).into());
                    names.extend((expert == 0).then_some(name));
                } else {
                    let name = self.full_name(&format!("{}.{expert}.{name}", self.names.experts), "weight");
                    let (found, tensor) = self.weight(checkpoint, name, [*rows, cols], MatrixUse::Layer)?;
                    tensors.push(tensor);
                    names.extend(found);
                }
            }
        }
        let matrices = self.backend.matrices(count, &self.given(&tensors), self.dtype)?;
        self.finish_tensors(checkpoint, names)?;
        Ok(matrices)
    }

    fn head_norms(&mut self, spec: &ModelSpec) -> Result<HeadNorms<B>, StartError> {
        let (kind, cols) = (spec.norm.kind, spec.attention.head_dim);
        let q = Norm { kind, weight: self.norm_weight(spec, self.names.q_norm, cols)?, bias: None };
        let k = Norm { kind, weight: self.norm_weight(spec, self.names.k_norm, cols)?, bias: None };
        Ok(HeadNorms { q, k })
    }

    fn norm(&mut self, spec: &ModelSpec, name: &str) -> Result<Norm<B::Vector>, StartError> {
        let (kind, cols) = (spec.norm.kind, spec.hidden_size);
        let has_bias = matches!(kind, NormKind::Layer { .. });
        if !spec.norm.affine {
            let weight = self.constant(1.0, cols)?;
            let bias = has_bias.then(|| self.constant(0.0, cols)).transpose()?;
            return Ok(Norm { kind, weight, bias });
        }
        let weight = self.norm_weight(spec, name, cols)?;
        let bias = has_bias.then(|| self.vector(&[(name, cols)], "bias")).transpose()?;
        Ok(Norm { kind, weight, bias })
    }

    /// The weight of a norm as the backend expects it, without the offset of the stored values.
    fn norm_weight(&mut self, spec: &ModelSpec, name: &str, cols: usize) -> Result<B::Vector, StartError> {
        let offset = if self.names.whole_norms { 0.0 } else { spec.norm.weight_offset };
        let Some(checkpoint) = self.checkpoint.filter(|_| offset != 0.0) else {
            return self.vector(&[(name, cols)], "weight");
        };
        let name = self.full_name(name, "weight");
        let stored = checkpoint.tensor(&name, &[cols])?.to_f32();
        let bytes: Vec<u8> = stored.into_iter().flat_map(|weight| (weight + offset).to_le_bytes()).collect();
        let vector = self.backend.vector(&[HostTensor { format: DType::F32.into(), rows: 1, cols, bytes: &bytes }])?;
        self.finish_tensors(checkpoint, vec![name])?;
        Ok(vector)
    }

    fn constant(&self, value: f32, cols: usize) -> Result<B::Vector, StartError> {
        let bytes: Vec<u8> = std::iter::repeat_n(value.to_le_bytes(), cols).flatten().collect();
        self.backend.vector(&[HostTensor { format: DType::F32.into(), rows: 1, cols, bytes: &bytes }])
    }

    /// `parts` are `(name, rows)`, stacked vertically.
    fn linear(&mut self, parts: &[(&str, usize)], cols: usize, bias: bool) -> Result<LinearLayer<B>, StartError> {
        let weight = match (self.names.transposed, self.checkpoint) {
            (true, Some(checkpoint)) => self.transposed_matrix(checkpoint, parts, cols)?,
            _ => self.matrix(parts, cols)?,
        };
        let bias = bias.then(|| self.vector(parts, "bias")).transpose()?;
        Ok(LinearLayer { weight, bias })
    }

    /// [`Loader::linear`] for [`Backend::gated_linear`].
    fn gate_up(&mut self, parts: &[(&str, usize)], cols: usize, bias: bool) -> Result<LinearLayer<B>, StartError> {
        assert!(!self.names.transposed, "no family has a gated MLP that is stored transposed");
        let weight = self.matrix_by(parts, cols, B::gate_up_matrix, B::random_gate_up_matrix)?;
        let bias = bias.then(|| self.vector(parts, "bias")).transpose()?;
        Ok(LinearLayer { weight, bias })
    }

    /// A matrix from parts that are stored as `[cols, rows]`.
    fn transposed_matrix(
        &mut self,
        checkpoint: &'a Checkpoint,
        parts: &[(&str, usize)],
        cols: usize,
    ) -> Result<B::Matrix, StartError> {
        let names: Vec<_> = parts.iter().map(|(name, _)| self.full_name(name, "weight")).collect();
        let stored = parts
            .iter()
            .zip(&names)
            .map(|((_, rows), name)| checkpoint.tensor(name, &[cols, *rows]))
            .collect::<Result<Vec<_>, _>>()?;
        let matrix = if self.quantizing.is_none() {
            for matrix in &stored {
                self.count(&HostTensor { rows: matrix.cols, cols: matrix.rows, ..*matrix });
            }
            self.backend.transposed_matrix(&stored, self.dtype)?
        } else {
            let turned = names.iter().zip(stored);
            let turned = turned.map(|(name, stored)| self.quantized(name, stored, true, MatrixUse::Layer));
            let turned = turned.collect::<Result<Vec<_>, _>>()?;
            self.backend.matrix(&self.given(&turned), self.dtype)?
        };
        self.finish_tensors(checkpoint, names)?;
        Ok(matrix)
    }

    fn matrix(&mut self, parts: &[(&str, usize)], cols: usize) -> Result<B::Matrix, StartError> {
        self.matrix_by(parts, cols, B::matrix, B::random_matrix)
    }

    fn matrix_by(
        &mut self,
        parts: &[(&str, usize)],
        cols: usize,
        make: impl FnOnce(&B, &[HostTensor<'_>], DType) -> Result<B::Matrix, StartError>,
        make_random: impl FnOnce(&B, usize, usize, DType, u64) -> Result<B::Matrix, StartError>,
    ) -> Result<B::Matrix, StartError> {
        let Some(checkpoint) = self.checkpoint else {
            let rows = parts.iter().map(|(_, rows)| rows).sum();
            self.num_random += 1;
            parts.iter().for_each(|(_, rows)| self.tally.add(self.dtype.into(), *rows, cols));
            return make_random(self.backend, rows, cols, self.dtype, self.num_random);
        };
        let (names, ordered) = self.read(checkpoint, parts, "weight", Some(cols))?;
        let matrix = make(self.backend, &self.given(&ordered), self.dtype)?;
        self.finish_tensors(checkpoint, names)?;
        Ok(matrix)
    }

    fn vector(&mut self, parts: &[(&str, usize)], ending: &str) -> Result<B::Vector, StartError> {
        let Some(checkpoint) = self.checkpoint else {
            let value = if ending == "bias" { 0.0 } else { 1.0 };
            return self.constant(value, parts.iter().map(|(_, cols)| cols).sum());
        };
        let (names, ordered) = self.read(checkpoint, parts, ending, None)?;
        let tensors: Vec<_> = ordered.iter().map(OrderedTensor::tensor).collect();
        let vector = self.backend.vector(&tensors)?;
        self.finish_tensors(checkpoint, names)?;
        Ok(vector)
    }

    /// The matrices that a backend gets.
    fn given<'t>(&mut self, tensors: &'t [OrderedTensor<'_>]) -> Vec<HostTensor<'t>> {
        tensors.iter().for_each(|tensor| self.count(&tensor.stored));
        tensors.iter().map(OrderedTensor::tensor).collect()
    }

    /// Counts a matrix, which becomes one of [`Loader::dtype`] if it is plain.
    fn count(&mut self, matrix: &HostTensor<'_>) {
        let held = match matrix.format {
            WeightFormat::Plain(_) => self.dtype.into(),
            quantized => quantized,
        };
        self.tally.add(held, matrix.rows, matrix.cols);
    }

    /// The tensors of `parts`: matrices with so many columns, or vectors. Also returns the names in the checkpoint.
    fn read(
        &mut self,
        checkpoint: &'a Checkpoint,
        parts: &[(&str, usize)],
        ending: &str,
        cols: Option<usize>,
    ) -> Result<(Vec<String>, Vec<OrderedTensor<'a>>), StartError> {
        let (mut names, mut tensors) = (Vec::new(), Vec::new());
        for (name, rows) in parts {
            let full_name = self.full_name(name, ending);
            let (found, mut tensor) = match cols {
                Some(cols) => self.weight(checkpoint, full_name, [*rows, cols], self.matrix_use(name))?,
                None => {
                    let vector = checkpoint.tensor(&full_name, &[*rows])?;
                    (vec![full_name], vector.into())
                }
            };
            if self.names.interleaved.contains(name) {
                // A vector is one row.
                let stored = HostTensor { rows: *rows, ..tensor.tensor() };
                let bytes = half_split(&stored, self.spec.attention.head_dim);
                tensor.bytes = Cow::Owned(bytes);
            }
            names.extend(found);
            tensors.push(tensor);
        }
        Ok((names, tensors))
    }

    /// A matrix `[rows, cols]`, and the names of what the checkpoint stores for it. `name` is that of a plain weight.
    fn weight(
        &mut self,
        checkpoint: &'a Checkpoint,
        name: String,
        [rows, cols]: [usize; 2],
        matrix: MatrixUse,
    ) -> Result<(Vec<String>, OrderedTensor<'a>), StartError> {
        let module = name.strip_suffix(".weight").unwrap_or(&name);
        let find = |scheme: &QuantScheme| QuantModule::find(checkpoint, scheme, module, [rows, cols], self.dtype);
        let Some(module) = self.spec.quantization.as_ref().map(find).transpose()?.flatten() else {
            let stored = checkpoint.tensor(&name, &[rows, cols])?;
            let tensor = self.quantized(&name, stored, false, matrix)?;
            return Ok((vec![name], tensor));
        };
        // What stays as it is was not converted.
        let module = if self.backend.holds_fp8(self.dtype) { module.keep_fp8() } else { module };
        if module.format() != WeightFormat::Fp8 {
            self.conversions.add(module.stored_as(), module.format(), [rows, cols]);
        }
        let bytes = if B::READS_ELEMENTS { module.convert()? } else { vec![0; module.held_bytes()] };
        let stored = HostTensor { format: module.format(), rows, cols, bytes: &[] };
        Ok((module.tensors().to_vec(), OrderedTensor { stored, bytes: Cow::Owned(bytes) }))
    }

    /// A stored tensor as a matrix, quantised if the load does so. One that `is_turned` is stored as `[cols, rows]`.
    fn quantized(
        &mut self,
        name: &str,
        stored: HostTensor<'a>,
        is_turned: bool,
        matrix: MatrixUse,
    ) -> Result<OrderedTensor<'a>, StartError> {
        let HostTensor { format: from, rows, cols, .. } = stored;
        let [rows, cols] = if is_turned { [cols, rows] } else { [rows, cols] };
        let elements = || match is_turned && B::READS_ELEMENTS {
            true => Cow::Owned(stored.transposed()),
            false => Cow::Borrowed(stored.bytes),
        };
        let shaped = |format| HostTensor { format, rows, cols, bytes: &[] };
        let Some(quantizing) = self.quantizing.as_mut().filter(|_| matrix != MatrixUse::Plain) else {
            return Ok(OrderedTensor { stored: shaped(from), bytes: elements() });
        };
        let Some(format) = quantizing.format(matrix, cols) else {
            self.conversions.add(format!("{from} in rows of {cols}"), self.dtype.into(), [rows, cols]);
            return Ok(OrderedTensor { stored: shaped(from), bytes: elements() });
        };
        let held = WeightFormat::Quantized(format);
        self.conversions.add(from.to_string(), held, [rows, cols]);
        let bytes = match format.row_bytes(cols) {
            Some(row_bytes) if !B::READS_ELEMENTS => Cow::Owned(vec![0; rows * row_bytes]),
            _ => quantizing.blocks(name, format, [rows, cols], from, elements)?,
        };
        Ok(OrderedTensor { stored: shaped(held), bytes })
    }

    /// What the matrix `name` is for.
    fn matrix_use(&self, name: &str) -> MatrixUse {
        let TensorNames { embeddings, positions, lm_head, router, .. } = *self.names;
        if name == router || name == positions {
            MatrixUse::Plain
        } else if name == lm_head || (name == embeddings && self.spec.tied_embeddings) {
            MatrixUse::Head
        } else {
            MatrixUse::Layer
        }
    }

    fn full_name(&self, name: &str, ending: &str) -> String {
        if name == self.names.lm_head {
            let scope = if self.prefix.starts_with(LANGUAGE_MODEL) { LANGUAGE_MODEL } else { "" };
            return format!("{scope}{name}.{ending}");
        }
        format!("{}{}{name}.{ending}", self.prefix, self.scope)
    }

    /// The backend has its own copy, so the pages of the file need not stay in memory.
    fn finish_tensors(&mut self, checkpoint: &Checkpoint, names: Vec<String>) -> Result<(), StartError> {
        for name in names {
            checkpoint.release(&name);
            self.quantizing.iter().for_each(|quantizing| quantizing.release(&name));
            self.done_bytes += checkpoint.size_bytes(&name) as u64;
            self.used.insert(name);
        }
        (self.progress)(self.done_bytes, self.total_bytes)
    }

    /// An unused bias would give wrong answers without an error. So an unused tensor of a layer is an error; other
    /// unused tensors, such as heads for other purposes, are logged.
    ///
    /// Returns what was converted, and what the backend got.
    fn finish(self) -> Result<(Conversions, WeightTally), StartError> {
        let spec = self.spec;
        let Some(checkpoint) = self.checkpoint else { return Ok((self.conversions, self.tally)) };
        let is_known = |name: &str| {
            // Older checkpoints store the inputs of the rotary embedding, and those of GPT-2 the causal mask.
            name.ends_with("rotary_emb.inv_freq")
                || (spec.tied_embeddings && name.ends_with("lm_head.weight"))
                || (spec.family == Family::Gpt2 && (name.ends_with("attn.bias") || name.ends_with("attn.masked_bias")))
                || (spec.quantization.is_some() && quantized::changes_nothing(checkpoint, name))
        };
        let is_vision = |name: &str| ["vision_tower.", "multi_modal_projector."].iter().any(|part| name.contains(part));
        let unused = checkpoint.names().filter(|name| !self.used.contains(*name) && !is_known(name));
        let (vision, left): (BTreeSet<_>, BTreeSet<_>) = unused.partition(|name| is_vision(name));
        if !vision.is_empty() {
            tracing::info!(
                tensors = vision.len(),
                "only the text part of this model is served: images are not supported"
            );
        }
        let in_layers = format!("{}{}.", self.prefix, self.names.layers);
        if let Some(name) = left.iter().find(|name| name.starts_with(&in_layers)) {
            return Err(StartError::new(format!(
                "the checkpoint has the tensor {name}, but the model of {} does not",
                checkpoint.configuration()
            )));
        }
        if !left.is_empty() {
            tracing::warn!(tensors = ?left, "the checkpoint has tensors that this model does not use");
        }
        if !self.conversions.is_empty() {
            tracing::info!("the weights are converted: {}", self.conversions);
        }
        if let Some(quantizing) = self.quantizing {
            quantizing.finish();
        }
        (self.progress)(self.total_bytes, self.total_bytes)?;
        Ok((self.conversions, self.tally))
    }
}
