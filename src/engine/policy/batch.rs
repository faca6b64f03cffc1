//! What of each running sequence goes into a step.

use super::{InFlight, Part, Scheduler};
use crate::engine::allocation::{Grow, Victim};
use crate::engine::constraint::NextToken;
use crate::engine::plan::{FedTokens, PlannedSeq, PromptLogprobsPlan, SampleHistory, SamplePlan};
use crate::engine::sequence::Sequence;
use crate::engine::step_time::StepLoad;
use std::sync::Arc;

impl Scheduler {
    /// Schedules all that running sequences have to compute, which is right for those with one token, and adds these up.
    pub(super) fn schedule_decodes(&mut self) -> StepLoad {
        let mut has_beams = false;
        for seq in self.running.iter_mut() {
            seq.scheduled = seq.remaining(self.config.max_model_len);
            has_beams |= seq.is_beam();
        }
        if has_beams {
            self.hold_beams_back();
        }
        let mut decodes = StepLoad::default();
        for seq in self.running.iter().filter(|seq| seq.scheduled == 1) {
            decodes.add(1, seq.num_planned());
        }
        decodes
    }

    /// The batch of what is scheduled.
    pub(super) fn plan_batch(&mut self, batch: &mut Vec<PlannedSeq>) -> InFlight {
        let mut in_flight = InFlight { parts: Vec::with_capacity(self.running.len()), load: StepLoad::default() };
        batch.reserve(self.running.len());
        self.empty_slots = 0;
        for seq in self.running.iter_mut() {
            if seq.scheduled > 0 {
                in_flight.load.add(seq.scheduled, seq.num_planned());
                let hidden_rows = seq.hidden_rows(seq.num_planned() + seq.scheduled).len();
                let samples = plan_seq(seq, self.config.max_model_len, batch);
                in_flight.parts.push(Part {
                    rank: seq.rank,
                    num_tokens: seq.scheduled,
                    hidden_rows,
                    samples,
                    decides: samples && seq.decides(),
                });
                seq.computing += std::mem::take(&mut seq.scheduled);
                seq.sampling += usize::from(samples);
            }
            self.empty_slots += seq.table.len() * self.config.block_size - seq.num_planned();
        }
        self.forecast.step_s = self.step_times.expect(&in_flight.load);
        in_flight
    }
}

/// What a running sequence asks for in this step, and the blocks promised to it that it does not hold yet.
pub(super) fn grow(seq: &Sequence, block_size: usize) -> (Option<Grow>, usize) {
    let promised = seq.promised_blocks(block_size);
    if seq.scheduled == 0 {
        return (None, promised);
    }
    let end = seq.num_planned() + seq.scheduled;
    let new_blocks = end.div_ceil(block_size).saturating_sub(seq.table.len());
    let place = seq.num_planned() / block_size;
    let writes_into = seq.table.get(place).filter(|_| seq.tail_shared).map(|block| (place, *block));
    let grow = (new_blocks > 0 || writes_into.is_some()).then(|| Grow {
        seq: seq.rank.seq,
        new_blocks,
        promised: new_blocks.min(promised),
        writes_into,
    });
    (grow, promised)
}

pub(super) fn victim(seq: &Sequence, block_size: usize) -> Victim {
    Victim { seq: seq.rank.seq, table: seq.table.clone(), promised: seq.promised_blocks(block_size) }
}

/// Adds a sequence's part to the batch; whether it samples.
fn plan_seq(seq: &mut Sequence, max_model_len: usize, batch: &mut Vec<PlannedSeq>) -> bool {
    let (first, end, num_known) = (seq.num_planned(), seq.num_planned() + seq.scheduled, seq.num_tokens());
    let samples = end >= num_known && seq.params.pooling.is_none();
    seq.next =
        seq.guide.as_ref().filter(|_| samples).map(|guide| {
            Arc::new(NextToken::new(guide, seq.params.clone(), seq.output.share(), seq.room(max_model_len)))
        });
    let sample = samples.then(|| SamplePlan {
        params: seq.params.clone(),
        position: (seq.output.len() + usize::from(end > num_known)) as u32,
        history: seq.params.has_penalties().then(|| {
            let (prompt, output) = (seq.prompt.clone(), seq.output.share());
            Box::new(SampleHistory { prompt, output })
        }),
        first_sample: seq.sample,
        num_samples: seq.num_samples(),
        next: seq.next.clone(),
    });
    batch.push(PlannedSeq {
        seq: seq.rank.seq,
        num_computed: first,
        tokens: FedTokens::new(),
        pending: end > num_known,
        table: seq.table.clone(),
        sample,
        prompt_logprobs: prompt_logprobs(seq, end),
        hidden_rows: seq.hidden_rows(end),
    });
    // In their place: what is made elsewhere is moved.
    let tokens = &mut batch.last_mut().expect("it was just pushed").tokens;
    seq.feed(first..end.min(num_known), tokens);
    if end > num_known {
        tokens.push(0);
    }
    samples
}

/// Rows of this step that predict prompt tokens neither reported nor asked for.
fn prompt_logprobs(seq: &Sequence, end: usize) -> Option<PromptLogprobsPlan> {
    let num_top = seq.params.prompt_logprobs.filter(|_| seq.sample == 0 && !seq.started)?;
    let first = seq.prompt_logprobs.len().max(seq.num_planned());
    let last = end.min(seq.prompt.len() - 1);
    (first < last).then(|| PromptLogprobsPlan {
        first_row: first - seq.num_planned(),
        targets: seq.prompt[first + 1..=last].to_vec(),
        num_top,
    })
}
