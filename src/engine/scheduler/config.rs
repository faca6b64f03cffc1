//! What the scheduler is told of the pools and of the policy.

use crate::engine::bill::Quota;
use serde::{Deserialize, Serialize};

/// What becomes of the KV of a preempted sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PreemptionMode {
    /// Whatever is expected to be done sooner, for each victim: see [`crate::engine::arbiter`].
    Auto,
    /// To the swap pool; dropped where that is full.
    Swap,
    /// Dropped, and computed again when the sequence comes back.
    Recompute,
}

/// What a sequence has to find room for before it runs, beside those that do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AdmissionPolicy {
    /// What all of them are expected to need, by the lengths of outputs that have ended, for as many steps as make
    /// another preemption worth while.
    Expected,
    /// All that they may need: nothing is ever preempted for want of blocks.
    MaxTokens,
    /// The tokens that it has.
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
    /// Seconds that a step should take while somebody waits for a next token: how much of a prompt goes into it follows
    /// from the steps before. `None`: as much as `max_num_batched_tokens` allows.
    pub inter_token_target: Option<f64>,
    pub max_model_len: usize,
    pub policy: SchedulingPolicy,
    pub preemption_mode: PreemptionMode,
    pub admission: AdmissionPolicy,
    /// Blocks that an admission leaves available while something runs.
    pub watermark_blocks: usize,
    /// With fewer device blocks available, those who would yield first have their full blocks copied ahead of need ...
    pub write_behind_blocks: usize,
    /// ... but for so many.
    pub max_tail_blocks: usize,
    /// Blocks that requests which are not preemptible may hold together, at most.
    pub non_preemptible_blocks: usize,
    /// Of each tenant.
    pub quota: Quota,
    /// Of several tenants that wait, the one that has least goes first, and who has more than an equal part yields first;
    /// off, it counts who came first.
    #[serde(default)]
    pub key_turns: bool,
    /// Off: requests share nothing, only the samples of one request do.
    pub prefix_caching: bool,
    /// Plan a step while the one before it is in flight.
    pub overlap: bool,
    /// Secret of the block hashes: never written down.
    #[serde(skip)]
    pub hash_key: [u8; 32],
}

impl SchedulerConfig {
    /// Blocks that a step may take at most, or a part of the pool: they are kept free, so that what was in them has been
    /// copied away before they are written. None where there is nowhere to copy to.
    pub(super) fn reserve_blocks(&self) -> usize {
        let step = self.max_num_batched_tokens.div_ceil(self.block_size) + self.max_num_seqs;
        if self.num_swap_blocks == 0 { 0 } else { step.min(self.num_device_blocks / MAX_RESERVE_PART) }
    }
}

/// See [`SchedulerConfig::reserve_blocks`].
const MAX_RESERVE_PART: usize = 16;
