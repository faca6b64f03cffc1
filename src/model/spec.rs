//! What a model is, as data: the differences between families that the one forward pass reads.
//!
//! Families that are not built yet fit the same way: another [`NormPlacement`] (Gemma 2's norms on both sides of a
//! sublayer), another factor or cap beside `AttentionSpec::scale`, another kind of [`MlpSpec`] (experts).

use crate::backend::{Activation, AttentionShape, DType, KvLayout, NormKind};
use crate::error::StartError;
use crate::ids::TokenId;
use crate::model::families;
use crate::model::files::ModelFiles;

/// Decides the names of a checkpoint's tensors; everything else that differs is in the fields of [`ModelSpec`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Opt,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    pub family: Family,
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the token embeddings and of what the vocabulary product reads. Where it is not `hidden_size`, two
    /// projections lie between (OPT-350m).
    pub embed_size: usize,
    /// The vocabulary product uses the token embeddings.
    pub tied_embeddings: bool,
    pub positions: Positions,
    pub attention: AttentionSpec,
    pub mlp: MlpSpec,
    pub norm: NormSpec,
    /// One entry a layer: a token of it sees itself and the `window - 1` before it; `None`: all before it.
    pub windows: Vec<Option<usize>>,
    /// `max_position_embeddings` of config.json.
    pub max_position_embeddings: usize,
    /// The precision that the checkpoint is meant to compute in.
    pub dtype: DType,
    pub bos_token_id: Option<TokenId>,
    /// Tokens that end a generation: those of generation_config.json, then those of config.json.
    pub eos_token_ids: Vec<TokenId>,
}

/// How a token's place in its sequence enters.
#[derive(Clone, Debug, PartialEq)]
pub enum Positions {
    /// Q and K turn with the position.
    Rope(RopeSpec),
    /// A table of `max_position_embeddings + offset` rows, added to the token embeddings.
    Learned { offset: usize },
}

#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    pub scaling: RopeScaling,
}

