//! What of each running sequence goes into a step.

use super::{InFlight, Part, Scheduler};
use crate::engine::allocation::Grow;
use crate::engine::constraint::NextToken;
use crate::engine::plan::{FedTokens, PlannedSeq, PromptLogprobsPlan, SampleHistory, SamplePlan};
use crate::engine::sequence::Sequence;
use crate::engine::step_time::StepLoad;
use std::iter::once_with;
use std::sync::Arc;

impl Scheduler {
    /// Schedules all that running sequences have to compute, which is right for those with one token, and adds these up.
    pub(super) fn schedule_decodes(&mut self) -> StepLoad {
        let (mut decodes, mut has_beams) = (StepLoad::default(), false);
        for seq in self.running.iter_mut() {
            seq.scheduled = seq.remaining();
            add_decode(&mut decodes, seq);
            has_beams |= seq.is_beam();
        }
        if has_beams {
            self.hold_beams_back();
            decodes = StepLoad::default();
            self.running.iter().for_each(|seq| add_decode(&mut decodes, seq));
        }
        decodes
    }

    /// The batch of what is scheduled.
    pub(super) fn plan_batch(&mut self, batch: &mut Vec<PlannedSeq>) -> InFlight {
        let parts = Vec::with_capacity(self.running.len());
        let mut in_flight = InFlight { parts, load: StepLoad::default(), decides: false };
        batch.reserve(self.running.len());
        self.report.empty_slots = 0;
        for seq in self.running.iter_mut() {
            if seq.scheduled > 0 {
                in_flight.load.add(seq.scheduled, seq.num_planned());
                let hidden_rows = seq.hidden_rows(seq.planned_end()).len();
                let samples = plan_seq(seq, batch);
                in_flight.parts.push(Part { rank: seq.rank, num_tokens: seq.scheduled, hidden_rows, samples });
                in_flight.decides |= samples && seq.decides();
                seq.computing += std::mem::take(&mut seq.scheduled);
                seq.sampling += usize::from(samples);
            }
            let num_filled = seq.swap_in.as_ref().map_or(seq.num_planned(), |coming| coming.num_tokens);
            self.report.empty_slots += seq.table.len() * self.config.block_size - num_filled;
        }
        self.forecast.step_s = self.step_times.expect(&in_flight.load);
        in_flight
    }
}

fn add_decode(decodes: &mut StepLoad, seq: &Sequence) {
    if seq.scheduled == 1 {
        decodes.add(1, seq.num_planned());
    }
}

/// What a running sequence asks for in this step.
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

/// Adds a sequence's part to the batch; whether it samples.
fn plan_seq(seq: &mut Sequence, batch: &mut Vec<PlannedSeq>) -> bool {
    let samples = seq.samples();
    let guide = seq.guide.as_ref().filter(|_| samples);
    let next = |guide| NextToken::new(guide, seq.params.clone(), seq.output.share(), seq.room());
    seq.next = guide.map(next).map(Arc::new);
    let seq = &*seq;
    // Made in its place, what is rare or can fail after it: what is made elsewhere is moved.
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

/// Rows of this step that predict prompt tokens neither reported nor asked for.
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
