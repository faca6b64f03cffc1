//! A model as data: the differences between families that the one forward pass reads.

use crate::quantized::scheme::QuantScheme;
use pagetide_backend::{Activation, AttentionShape, DType, ExpertsShape, KvDType, KvLayout, NormKind};
use pagetide_base::error::StartError;
use pagetide_base::ids::TokenId;

/// The family decides the names of a checkpoint's tensors. Everything else that differs is in [`ModelSpec`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Qwen2Moe,
    Qwen3Moe,
    Mixtral,
    Phi3,
    Gemma2,
    Gemma3,
    Opt,
    Gpt2,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    pub family: Family,
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the token embeddings and of the input of the vocabulary product. If it differs from `hidden_size`,
    /// there are two projections (OPT-350m).
    pub embed_size: usize,
    /// The vocabulary product uses the token embeddings.
    pub tied_embeddings: bool,
    /// Factor on the token embeddings.
    pub embed_scale: f32,
    /// Logits become `cap · tanh(logit / cap)`.
    pub logit_softcap: Option<f32>,
    pub positions: PositionSpec,
    /// Rotary embedding of layers with a window, if it differs from the others (Gemma 3).
    pub windowed_rope: Option<RopeSpec>,
    pub attention: AttentionSpec,
    pub mlp: MlpSpec,
    /// Some layers have experts instead of the MLP.
    pub experts: Option<ExpertsSpec>,
    pub norm: NormSpec,
    /// One entry per layer. A token attends to itself and the `window - 1` tokens before it; `None`: to all tokens
    /// before it.
    pub windows: Vec<Option<usize>>,
    /// `max_position_embeddings` of config.json.
    pub max_position_embeddings: usize,
    /// The precision that the checkpoint is meant for.
    pub dtype: DType,
    pub bos_token_id: Option<TokenId>,
    /// Tokens that end a generation: those of generation_config.json, then those of config.json.
    pub eos_token_ids: Vec<TokenId>,
    /// How the checkpoint is quantised, unless it is a GGUF file, whose tensors say it themselves.
    pub quantization: Option<QuantScheme>,
}

/// How positions enter the model.
#[derive(Clone, Debug, PartialEq)]
pub enum PositionSpec {
    /// Q and K are rotated by the position.
    Rope(RopeSpec),
    /// A table of `max_position_embeddings + offset` rows, added to the token embeddings.
    Learned { offset: usize },
}

#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// Number of leading dimensions of a head that are rotated. The others are unchanged.
    pub rotary_dim: usize,
    pub scaling: RopeScaling,
}