/// How the wavelengths are stretched for sequences longer than those of the first training; see `model::rope`.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    Linear {
        factor: f64,
    },
    Dynamic {
        factor: f64,
    },
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_positions: usize,
    },
    Yarn {
        factor: f64,
        original_max_positions: usize,
        beta_fast: f64,
        beta_slow: f64,
        /// Factor on cos and sin, resolved from `attention_factor`, or `mscale` and `mscale_all_dim`, or `factor`.
        attention_factor: f64,
        /// The ramp between the two betas begins and ends at whole dimensions.
        truncate: bool,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    pub num_heads: usize,
    /// Equal to `num_heads`: multi-head; 1: multi-query; between: grouped-query attention.
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// Factor on q·k.
    pub scale: f32,
    pub qkv_bias: bool,
    pub out_bias: bool,
    /// Each head of Q and K is normalised (RMS) before it turns.
    pub qk_norm: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct MlpSpec {
    pub intermediate_size: usize,
    pub activation: Activation,
    /// `down(act(gate(x)) * up(x))`, else `down(act(up(x)))`.
    pub gated: bool,
    pub bias: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct NormSpec {
    pub kind: NormKind,
    /// Has learned weights (and, for LayerNorm, biases).
    pub affine: bool,
    pub placement: NormPlacement,
    /// A last norm stands before the vocabulary product.
    pub is_final: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlacement {
    /// `x + sublayer(norm(x))`
    Before,
    /// `norm(x + sublayer(x))`
    After,
}

impl ModelSpec {
    /// Reads `config.json` and `generation_config.json`; the precision, where they name none, is that of the weights.
    pub fn load(files: &ModelFiles) -> Result<Self, StartError> {
        const CONFIG: &str = "config.json";
        const GENERATION: &str = "generation_config.json";
        let config = files
            .read_json(CONFIG)?
            .ok_or_else(|| StartError::new(format!("model: there is no {}", files.path(CONFIG))))?;
        let in_config = |error| files.error(CONFIG, error);
        let dtype = match families::dtype(&config).map_err(in_config)? {
            Some(dtype) => dtype,
            None => weights_dtype(files)?,
        };
        let mut spec = families::parse(&config, dtype).map_err(in_config)?;
        if let Some(generation) = files.read_json(GENERATION)? {
            let mut ids = families::eos_token_ids(&generation).map_err(|error| files.error(GENERATION, error))?;
            ids.extend(spec.eos_token_ids.iter().filter(|id| !ids.contains(id)).copied().collect::<Vec<_>>());
            spec.eos_token_ids = ids;
        }
        Ok(spec)
    }

    pub fn num_layers(&self) -> usize {
        self.windows.len()
    }

    pub fn attention_shape(&self, layer: usize) -> AttentionShape {
        let AttentionSpec { num_heads, num_kv_heads, head_dim, scale, .. } = self.attention;
        AttentionShape { num_heads, num_kv_heads, head_dim, scale, window: self.windows[layer] }
    }

    pub fn kv_layout(&self, block_size: usize, dtype: DType) -> KvLayout {
        let AttentionSpec { num_kv_heads, head_dim, .. } = self.attention;
        KvLayout { num_layers: self.num_layers(), num_kv_heads, head_dim, block_size, dtype }
    }

    /// Tokens of a sequence at most, where nothing else is asked for: what the model was made for.
    pub fn default_max_model_len(&self) -> usize {
        self.max_position_embeddings
    }

    /// Tokens of a sequence that the positions can express with the scaling that config.json asks for. Checkpoints
    /// give `max_position_embeddings` before linear, dynamic and (often) YaRN scaling, but after llama3's.
    pub fn max_model_len_limit(&self) -> usize {
        let scaled = match &self.positions {
            Positions::Rope(RopeSpec { scaling, .. }) => match scaling {
                RopeScaling::None | RopeScaling::Llama3 { .. } => 0.0,
                RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor } => {
                    self.max_position_embeddings as f64 * factor
                }
                RopeScaling::Yarn { factor, original_max_positions, .. } => *original_max_positions as f64 * factor,
            },
            Positions::Learned { .. } => 0.0,
        };
        self.max_position_embeddings.max(scaled as usize)
    }

    pub fn check_max_model_len(&self, max_model_len: usize) -> Result<(), StartError> {
        let limit = self.max_model_len_limit();
        if (1..=limit).contains(&max_model_len) {
            return Ok(());
        }
        Err(StartError::new(format!(
            "max_model_len: {max_model_len} is not between 1 and {limit}, the most positions this model can tell apart \
             (max_position_embeddings {}, with its rope scaling)",
            self.max_position_embeddings
        )))
    }

    /// Learned numbers, a tied embedding counted once.
    pub fn num_parameters(&self) -> u64 {
        let (matrices, vectors) = self.parameter_counts();
        matrices + vectors
    }

    /// Memory of the weights when matrices are held in `dtype`; norms and biases are float32.
    pub fn weights_bytes(&self, dtype: DType) -> u64 {
        let (matrices, vectors) = self.parameter_counts();
        matrices * dtype.size_bytes() as u64 + vectors * 4
    }

    /// Elements in matrices, and in vectors (norms, biases).
    fn parameter_counts(&self) -> (u64, u64) {
        let AttentionSpec { num_heads, num_kv_heads, head_dim, qkv_bias, out_bias, qk_norm, .. } = self.attention;
        let MlpSpec { intermediate_size, gated, bias: mlp_bias, .. } = self.mlp;
        let hidden = self.hidden_size;
        let only = |condition: bool, count: usize| if condition { count } else { 0 };

        let vectors_per_norm = match self.norm.kind {
            NormKind::Rms { .. } => 1,
            NormKind::Layer { .. } => 2,
        };
        let norm = only(self.norm.affine, hidden * vectors_per_norm);
        let qkv = (num_heads + 2 * num_kv_heads) * head_dim;
        let up = intermediate_size * if gated { 2 } else { 1 };

        let layer_matrices = qkv * hidden + hidden * num_heads * head_dim + up * hidden + hidden * intermediate_size;
        let layer_vectors = only(qkv_bias, qkv)
            + only(out_bias, hidden)
            + only(qk_norm, 2 * head_dim)
            + only(mlp_bias, up + hidden)
            + 2 * norm;

        let embeddings = self.vocab_size * self.embed_size * if self.tied_embeddings { 1 } else { 2 };
        let projections = only(self.embed_size != hidden, 2 * self.embed_size * hidden);
        let positions = match self.positions {
            Positions::Rope(_) => 0,
            Positions::Learned { offset } => (self.max_position_embeddings + offset) * hidden,
        };
        let matrices = embeddings + projections + positions + self.num_layers() * layer_matrices;
        let vectors = self.num_layers() * layer_vectors + only(self.norm.is_final, norm);
        (matrices as u64, vectors as u64)
    }
}

/// The precision in which the token embeddings are stored.
fn weights_dtype(files: &ModelFiles) -> Result<DType, StartError> {
    let checkpoint = files.checkpoint()?;
    let embeddings = checkpoint.names().find(|name| name.ends_with("embed_tokens.weight"));
    embeddings.and_then(|name| checkpoint.dtype(name)).ok_or_else(|| {
        StartError::new("config.json names no dtype, and the checkpoint has no embed_tokens.weight to take it from")
    })
}
