//! Phi-3, Phi-3.5 and Phi-4: Llama's layers, some of whose dimensions turn, and factors for long sequences.

use super::fields::Fields;
use super::parts::{activation, attention, rms_norm, turning_head};
use super::rope;
use crate::spec::{Family, MlpSpec, ModelSpec, PositionSpec};
use pagetide_backend::DType;
use pagetide_base::error::StartError;

pub(super) fn phi3(config: &Fields, dtype: DType) -> Result<ModelSpec, StartError> {
    let hidden_size = config.size("hidden_size")?;
    let max_position_embeddings = config.size_or("max_position_embeddings", 4096)?;
    let attention = attention(config, hidden_size, config.optional_size("head_dim")?, false, false, false)?;
    let head = turning_head(config, &attention, max_position_embeddings)?;
    let window = config.nullable_size("sliding_window", None)?;
    Ok(ModelSpec {
        family: Family::Phi3,
        vocab_size: config.size("vocab_size")?,
        hidden_size,
        embed_size: hidden_size,
        tied_embeddings: config.bool_or("tie_word_embeddings", false)?,
        embed_scale: 1.0,
        logit_softcap: None,
        positions: PositionSpec::Rope(rope::phi(config, head)?),
        windowed_rope: None,
        attention,
        mlp: MlpSpec {
            intermediate_size: config.size("intermediate_size")?,
            activation: activation(config, "hidden_act", "silu")?,
            gated: true,
            bias: false,
        },
        experts: None,
        norm: rms_norm(config, 1e-5)?,
        windows: vec![window; config.layers("num_hidden_layers")?],
        max_position_embeddings,
        dtype,
        bos_token_id: config.token_ids_or("bos_token_id", Some(1))?.first().copied(),
        eos_token_ids: config.token_ids_or("eos_token_id", Some(32_000))?,
        quantization: None,
    })
}
