//! `config.json` to [`ModelSpec`]: one function a family, refusing what the runtime would compute wrongly.
//!
//! Read are both spellings: that of transformers up to 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and that of 5
//! (`rope_parameters`, `dtype`). A missing key means what the family's configuration class in transformers says.

use crate::backend::{Activation, DType, NormKind};
use crate::error::StartError;
use crate::ids::TokenId;
use crate::model::spec::{
    AttentionSpec, Family, MlpSpec, ModelSpec, NormPlacement, NormSpec, Positions, RopeScaling, RopeSpec,
};
use serde_json::{Map, Value};

/// `(architecture in config.json, model_type, family)`.
const SUPPORTED: &[(&str, &str, Family)] = &[
    ("LlamaForCausalLM", "llama", Family::Llama),
    ("LLaMAForCausalLM", "llama", Family::Llama),
    ("MistralForCausalLM", "mistral", Family::Mistral),
    ("Qwen2ForCausalLM", "qwen2", Family::Qwen2),
    ("Qwen3ForCausalLM", "qwen3", Family::Qwen3),
    ("OPTForCausalLM", "opt", Family::Opt),
];

const SUPPORTED_FAMILIES: &str = "supported are Llama 1 to 3 (LlamaForCausalLM), Mistral (MistralForCausalLM), \
                                  Qwen2 and 2.5 (Qwen2ForCausalLM), Qwen3 (Qwen3ForCausalLM) and OPT (OPTForCausalLM)";

/// `dtype`: the precision, which [`dtype`] reads where the configuration names one. Errors name the key.
pub fn parse(config: &Map<String, Value>, dtype: DType) -> Result<ModelSpec, StartError> {
    let config = Fields { members: config, path: "" };
    if let Some(quantization) = config.get("quantization_config") {
        let method = quantization.get("quant_method").and_then(Value::as_str).unwrap_or("unknown");
        return Err(config.error(
            "quantization_config",
            format!("quantized checkpoints are not supported (this one: {method}); use one in bf16, fp16 or fp32"),
        ));
    }
    match family(&config)? {
        Family::Opt => opt(&config, dtype),
        family => llama_like(&config, family, dtype),
    }
}

/// The precision that the checkpoint is meant to compute in; `None` if the configuration leaves it to the weights.
pub fn dtype(config: &Map<String, Value>) -> Result<Option<DType>, StartError> {
    let config = Fields { members: config, path: "" };
    let key = if config.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    match config.string(key)?.map(|name| name.trim_start_matches("torch.")) {
        None | Some("auto") => Ok(None),
        Some("float32") => Ok(Some(DType::F32)),
        Some("float16") => Ok(Some(DType::F16)),
        Some("bfloat16") => Ok(Some(DType::BF16)),
        Some(other) => {
            Err(config.error(key, format!("'{other}' is not supported; supported are float32, float16 and bfloat16")))
        }
    }
}

/// End tokens that `generation_config.json` names.
pub fn eos_token_ids(generation: &Map<String, Value>) -> Result<Vec<TokenId>, StartError> {
    let generation = Fields { members: generation, path: "" };
    Ok(generation.token_ids("eos_token_id")?.unwrap_or_default())
}

fn family(config: &Fields) -> Result<Family, StartError> {
    let architecture = config.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    let model_type = config.get("model_type").and_then(Value::as_str);
    let found = SUPPORTED.iter().find(|(name, kind, _)| match architecture {
        Some(architecture) => architecture == *name,
        None => model_type == Some(kind),
    });
    let name = architecture.or(model_type);
    match (found, name) {
        (Some((_, _, family)), _) => Ok(*family),
        (None, Some(name)) => Err(StartError::new(format!("the model {name} is not supported; {SUPPORTED_FAMILIES}"))),
        (None, None) => {
            Err(StartError::new(format!("names neither architectures nor model_type; {SUPPORTED_FAMILIES}")))
        }
    }
}

