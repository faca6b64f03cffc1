//! The scheduler's configuration.

use crate::bill::Quota;
use serde::{Deserialize, Serialize};

/// What happens to the KV of a preempted sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PreemptionMode {
    /// For each victim, the way that is expected to take less time: see [`crate::arbiter`].
    Auto,
    /// It goes to the swap pool. If that is full, it is dropped.
    Swap,
    /// It is dropped, and computed again when the sequence comes back.
    Recompute,
}

/// What has to fit beside the running sequences before another one is admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AdmissionPolicy {
    /// What all sequences are expected to need until another preemption would be worth its cost. The expectation
    /// follows from the lengths of earlier outputs.
    Expected,
    /// All that the sequences may ever need. Nothing is preempted for lack of blocks.
    MaxTokens,
    /// The tokens that the sequence already has.
    Prompt,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SchedulingPolicy {
    /// First come, first served.
    Fcfs,
    /// Lower priority values first, then first come.
    Priority,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SchedulerConfig {
    /// Tokens a block.
    pub block_size: usize,
    pub num_device_blocks: usize,
    pub num_swap_blocks: usize,
    pub max_num_seqs: usize,
    /// Tokens a step; at least `max_num_seqs`, so that every decode fits.
    pub max_num_batched_tokens: usize,
    /// Seconds that a step should take while a sequence decodes. How much of a prompt goes into the step follows from
    /// the times of earlier steps. `None`: as much as `max_num_batched_tokens` allows.
    pub inter_token_target: Option<f64>,
    pub max_model_len: usize,
    pub policy: SchedulingPolicy,
    pub preemption_mode: PreemptionMode,
    pub admission: AdmissionPolicy,
    /// Blocks that an admission leaves available while something runs.
    pub watermark_blocks: usize,
    /// While fewer device blocks than this are available, full blocks of likely victims are copied ahead.
    pub write_behind_blocks: usize,
    /// How many full blocks of a likely victim are not copied ahead.
    pub max_tail_blocks: usize,
    /// The most blocks that non-preemptible requests may hold together.
    pub non_preemptible_blocks: usize,
    /// The quota of each tenant.
    pub quota: Quota,
    /// If several tenants have waiting requests, the tenant that holds least goes first, and tenants with more than an
    /// equal part are preempted first. If this is off, the order of arrival decides.
    #[serde(default)]
    pub key_turns: bool,
    /// If this is off, only the samples of one request share blocks.
    pub prefix_caching: bool,
    /// Plan a step while the one before it is in flight.
    pub overlap: bool,
    /// The secret key of the block hashes. It is never written to a file.
    #[serde(skip)]
    pub hash_key: [u8; 32],
}

impl SchedulerConfig {
    /// The plainest rules for pools of these sizes, which are then the only limits. First come, first served. A request
    /// starts when its prompt fits. Nothing is copied ahead, cached, overlapped or kept for anyone. A victim is swapped
    /// out.
    pub fn new(block_size: usize, num_device_blocks: usize, num_swap_blocks: usize) -> Self {
        let num_slots = block_size * num_device_blocks;
        Self {
            block_size,
            num_device_blocks,
            num_swap_blocks,
            max_num_seqs: num_slots,
            max_num_batched_tokens: num_slots,
            inter_token_target: None,
            max_model_len: num_slots,
            policy: SchedulingPolicy::Fcfs,
            preemption_mode: PreemptionMode::Swap,
            admission: AdmissionPolicy::Prompt,
            watermark_blocks: 0,
            write_behind_blocks: 0,
            max_tail_blocks: 0,
            non_preemptible_blocks: 0,
            quota: Quota::default(),
            key_turns: false,
            prefix_caching: false,
            overlap: false,
            hash_key: [0; 32],
        }
    }

    /// The number of blocks that are kept free, so that their old content has been copied away before they are written:
    /// the most that a step may take, but at most a part of the pool. 0 if there is no swap pool.
    pub(super) fn reserve_blocks(&self) -> usize {
        let step = self.max_num_batched_tokens.div_ceil(self.block_size) + self.max_num_seqs;
        if self.num_swap_blocks == 0 { 0 } else { step.min(self.num_device_blocks / MAX_RESERVE_PART) }
    }
}

/// See [`SchedulerConfig::reserve_blocks`].
const MAX_RESERVE_PART: usize = 16;
