//! What may change while requests run: between two steps, and none of them is dropped for it.

use super::{AdmissionPolicy, PreemptionMode, Scheduler, SchedulerConfig, SchedulingPolicy, Tail};
use crate::engine::bill::Quota;
use crate::engine::block_pool::PoolStats;
use crate::engine::sequence::Sequence;
use crate::sampling::params::SamplingParams;
use serde::{Deserialize, Serialize};

/// The part of a [`SchedulerConfig`] that may change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tuning {
    pub num_swap_blocks: usize,
    pub max_num_seqs: usize,
    pub max_num_batched_tokens: usize,
    pub inter_token_target: Option<f64>,
    /// For requests that arrive from now on: who is there keeps the rank that it has.
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

/// Steps become as small as this when those have ended who have seats.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct WantedSize {
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
}

impl Scheduler {
    /// From the next step on. `swap` is what the swap pool says after it has been given its new size. Neither
    /// `max_num_seqs` nor `max_num_batched_tokens` may be more than the executor was made for.
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
        self.refusal = None;
        // What was promised with other settings holds no longer.
        self.looks = self.looks.wrapping_add(1);
        self.wanted_size = Some(WantedSize { max_num_seqs, max_num_batched_tokens });
        self.settle_size();
        self.swap_stats = swap;
        self.give_backing_up_to_drain();
    }

    /// Whether the swap pool is smaller than what is used of it.
    pub(super) fn is_draining(&self) -> bool {
        self.swap_stats.draining > 0
    }

    /// Copies that were made ahead are given up for the swap pool to become as small as it should, as many as it takes.
    fn give_backing_up_to_drain(&mut self) {
        let mut too_many = self.swap_stats.draining;
        for seq in self.running.iter_mut() {
            if too_many == 0 {
                return;
            }
            if !seq.backing.is_empty() {
                too_many = too_many.saturating_sub(seq.backing.len());
                self.pending_swap.release.push(std::mem::take(&mut seq.backing));
                (seq.num_backed, seq.tail) = (0, Tail::default());
            }
        }
    }

    /// Makes steps as small as they should be, as far as nobody has to leave a seat for it: nobody new gets one meanwhile.
    pub(super) fn settle_size(&mut self) {
        let Some(WantedSize { max_num_seqs, max_num_batched_tokens }) = self.wanted_size else { return };
        let taken: usize = self.running.iter().map(Sequence::seats).sum::<usize>() + self.num_reserved_seats();
        // Beams go on together or not at all.
        let all = self.running.iter().chain(self.waiting.iter());
        let widest = all.filter(|seq| seq.is_beam()).map(|seq| num_beams(&seq.params)).max().unwrap_or(0);
        self.config.max_num_seqs = max_num_seqs.max(taken).max(widest);
        self.config.max_num_batched_tokens = max_num_batched_tokens.max(self.config.max_num_seqs);
        let is_settled = self.config.max_num_seqs == max_num_seqs;
        self.wanted_size = self.wanted_size.filter(|_| !is_settled);
    }

    /// A search that was accepted just before steps became smaller gets its seats all the same.
    pub(super) fn make_room_for_beams(&mut self, params: &SamplingParams) {
        let SchedulerConfig { max_num_seqs, max_num_batched_tokens, .. } = self.config;
        if num_beams(params) > max_num_seqs {
            self.wanted_size = self.wanted_size.or(Some(WantedSize { max_num_seqs, max_num_batched_tokens }));
            self.config.max_num_seqs = num_beams(params);
            self.config.max_num_batched_tokens = max_num_batched_tokens.max(self.config.max_num_seqs);
        }
    }
}

/// 0: it searches nothing.
fn num_beams(params: &SamplingParams) -> usize {
    params.beam.as_ref().map_or(0, |beam| beam.width as usize)
}
