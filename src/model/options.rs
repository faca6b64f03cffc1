//! The options that a model is loaded with.

use pagetide_backend::cpu::Isa;
use pagetide_backend::cuda::driver::DriverOptions;
use pagetide_base::choice;
use std::path::PathBuf;

choice!(
    /// Type of the weights.
    DtypeChoice {
        /// The checkpoint's own.
        Auto = "auto",
        Float32 = "float32",
        Float16 = "float16",
        Bfloat16 = "bfloat16",
    }
);
choice!(
    /// Type of the KV cache.
    CacheDtype {
        /// That of the weights.
        Auto = "auto",
        Int8 = "int8",
        Fp8 = "fp8",
        Int4 = "int4",
    }
);
choice!(
    /// Where the weights come from.
    LoadFormat {
        /// The checkpoint's safetensors files.
        Auto = "auto",
        /// Random numbers.
        Dummy = "dummy",
        /// Nowhere: there is no model.
        Null = "null",
    }
);
choice!(DeviceKind {
    /// The GPU if there is one, else the CPU.
    Auto = "auto",
    Cpu = "cpu",
    Cuda = "cuda",
});

choice!(
    /// What the matrices of a checkpoint are quantised to when it is loaded.
    Quantization {
        /// They stay in [`LoadOptions::dtype`].
        None = "none",
        Q8_0 = "q8_0",
        Q4_0 = "q4_0",
        Q4_1 = "q4_1",
        Q5_0 = "q5_0",
        Q5_1 = "q5_1",
        Q4K = "q4_k",
        Q6K = "q6_k",
    }
);

/// Which model to open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSource {
    /// A directory, a name on the Hugging Face hub, or [`DEMO_MODEL`](super::files::DEMO_MODEL).
    pub path: String,
    /// Branch, tag or commit of a hub model; `None` is its main branch.
    pub revision: Option<String>,
}

/// How a model is loaded, and the size of its KV pools.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    pub source: ModelSource,
    pub dtype: DtypeChoice,
    pub load_format: LoadFormat,
    pub quantization: Quantization,
    /// Holds quantised weights for the next start. `None`: they are not kept.
    pub quantization_cache: Option<PathBuf>,
    /// `None`: the model's own limit.
    pub max_model_len: Option<usize>,
    pub device: DeviceKind,
    /// Threads of the CPU backend.
    pub threads: usize,
    /// `None`: the best instruction set of this machine ([`Isa::detect`]).
    pub isa: Option<Isa>,
    pub driver: DriverOptions,
    pub cuda_graphs: bool,
    /// Whether products with FP8 matrices quantise their activations to FP8 on a GPU.
    pub fp8_activations: bool,
    /// Fraction of the memory for weights and KV blocks.
    pub memory_fraction: PerDevice<f64>,
    /// Maximum number of tokens in a step.
    pub batched_tokens: PerDevice<usize>,
    pub max_num_seqs: usize,
    pub cache_dtype: CacheDtype,
    /// Tokens in a KV block.
    pub block_size: usize,
    /// `None`: as many as fit in the fraction of the memory.
    pub num_device_blocks: Option<usize>,
    /// Size of the swap pool. `None`: the loader decides.
    pub swap_bytes: Option<usize>,
    /// Maximum to which the swap pool can grow later. `None`: the loader decides.
    pub max_swap_bytes: Option<usize>,
}

/// A value that depends on the kind of device.
#[derive(Clone, Copy, Debug)]
pub struct PerDevice<T> {
    pub cpu: T,
    pub gpu: T,
}