/// Llama, Mistral, Qwen2 and Qwen3: RMSNorm before, RoPE, a gated MLP.
fn llama_like(config: &Fields, family: Family, dtype: DType) -> Result<ModelSpec, StartError> {
    let hidden_size = config.size("hidden_size")?;
    let num_layers = config.size("num_hidden_layers")?;
    let max_position_embeddings = config.size_or(
        "max_position_embeddings",
        match family {
            Family::Llama => 2048,
            Family::Mistral => 131_072,
            _ => 32_768,
        },
    )?;
    let head_dim = match (config.optional_size("head_dim")?, family) {
        (Some(head_dim), _) => Some(head_dim),
        (None, Family::Qwen3) => Some(128),
        (None, _) => None,
    };
    let (qkv_bias, out_bias) = match family {
        Family::Mistral => (false, false),
        Family::Qwen2 => (true, false),
        _ => {
            let bias = config.bool_or("attention_bias", false)?;
            (bias, bias)
        }
    };
    let mlp_bias = family == Family::Llama && config.bool_or("mlp_bias", false)?;
    let (bos, eos) = match family {
        Family::Llama | Family::Mistral => (Some(1), Some(2)),
        _ => (None, None),
    };
    let attention = attention(config, hidden_size, head_dim, qkv_bias, out_bias, family == Family::Qwen3)?;
    if !attention.head_dim.is_multiple_of(2) {
        return Err(config.error("head_dim", format!("{} is odd, but rotary positions need pairs", attention.head_dim)));
    }
    Ok(ModelSpec {
        family,
        vocab_size: config.size("vocab_size")?,
        hidden_size,
        embed_size: hidden_size,
        tied_embeddings: config.bool_or("tie_word_embeddings", false)?,
        positions: Positions::Rope(rope(config, max_position_embeddings)?),
        attention,
        mlp: MlpSpec {
            intermediate_size: config.size("intermediate_size")?,
            activation: activation(config, "hidden_act", "silu")?,
            gated: true,
            bias: mlp_bias,
        },
        norm: NormSpec {
            kind: NormKind::Rms { eps: config.number_or("rms_norm_eps", 1e-6)? as f32 },
            affine: true,
            placement: NormPlacement::Before,
            is_final: true,
        },
        windows: windows(config, family, num_layers)?,
        max_position_embeddings,
        dtype,
        bos_token_id: config.token_ids_or("bos_token_id", bos)?.first().copied(),
        eos_token_ids: config.token_ids_or("eos_token_id", eos)?,
    })
}

/// OPT: LayerNorm on either side, learned positions, biases, embeddings that may be narrower than the model.
fn opt(config: &Fields, dtype: DType) -> Result<ModelSpec, StartError> {
    let hidden_size = config.size("hidden_size")?;
    let bias = config.bool_or("enable_bias", true)?;
    let norm_before = config.bool_or("do_layer_norm_before", true)?;
    Ok(ModelSpec {
        family: Family::Opt,
        vocab_size: config.size("vocab_size")?,
        hidden_size,
        embed_size: config.size_or("word_embed_proj_dim", hidden_size)?,
        tied_embeddings: config.bool_or("tie_word_embeddings", true)?,
        // The first two rows of the table were meant for padding.
        positions: Positions::Learned { offset: 2 },
        attention: attention(config, hidden_size, None, bias, bias, false)?,
        mlp: MlpSpec {
            intermediate_size: config.size("ffn_dim")?,
            activation: activation(config, "activation_function", "relu")?,
            gated: false,
            bias,
        },
        norm: NormSpec {
            kind: NormKind::Layer { eps: 1e-5 },
            affine: config.bool_or("layer_norm_elementwise_affine", true)?,
            placement: if norm_before { NormPlacement::Before } else { NormPlacement::After },
            is_final: norm_before && !config.bool_or("_remove_final_layer_norm", false)?,
        },
        windows: vec![None; config.size("num_hidden_layers")?],
        max_position_embeddings: config.size_or("max_position_embeddings", 2048)?,
        dtype,
        bos_token_id: config.token_ids_or("bos_token_id", Some(2))?.first().copied(),
        eos_token_ids: config.token_ids_or("eos_token_id", Some(2))?,
    })
}

fn attention(
    config: &Fields,
    hidden_size: usize,
    head_dim: Option<usize>,
    qkv_bias: bool,
    out_bias: bool,
    qk_norm: bool,
) -> Result<AttentionSpec, StartError> {
    let num_heads = config.size("num_attention_heads")?;
    let num_kv_heads = config.size_or("num_key_value_heads", num_heads)?;
    if !num_heads.is_multiple_of(num_kv_heads) {
        return Err(config.error(
            "num_key_value_heads",
            format!("num_attention_heads, {num_heads}, is not a multiple of it ({num_kv_heads})"),
        ));
    }
    let head_dim = match head_dim {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => {
            return Err(config.error(
                "hidden_size",
                format!(
                    "{hidden_size} is not a multiple of num_attention_heads, {num_heads}, and there is no head_dim"
                ),
            ));
        }
    };
    let scale = (head_dim as f32).powf(-0.5);
    Ok(AttentionSpec { num_heads, num_kv_heads, head_dim, scale, qkv_bias, out_bias, qk_norm })
}

