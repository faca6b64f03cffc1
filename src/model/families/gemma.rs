//! Gemma 2, and the text part of Gemma 3: norms on both sides of sublayers, and alternating layers with and without a
//! window.

use super::fields::Fields;
use super::parts::{activation, listed_windows, rms_norm, shared_heads, turning_head};
use super::rope;
use crate::spec::{AttentionSpec, Family, MlpSpec, ModelSpec, NormPlacement, NormSpec, PositionSpec};
use pagetide_backend::DType;
use pagetide_base::error::StartError;

/// Published configurations omit the defaults of the classes in transformers, even sizes.
pub(super) fn gemma(config: &Fields, family: Family, dtype: DType) -> Result<ModelSpec, StartError> {
    let is_third = family == Family::Gemma3;
    if config.bool_or("use_bidirectional_attention", false)? {
        return Err(config.error("use_bidirectional_attention", "attention to later tokens is not supported"));
    }
    let hidden_size = config.size_or("hidden_size", 2304)?;
    let max_position_embeddings = config.size_or("max_position_embeddings", if is_third { 131_072 } else { 8192 })?;
    let (cap_scores, cap_logits) = if is_third { (None, None) } else { (Some(50.0), Some(30.0)) };
    let bias = config.bool_or("attention_bias", false)?;
    let num_heads = config.size_or("num_attention_heads", 8)?;
    let attention = AttentionSpec {
        num_heads,
        num_kv_heads: shared_heads(config, num_heads, config.size_or("num_key_value_heads", 4)?)?,
        head_dim: config.size_or("head_dim", 256)?,
        scale: config.positive_or("query_pre_attn_scalar", 256.0)?.powf(-0.5) as f32,
        scale_by_layer: false,
        softcap: config.nullable_positive("attn_logit_softcapping", cap_scores)?.map(|cap| cap as f32),
        qkv_bias: bias,
        out_bias: bias,
        qk_norm: is_third,
    };
    let head = turning_head(config, &attention, max_position_embeddings)?;
    let (positions, windowed_rope) = if is_third {
        let (rope, windowed) = rope::gemma3(config, head)?;
        (rope, Some(windowed))
    } else {
        (rope::rope(config, head, 1e4)?, None)
    };
    Ok(ModelSpec {
        family,
        vocab_size: config.size_or("vocab_size", if is_third { 262_208 } else { 256_000 })?,
        hidden_size,
        embed_size: hidden_size,
        tied_embeddings: config.bool_or("tie_word_embeddings", true)?,
        embed_scale: (hidden_size as f32).sqrt(),
        logit_softcap: config.nullable_positive("final_logit_softcapping", cap_logits)?.map(|cap| cap as f32),
        positions: PositionSpec::Rope(positions),
        windowed_rope,
        attention,
        mlp: MlpSpec {
            intermediate_size: config.size_or("intermediate_size", 9216)?,
            activation: activation(config, "hidden_activation", "gelu_pytorch_tanh")?,
            gated: true,
            bias: false,
        },
        experts: None,
        norm: NormSpec { weight_offset: 1.0, placement: NormPlacement::Both, ..rms_norm(config, 1e-6)? },
        windows: windows(config, family)?,
        max_position_embeddings,
        dtype,
        bos_token_id: config.token_ids_or("bos_token_id", Some(2))?.first().copied(),
        eos_token_ids: config.token_ids_or("eos_token_id", Some(1))?,
        quantization: None,
    })
}

fn windows(config: &Fields, family: Family) -> Result<Vec<Option<usize>>, StartError> {
    let num_layers = config.optional_layers("num_hidden_layers")?.unwrap_or(26);
    let window = config.nullable_size("sliding_window", Some(4096))?;
    let window = window.ok_or_else(|| config.error("sliding_window", "null, but some layers have a window"))?;
    // Every second layer (Gemma 2) or every sixth (Gemma 3) has no window.
    let pattern = match family {
        Family::Gemma3 => config.size_or("sliding_window_pattern", 6)?,
        _ => 2,
    };
    let derived = (1..=num_layers).map(|layer| (layer % pattern != 0).then_some(window)).collect();
    Ok(listed_windows(config, Some(window), num_layers)?.unwrap_or(derived))
}
