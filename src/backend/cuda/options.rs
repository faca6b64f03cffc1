//! The options of a CUDA backend, and the macros that specialise its kernels.

use crate::{CodeType, DType, KvDType, KvLayout};
use pagetide_base::error::StartError;

/// The model and the sizes that kernels are specialised for and buffers allocated for.
#[derive(Clone, Debug, PartialEq)]
pub struct CudaOptions {
    /// Type of weights and activations, and of a KV cache without codes.
    pub dtype: DType,
    pub num_heads: usize,
    pub kv: KvLayout,
    pub vocab_size: usize,
    /// The most rows and sequences of a step.
    pub max_rows: usize,
    pub max_seqs: usize,
    /// The most tokens of a sequence. Block tables have room for so many.
    pub max_model_len: usize,
    /// The most rows of logits at a time.
    pub max_logit_rows: usize,
    /// Whether decode steps are recorded and replayed.
    pub graphs: bool,
    /// Whether a row's bits must not depend on the rest of the batch.
    pub batch_invariant: bool,
    /// Whether products with FP8 matrices quantise their activations to FP8 too.
    pub fp8_activations: bool,
    /// Whether products of few rows have kernels of their own; with `batch_invariant` they have none.
    pub few_rows: FewRowsUse,
    /// Whether attention scores are capped.
    pub softcap: bool,
    /// Whether some layers have experts.
    pub experts: bool,
    /// The windows of the layers' attention, each once: tokens that a token sees, itself included; `None`: all.
    pub windows: Vec<Option<usize>>,
}

impl CudaOptions {
    /// Those of attention alone: no rows, and nothing that kernels may have beyond what all models need.
    pub fn for_attention(dtype: DType, num_heads: usize, kv: KvLayout) -> Self {
        Self {
            dtype,
            num_heads,
            kv,
            vocab_size: 0,
            max_rows: 0,
            max_seqs: 0,
            max_model_len: 0,
            max_logit_rows: 0,
            graphs: false,
            batch_invariant: false,
            fp8_activations: false,
            few_rows: FewRowsUse::Timed,
            softcap: false,
            experts: false,
            windows: vec![None],
        }
    }
}

/// When products of up to 8 rows are computed by `few_rows`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FewRowsUse {
    /// Where that is not slower than the separate launches, on a device that has a clock; everywhere on another one.
    #[default]
    Timed,
    Always,
    Never,
}

const MAX_HEAD_DIM: usize = 256;
/// Kernels copy the scales of so many tokens at once.
const SCALES_AT_ONCE: usize = 8;

/// Refuses a KV cache that the kernels cannot hold.
pub fn check_layout(kv: &KvLayout) -> Result<(), StartError> {
    let KvLayout { head_dim, block_size, dtype, .. } = *kv;
    if !head_dim.is_multiple_of(8) || head_dim > MAX_HEAD_DIM {
        return Err(StartError::new(format!(
            "the model's heads have {head_dim} dimensions; on a GPU multiples of 8 up to {MAX_HEAD_DIM} are supported: \
             use --device cpu"
        )));
    }
    if dtype == KvDType::Codes(CodeType::Int4) {
        return Err(StartError::new(
            "cache.dtype = int4: so far only the CPU backend has a KV cache of 4 bits; use cache.dtype = auto, int8 or \
             fp8, or --device cpu",
        ));
    }
    if matches!(dtype, KvDType::Codes(_)) && !block_size.is_multiple_of(SCALES_AT_ONCE) {
        return Err(StartError::new(format!(
            "cache.block_size = {block_size}: on a GPU it has to be a multiple of {SCALES_AT_ONCE} with cache.dtype = \
             {dtype}"
        )));
    }
    Ok(())
}

/// The kernels' name of a type.
fn scalar_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
    }
}

/// The macro that specialises the kernels that work on the model's tensors.
pub(super) fn scalar_define(dtype: DType) -> (&'static str, String) {
    ("DTYPE", scalar_type(dtype).to_string())
}

/// The macros that specialise the kernels that work on the model's heads and on KV blocks.
pub(super) fn head_defines(options: &CudaOptions) -> Vec<(&'static str, String)> {
    let CudaOptions { dtype, num_heads, kv, .. } = options;
    let codes = match kv.dtype {
        KvDType::Plain(_) => None,
        KvDType::Codes(CodeType::Int8) => Some("Int8"),
        KvDType::Codes(CodeType::Fp8) => Some("Fp8"),
        KvDType::Codes(CodeType::Int4) => unreachable!("`check_layout` refuses int4"),
    };
    let mut defines = vec![
        scalar_define(*dtype),
        ("BLOCK_SIZE", kv.block_size.to_string()),
        ("HEAD_DIM", kv.head_dim.to_string()),
        ("NUM_HEADS", num_heads.to_string()),
        ("NUM_KV_HEADS", kv.num_kv_heads.to_string()),
        ("NUM_LAYERS", kv.num_layers.to_string()),
    ];
    defines.extend(codes.map(|codes| ("KV_CODES", codes.to_string())));
    defines
}
