//! The experts of Mixtral and of Qwen's sparse models.

use super::fields::Fields;
use crate::spec::{ExpertsSpec, Family};
use pagetide_base::error::StartError;

/// `None` for families without experts.
pub(super) fn experts(config: &Fields, family: Family, num_layers: usize) -> Result<Option<ExpertsSpec>, StartError> {
    let spec = match family {
        Family::Mixtral => ExpertsSpec {
            num_experts: config.size_or("num_local_experts", 8)?,
            num_chosen: config.size_or("num_experts_per_tok", 2)?,
            intermediate_size: config.size("intermediate_size")?,
            shared_intermediate_size: None,
            renormalize: true,
            layers: vec![true; num_layers],
        },
        Family::Qwen2Moe => ExpertsSpec {
            num_experts: config.size_or("num_experts", 60)?,
            num_chosen: config.size_or("num_experts_per_tok", 4)?,
            intermediate_size: config.size_or("moe_intermediate_size", 1408)?,
            shared_intermediate_size: Some(config.size_or("shared_expert_intermediate_size", 5632)?),
            renormalize: config.bool_or("norm_topk_prob", false)?,
            layers: sparse_layers(config, num_layers)?,
        },
        Family::Qwen3Moe => ExpertsSpec {
            num_experts: match config.optional_size("num_experts")? {
                Some(num_experts) => num_experts,
                None => config.size_or("num_local_experts", 128)?,
            },
            num_chosen: config.size_or("num_experts_per_tok", 8)?,
            intermediate_size: config.size_or("moe_intermediate_size", 768)?,
            shared_intermediate_size: None,
            renormalize: config.bool_or("norm_topk_prob", false)?,
            layers: sparse_layers(config, num_layers)?,
        },
        _ => return Ok(None),
    };
    if spec.num_chosen > spec.num_experts {
        let problem = format!("{} of {} experts", spec.num_chosen, spec.num_experts);
        return Err(config.error("num_experts_per_tok", problem));
    }
    let is_shared = |key| Ok::<_, StartError>(config.count_or(key, 0)? > 0);
    if spec.shared_intermediate_size.is_none()
        && (is_shared("shared_expert_intermediate_size")? || is_shared("n_shared_experts")?)
    {
        let problem = "shared experts are supported in Qwen2's sparse models only";
        return Err(config.error("shared_expert_intermediate_size", problem));
    }
    Ok(Some(spec))
}

fn sparse_layers(config: &Fields, num_layers: usize) -> Result<Vec<bool>, StartError> {
    let step = config.size_or("decoder_sparse_step", 1)?;
    let dense = config.indices("mlp_only_layers", num_layers)?;
    Ok((0..num_layers).map(|layer| (layer + 1) % step == 0 && !dense.contains(&layer)).collect())
}
