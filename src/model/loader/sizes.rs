//! What every kind of load has in common: the resolved options, the checkpoint and the sizes of the KV pools.

use crate::checkpoint::Checkpoint;
use crate::files::{DEMO_MODEL, ModelFiles};
use crate::options::{DtypeChoice, LoadFormat, LoadOptions};
use crate::runner::PoolSizes;
use crate::spec::{Family, ModelSpec};
use pagetide_backend::{DType, KvLayout};
use pagetide_base::error::StartError;

/// A description of the loaded model: for the scheduler's limits, and for people.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadedModel {
    /// For people: `cpu (avx512, 4 threads)`, `cuda (NVIDIA H100 80GB HBM3)`.
    pub device: String,
    pub is_gpu: bool,
    /// What computes KV: the name of an instruction set, or of a kind of device. Another one may lay it out in another
    /// way, or differ in its last bits.
    pub arithmetic: String,
    pub family: Family,
    pub dtype: DType,
    pub max_model_len: usize,
    /// Maximum number of tokens in a step. Buffers have this size.
    pub max_num_batched_tokens: usize,
    /// Maximum number of sequences in a step. Buffers have this size.
    pub max_num_seqs: usize,
    pub num_parameters: u64,
    pub weights_bytes: u64,
    pub pools: PoolSizes,
}

pub(super) fn dtype(options: &LoadOptions, spec: &ModelSpec) -> DType {
    match options.dtype {
        DtypeChoice::Auto => spec.dtype,
        DtypeChoice::Float32 => DType::F32,
        DtypeChoice::Float16 => DType::F16,
        DtypeChoice::Bfloat16 => DType::BF16,
    }
}

pub(super) fn max_model_len(options: &LoadOptions, spec: &ModelSpec) -> usize {
    options.max_model_len.unwrap_or(spec.default_max_model_len())
}

/// The checkpoint to read; `None` for random weights.
pub(super) fn checkpoint(options: &LoadOptions, files: &ModelFiles) -> Result<Option<Checkpoint>, StartError> {
    match options.load_format {
        LoadFormat::Auto => files.checkpoint().map(Some),
        LoadFormat::Dummy | LoadFormat::Null => Ok(None),
    }
}

/// Default number of device blocks of the demo model. They hold 16 sequences of full length: few enough that a user can
/// fill them and watch blocks being swapped.
const MAX_DEMO_BLOCKS: usize = 2048;

/// The sizes of the KV pools. Without a configured number of blocks, the device pool takes `budget` bytes, but at most
/// what all sequences at full length could use, and at most [`MAX_DEMO_BLOCKS`] for the demo model. `budget` also
/// returns a description of its size for errors. `spare_swap_bytes` is the default maximum of the swap pool.
pub(super) fn pool_sizes(
    options: &LoadOptions,
    layout: KvLayout,
    max_model_len: usize,
    spare_swap_bytes: usize,
    budget: impl FnOnce() -> Result<(usize, String), StartError>,
) -> Result<PoolSizes, StartError> {
    let block_bytes = layout.block_bytes();
    let num_swap_blocks = options.swap_bytes / block_bytes;
    let num_device_blocks = match options.num_device_blocks {
        Some(blocks) => blocks,
        None => {
            let (budget, share_of) = budget()?;
            let useful = options.max_num_seqs * max_model_len.div_ceil(layout.block_size);
            let is_demo = options.source.path == DEMO_MODEL && options.load_format == LoadFormat::Auto;
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
    let spare_swap_bytes = spare_swap_bytes.min(limit.saturating_mul(block_bytes));
    let max_swap_blocks = options.max_swap_bytes.unwrap_or(spare_swap_bytes.max(options.swap_bytes)) / block_bytes;
    let largest = num_device_blocks.max(max_swap_blocks);
    if largest > limit {
        return Err(StartError::new(format!(
            "{largest} KV blocks are too many: a pool can have at most {limit} blocks of {} tokens",
            layout.block_size
        )));
    }
    Ok(PoolSizes { layout, num_device_blocks, num_swap_blocks, max_swap_blocks })
}
