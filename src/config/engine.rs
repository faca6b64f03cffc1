//! Settings of the model, the device, the KV cache on both tiers, and the scheduler.

use super::{
    AdmissionPolicy, CacheDtype, CopyBatches, DEMO_MODEL, DeviceKind, DtypeChoice, Eviction, IsaChoice, LoadFormat,
    OnFailure, Overlap, PreemptionMode, Quantization, ReasoningParser, SchedulingPolicy, ToolCallParser, num_cores,
};

#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// A directory, a name on the Hugging Face hub, or [`DEMO_MODEL`].
    pub path: String,
    /// Revision of a hub model. `None`: its main branch.
    pub revision: Option<String>,
    pub dtype: DtypeChoice,
    pub quantization: Quantization,
    /// A folder, or `off`. `None`: `pagetide/quantized` in the user's cache directory.
    pub quantization_cache: Option<String>,
    /// `None`: the model's own limit.
    pub max_model_len: Option<u32>,
    pub load_format: LoadFormat,
    /// Whether the model's tokenizer is not loaded.
    pub skip_tokenizer_init: bool,
    pub tool_call_parser: ToolCallParser,
    pub reasoning_parser: ReasoningParser,
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            path: DEMO_MODEL.into(),
            revision: None,
            dtype: DtypeChoice::Auto,
            quantization: Quantization::None,
            quantization_cache: None,
            max_model_len: None,
            load_format: LoadFormat::Auto,
            skip_tokenizer_init: false,
            tool_call_parser: ToolCallParser::Auto,
            reasoning_parser: ReasoningParser::Auto,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct DeviceConfig {
    pub kind: DeviceKind,
    /// Threads of the CPU backend. 0: one per core.
    pub threads: usize,
    pub isa: IsaChoice,
    /// `None`: see [`DeviceConfig::memory_fraction`].
    pub memory_utilization: Option<f64>,
    /// Directories searched for CUDA's libraries before all others.
    pub cuda_library_path: Vec<String>,
    /// `None`: `pagetide/kernels` in the user's cache directory.
    pub kernel_cache: Option<String>,
    pub cuda_graphs: bool,
    /// Products with FP8 matrices quantise their activations to FP8 on a GPU.
    pub fp8_activations: bool,
    /// The results of a token on a GPU do not depend on the other sequences in its step.
    pub batch_invariant: bool,
    pub copy_batches: CopyBatches,
    pub on_failure: OnFailure,
    /// 0: no limit.
    pub step_timeout_s: u64,
}

impl Default for DeviceConfig {
    fn default() -> Self {
        Self {
            kind: DeviceKind::Auto,
            threads: 0,
            isa: IsaChoice::Auto,
            memory_utilization: None,
            cuda_library_path: Vec::new(),
            kernel_cache: None,
            cuda_graphs: true,
            fp8_activations: false,
            batch_invariant: false,
            copy_batches: CopyBatches::Auto,
            on_failure: OnFailure::Restart,
            step_timeout_s: 300,
        }
    }
}

impl DeviceConfig {
    pub fn num_threads(&self) -> usize {
        if self.threads > 0 { self.threads } else { num_cores() }
    }

    /// Fraction of the device's memory for weights and KV blocks. On the CPU, other programs need memory too.
    pub fn memory_fraction(&self, on_cuda: bool) -> f64 {
        self.memory_utilization.unwrap_or(if on_cuda { 0.9 } else { 0.5 })
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct CacheConfig {
    pub dtype: CacheDtype,
    /// Tokens in a KV block, from 1 to 256.
    pub block_size: u32,
    /// `None`: as many as fit in `device.memory_utilization`.
    pub num_device_blocks: Option<u32>,
    pub enable_prefix_caching: bool,
    pub eviction: Eviction,
    /// Fraction of the device blocks that requests of one API key may hold.
    pub max_share_per_key: f64,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            dtype: CacheDtype::Auto,
            block_size: 16,
            num_device_blocks: None,
            enable_prefix_caching: true,
            eviction: Eviction::Adaptive,
            max_share_per_key: 1.0,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct SwapConfig {
    /// 0: there is no swap tier. `None`: the loader decides.
    pub space_gib: Option<f64>,
    /// Maximum of `space_gib` while the server runs. `None`: the loader decides.
    pub max_space_gib: Option<f64>,
    /// Fraction of the device blocks.
    pub high_watermark: f64,
    pub max_tail_blocks: usize,
    /// Fraction of the swap pool that requests of one API key may hold.
    pub max_share_per_key: f64,
}

impl Default for SwapConfig {
    fn default() -> Self {
        Self { space_gib: None, max_space_gib: None, high_watermark: 0.8, max_tail_blocks: 4, max_share_per_key: 1.0 }
    }
}

impl SwapConfig {
    /// Size of the swap pool. `None`: the loader decides.
    pub fn space_bytes(&self) -> Option<usize> {
        self.space_gib.map(gib)
    }

    /// Maximum size of the swap pool while the server runs. `None`: the loader decides.
    pub fn max_space_bytes(&self) -> Option<usize> {
        self.max_space_gib.map(gib)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerSettings {
    pub max_num_seqs: u32,
    /// `None`: see [`SchedulerSettings::batched_tokens`].
    pub max_num_batched_tokens: Option<u32>,
    /// 0: no target.
    pub inter_token_target_ms: u64,
    pub preemption_mode: PreemptionMode,
    pub admission: AdmissionPolicy,
    pub policy: SchedulingPolicy,
    /// Fraction of the device blocks that must stay free when a request is admitted.
    pub watermark: f64,
    /// Fraction of the device blocks that requests which must not be preempted may reserve.
    pub non_preemptible_share: f64,
    /// API keys share the device fairly.
    pub key_turns: bool,
    pub overlap: Overlap,
}

impl Default for SchedulerSettings {
    fn default() -> Self {
        Self {
            max_num_seqs: 256,
            max_num_batched_tokens: None,
            inter_token_target_ms: 100,
            preemption_mode: PreemptionMode::Auto,
            admission: AdmissionPolicy::Expected,
            policy: SchedulingPolicy::Fcfs,
            watermark: 0.01,
            non_preemptible_share: 0.25,
            key_turns: true,
            overlap: Overlap::Auto,
        }
    }
}

impl SchedulerSettings {
    /// Maximum number of tokens in a step. It is at least `max_num_seqs`, because each running sequence needs one.
    pub fn batched_tokens(&self, on_cuda: bool) -> u32 {
        self.max_num_batched_tokens.unwrap_or_else(|| self.max_num_seqs.max(if on_cuda { 2048 } else { 512 }))
    }

    /// The part of `num_device_blocks` that requests which must not be preempted may reserve together.
    pub fn non_preemptible_blocks(&self, num_device_blocks: usize) -> usize {
        (self.non_preemptible_share * num_device_blocks as f64) as usize
    }

    /// Target duration of a step in seconds while any sequence decodes.
    pub fn inter_token_target(&self) -> Option<f64> {
        (self.inter_token_target_ms > 0).then(|| self.inter_token_target_ms as f64 / 1e3)
    }

    /// Whether steps are planned ahead. The CPU backend gains nothing from it, because it plans and computes on the
    /// same cores.
    pub fn overlaps(&self, on_cuda: bool) -> bool {
        match self.overlap {
            Overlap::Auto => on_cuda,
            Overlap::On => true,
            Overlap::Off => false,
        }
    }
}

/// In bytes.
fn gib(gib: f64) -> usize {
    (gib * (1u64 << 30) as f64) as usize
}