fn activation(config: &Fields, key: &str, default: &str) -> Result<Activation, StartError> {
    match config.string(key)?.unwrap_or(default) {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu" | "gelu_python" => Ok(Activation::Gelu),
        "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
        "relu" => Ok(Activation::Relu),
        other => Err(config.error(
            key,
            format!("'{other}' is not supported; supported are silu, gelu, gelu_new, gelu_pytorch_tanh and relu"),
        )),
    }
}

/// The window of each layer.
fn windows(config: &Fields, family: Family, num_layers: usize) -> Result<Vec<Option<usize>>, StartError> {
    let given = |default| match config.members.get("sliding_window") {
        None => Ok(default),
        Some(_) => config.optional_size("sliding_window"),
    };
    let (window, first_layer) = match family {
        Family::Mistral => (given(Some(4096))?, 0),
        Family::Qwen2 | Family::Qwen3 if config.bool_or("use_sliding_window", false)? => {
            (given(Some(4096))?, config.count_or("max_window_layers", 28)?)
        }
        _ => (None, num_layers),
    };
    let derived: Vec<_> = (0..num_layers).map(|layer| window.filter(|_| layer >= first_layer)).collect();
    let Some(types) = config.get("layer_types") else { return Ok(derived) };

    let types = types.as_array().ok_or_else(|| config.error("layer_types", "not a list"))?;
    if types.len() != num_layers {
        return Err(config.error("layer_types", format!("{} entries for {num_layers} layers", types.len())));
    }
    let listed = types
        .iter()
        .map(|kind| match kind.as_str() {
            Some("full_attention") => Ok(None),
            Some("sliding_attention") if window.is_some() => Ok(window),
            Some("sliding_attention") => Err(config.error("layer_types", "sliding_attention, but there is no window")),
            _ => Err(config.error("layer_types", format!("{kind} is neither full_attention nor sliding_attention"))),
        })
        .collect::<Result<Vec<_>, _>>()?;
    match family {
        Family::Qwen2 | Family::Qwen3 => Ok(listed),
        // transformers does not read the list for these families; other programs do.
        _ if listed == derived => Ok(derived),
        _ => Err(config.error("layer_types", "says otherwise than sliding_window, which this family goes by")),
    }
}

fn rope(config: &Fields, max_position_embeddings: usize) -> Result<RopeSpec, StartError> {
    let object = |key| config.get(key).and_then(Value::as_object).filter(|members| !members.is_empty());
    let empty = Map::new();
    let (members, path) = match (object("rope_scaling"), object("rope_parameters")) {
        (Some(members), _) => (members, "rope_scaling."),
        (None, Some(members)) => (members, "rope_parameters."),
        (None, None) => (&empty, "rope_parameters."),
    };
    let rope = Fields { members, path };
    if let Some((kind, _)) = members.iter().find(|(_, value)| value.is_object()) {
        return Err(rope.error(kind, "positions that differ between layers are not supported"));
    }
    let partial = rope.number_or("partial_rotary_factor", config.number_or("partial_rotary_factor", 1.0)?)?;
    if partial != 1.0 {
        return Err(rope.error("partial_rotary_factor", format!("{partial} is not supported, only 1")));
    }
    let theta = rope.positive_or("rope_theta", config.positive_or("rope_theta", 10_000.0)?)?;
    let kind = match rope.string("rope_type")? {
        Some(kind) => kind,
        None => rope.string("type")?.unwrap_or("default"),
    };
    let original_max_positions = match config.optional_size("original_max_position_embeddings")? {
        Some(original) => original,
        None => rope.size_or("original_max_position_embeddings", max_position_embeddings)?,
    };
    let scaling = match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: rope.positive("factor")? },
        "dynamic" => RopeScaling::Dynamic { factor: rope.positive("factor")? },
        "llama3" => llama3(&rope, original_max_positions)?,
        "yarn" => yarn(&rope, original_max_positions, max_position_embeddings)?,
        other => {
            return Err(rope.error(
                "rope_type",
                format!("'{other}' is not supported; supported are default, linear, dynamic, llama3 and yarn"),
            ));
        }
    };
    Ok(RopeSpec { theta, scaling })
}

fn llama3(rope: &Fields, original_max_positions: usize) -> Result<RopeScaling, StartError> {
    let low_freq_factor = rope.positive("low_freq_factor")?;
    let high_freq_factor = rope.positive("high_freq_factor")?;
    if high_freq_factor <= low_freq_factor {
        return Err(rope
            .error("high_freq_factor", format!("{high_freq_factor} is not above low_freq_factor, {low_freq_factor}")));
    }
    Ok(RopeScaling::Llama3 {
        factor: rope.positive("factor")?,
        low_freq_factor,
        high_freq_factor,
        original_max_positions,
    })
}