/// How wavelengths are stretched for sequences that are longer than in the original training; see `model::rope`.
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
        /// The ramp between the two betas begins and ends at integer dimensions.
        truncate: bool,
    },
    /// Phi-3: a factor for each wavelength, `[rotary_dim / 2]`.
    LongRope {
        /// For sequences up to `original_max_positions`.
        short_factor: Vec<f64>,
        /// For longer sequences.
        long_factor: Vec<f64>,
        original_max_positions: usize,
        /// Factor on cos and sin.
        attention_factor: f64,
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
    /// The factor of layer `i`, from 0, is `scale / (i + 1)`.
    pub scale_by_layer: bool,
    /// Scores become `cap · tanh(score / cap)`.
    pub softcap: Option<f32>,
    pub qkv_bias: bool,
    pub out_bias: bool,
    /// Each head of Q and K is normalised (RMS) before the rotation.
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

/// Experts: a router chooses some of these MLPs for each token. Activation and gating are those of [`MlpSpec`].
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsSpec {
    pub num_experts: usize,
    /// Number of experts per token.
    pub num_chosen: usize,
    pub intermediate_size: usize,
    /// Width of the expert that all tokens go through, beside those that are chosen.
    pub shared_intermediate_size: Option<usize>,
    /// The weights of the chosen experts are divided by their sum.
    pub renormalize: bool,
    /// `[num_layers]`: the layers with experts.
    pub layers: Vec<bool>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct NormSpec {
    pub kind: NormKind,
    /// Has learned weights (and, for LayerNorm, biases).
    pub affine: bool,
    /// Added to the stored weights. It is 1 for Gemma, whose weights are stored minus 1.
    pub weight_offset: f32,
    pub placement: NormPlacement,
    /// There is a final norm before the vocabulary product.
    pub is_final: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlacement {
    /// `x + sublayer(norm(x))`
    Before,
    /// `norm(x + sublayer(x))`
    After,
    /// `x + norm(sublayer(norm(x)))`
    Both,
}

/// Maximum number of layers. This limit and the following ones are about ten times the largest published models. They
/// are small enough that no product of sizes exceeds 64 bits and no list of this length is a burden.
pub const MAX_LAYERS: usize = 4096;
const MAX_VOCAB: usize = 1 << 24;
const MAX_HIDDEN: usize = 1 << 20;
const MAX_INTERMEDIATE: usize = 1 << 24;
const MAX_EXPERTS: usize = 1 << 16;
/// `num_heads · head_dim`.
const MAX_HEADS_WIDTH: usize = 1 << 24;
const MAX_PARAMETERS: u128 = 1 << 50;

impl ModelSpec {
    /// Rejects impossible sizes before memory is allocated for them.
    pub fn check_sizes(&self) -> Result<(), StartError> {
        let AttentionSpec { num_heads, head_dim, .. } = self.attention;
        let experts = self.experts.as_ref();
        let (num_experts, expert_width) =
            experts.map_or((1, 1), |experts| (experts.num_experts, experts.intermediate_size));
        let shared_width = experts.and_then(|experts| experts.shared_intermediate_size).unwrap_or(1);
        let heads_width = num_heads.saturating_mul(head_dim);
        let sizes = [
            ("layers", self.num_layers(), MAX_LAYERS),
            ("vocabulary", self.vocab_size, MAX_VOCAB),
            ("hidden size", self.hidden_size, MAX_HIDDEN),
            ("embedding size", self.embed_size, MAX_HIDDEN),
            ("intermediate size", self.mlp.intermediate_size, MAX_INTERMEDIATE),
            ("experts' intermediate size", expert_width, MAX_INTERMEDIATE),
            ("shared expert's intermediate size", shared_width, MAX_INTERMEDIATE),
            ("experts", num_experts, MAX_EXPERTS),
            ("attention heads times head size", heads_width, MAX_HEADS_WIDTH),
        ];
        if let Some((what, size, largest)) = sizes.into_iter().find(|(_, size, largest)| !(1..=*largest).contains(size))
        {
            return Err(StartError::new(format!("{what}: {size} is not in the supported range from 1 to {largest}")));
        }
        let (matrices, vectors) = self.parameter_counts();
        if matrices + vectors > MAX_PARAMETERS {
            return Err(StartError::new(format!(
                "these sizes give {} parameters: at most {MAX_PARAMETERS} are supported",
                matrices + vectors
            )));
        }
        Ok(())
    }

    pub fn num_layers(&self) -> usize {
        self.windows.len()
    }

    pub fn attention_shape(&self, layer: usize) -> AttentionShape {
        let AttentionSpec { num_heads, num_kv_heads, head_dim, scale, scale_by_layer, softcap, .. } = self.attention;
        let scale = if scale_by_layer { scale / (layer + 1) as f32 } else { scale };
        AttentionShape { num_heads, num_kv_heads, head_dim, scale, softcap, window: self.windows[layer] }
    }

    /// Whether a layer has experts instead of an MLP.
    pub fn has_experts(&self, layer: usize) -> bool {
        self.experts.as_ref().is_some_and(|experts| experts.layers[layer])
    }

    /// The experts of layers that have them.
    pub fn experts_shape(&self) -> Option<ExpertsShape> {
        let ExpertsSpec { num_experts, num_chosen, intermediate_size, renormalize, .. } = *self.experts.as_ref()?;
        let (hidden_size, activation) = (self.hidden_size, self.mlp.activation);
        Some(ExpertsShape { num_experts, num_chosen, hidden_size, intermediate_size, activation, renormalize })
    }

    pub fn kv_layout(&self, block_size: usize, dtype: impl Into<KvDType>) -> KvLayout {
        let AttentionSpec { num_kv_heads, head_dim, .. } = self.attention;
        KvLayout { num_layers: self.num_layers(), num_kv_heads, head_dim, block_size, dtype: dtype.into() }
    }

    /// Default maximum number of tokens of a sequence: what the model was made for.
    pub fn default_max_model_len(&self) -> usize {
        match &self.positions {
            // The long factors reduce quality if they are not needed.
            PositionSpec::Rope(RopeSpec { scaling: RopeScaling::LongRope { original_max_positions, .. }, .. }) => {
                self.max_position_embeddings.min(*original_max_positions)
            }
            _ => self.max_position_embeddings,
        }
    }

    /// The number of positions that the scaling in config.json can express. Checkpoints give `max_position_embeddings`
    /// before linear, dynamic and (often) YaRN scaling, but after the scaling of llama3, LongRoPE and Gemma 3.
    pub fn max_model_len_limit(&self) -> usize {
        let scaled = match &self.positions {
            PositionSpec::Rope(RopeSpec { scaling, .. }) => match scaling {
                _ if self.family == Family::Gemma3 => 0.0,
                RopeScaling::None | RopeScaling::Llama3 { .. } | RopeScaling::LongRope { .. } => 0.0,
                RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor } => {
                    self.max_position_embeddings as f64 * factor
                }
                RopeScaling::Yarn { factor, original_max_positions, .. } => *original_max_positions as f64 * factor,
            },
            PositionSpec::Learned { .. } => 0.0,
        };
        self.max_position_embeddings.max(scaled as usize)
    }

    pub fn check_max_model_len(&self, max_model_len: usize) -> Result<(), StartError> {
        let limit = self.max_model_len_limit();
        if (1..=limit).contains(&max_model_len) {
            return Ok(());
        }
        Err(StartError::new(format!(
            "max_model_len: {max_model_len} is not between 1 and {limit}, this model's maximum \
             (max_position_embeddings {} with its rope scaling)",
            self.max_position_embeddings
        )))
    }

    /// Number of parameters. A tied embedding counts once.
    pub fn num_parameters(&self) -> u64 {
        let (matrices, vectors) = self.parameter_counts();
        // A loaded model has at most `MAX_PARAMETERS`.
        (matrices + vectors) as u64
    }

    /// Memory of the weights with matrices in `dtype`. Norms and biases are float32.
    pub fn weights_bytes(&self, dtype: DType) -> u64 {
        let (matrices, vectors) = self.parameter_counts();
        matrices as u64 * dtype.size_bytes() as u64 + vectors as u64 * 4
    }

    /// Number of elements in matrices and in vectors (norms, biases). 128 bits hold any sizes in config.json.
    fn parameter_counts(&self) -> (u128, u128) {
        let only = |condition: bool, count: u128| if condition { count } else { 0 };
        let hidden = self.hidden_size as u128;
        let vectors_per_norm = match self.norm.kind {
            NormKind::Rms { .. } => 1,
            NormKind::Layer { .. } => 2,
        };
        let norm = only(self.norm.affine, hidden * vectors_per_norm);
        let norms = norm * if self.norm.placement == NormPlacement::Both { 4 } else { 2 };

        let (vocab, embed) = (self.vocab_size as u128, self.embed_size as u128);
        let embeddings = vocab * embed * if self.tied_embeddings { 1 } else { 2 };
        let projections = only(embed != hidden, 2 * embed * hidden);
        let positions = match self.positions {
            PositionSpec::Rope(_) => 0,
            PositionSpec::Learned { offset } => (self.max_position_embeddings + offset) as u128 * hidden,
        };
        let (mut matrices, mut vectors) = (embeddings + projections + positions, only(self.norm.is_final, norm));
        for layer in 0..self.num_layers() {
            let (attention, mlp) = (self.attention_counts(), self.mlp_counts(layer));
            matrices += attention.0 + mlp.0;
            vectors += attention.1 + mlp.1 + norms;
        }
        (matrices, vectors)
    }

    fn attention_counts(&self) -> (u128, u128) {
        let AttentionSpec { num_heads, num_kv_heads, head_dim, qkv_bias, out_bias, qk_norm, .. } = self.attention;
        let [hidden, heads, kv_heads, dim] =
            [self.hidden_size, num_heads, num_kv_heads, head_dim].map(|size| size as u128);
        let qkv = (heads + 2 * kv_heads) * dim;
        let vectors = [(qkv_bias, qkv), (out_bias, hidden), (qk_norm, 2 * dim)];
        let vectors = vectors.into_iter().filter(|(has, _)| *has).map(|(_, len)| len).sum();
        (qkv * hidden + hidden * heads * dim, vectors)
    }

    fn mlp_counts(&self, layer: usize) -> (u128, u128) {
        let (MlpSpec { intermediate_size, gated, bias, .. }, hidden) = (&self.mlp, self.hidden_size as u128);
        if let Some(experts) = self.experts.as_ref().filter(|experts| experts.layers[layer]) {
            let per_expert = 3 * experts.intermediate_size as u128 * hidden;
            let shared = experts.shared_intermediate_size.map_or(0, |width| 3 * width as u128 * hidden);
            let gate = if experts.shared_intermediate_size.is_some() { hidden } else { 0 };
            return (experts.num_experts as u128 * (hidden + per_expert) + shared, gate);
        }
        let width = *intermediate_size as u128;
        let up = width * if *gated { 2 } else { 1 };
        (up * hidden + hidden * width, if *bias { up + hidden } else { 0 })
    }
}
