//! From the settings to the configuration of the scheduler and the pools.

use pagetide_base::error::StartError;
use pagetide_config::{self as config, Config};
use pagetide_engine::bill::Quota;
use pagetide_engine::prefix_cache::EvictionPolicy;
use pagetide_engine::scheduler::{AdmissionPolicy, PreemptionMode, SchedulerConfig, SchedulingPolicy};
use pagetide_model::loader::LoadedModel;

/// The scheduler's configuration for a model that is loaded.
pub(super) fn scheduler_config(config: &Config, loaded: &LoadedModel) -> Result<SchedulerConfig, StartError> {
    let mut hash_key = [0; 32];
    getrandom::fill(&mut hash_key).map_err(|error| StartError::new(format!("no random numbers: {error}")))?;
    Ok(SchedulerConfig {
        block_size: loaded.pools.layout.block_size,
        max_num_batched_tokens: loaded.max_num_batched_tokens,
        max_model_len: loaded.max_model_len,
        hash_key,
        ..configured_scheduler(config, loaded.pools.num_device_blocks, loaded.pools.num_swap_blocks, loaded.is_gpu)
    })
}

/// The scheduler's configuration for pools of these sizes, from the settings alone. The longest sequence is what the
/// device pool holds, and block hashes have no secret key.
pub fn configured_scheduler(
    config: &Config,
    num_device_blocks: usize,
    num_swap_blocks: usize,
    is_gpu: bool,
) -> SchedulerConfig {
    let block_size = config.cache.block_size as usize;
    SchedulerConfig {
        block_size,
        num_device_blocks,
        num_swap_blocks,
        max_num_seqs: config.scheduler.max_num_seqs as usize,
        max_num_batched_tokens: config.scheduler.batched_tokens(is_gpu) as usize,
        inter_token_target: config.scheduler.inter_token_target(),
        max_model_len: num_device_blocks * block_size,
        policy: match config.scheduler.policy {
            config::SchedulingPolicy::Fcfs => SchedulingPolicy::Fcfs,
            config::SchedulingPolicy::Priority => SchedulingPolicy::Priority,
        },
        preemption_mode: match config.scheduler.preemption_mode {
            config::PreemptionMode::Auto => PreemptionMode::Auto,
            config::PreemptionMode::Swap => PreemptionMode::Swap,
            config::PreemptionMode::Recompute => PreemptionMode::Recompute,
        },
        admission: match config.scheduler.admission {
            config::AdmissionPolicy::Expected => AdmissionPolicy::Expected,
            config::AdmissionPolicy::MaxTokens => AdmissionPolicy::MaxTokens,
            config::AdmissionPolicy::Prompt => AdmissionPolicy::Prompt,
        },
        watermark_blocks: (config.scheduler.watermark * num_device_blocks as f64) as usize,
        write_behind_blocks: ((1.0 - config.swap.high_watermark) * num_device_blocks as f64) as usize,
        max_tail_blocks: config.swap.max_tail_blocks,
        non_preemptible_blocks: config.scheduler.non_preemptible_blocks(num_device_blocks),
        quota: Quota::of_shares(
            (config.cache.max_share_per_key, num_device_blocks),
            (config.swap.max_share_per_key, num_swap_blocks),
        ),
        key_turns: config.scheduler.key_turns,
        prefix_caching: config.cache.enable_prefix_caching,
        overlap: config.scheduler.overlaps(is_gpu),
        hash_key: [0; 32],
    }
}

/// The eviction policy of both pools.
pub fn eviction_policy(config: &Config) -> EvictionPolicy {
    match config.cache.eviction {
        config::Eviction::Adaptive => EvictionPolicy::Adaptive,
        config::Eviction::Lru => EvictionPolicy::Lru,
    }
}
