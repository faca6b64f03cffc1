//! "Loads" no model.

use super::memory::{SwapDefaults, available_memory_budget};
use super::sizes::{LoadedModel, dtype, kv_layout, max_model_len, pool_sizes};
use crate::null::NullRunner;
use crate::options::LoadOptions;
use crate::spec::ModelSpec;
use crate::tally::WeightTally;
use pagetide_base::error::StartError;

/// The pools have the same sizes as on the CPU, so that scheduling is the same. Nothing is allocated.
pub(super) fn load(options: &LoadOptions, spec: &ModelSpec) -> Result<(NullRunner, LoadedModel), StartError> {
    tracing::warn!("--load-format null: there is no model, so all answers are random tokens");
    let (dtype, max_model_len) = (dtype(options, spec), max_model_len(options, spec));
    let layout = kv_layout(options, spec, dtype);
    // The limits are those of the CPU, although no buffer depends on them here.
    let max_num_batched_tokens = options.batched_tokens.cpu;
    let loaded = LoadedModel {
        device: "null".into(),
        arithmetic: "null".into(),
        is_gpu: false,
        family: spec.family,
        dtype,
        max_model_len,
        max_num_batched_tokens,
        max_num_seqs: max_num_batched_tokens,
        num_parameters: spec.num_parameters(),
        weights_bytes: 0,
        weights: WeightTally::default(),
        pools: pool_sizes(options, layout, max_model_len, &SwapDefaults::of_cpu(), available_memory_budget(options))?,
    };
    Ok((NullRunner::new(spec.vocab_size, spec.embed_size), loaded))
}
