//! From a configuration to a model that is ready to run: device, weights, and how many KV blocks fit beside them.

use crate::backend::cpu::{CpuBackend, CpuOptions, Isa};
use crate::backend::{DType, KvLayout};
use crate::config::{self, Config, DeviceKind, DtypeChoice, LoadFormat};
use crate::error::StartError;
use crate::model::decoder::Decoder;
use crate::model::files::ModelFiles;
use crate::model::runner::{ModelRunner, PoolSizes};
use crate::model::spec::ModelSpec;
use sysinfo::System;

/// Rows of logits in host memory at once.
const MAX_LOGIT_ROWS: usize = 64;

/// What was loaded, for the scheduler's sizes and for people.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadedModel {
    /// For people: `cpu (avx512, 4 threads)`.
    pub device: String,
    pub is_gpu: bool,
    pub dtype: DType,
    pub max_model_len: usize,
    pub max_num_batched_tokens: usize,
    pub num_parameters: u64,
    pub weights_bytes: u64,
    pub pools: PoolSizes,
}

/// Loads the weights onto the configured device and makes the KV pools. `progress` hears of bytes read and bytes to
/// read.
pub fn load(
    config: &Config,
    files: &ModelFiles,
    spec: ModelSpec,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(ModelRunner<CpuBackend>, LoadedModel), StartError> {
    if config.device.kind == DeviceKind::Cuda {
        return Err(StartError::new(
            "device.kind = cuda: this version has no CUDA backend; use --device cpu (or auto)",
        ));
    }
    let max_model_len = config.model.max_model_len.map_or(spec.default_max_model_len(), |len| len as usize);
    let max_num_batched_tokens = config.scheduler.batched_tokens(false) as usize;
    let dtype = match config.model.dtype {
        DtypeChoice::Auto => spec.dtype,
        DtypeChoice::Float32 => DType::F32,
        DtypeChoice::Float16 => DType::F16,
        DtypeChoice::Bfloat16 => DType::BF16,
    };
    let (num_parameters, weights_bytes) = (spec.num_parameters(), spec.weights_bytes(dtype));
    let layout = spec.kv_layout(config.cache.block_size as usize, dtype);

    let checkpoint = match config.model.load_format {
        LoadFormat::Auto => Some(files.checkpoint()?),
        LoadFormat::Dummy => None,
    };
    let options = CpuOptions { threads: Some(config.device.num_threads()), isa: isa(config.device.isa) };
    let backend = CpuBackend::new(options)?;
    let device = format!("cpu ({}, {} threads)", backend.isa().name(), backend.num_threads());
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
    let pools = pool_sizes(config, layout, max_model_len)?;
    let runner = ModelRunner::new(backend, decoder, pools)?;
    let loaded = LoadedModel {
        device,
        is_gpu: false,
        dtype,
        max_model_len,
        max_num_batched_tokens,
        num_parameters,
        weights_bytes,
        pools,
    };
    Ok((runner, loaded))
}

fn isa(choice: config::Isa) -> Option<Isa> {
    match choice {
        config::Isa::Auto => None,
        config::Isa::Amx => Some(Isa::Amx),
        config::Isa::Avx512 => Some(Isa::Avx512),
        config::Isa::Avx2 => Some(Isa::Avx2),
        config::Isa::Portable => Some(Isa::Portable),
    }
}

/// With no number given, the device pool takes its share of the memory that is still available once the weights are
/// loaded, and never more than all sequences at full length could use.
fn pool_sizes(config: &Config, layout: KvLayout, max_model_len: usize) -> Result<PoolSizes, StartError> {
    let block_bytes = layout.block_bytes();
    let num_swap_blocks = config.swap.space_bytes() / block_bytes;
    let num_device_blocks = match config.cache.num_device_blocks {
        Some(blocks) => blocks as usize,
        None => {
            let share = config.device.memory_fraction(false);
            let budget = (available_memory() as f64 * share) as usize;
            let useful = config.scheduler.max_num_seqs as usize * max_model_len.div_ceil(layout.block_size);
            let blocks = (budget / block_bytes).min(useful);
            if blocks == 0 {
                return Err(StartError::new(format!(
                    "no KV block of {block_bytes} bytes fits into {share} of the available memory ({budget} bytes): \
                     raise --device-memory-utilization, lower --block-size, or free memory"
                )));
            }
            blocks
        }
    };
    let limit = u32::MAX as usize / layout.block_size;
    if num_device_blocks.max(num_swap_blocks) > limit {
        return Err(StartError::new(format!(
            "{} KV blocks are too many: at most {limit} of {} tokens are supported in a pool",
            num_device_blocks.max(num_swap_blocks),
            layout.block_size
        )));
    }
    Ok(PoolSizes { layout, num_device_blocks, num_swap_blocks })
}

/// Bytes that this process can still take: the machine's, or the container's where that is less.
fn available_memory() -> u64 {
    let mut system = System::new();
    system.refresh_memory();
    let machine = system.available_memory();
    system.cgroup_limits().map_or(machine, |limits| machine.min(limits.free_memory))
}
