//! Parts of a model's configuration that several families share.

use super::fields::Fields;
use super::rope::RotaryHead;
use crate::spec::{AttentionSpec, NormPlacement, NormSpec};
use pagetide_backend::{Activation, NormKind};
use pagetide_base::error::StartError;
use serde_json::Value;

pub fn rms_norm(config: &Fields, eps: f64) -> Result<NormSpec, StartError> {
    Ok(NormSpec {
        kind: NormKind::Rms { eps: config.epsilon_or("rms_norm_eps", eps)? },
        affine: true,
        weight_offset: 0.0,
        placement: NormPlacement::Before,
        is_final: true,
    })
}

/// The attention head for rotary positions, which need pairs of dimensions.
pub fn turning_head(
    config: &Fields,
    attention: &AttentionSpec,
    max_positions: usize,
) -> Result<RotaryHead, StartError> {
    let dim = attention.head_dim;
    if !dim.is_multiple_of(2) {
        return Err(config.error("head_dim", format!("{dim} is odd, but rotary positions need pairs")));
    }
    Ok(RotaryHead { dim, max_positions })
}

pub fn attention(
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

/// Checks that the query heads can share `num_kv_heads`.
pub fn shared_heads(config: &Fields, num_heads: usize, num_kv_heads: usize) -> Result<usize, StartError> {
    if num_heads.is_multiple_of(num_kv_heads) {
        return Ok(num_kv_heads);
    }
    Err(config.error(
        "num_key_value_heads",
        format!("num_attention_heads, {num_heads}, is not a multiple of it ({num_kv_heads})"),
    ))
}

pub fn activation(config: &Fields, key: &str, default: &str) -> Result<Activation, StartError> {
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

/// The window of each layer according to `layer_types`, if there is such a list.
pub fn listed_windows(
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
