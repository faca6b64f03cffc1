//! What every kind of load has in common: the resolved options, the checkpoint and the sizes of the KV pools.

use super::memory::SwapDefaults;
use crate::checkpoint::Checkpoint;
use crate::files::{DEMO_MODEL, ModelFiles};
use crate::options::{CacheDtype, DtypeChoice, LoadFormat, LoadOptions, Quantization};
use crate::quantizer::kept::KeptPlace;
use crate::quantizer::{QUANTIZER_VERSION, QuantizePlan};
use crate::runner::PoolSizes;
use crate::spec::{Family, ModelSpec};
use crate::tally::WeightTally;
use pagetide_backend::{CodeType, DType, KvDType, KvLayout};
use pagetide_base::error::StartError;
use std::path::Path;

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
    pub weights: WeightTally,
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

/// The layout of the KV cache of a model whose weights have type `dtype`.
pub(super) fn kv_layout(options: &LoadOptions, spec: &ModelSpec, dtype: DType) -> KvLayout {
    let dtype = match options.cache_dtype {
        CacheDtype::Auto => KvDType::Plain(dtype),
        CacheDtype::Int8 => KvDType::Codes(CodeType::Int8),
        CacheDtype::Fp8 => KvDType::Codes(CodeType::Fp8),
        CacheDtype::Int4 => KvDType::Codes(CodeType::Int4),
    };
    spec.kv_layout(options.block_size, dtype)
}

pub(super) fn max_model_len(options: &LoadOptions, spec: &ModelSpec) -> usize {
    options.max_model_len.unwrap_or(spec.default_max_model_len())
}

/// The checkpoint to read, and how it is quantised; `None` for random weights.
pub(super) fn checkpoint(
    options: &LoadOptions,
    files: &ModelFiles,
    spec: &ModelSpec,
) -> Result<Option<Checkpoint>, StartError> {
    if options.load_format != LoadFormat::Auto {
        return Ok(None);
    }
    let to = options.quantization;
    if to == Quantization::None {
        return files.checkpoint().map(Some);
    }
    let as_it_is = |what: &str| {
        let path = &options.source.path;
        Err(StartError::new(format!(
            "model.quantization = {to}: {path} is {what}, which is served as it is: set model.quantization = none"
        )))
    };
    if files.gguf().is_some() {
        return as_it_is("a GGUF file");
    }
    if spec.quantization.is_some() {
        return as_it_is("a quantised checkpoint (quantization_config in config.json)");
    }
    let mut checkpoint = files.checkpoint()?;
    let place =
        options.quantization_cache.as_deref().map(|folder| place(folder, to, files, &checkpoint)).transpose()?;
    checkpoint.quantize(QuantizePlan { to, place });
    Ok(Some(checkpoint))
}

/// Where the checkpoint's quantised weights are kept.
fn place(
    folder: &Path,
    to: Quantization,
    files: &ModelFiles,
    checkpoint: &Checkpoint,
) -> Result<KeptPlace, StartError> {
    let mut hasher = blake3::Hasher::new_derive_key("Pagetide: quantised weights");
    hasher.update(format!("{QUANTIZER_VERSION} {to}\n").as_bytes());
    hasher.update(files.read_text("config.json")?.unwrap_or_default().as_bytes());
    checkpoint.hash_version(&mut hasher);
    let key = hasher.finalize().to_hex().to_string();
    // For people. The longest names of files have 255 bytes.
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    let name: String =
        files.name().chars().map(|letter| if is_plain(letter) { letter } else { '-' }).take(100).collect();
    Ok(KeptPlace { path: folder.join(format!("{name}-{to}-{}.weights", &key[..32])), key })
}

/// Default number of device blocks of the demo model. They hold 16 sequences of full length: few enough that a user can
/// fill them and watch blocks being swapped.
const MAX_DEMO_BLOCKS: usize = 2048;