fn yarn(rope: &Fields, original_max_positions: usize, max_positions: usize) -> Result<RopeScaling, StartError> {
    let factor = rope.positive_or("factor", max_positions as f64 / original_max_positions as f64)?;
    // "YaRN: Efficient Context Window Extension of Large Language Models" (arXiv 2309.00071), section 3.4, with the
    // factors that DeepSeek added.
    let temperature = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    let attention_factor = match rope.number("attention_factor")? {
        Some(given) => given,
        None => match (rope.number("mscale")?, rope.number("mscale_all_dim")?) {
            (Some(mscale), Some(all_dim)) if mscale != 0.0 && all_dim != 0.0 => {
                temperature(mscale) / temperature(all_dim)
            }
            _ => temperature(1.0),
        },
    };
    Ok(RopeScaling::Yarn {
        factor,
        original_max_positions,
        beta_fast: rope.positive_or("beta_fast", 32.0)?,
        beta_slow: rope.positive_or("beta_slow", 1.0)?,
        attention_factor,
        truncate: rope.bool_or("truncate", true)?,
    })
}

/// A JSON object's members, read with errors that name the key. `null` is as good as absent.
struct Fields<'a> {
    members: &'a Map<String, Value>,
    /// What stands before a key in messages.
    path: &'static str,
}

impl<'a> Fields<'a> {
    fn error(&self, key: &str, problem: impl std::fmt::Display) -> StartError {
        StartError::new(format!("{}{key}: {problem}", self.path))
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.members.get(key).filter(|value| !value.is_null())
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, StartError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.error(key, format!("{value} is not {expected}")))
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, StartError> {
        value.ok_or_else(|| self.error(key, "missing"))
    }

    fn string(&self, key: &str) -> Result<Option<&'a str>, StartError> {
        self.typed(key, "a text", Value::as_str)
    }

    fn bool_or(&self, key: &str, default: bool) -> Result<bool, StartError> {
        Ok(self.typed(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    fn count_or(&self, key: &str, default: usize) -> Result<usize, StartError> {
        let read = |value: &Value| value.as_u64().and_then(|count| usize::try_from(count).ok());
        Ok(self.typed(key, "a whole number from 0", read)?.unwrap_or(default))
    }

    /// Sizes end at 2³¹: products of two fit a `usize`.
    fn optional_size(&self, key: &str) -> Result<Option<usize>, StartError> {
        self.typed(key, "a whole number from 1 to 2147483647", |value| {
            let size = value.as_u64().filter(|size| (1..1 << 31).contains(size))?;
            usize::try_from(size).ok()
        })
    }

    fn size(&self, key: &str) -> Result<usize, StartError> {
        self.optional_size(key).and_then(|size| self.required(key, size))
    }

    fn size_or(&self, key: &str, default: usize) -> Result<usize, StartError> {
        Ok(self.optional_size(key)?.unwrap_or(default))
    }

    fn number(&self, key: &str) -> Result<Option<f64>, StartError> {
        self.typed(key, "a number", Value::as_f64)
    }

    fn number_or(&self, key: &str, default: f64) -> Result<f64, StartError> {
        Ok(self.number(key)?.unwrap_or(default))
    }

    fn optional_positive(&self, key: &str) -> Result<Option<f64>, StartError> {
        self.typed(key, "a number above 0", |value| value.as_f64().filter(|number| *number > 0.0))
    }

    fn positive(&self, key: &str) -> Result<f64, StartError> {
        self.optional_positive(key).and_then(|number| self.required(key, number))
    }

    fn positive_or(&self, key: &str, default: f64) -> Result<f64, StartError> {
        Ok(self.optional_positive(key)?.unwrap_or(default))
    }

    /// One token id, or a list of them.
    fn token_ids(&self, key: &str) -> Result<Option<Vec<TokenId>>, StartError> {
        let id = |value: &Value| value.as_u64().and_then(|id| TokenId::try_from(id).ok());
        self.typed(key, "a token id or a list of token ids", |value| match value {
            Value::Array(list) => list.iter().map(id).collect(),
            value => Some(vec![id(value)?]),
        })
    }

    /// `default` stands for an absent key; `null` means that there is no such token.
    fn token_ids_or(&self, key: &str, default: Option<TokenId>) -> Result<Vec<TokenId>, StartError> {
        match self.members.contains_key(key) {
            true => Ok(self.token_ids(key)?.unwrap_or_default()),
            false => Ok(default.into_iter().collect()),
        }
    }
}
