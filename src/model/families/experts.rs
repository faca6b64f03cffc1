//! The experts of Mixtral and of Qwen3's sparse models.

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
            renormalize: true,
            layers: vec![true; num_layers],
        },
        Family::Qwen3Moe => ExpertsSpec {
            num_experts: match config.optional_size("num_experts")? {
                Some(num_experts) => num_experts,
                None => config.size_or("num_local_experts", 128)?,
            },
            num_chosen: config.size_or("num_experts_per_tok", 8)?,
            intermediate_size: config.size_or("moe_intermediate_size", 768)?,
            renormalize: config.bool_or("norm_topk_prob", false)?,
            layers: sparse_layers(config, num_layers)?,
        },
        _ => return Ok(None),
    };
    if spec.num_chosen > spec.num_experts {
        let problem = format!("{} of {} experts", spec.num_chosen, spec.num_experts);
        return Err(config.error("num_experts_per_tok", problem));
    }
    if config.count_or("shared_expert_intermediate_size", 0)? > 0 || config.count_or("n_shared_experts", 0)? > 0 {
        return Err(config.error("shared_expert_intermediate_size", "shared experts are not supported"));
    }
    Ok(Some(spec))
}

fn sparse_layers(config: &Fields, num_layers: usize) -> Result<Vec<bool>, StartError> {
    let step = config.size_or("decoder_sparse_step", 1)?;
    let dense = config.indices("mlp_only_layers", num_layers)?;
    Ok((0..num_layers).map(|layer| (layer + 1) % step == 0 && !dense.contains(&layer)).collect())
}
