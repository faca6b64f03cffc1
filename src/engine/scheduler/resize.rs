//! Steps that become smaller while requests run: no sequence has to leave its seat for it, and no new one gets a seat
//! until steps are as small as they should be.

use super::SchedulerConfig;
use super::contracts::Contracts;
use super::sequences::Sequences;
use crate::sequence::Sequence;
use pagetide_base::sampling::params::SamplingParams;
use serde::{Deserialize, Serialize};

/// Where steps are still larger than was asked for.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct StepResize(Option<StepSize>);

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct StepSize {
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
}

impl StepResize {
    pub fn begin(&mut self, max_num_seqs: usize, max_num_batched_tokens: usize) {
        self.0 = Some(StepSize { max_num_seqs, max_num_batched_tokens });
    }

    /// Makes steps as small as they should be, as far as no sequence has to leave its seat for it.
    pub fn settle(&mut self, config: &mut SchedulerConfig, seqs: &Sequences, contracts: &Contracts) {
        let Some(StepSize { max_num_seqs, max_num_batched_tokens }) = self.0 else { return };
        let taken = seqs.running.iter().map(Sequence::seats).sum::<usize>() + contracts.num_reserved_seats(seqs);
        // Beams go on together or not at all.
        let widest = seqs.iter().filter(|seq| seq.is_beam()).map(|seq| num_beams(&seq.params)).max().unwrap_or(0);
        config.max_num_seqs = max_num_seqs.max(taken).max(widest);
        config.max_num_batched_tokens = max_num_batched_tokens.max(config.max_num_seqs);
        self.0 = self.0.filter(|_| config.max_num_seqs != max_num_seqs);
    }

    /// A search that was accepted before steps became smaller still gets its seats.
    pub fn make_room_for_beams(&mut self, params: &SamplingParams, config: &mut SchedulerConfig) {
        let SchedulerConfig { max_num_seqs, max_num_batched_tokens, .. } = *config;
        if num_beams(params) > max_num_seqs {
            self.0 = self.0.or(Some(StepSize { max_num_seqs, max_num_batched_tokens }));
            config.max_num_seqs = num_beams(params);
            config.max_num_batched_tokens = max_num_batched_tokens.max(config.max_num_seqs);
        }
    }
}

/// The number of beams. 0 if it is not a beam search.
fn num_beams(params: &SamplingParams) -> usize {
    params.beam.as_ref().map_or(0, |beam| beam.width as usize)
}
