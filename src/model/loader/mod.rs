//! From a configuration to a model that is ready to run: device, weights, and how many KV blocks fit beside them.

mod check;
mod cpu;
mod cuda;
mod null;

use crate::backend::cuda::driver;
use crate::backend::profile::Profile;
use crate::backend::{DType, KvLayout};
use crate::config::{Config, DEMO_MODEL, DeviceKind, DtypeChoice, LoadFormat};
use crate::engine::plan::StepRunner;
use crate::error::StartError;
use crate::model::checkpoint::Checkpoint;
use crate::model::files::ModelFiles;
use crate::model::runner::PoolSizes;
use crate::model::spec::{Family, ModelSpec};
use crate::model::weights::Progress;
pub use check::{Target, check};
pub use cpu::backend as cpu_backend;
pub use cuda::{GpuRunner, OpenDevice, driver_settings, load_on_gpu};

/// What was loaded, for the scheduler's sizes and for people.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadedModel {
    /// For people: `cpu (avx512, 4 threads)`, `cuda (NVIDIA H100 80GB HBM3)`.
    pub device: String,
    pub is_gpu: bool,
    pub dtype: DType,
    pub max_model_len: usize,
    /// Steps of more tokens than this, or of more sequences than the next, cannot be executed: buffers are made for them.
    pub max_num_batched_tokens: usize,
    pub max_num_seqs: usize,
    pub num_parameters: u64,
    pub weights_bytes: u64,
    pub pools: PoolSizes,
}

/// Loads the weights onto the configured device and makes the KV pools. `profile` gets what the steps do; only the CPU
/// can tell. `progress` hears of bytes read and bytes to read.
pub fn load(
    config: &Config,
    files: &ModelFiles,
    spec: ModelSpec,
    profile: Option<Profile>,
    progress: &mut Progress<'_>,
) -> Result<(Box<dyn StepRunner>, LoadedModel), StartError> {
    if config.model.load_format == LoadFormat::Null {
        if profile.is_some() {
            return Err(StartError::new("no roofline of --load-format null: it computes nothing"));
        }
        let (runner, loaded) = null::load(config, &spec)?;
        return Ok((Box::new(runner), loaded));
    }
    let gpu = match config.device.kind {
        DeviceKind::Cpu => None,
        DeviceKind::Cuda => Some(driver::find(&driver_settings(&config.device))?),
        DeviceKind::Auto => match driver::find(&driver_settings(&config.device)) {
            Ok(gpu) => Some(gpu),
            Err(why) => {
                tracing::info!("running on the CPU: {why}");
                None
            }
        },
    };
    if dtype(config, &spec) == DType::F16 && matches!(spec.family, Family::Gemma2 | Family::Gemma3) {
        tracing::warn!("Gemma's activations may outgrow float16: use --dtype bfloat16 or float32");
    }
    check(config, files, &spec, if gpu.is_some() { Target::Gpu } else { Target::Cpu })?;
    match gpu {
        Some(_) if profile.is_some() => Err(StartError::new(
            "no roofline of a GPU: its operations go on after they have been called; \
             `pagetide bench gpu` measures them, and --device cpu measures the CPU",
        )),
        Some(gpu) => {
            let (runner, loaded) = load_on_gpu(gpu.opener(), config, files, spec, progress)?;
            Ok((Box::new(runner), loaded))
        }
        None => cpu::load(config, files, spec, profile, progress),
    }
}

fn dtype(config: &Config, spec: &ModelSpec) -> DType {
    match config.model.dtype {
        DtypeChoice::Auto => spec.dtype,
        DtypeChoice::Float32 => DType::F32,
        DtypeChoice::Float16 => DType::F16,
        DtypeChoice::Bfloat16 => DType::BF16,
    }
}

fn max_model_len(config: &Config, spec: &ModelSpec) -> usize {
    config.model.max_model_len.map_or(spec.default_max_model_len(), |len| len as usize)
}

/// `None`: random weights.
fn checkpoint(config: &Config, files: &ModelFiles) -> Result<Option<Checkpoint>, StartError> {
    match config.model.load_format {
        LoadFormat::Auto => files.checkpoint().map(Some),
        LoadFormat::Dummy | LoadFormat::Null => Ok(None),
    }
}

/// Device blocks of the demo model where no number is given: so few that a load which its user can make fills them, and the
/// tide is seen to move. They hold 16 sequences of full length.
const MAX_DEMO_BLOCKS: usize = 2048;

/// With no number given, the device pool takes `budget` bytes, which are a share of some memory as `share_of` says, and
/// never more than all sequences at full length could use; the demo model takes [`MAX_DEMO_BLOCKS`] at most. The swap pool may become `spare_swap_bytes` large, where the
/// configuration does not say.
fn pool_sizes(
    config: &Config,
    layout: KvLayout,
    max_model_len: usize,
    spare_swap_bytes: usize,
    budget: impl FnOnce() -> Result<(usize, String), StartError>,
) -> Result<PoolSizes, StartError> {
    let block_bytes = layout.block_bytes();
    let num_swap_blocks = config.swap.space_bytes() / block_bytes;
    let num_device_blocks = match config.cache.num_device_blocks {
        Some(blocks) => blocks as usize,
        None => {
            let (budget, share_of) = budget()?;
            let useful = config.scheduler.max_num_seqs as usize * max_model_len.div_ceil(layout.block_size);
            let is_demo = config.model.path == DEMO_MODEL && config.model.load_format == LoadFormat::Auto;
            let most = if is_demo { MAX_DEMO_BLOCKS } else { usize::MAX };
            let blocks = (budget / block_bytes).min(useful).min(most);
            if blocks == 0 {
                return Err(StartError::new(format!(
                    "no KV block of {block_bytes} bytes fits into {share_of} ({budget} bytes): \
                     raise --device-memory-utilization, lower --block-size, or free memory"
                )));
            }
            blocks
        }
    };
    let limit = u32::MAX as usize / layout.block_size;
    let max_swap_blocks =
        config.swap.max_space_bytes(spare_swap_bytes.min(limit.saturating_mul(block_bytes))) / block_bytes;
    let largest = num_device_blocks.max(max_swap_blocks);
    if largest > limit {
        return Err(StartError::new(format!(
            "{largest} KV blocks are too many: at most {limit} of {} tokens are supported in a pool",
            layout.block_size
        )));
    }
    Ok(PoolSizes { layout, num_device_blocks, num_swap_blocks, max_swap_blocks })
}
