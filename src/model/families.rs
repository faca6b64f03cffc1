//! `config.json` to [`ModelSpec`]: one function a family, refusing what the runtime would compute wrongly.
//!
//! Read are both spellings: that of transformers up to 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and that of 5
//! (`rope_parameters`, `dtype`). A missing key means what the family's configuration class in transformers says.

mod experts;
mod fields;
mod gemma;
mod learned;
mod phi;
mod rope;

use crate::backend::{Activation, DType, NormKind};
use crate::error::StartError;
use crate::ids::TokenId;
use crate::model::spec::{AttentionSpec, Family, MlpSpec, ModelSpec, NormPlacement, NormSpec, Positions};
use fields::Fields;
use rope::Head;
use serde_json::{Map, Value};

/// `(architecture in config.json, model_type, family)`.
const SUPPORTED: &[(&str, &str, Family)] = &[
    ("LlamaForCausalLM", "llama", Family::Llama),
    ("LLaMAForCausalLM", "llama", Family::Llama),
    ("MistralForCausalLM", "mistral", Family::Mistral),
    ("Qwen2ForCausalLM", "qwen2", Family::Qwen2),
    ("Qwen3ForCausalLM", "qwen3", Family::Qwen3),
    ("Qwen3MoeForCausalLM", "qwen3_moe", Family::Qwen3Moe),
    ("MixtralForCausalLM", "mixtral", Family::Mixtral),
    ("Phi3ForCausalLM", "phi3", Family::Phi3),
    ("Gemma2ForCausalLM", "gemma2", Family::Gemma2),
    ("Gemma3ForCausalLM", "gemma3_text", Family::Gemma3),
    ("Gemma3ForConditionalGeneration", "gemma3", Family::Gemma3),
    ("OPTForCausalLM", "opt", Family::Opt),
    ("GPT2LMHeadModel", "gpt2", Family::Gpt2),
];

const SUPPORTED_FAMILIES: &str = "supported are Llama 1 to 3 (LlamaForCausalLM), Mistral (MistralForCausalLM), Mixtral \
                                  (MixtralForCausalLM), Qwen2 and 2.5 (Qwen2ForCausalLM), Qwen3 (Qwen3ForCausalLM, \
                                  Qwen3MoeForCausalLM), Phi-3 and Phi-4 (Phi3ForCausalLM), Gemma 2 \
                                  (Gemma2ForCausalLM), the text part of Gemma 3 (Gemma3ForCausalLM, \
                                  Gemma3ForConditionalGeneration), OPT (OPTForCausalLM) and GPT-2 (GPT2LMHeadModel)";

/// `dtype`: the precision, which [`dtype`] reads where the configuration names one. Errors name the key.
pub fn parse(config: &Map<String, Value>, dtype: DType) -> Result<ModelSpec, StartError> {
    let family = family(&Fields { members: config, path: "" })?;
    let nested = nested_text(config);
    let config = match &nested {
        Some(text) => Fields { members: text, path: "text_config." },
        None => Fields { members: config, path: "" },
    };
    if let Some(quantization) = config.get("quantization_config") {
        let method = quantization.get("quant_method").and_then(Value::as_str).unwrap_or("unknown");
        return Err(config.error(
            "quantization_config",
            format!("quantized checkpoints are not supported (this one: {method}); use one in bf16, fp16 or fp32"),
        ));
    }
    match family {
        Family::Opt => learned::opt(&config, dtype),
        Family::Gpt2 => learned::gpt2(&config, dtype),
        Family::Phi3 => phi::phi3(&config, dtype),
        Family::Gemma2 | Family::Gemma3 => gemma::gemma(&config, family, dtype),
        family => llama_like(&config, family, dtype),
    }
}

