//! Llama and the families that are built like it.

use super::experts::experts;
use super::fields::Fields;
use super::parts::{activation, attention, listed_windows, rms_norm, turning_head};
use super::rope;
use crate::spec::{Family, MlpSpec, ModelSpec, PositionSpec};
use pagetide_backend::DType;
use pagetide_base::error::StartError;

/// Llama, Mistral, Mixtral, Qwen2 and Qwen3, sparse or not: RMSNorm before sublayers, RoPE, and a gated MLP or experts.
pub fn llama_like(config: &Fields, family: Family, dtype: DType) -> Result<ModelSpec, StartError> {
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
        Family::Qwen2Moe => (config.bool_or("qkv_bias", true)?, false),
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
        positions: PositionSpec::Rope(rope::rope(config, head, theta)?),
        windowed_rope: None,
        attention,
        mlp: MlpSpec {
            intermediate_size: config.size("intermediate_size")?,
            activation: activation(config, "hidden_act", "silu")?,
            gated: true,
            bias: mlp_bias,
        },
        experts: experts(config, family, num_layers)?,
        norm: rms_norm(config, rms_norm_eps)?,
        windows: windows(config, family, num_layers)?,
        max_position_embeddings,
        dtype,
        bos_token_id: config.token_ids_or("bos_token_id", bos)?.first().copied(),
        eos_token_ids: config.token_ids_or("eos_token_id", eos)?,
        quantization: None,
    })
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
        // Only `layer_types` says which of these layers have it: programs derive it in different ways.
        Family::Qwen2Moe if config.bool_or("use_sliding_window", false)? => {
            if config.get("layer_types").is_none() {
                return Err(config.error("use_sliding_window", "needs layer_types for Qwen2's sparse models"));
            }
            (given(Some(4096))?, num_layers)
        }
        _ => (None, num_layers),
    };
    let derived: Vec<_> = (0..num_layers).map(|layer| window.filter(|_| layer >= first_layer)).collect();
    let Some(listed) = listed_windows(config, window, num_layers)? else { return Ok(derived) };
    match family {
        Family::Qwen2 | Family::Qwen2Moe | Family::Qwen3 => Ok(listed),
        // transformers ignores the list for these families, but other programs read it.
        _ if listed == derived => Ok(derived),
        _ => Err(config.error("layer_types", "contradicts sliding_window, which this family uses")),
    }
}
