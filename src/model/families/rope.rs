//! The keys of rotary positions, in both spellings.

use super::fields::Fields;
use crate::spec::{RopeScaling, RopeSpec};
use pagetide_base::error::StartError;
use serde_json::{Map, Value};
use std::sync::LazyLock;

/// The head that turns, and the model's length.
#[derive(Clone, Copy)]
pub(super) struct RotaryHead {
    pub dim: usize,
    pub max_positions: usize,
}

/// One rope for all layers, every dimension of whose heads turns.
pub(super) fn rope(config: &Fields, head: RotaryHead, default_theta: f64) -> Result<RopeSpec, StartError> {
    let (rope, theta) = (members(config), config.positive_or("rope_theta", default_theta)?);
    if let Some((kind, _)) = rope.members.iter().find(|(_, value)| value.is_object()) {
        return Err(rope.error(kind, "positions that differ between layers are not supported"));
    }
    let partial = partial_factor(config, &rope)?;
    if partial != 1.0 {
        return Err(rope.error("partial_rotary_factor", format!("{partial} is not supported, only 1")));
    }
    let original = config.optional_size("original_max_position_embeddings")?;
    let scaling = match kind(&rope)? {
        "longrope" => {
            let original = original.map_or_else(|| rope.size("original_max_position_embeddings"), Ok)?;
            long_rope(&rope, head, original)?
        }
        _ => scaling(&rope, head, original)?,
    };
    Ok(RopeSpec { theta: rope.positive_or("rope_theta", theta)?, rotary_dim: head.dim, scaling })
}

/// Phi-3: some dimensions of a head, and factors for each wavelength.
pub(super) fn phi(config: &Fields, head: RotaryHead) -> Result<RopeSpec, StartError> {
    let rope = members(config);
    let partial = partial_factor(config, &rope)?;
    let rotary_dim = (head.dim as f64 * partial) as usize;
    if !(2..=head.dim).contains(&rotary_dim) || !rotary_dim.is_multiple_of(2) {
        let problem = format!("{partial} of {} dimensions is {rotary_dim}, which are not pairs of these", head.dim);
        return Err(rope.error("partial_rotary_factor", problem));
    }
    let head = RotaryHead { dim: rotary_dim, ..head };
    let scaling = match kind(&rope)? {
        "default" => RopeScaling::None,
        // As the first files called it.
        "longrope" | "su" | "yarn" => {
            let original = config.optional_size("original_max_position_embeddings")?;
            let original = original.map_or_else(|| rope.size_or("original_max_position_embeddings", 4096), Ok)?;
            long_rope(&rope, head, original)?
        }
        other => {
            return Err(
                rope.error("rope_type", format!("'{other}' is not supported; supported are default and longrope"))
            );
        }
    };
    let theta = rope.positive_or("rope_theta", config.positive_or("rope_theta", 10_000.0)?)?;
    Ok(RopeSpec { theta, rotary_dim, scaling })
}

/// Gemma 3: the ropes of layers without and with a window.
pub(super) fn gemma3(config: &Fields, head: RotaryHead) -> Result<(RopeSpec, RopeSpec), StartError> {
    let empty = Map::new();
    let nested = config.get("rope_parameters");
    let object = |key| nested.and_then(|nested| nested.get(key)).and_then(Value::as_object);
    let full = match config.object("rope_scaling") {
        Some(members) => Fields { members, path: "rope_scaling." },
        None => Fields { members: object("full_attention").unwrap_or(&empty), path: "rope_parameters.full_attention." },
    };
    let windowed =
        Fields { members: object("sliding_attention").unwrap_or(&empty), path: "rope_parameters.sliding_attention." };
    let spec = |rope: &Fields, theta| {
        if kind(rope)? == "longrope" {
            return Err(rope.error("rope_type", "'longrope' is not supported for this family"));
        }
        let theta = rope.positive_or("rope_theta", theta)?;
        Ok(RopeSpec { theta, rotary_dim: head.dim, scaling: scaling(rope, head, None)? })
    };
    let full = spec(&full, config.positive_or("rope_theta", 1e6)?)?;
    Ok((full, spec(&windowed, config.positive_or("rope_local_base_freq", 1e4)?)?))
}

fn members<'a>(config: &Fields<'a>) -> Fields<'a> {
    static EMPTY: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);
    match (config.object("rope_scaling"), config.object("rope_parameters")) {
        (Some(members), _) => Fields { members, path: "rope_scaling." },
        (None, Some(members)) => Fields { members, path: "rope_parameters." },
        (None, None) => Fields { members: &EMPTY, path: "rope_parameters." },
    }
}

fn partial_factor(config: &Fields, rope: &Fields) -> Result<f64, StartError> {
    rope.number_or("partial_rotary_factor", config.number_or("partial_rotary_factor", 1.0)?)
}

fn kind<'a>(rope: &Fields<'a>) -> Result<&'a str, StartError> {
    match rope.string("rope_type")? {
        Some(kind) => Ok(kind),
        None => Ok(rope.string("type")?.unwrap_or("default")),
    }
}

fn unknown(rope: &Fields, kind: &str) -> StartError {
    let problem =
        format!("'{kind}' is not supported; supported are default, linear, dynamic, llama3, yarn and longrope");
    rope.error("rope_type", problem)
}

/// `original`: the length of the first training, where the configuration gives it outside of `rope`.
fn scaling(rope: &Fields, head: RotaryHead, original: Option<usize>) -> Result<RopeScaling, StartError> {
    let original_max_positions = match original {
        Some(original) => original,
        None => rope.size_or("original_max_position_embeddings", head.max_positions)?,
    };
    match kind(rope)? {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor: rope.positive("factor")? }),
        "dynamic" => Ok(RopeScaling::Dynamic { factor: rope.positive("factor")? }),
        "llama3" => llama3(rope, original_max_positions),
        "yarn" => yarn(rope, original_max_positions, head.max_positions),
        other => Err(unknown(rope, other)),
    }
}

/// "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens" (arXiv 2402.13753).
fn long_rope(rope: &Fields, head: RotaryHead, original_max_positions: usize) -> Result<RopeScaling, StartError> {
    let factor = rope.positive_or("factor", head.max_positions as f64 / original_max_positions as f64)?;
    let attention_factor = match rope.optional_positive("attention_factor")? {
        Some(given) => given,
        None if factor <= 1.0 => 1.0,
        None => (1.0 + factor.ln() / (original_max_positions as f64).ln()).sqrt(),
    };
    Ok(RopeScaling::LongRope {
        short_factor: rope.factors("short_factor", head.dim / 2)?,
        long_factor: rope.factors("long_factor", head.dim / 2)?,
        original_max_positions,
        attention_factor,
    })
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
