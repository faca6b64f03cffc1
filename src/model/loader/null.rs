//! "Loading" no model at all.

use super::cpu::{available_memory_budget, spare_swap_bytes};
use super::{LoadedModel, dtype, max_model_len, pool_sizes};
use crate::config::Config;
use crate::error::StartError;
use crate::model::null::NullRunner;
use crate::model::spec::ModelSpec;

/// The pools have the sizes that they would have on the CPU, so that scheduling is the same; nothing is allocated.
pub(super) fn load(config: &Config, spec: &ModelSpec) -> Result<(NullRunner, LoadedModel), StartError> {
    tracing::warn!("--load-format null: there is no model; every answer is made of random tokens");
    let (dtype, max_model_len) = (dtype(config, spec), max_model_len(config, spec));
    let layout = spec.kv_layout(config.cache.block_size as usize, dtype);
    // As on the CPU, although nothing here could be too large.
    let max_num_batched_tokens = config.scheduler.batched_tokens(false) as usize;
    let loaded = LoadedModel {
        device: "null".into(),
        is_gpu: false,
        dtype,
        max_model_len,
        max_num_batched_tokens,
        max_num_seqs: max_num_batched_tokens,
        num_parameters: spec.num_parameters(),
        weights_bytes: 0,
        pools: pool_sizes(config, layout, max_model_len, spare_swap_bytes(), available_memory_budget(config))?,
    };
    Ok((NullRunner::new(spec.vocab_size, spec.embed_size), loaded))
}
