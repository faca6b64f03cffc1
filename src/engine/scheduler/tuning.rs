//! Settings that may change while requests run: between two steps, and no request is dropped for it.

use super::{AdmissionPolicy, PreemptionMode, Scheduler, SchedulerConfig, SchedulingPolicy};
use crate::bill::Quota;
use crate::block_pool::PoolStats;
use serde::{Deserialize, Serialize};

/// The part of a [`SchedulerConfig`] that may change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tuning {
    pub num_swap_blocks: usize,
    pub max_num_seqs: usize,
    pub max_num_batched_tokens: usize,
    pub inter_token_target: Option<f64>,
    /// For requests that arrive from now on. Requests that are there keep their rank.
    pub policy: SchedulingPolicy,
    pub preemption_mode: PreemptionMode,
    pub admission: AdmissionPolicy,
    pub watermark_blocks: usize,
    pub write_behind_blocks: usize,
    pub max_tail_blocks: usize,
    pub non_preemptible_blocks: usize,
    pub quota: Quota,
}

impl From<&SchedulerConfig> for Tuning {
    fn from(config: &SchedulerConfig) -> Self {
        Self {
            num_swap_blocks: config.num_swap_blocks,
            max_num_seqs: config.max_num_seqs,
            max_num_batched_tokens: config.max_num_batched_tokens,
            inter_token_target: config.inter_token_target,
            policy: config.policy,
            preemption_mode: config.preemption_mode,
            admission: config.admission,
            watermark_blocks: config.watermark_blocks,
            write_behind_blocks: config.write_behind_blocks,
            max_tail_blocks: config.max_tail_blocks,
            non_preemptible_blocks: config.non_preemptible_blocks,
            quota: config.quota,
        }
    }
}

impl Scheduler {
    /// Changes settings, from the next step on. `swap` is what the swap pool says after it has been given its new size.
    /// Neither `max_num_seqs` nor `max_num_batched_tokens` may be more than the executor was made for.
    pub fn tune(&mut self, tuning: &Tuning, swap: PoolStats) {
        let Tuning { num_swap_blocks, max_num_seqs, max_num_batched_tokens, inter_token_target, .. } = *tuning;
        let Tuning { policy, preemption_mode, watermark_blocks, write_behind_blocks, max_tail_blocks, .. } = *tuning;
        assert!(max_num_batched_tokens >= max_num_seqs, "every decode must fit into a step");
        self.config = SchedulerConfig {
            num_swap_blocks,
            inter_token_target,
            policy,
            preemption_mode,
            admission: tuning.admission,
            watermark_blocks,
            write_behind_blocks,
            max_tail_blocks,
            non_preemptible_blocks: tuning.non_preemptible_blocks,
            quota: tuning.quota,
            ..self.config
        };
        self.admission.end_refusal();
        self.resize.begin(max_num_seqs, max_num_batched_tokens);
        self.resize.settle(&mut self.config, &self.seqs, &self.contracts);
        self.tiers.resize(swap, &mut self.seqs);
    }
}
