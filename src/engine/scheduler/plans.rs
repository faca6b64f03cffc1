//! The batch of a step, and the plans in flight.

use super::sequences::Sequences;
use crate::allocation::Grow;
use crate::plan::{FedTokens, PlannedSeq, PromptLogprobsPlan, SampleHistory, SamplePlan};
use crate::prefix_cache::{BlockHash, BlockHasher};
use crate::sequence::{Rank, Sequence};
use crate::step_time::StepLoad;
use pagetide_base::ids::BlockId;
use pagetide_base::rules::NextToken;
use serde::{Deserialize, Serialize};
use std::iter::once_with;
use std::sync::Arc;

/// A plan in flight: made, and without results yet.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct PlanInFlight {
    /// In order of rank.
    pub parts: Vec<PlannedPart>,
    pub load: StepLoad,
    /// It samples for a sequence that then [awaits the results](Sequence::awaits_results).
    pub decides: bool,
}

/// A sequence's part of a plan.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct PlannedPart {
    pub rank: Rank,
    pub num_tokens: usize,
    pub hidden_rows: usize,
    pub samples: bool,
}

impl Sequences {
    /// Makes the batch of what is scheduled. Returns also the slots in blocks of running sequences that hold no token
    /// even when all plans in flight are done.
    pub fn plan_batch(&mut self, block_size: usize, batch: &mut Vec<PlannedSeq>) -> (PlanInFlight, usize) {
        let parts = Vec::with_capacity(self.running.len());
        let mut in_flight = PlanInFlight { parts, ..PlanInFlight::default() };
        batch.reserve(self.running.len());
        let mut empty_slots = 0;
        for seq in self.running.iter_mut() {
            if seq.scheduled > 0 {
                in_flight.load.add(seq.scheduled, seq.num_planned());
                let hidden_rows = seq.hidden_rows(seq.planned_end()).len();
                let samples = plan_seq(seq, batch);
                in_flight.parts.push(PlannedPart { rank: seq.rank, num_tokens: seq.scheduled, hidden_rows, samples });
                in_flight.decides |= samples && seq.decides();
                seq.computing += std::mem::take(&mut seq.scheduled);
                seq.sampling += usize::from(samples);
            }
            let num_filled = seq.swap_in.as_ref().map_or(seq.num_planned(), |coming| coming.num_tokens);
            empty_slots += seq.table.len() * block_size - num_filled;
        }
        (in_flight, empty_slots)
    }
}

/// The blocks that a running sequence needs in this step, if any.
pub(super) fn grow(seq: &Sequence, block_size: usize) -> Option<Grow> {
    if seq.scheduled == 0 {
        return None;
    }
    let new_blocks = seq.missing_blocks(seq.planned_end(), block_size);
    let place = seq.tail_shared.then(|| seq.num_planned() / block_size);
    let writes_into = place.and_then(|place| Some((place, *seq.table.get(place)?)));
    (new_blocks > 0 || writes_into.is_some()).then(|| Grow {
        seq: seq.rank.seq,
        new_blocks,
        promised: new_blocks.min(seq.promised_blocks(block_size)),
        writes_into,
    })
}

/// Adds a sequence's part to the batch, and returns whether it samples.
fn plan_seq(seq: &mut Sequence, batch: &mut Vec<PlannedSeq>) -> bool {
    let samples = seq.samples();
    let guide = seq.guide.as_ref().filter(|_| samples);
    let next = |guide| NextToken::new(guide, seq.params.clone(), seq.output.share(), seq.room());
    seq.next = guide.map(next).map(Arc::new);
    let seq = &*seq;
    // The entry is built in place, because building it elsewhere would move it. Fields that are rare or can fail are
    // set after that.
    batch.extend(once_with(|| PlannedSeq {
        seq: seq.rank.seq,
        num_computed: seq.num_planned(),
        tokens: FedTokens::new(),
        pending: seq.feeds_pending(),
        table: seq.table.clone(),
        sample: seq.samples().then(|| SamplePlan {
            params: seq.params.clone(),
            position: (seq.output.len() + usize::from(seq.feeds_pending())) as u32,
            history: None,
            mu: seq.mu,
            first_sample: seq.sample,
            num_samples: seq.num_samples(),
            next: seq.next.clone(),
        }),
        prompt_logprobs: None,
        hidden_rows: seq.hidden_rows(seq.planned_end()),
    }));
    let planned = batch.last_mut().expect("it was just added");
    seq.feed(seq.num_planned()..seq.planned_end().min(seq.num_tokens()), &mut planned.tokens);
    if planned.pending {
        planned.tokens.push(0);
    }
    if let Some(sample) = planned.sample.as_mut().filter(|_| seq.has_penalties) {
        let (prompt, output) = (seq.prompt.clone(), seq.output.share());
        sample.history = Some(Box::new(SampleHistory { prompt, output }));
    }
    if !seq.started && seq.sample == 0 {
        planned.prompt_logprobs = prompt_logprobs(seq).map(Box::new);
    }
    samples
}

/// The rows of this step that predict prompt tokens whose log-probabilities were neither reported nor planned before.
fn prompt_logprobs(seq: &Sequence) -> Option<PromptLogprobsPlan> {
    let num_top = seq.params.prompt_logprobs?;
    let first = seq.prompt_logprobs.len().max(seq.num_planned());
    let last = seq.planned_end().min(seq.prompt.len() - 1);
    (first < last).then(|| PromptLogprobsPlan {
        first_row: first - seq.num_planned(),
        targets: seq.prompt[first + 1..=last].to_vec(),
        num_top,
    })
}

/// Publishes the blocks that have become full.
#[inline]
pub(super) fn publish(
    seq: &mut Sequence,
    hasher: &BlockHasher,
    block_size: usize,
    publish: &mut Vec<(BlockId, BlockHash)>,
) {
    if seq.num_computed < (seq.num_published + 1) * block_size {
        return;
    }
    let num_full = seq.num_computed / block_size;
    seq.extend_hashes(hasher, block_size, num_full);
    let new = seq.num_published..num_full;
    publish.extend(seq.table[new.clone()].iter().copied().zip(seq.hashes[new].iter().copied()));
    seq.num_published = num_full;
}