/// The sizes of the KV pools. Without a configured number of blocks, the device pool takes `budget` bytes, but at most
/// what all sequences at full length could use, and at most [`MAX_DEMO_BLOCKS`] for the demo model. `budget` also
/// returns a description of its size for errors.
pub(super) fn pool_sizes(
    options: &LoadOptions,
    layout: KvLayout,
    max_model_len: usize,
    swap: &SwapDefaults,
    budget: impl FnOnce() -> Result<(usize, String), StartError>,
) -> Result<PoolSizes, StartError> {
    let block_bytes = layout.block_bytes();
    // Slots are numbered with 32 bits.
    let limit = u32::MAX as usize / layout.block_size;
    let num_device_blocks = match options.num_device_blocks {
        Some(blocks) => blocks,
        None => {
            let (budget, share_of) = budget()?;
            let useful = options.max_num_seqs * max_model_len.div_ceil(layout.block_size);
            let is_demo = options.source.path == DEMO_MODEL && options.load_format == LoadFormat::Auto;
            let most = if is_demo { MAX_DEMO_BLOCKS } else { usize::MAX };
            let blocks = (budget / block_bytes).min(useful).min(most).min(limit);
            if blocks == 0 {
                return Err(StartError::new(format!(
                    "no KV block of {block_bytes} bytes fits into {share_of} ({budget} bytes): \
                     raise --device-memory-utilization, lower --block-size, or free memory"
                )));
            }
            blocks
        }
    };
    let swap_bytes = options.swap_bytes.unwrap_or_else(|| {
        let most = options.max_swap_bytes.unwrap_or(usize::MAX);
        (swap.bytes)(num_device_blocks.saturating_mul(block_bytes)).min(most).min(limit.saturating_mul(block_bytes))
    });
    let num_swap_blocks = swap_bytes / block_bytes;
    let spare_bytes = swap.spare_bytes.min(limit.saturating_mul(block_bytes));
    let max_swap_blocks = options.max_swap_bytes.unwrap_or(spare_bytes.max(swap_bytes)) / block_bytes;
    let of_swap_pool = ("swap.space_gib or swap.max_space_gib", max_swap_blocks.max(num_swap_blocks));
    for (setting, blocks) in [("cache.num_device_blocks", num_device_blocks), of_swap_pool] {
        if blocks > limit {
            return Err(StartError::new(format!(
                "{setting}: {blocks} KV blocks are too many: a pool can have at most {limit} blocks with \
                 cache.block_size = {}",
                layout.block_size
            )));
        }
    }
    Ok(PoolSizes { layout, num_device_blocks, num_swap_blocks, max_swap_blocks })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{DeviceKind, ModelSource, PerDevice};
    use std::fs::{self, File};

    fn options(num_device_blocks: Option<usize>, swap_bytes: Option<usize>) -> LoadOptions {
        LoadOptions {
            source: ModelSource { path: "tiny".into(), revision: None },
            dtype: DtypeChoice::Auto,
            load_format: LoadFormat::Auto,
            quantization: Quantization::None,
            quantization_cache: None,
            max_model_len: None,
            device: DeviceKind::Cuda,
            threads: 1,
            isa: None,
            driver: Default::default(),
            cuda_graphs: false,
            fp8_activations: false,
            memory_fraction: PerDevice { cpu: 0.5, gpu: 0.5 },
            batched_tokens: PerDevice { cpu: 1, gpu: 1 },
            max_num_seqs: 1 << 16,
            cache_dtype: CacheDtype::Auto,
            block_size: 16,
            num_device_blocks,
            swap_bytes,
            max_swap_bytes: None,
        }
    }

    /// Blocks of 256 bytes, in terabytes: more than slots of 32 bits can number.
    #[test]
    fn pools_have_at_most_the_slots_that_can_be_numbered() {
        let layout = KvLayout { num_layers: 1, num_kv_heads: 1, head_dim: 4, block_size: 16, dtype: DType::F16.into() };
        let swap = SwapDefaults { bytes: |_| 1 << 42, spare_bytes: 1 << 42 };
        let sizes =
            |options: &LoadOptions| pool_sizes(options, layout, 1 << 20, &swap, || Ok((1 << 42, "the memory".into())));
        let limit = u32::MAX as usize / 16;
        let pools = sizes(&options(None, None)).unwrap();
        assert_eq!([pools.num_device_blocks, pools.num_swap_blocks, pools.max_swap_blocks], [limit; 3]);
        let refused = |options: &LoadOptions| sizes(options).expect_err("too many blocks").to_string();
        let error = refused(&options(Some(limit + 1), None));
        assert!(
            error.starts_with("cache.num_device_blocks: 268435456 KV blocks") && error.contains("268435455"),
            "{error}"
        );
        let error = refused(&options(Some(1), Some(1 << 42)));
        assert!(error.starts_with("swap.space_gib or swap.max_space_gib: "), "{error}");
    }

    /// The file of `llama-mha` in `model` when it is quantised.
    fn kept_in(model: &Path, to: Quantization) -> KeptPlace {
        let files = ModelFiles::open(model.to_str().unwrap()).unwrap();
        place(Path::new("/cache"), to, &files, &files.checkpoint().unwrap()).unwrap()
    }

    #[test]
    fn kept_weights_belong_to_one_version_of_the_files_and_one_format() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("a model: ü");
        fs::create_dir(&model).unwrap();
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/models/llama-mha");
        for name in ["config.json", "model.safetensors"] {
            fs::copy(from.join(name), model.join(name)).unwrap();
        }
        let KeptPlace { path, key } = kept_in(&model, Quantization::Q4_0);
        assert_eq!(kept_in(&model, Quantization::Q4_0).key, key);
        assert_eq!(path, Path::new("/cache").join(format!("a-model----q4_0-{}.weights", &key[..32])));
        assert_ne!(kept_in(&model, Quantization::Q8_0).key, key);

        // A byte in the middle of a tensor, and the old time of the last change.
        let weights = model.join("model.safetensors");
        let modified = fs::metadata(&weights).unwrap().modified().unwrap();
        let mut bytes = fs::read(&weights).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&weights, bytes).unwrap();
        File::options().write(true).open(&weights).unwrap().set_modified(modified).unwrap();
        let changed = kept_in(&model, Quantization::Q4_0).key;
        assert_ne!(changed, key);

        // Whether the vocabulary product has its own matrix decides formats.
        let config = fs::read_to_string(model.join("config.json")).unwrap();
        fs::write(model.join("config.json"), config.replace("\"model_type\"", "\"other\": 1, \"model_type\"")).unwrap();
        assert_ne!(kept_in(&model, Quantization::Q4_0).key, changed);
    }
}
