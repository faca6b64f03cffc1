//! The options of a CUDA backend, and the macros that specialise its kernels.

use crate::{DType, KvLayout};

/// The model and the sizes that kernels are specialised for and buffers allocated for.
#[derive(Clone, Debug, PartialEq)]
pub struct CudaOptions {
    /// Type of weights, KV cache and activations.
    pub dtype: DType,
    pub num_heads: usize,
    pub kv: KvLayout,
    pub vocab_size: usize,
    /// The most rows and sequences of a step.
    pub max_rows: usize,
    pub max_seqs: usize,
    /// The most rows of logits at a time.
    pub max_logit_rows: usize,
    /// Whether decode steps are recorded and replayed.
    pub graphs: bool,
    /// Whether a row's attention must not depend on the rest of the batch.
    pub batch_invariant: bool,
    /// Whether attention scores are capped.
    pub softcap: bool,
    /// Whether some layers have experts.
    pub experts: bool,
}

/// The kernels' name of a type.
pub(super) fn scalar_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
    }
}

/// The macros that specialise all kernels that work on the model's tensors.
pub(super) fn scalar_defines(options: &CudaOptions) -> Vec<(&'static str, String)> {
    let CudaOptions { dtype, num_heads, kv, .. } = options;
    vec![
        ("DTYPE", scalar_type(*dtype).to_string()),
        ("BLOCK_SIZE", kv.block_size.to_string()),
        ("HEAD_DIM", kv.head_dim.to_string()),
        ("NUM_HEADS", num_heads.to_string()),
        ("NUM_KV_HEADS", kv.num_kv_heads.to_string()),
        ("NUM_LAYERS", kv.num_layers.to_string()),
    ]
}
