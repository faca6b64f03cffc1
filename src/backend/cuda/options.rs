//! What a CUDA backend is made for, and the macros that specialise its kernels for that.

use crate::backend::{DType, KvLayout};

/// What the kernels are specialised and the buffers sized for.
#[derive(Clone, Debug, PartialEq)]
pub struct CudaOptions {
    /// Type of weights, KV cache and activations.
    pub dtype: DType,
    pub num_heads: usize,
    pub kv: KvLayout,
    pub vocab_size: usize,
    /// Rows and sequences of a step at most.
    pub max_rows: usize,
    pub max_seqs: usize,
    /// Rows of logits at a time.
    pub max_logit_rows: usize,
    /// Record and replay decode steps.
    pub graphs: bool,
    /// A row's attention does not depend on what else is in the batch.
    pub batch_invariant: bool,
    /// Attention's scores are capped.
    pub softcap: bool,
    /// Some layers have experts.
    pub experts: bool,
}

/// What the kernels call a type.
pub(super) fn scalar_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
    }
}

/// The macros that all kernels over the model's tensors are specialised by.
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