/// The text's part of a configuration for text and images, with what stands beside it for both.
fn nested_text(config: &Map<String, Value>) -> Option<Map<String, Value>> {
    const OF_BOTH: [&str; 6] =
        ["quantization_config", "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "tie_word_embeddings"];
    let mut text = config.get("text_config")?.as_object()?.clone();
    let outer = OF_BOTH.iter().filter_map(|key| Some((key.to_string(), config.get(*key)?.clone())));
    text.extend(outer.filter(|(_, value)| !value.is_null()));
    Some(text)
}

/// The precision that the checkpoint is meant to compute in; `None` if the configuration leaves it to the weights.
pub fn dtype(config: &Map<String, Value>) -> Result<Option<DType>, StartError> {
    let nested = nested_text(config);
    let config = Fields { members: nested.as_ref().unwrap_or(config), path: "" };
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

/// Llama, Mistral, Mixtral, Qwen2 and Qwen3: RMSNorm before, RoPE, a gated MLP or experts.
fn llama_like(config: &Fields, family: Family, dtype: DType) -> Result<ModelSpec, StartError> {
    let hidden_size = config.size("hidden_size")?;
    let num_layers = config.layers("num_hidden_layers")?;
    let max_position_embeddings = config.size_or(
        "max_position_embeddings",
        match family {
            Family::Llama => 2048,
            Family::Mistral | Family::Mixtral => 131_072,
            _ => 32_768,
        },
    )?;
    let head_dim = match (config.optional_size("head_dim")?, family) {
        (Some(head_dim), _) => Some(head_dim),
        (None, Family::Qwen3) => Some(128),
        (None, _) => None,
    };
    let (qkv_bias, out_bias) = match family {
        Family::Mistral | Family::Mixtral => (false, false),
        Family::Qwen2 => (true, false),
        _ => {
            let bias = config.bool_or("attention_bias", false)?;
            (bias, bias)
        }
    };
    let mlp_bias = family == Family::Llama && config.bool_or("mlp_bias", false)?;
    let (bos, eos) = match family {
        Family::Llama | Family::Mistral | Family::Mixtral => (Some(1), Some(2)),
        _ => (None, None),
    };
    let qk_norm = matches!(family, Family::Qwen3 | Family::Qwen3Moe);
    let attention = attention(config, hidden_size, head_dim, qkv_bias, out_bias, qk_norm)?;
    let head = turning_head(config, &attention, max_position_embeddings)?;
    let (rms_norm_eps, theta) = match family {
        Family::Mixtral => (1e-5, 1e6),
        _ => (1e-6, 1e4),
    };
    Ok(ModelSpec {
        family,
        vocab_size: config.size("vocab_size")?,
        hidden_size,
        embed_size: hidden_size,
        tied_embeddings: config.bool_or("tie_word_embeddings", false)?,
        embed_scale: 1.0,
        logit_softcap: None,
        positions: Positions::Rope(rope::rope(config, head, theta)?),
        windowed_rope: None,
        attention,
        mlp: MlpSpec {
            intermediate_size: config.size("intermediate_size")?,
            activation: activation(config, "hidden_act", "silu")?,
            gated: true,
            bias: mlp_bias,
        },
        experts: experts::experts(config, family, num_layers)?,
        norm: rms_norm(config, rms_norm_eps)?,
        windows: windows(config, family, num_layers)?,
        max_position_embeddings,
        dtype,
        bos_token_id: config.token_ids_or("bos_token_id", bos)?.first().copied(),
        eos_token_ids: config.token_ids_or("eos_token_id", eos)?,
    })
}

fn rms_norm(config: &Fields, eps: f64) -> Result<NormSpec, StartError> {
    Ok(NormSpec {
        kind: NormKind::Rms { eps: config.epsilon_or("rms_norm_eps", eps)? },
        affine: true,
        weight_offset: 0.0,
        placement: NormPlacement::Before,
        is_final: true,
    })
}

/// The head, which must have pairs of dimensions.
fn turning_head(config: &Fields, attention: &AttentionSpec, max_positions: usize) -> Result<Head, StartError> {
    let dim = attention.head_dim;
    if !dim.is_multiple_of(2) {
        return Err(config.error("head_dim", format!("{dim} is odd, but rotary positions need pairs")));
    }
    Ok(Head { dim, max_positions })
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
    let num_kv_heads = shared_heads(config, num_heads, config.size_or("num_key_value_heads", num_heads)?)?;
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
    Ok(AttentionSpec {
        num_heads,
        num_kv_heads,
        head_dim,
        scale,
        scale_by_layer: false,
        softcap: None,
        qkv_bias,
        out_bias,
        qk_norm,
    })
}

/// `num_kv_heads`, which the query heads must be able to share.
fn shared_heads(config: &Fields, num_heads: usize, num_kv_heads: usize) -> Result<usize, StartError> {
    if num_heads.is_multiple_of(num_kv_heads) {
        return Ok(num_kv_heads);
    }
    Err(config.error(
        "num_key_value_heads",
        format!("num_attention_heads, {num_heads}, is not a multiple of it ({num_kv_heads})"),
    ))
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

/// The window of each layer of a Llama-like model.
fn windows(config: &Fields, family: Family, num_layers: usize) -> Result<Vec<Option<usize>>, StartError> {
    let given = |default| config.nullable_size("sliding_window", default);
    let (window, first_layer) = match family {
        Family::Mistral => (given(Some(4096))?, 0),
        Family::Mixtral => (given(None)?, 0),
        Family::Qwen3Moe if config.bool_or("use_sliding_window", false)? => (given(Some(4096))?, 0),
        Family::Qwen2 | Family::Qwen3 if config.bool_or("use_sliding_window", false)? => {
            (given(Some(4096))?, config.count_or("max_window_layers", 28)?)
        }
        _ => (None, num_layers),
    };
    let derived: Vec<_> = (0..num_layers).map(|layer| window.filter(|_| layer >= first_layer)).collect();
    let Some(listed) = listed_windows(config, window, num_layers)? else { return Ok(derived) };
    match family {
        Family::Qwen2 | Family::Qwen3 => Ok(listed),
        // transformers does not read the list for these families; other programs do.
        _ if listed == derived => Ok(derived),
        _ => Err(config.error("layer_types", "says otherwise than sliding_window, which this family goes by")),
    }
}

/// The windows of layers by `layer_types`, if there is such a list.
fn listed_windows(
    config: &Fields,
    window: Option<usize>,
    num_layers: usize,
) -> Result<Option<Vec<Option<usize>>>, StartError> {
    let Some(types) = config.get("layer_types") else { return Ok(None) };
    let types = types.as_array().ok_or_else(|| config.error("layer_types", "not a list"))?;
    if types.len() != num_layers {
        return Err(config.error("layer_types", format!("{} entries for {num_layers} layers", types.len())));
    }
    let window_of = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(None),
        Some("sliding_attention") if window.is_some() => Ok(window),
        Some("sliding_attention") => Err(config.error("layer_types", "sliding_attention, but there is no window")),
        _ => Err(config.error("layer_types", format!("{kind} is neither full_attention nor sliding_attention"))),
    };
    types.iter().map(window_of).collect::<Result<_, _>>().map(Some)
}
