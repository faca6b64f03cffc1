//! Loading onto the CPU.

use super::{LoadedModel, checkpoint, dtype, max_model_len, pool_sizes};
use crate::backend::Backend;
use crate::backend::cpu::{CpuBackend, CpuOptions, Isa};
use crate::backend::profile::{Profile, Profiled};
use crate::config::{self, Config};
use crate::engine::plan::StepRunner;
use crate::error::StartError;
use crate::model::decoder::Decoder;
use crate::model::files::ModelFiles;
use crate::model::runner::ModelRunner;
use crate::model::spec::ModelSpec;
use crate::model::weights::Progress;
use sysinfo::System;

/// Rows of logits in host memory at once.
pub(super) const MAX_LOGIT_ROWS: usize = 64;

pub(super) fn load(
    config: &Config,
    files: &ModelFiles,
    spec: ModelSpec,
    profile: Option<Profile>,
    progress: &mut Progress<'_>,
) -> Result<(Box<dyn StepRunner>, LoadedModel), StartError> {
    let backend = backend(config)?;
    let device = format!("cpu ({}, {} threads)", backend.isa().name(), backend.num_threads());
    match profile {
        Some(profile) => load_onto(Profiled::new(backend, profile), device, config, files, spec, progress),
        None => load_onto(backend, device, config, files, spec, progress),
    }
}

/// As the section `device` says.
pub fn backend(config: &Config) -> Result<CpuBackend, StartError> {
    CpuBackend::new(CpuOptions { threads: Some(config.device.num_threads()), isa: isa(config.device.isa) })
}

fn load_onto<B: Backend + 'static>(
    backend: B,
    device: String,
    config: &Config,
    files: &ModelFiles,
    spec: ModelSpec,
    progress: &mut Progress<'_>,
) -> Result<(Box<dyn StepRunner>, LoadedModel), StartError> {
    let (dtype, max_model_len) = (dtype(config, &spec), max_model_len(config, &spec));
    let max_num_batched_tokens = config.scheduler.batched_tokens(false) as usize;
    let (num_parameters, weights_bytes) = (spec.num_parameters(), spec.weights_bytes(dtype));
    let layout = spec.kv_layout(config.cache.block_size as usize, dtype);

    let checkpoint = checkpoint(config, files)?;
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
    let pools = pool_sizes(config, layout, max_model_len, spare_swap_bytes(), available_memory_budget(config))?;
    let runner = ModelRunner::new(backend, decoder, pools)?;
    let loaded = LoadedModel {
        device,
        is_gpu: false,
        dtype,
        max_model_len,
        max_num_batched_tokens,
        max_num_seqs: max_num_batched_tokens,
        num_parameters,
        weights_bytes,
        pools,
    };
    Ok((Box::new(runner), loaded))
}

fn isa(choice: config::Isa) -> Option<Isa> {
    match choice {
        config::Isa::Auto => None,
        config::Isa::Amx => Some(Isa::Amx),
        config::Isa::Avx512 => Some(Isa::Avx512),
        config::Isa::Avx2 => Some(Isa::Avx2),
        config::Isa::Neon => Some(Isa::Neon),
        config::Isa::Portable => Some(Isa::Portable),
    }
}

/// What KV blocks may take, for [`pool_sizes`].
pub(super) fn available_memory_budget(config: &Config) -> impl FnOnce() -> Result<(usize, String), StartError> {
    let share = config.device.memory_fraction(false);
    move || Ok(((available_memory() as f64 * share) as usize, format!("{share} of the available memory")))
}

/// What the swap pool may become while requests run, in bytes. What is not touched of it costs nothing.
pub(super) fn spare_swap_bytes() -> usize {
    available_memory() as usize / 2
}

/// Whether this machine, or this container, could hold a model of `needed` bytes if nothing else were running. What
/// others have taken comes and goes, so that is left to the system.
pub(super) fn check_memory(needed: u128) -> Result<(), StartError> {
    let mut system = System::new();
    system.refresh_memory();
    let machine = system.total_memory().saturating_add(system.total_swap());
    let total = system
        .cgroup_limits()
        .map_or(machine, |limits| machine.min(limits.total_memory.saturating_add(limits.free_swap)));
    if needed <= u128::from(total) {
        return Ok(());
    }
    let gib = |bytes: u128| bytes as f64 / (1u64 << 30) as f64;
    Err(StartError::new(format!(
        "the model needs {:.1} GiB for weights and workspace, and this machine has {:.1} GiB of memory: use a smaller \
         model or a smaller --dtype, or lower --max-num-batched-tokens or --max-model-len",
        gib(needed),
        gib(total.into())
    )))
}

/// Bytes that this process can still take: the machine's, or the container's where that is less.
fn available_memory() -> u64 {
    let mut system = System::new();
    system.refresh_memory();
    let machine = system.available_memory();
    system.cgroup_limits().map_or(machine, |limits| machine.min(limits.free_memory))
}
