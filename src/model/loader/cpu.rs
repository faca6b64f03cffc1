//! Loading onto the CPU.

use super::memory::{SwapDefaults, available_memory_budget};
use super::sizes::{LoadedModel, checkpoint, dtype, kv_layout, max_model_len, pool_sizes};
use crate::checkpoint::Checkpoint;
use crate::decoder::Decoder;
use crate::files::ModelFiles;
use crate::options::LoadOptions;
use crate::runner::ModelRunner;
use crate::spec::ModelSpec;
use crate::step_runner::StepRunner;
use crate::weights::WeightsProgress;
use pagetide_backend::Backend;
use pagetide_backend::cpu::{CpuBackend, CpuOptions};
use pagetide_backend::profile::{Profile, Profiled};
use pagetide_base::error::StartError;

/// Maximum number of rows of logits in host memory at once.
pub(super) const MAX_LOGIT_ROWS: usize = 64;

pub(super) fn load(
    options: &LoadOptions,
    files: &ModelFiles,
    spec: ModelSpec,
    profile: Option<Profile>,
    progress: &mut WeightsProgress<'_>,
) -> Result<(Box<dyn StepRunner>, LoadedModel), StartError> {
    let backend = backend(options)?;
    let names = DeviceNames {
        device: format!("cpu ({}, {} threads)", backend.isa().name(), backend.num_threads()),
        arithmetic: backend.isa().name().into(),
    };
    match profile {
        Some(profile) => load_onto(Profiled::new(backend, profile), names, options, files, spec, progress),
        None => load_onto(backend, names, options, files, spec, progress),
    }
}

/// The CPU backend that the options describe.
pub fn backend(options: &LoadOptions) -> Result<CpuBackend, StartError> {
    CpuBackend::new(CpuOptions { threads: Some(options.threads), isa: options.isa })
}

/// Of [`LoadedModel`].
struct DeviceNames {
    device: String,
    arithmetic: String,
}

fn load_onto<B: Backend + 'static>(
    backend: B,
    DeviceNames { device, arithmetic }: DeviceNames,
    options: &LoadOptions,
    files: &ModelFiles,
    spec: ModelSpec,
    progress: &mut WeightsProgress<'_>,
) -> Result<(Box<dyn StepRunner>, LoadedModel), StartError> {
    let (dtype, max_model_len) = (dtype(options, &spec), max_model_len(options, &spec));
    let max_num_batched_tokens = options.batched_tokens.cpu;
    let (family, num_parameters) = (spec.family, spec.num_parameters());
    let layout = kv_layout(options, &spec, dtype);

    let checkpoint = checkpoint(options, files, &spec)?;
    let quantized = checkpoint.as_ref().filter(|checkpoint| !checkpoint.quantized().is_empty());
    let stored_bytes = quantized.map_or(spec.weights_bytes(dtype), Checkpoint::total_bytes);
    let decoder = Decoder::load(
        checkpoint.as_ref(),
        spec,
        dtype,
        max_num_batched_tokens,
        MAX_LOGIT_ROWS,
        max_model_len,
        &backend,
        progress,
    )?;
    let weights_bytes = decoder.conversions().weights_bytes(stored_bytes, dtype);
    let weights = decoder.tally().clone();
    let pools = pool_sizes(options, layout, max_model_len, &SwapDefaults::of_cpu(), available_memory_budget(options))?;
    let runner = ModelRunner::new(backend, decoder, pools)?;
    let loaded = LoadedModel {
        device,
        is_gpu: false,
        arithmetic,
        family,
        dtype,
        max_model_len,
        max_num_batched_tokens,
        max_num_seqs: max_num_batched_tokens,
        num_parameters,
        weights_bytes,
        weights,
        pools,
    };
    Ok((Box::new(runner), loaded))
}
