//! Families with learned positions: OPT and GPT-2.

use super::fields::Fields;
use super::parts::{activation, attention};
use crate::spec::{AttentionSpec, Family, MlpSpec, ModelSpec, NormPlacement, NormSpec, PositionSpec};
use pagetide_backend::{DType, NormKind};
use pagetide_base::error::StartError;

/// OPT: LayerNorm before or after sublayers, learned positions, biases, and embeddings that may be narrower than the
/// model.
pub(super) fn opt(config: &Fields, dtype: DType) -> Result<ModelSpec, StartError> {
    let hidden_size = config.size("hidden_size")?;
    let bias = config.bool_or("enable_bias", true)?;
    let norm_before = config.bool_or("do_layer_norm_before", true)?;
    Ok(ModelSpec {
        family: Family::Opt,
        vocab_size: config.size("vocab_size")?,
        hidden_size,
        embed_size: config.size_or("word_embed_proj_dim", hidden_size)?,
        tied_embeddings: config.bool_or("tie_word_embeddings", true)?,
        embed_scale: 1.0,
        logit_softcap: None,
        // The first two rows of the table were meant for padding.
        positions: PositionSpec::Learned { offset: 2 },
        windowed_rope: None,
        attention: attention(config, hidden_size, None, bias, bias, false)?,
        mlp: MlpSpec {
            intermediate_size: config.size("ffn_dim")?,
            activation: activation(config, "activation_function", "relu")?,
            gated: false,
            bias,
        },
        experts: None,
        norm: NormSpec {
            kind: NormKind::Layer { eps: 1e-5 },
            affine: config.bool_or("layer_norm_elementwise_affine", true)?,
            weight_offset: 0.0,
            placement: if norm_before { NormPlacement::Before } else { NormPlacement::After },
            is_final: norm_before && !config.bool_or("_remove_final_layer_norm", false)?,
        },
        windows: vec![None; config.layers("num_hidden_layers")?],
        max_position_embeddings: config.size_or("max_position_embeddings", 2048)?,
        dtype,
        bos_token_id: config.token_ids_or("bos_token_id", Some(2))?.first().copied(),
        eos_token_ids: config.token_ids_or("eos_token_id", Some(2))?,
        quantization: None,
    })
}

/// GPT-2: LayerNorm before sublayers, learned positions, biases everywhere.
pub(super) fn gpt2(config: &Fields, dtype: DType) -> Result<ModelSpec, StartError> {
    if config.bool_or("add_cross_attention", false)? {
        return Err(config.error("add_cross_attention", "attention to an encoder is not supported"));
    }
    let (hidden_size, num_heads) = (config.size("n_embd")?, config.size("n_head")?);
    if !hidden_size.is_multiple_of(num_heads) {
        return Err(config.error("n_embd", format!("{hidden_size} is not a multiple of n_head, {num_heads}")));
    }
    let head_dim = hidden_size / num_heads;
    let is_scaled = config.bool_or("scale_attn_weights", true)?;
    Ok(ModelSpec {
        family: Family::Gpt2,
        vocab_size: config.size("vocab_size")?,
        hidden_size,
        embed_size: hidden_size,
        tied_embeddings: config.bool_or("tie_word_embeddings", true)?,
        embed_scale: 1.0,
        logit_softcap: None,
        positions: PositionSpec::Learned { offset: 0 },
        windowed_rope: None,
        attention: AttentionSpec {
            num_heads,
            num_kv_heads: num_heads,
            head_dim,
            scale: if is_scaled { (head_dim as f32).powf(-0.5) } else { 1.0 },
            scale_by_layer: config.bool_or("scale_attn_by_inverse_layer_idx", false)?,
            softcap: None,
            qkv_bias: true,
            out_bias: true,
            qk_norm: false,
        },
        mlp: MlpSpec {
            intermediate_size: config.size_or("n_inner", 4 * hidden_size)?,
            activation: activation(config, "activation_function", "gelu_new")?,
            gated: false,
            bias: true,
        },
        experts: None,
        norm: NormSpec {
            kind: NormKind::Layer { eps: config.epsilon_or("layer_norm_epsilon", 1e-5)? },
            affine: true,
            weight_offset: 0.0,
            placement: NormPlacement::Before,
            is_final: true,
        },
        windows: vec![None; config.layers("n_layer")?],
        max_position_embeddings: config.size_or("n_positions", 1024)?,
        dtype,
        bos_token_id: config.token_ids_or("bos_token_id", Some(50_256))?.first().copied(),
        eos_token_ids: config.token_ids_or("eos_token_id", Some(50_256))?,
        quantization: None,
    })
}
