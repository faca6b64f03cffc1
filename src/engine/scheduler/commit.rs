//! The second half of a step: takes in its results or its failure.

use super::plans::{PlanInFlight, publish};
use super::{CommitReport, Scheduler};
use crate::plan::{Deliveries, Delivery, SeqOutput, StepOutput};
use crate::sequence::{Rank, Sequence};
use pagetide_base::ids::{RequestId, TokenId};
use pagetide_base::rules::NextToken;
use pagetide_base::sampling::params::{FinishReason, PositionLogprobs, Sampled};
use std::collections::BTreeMap;
use std::iter::once_with;

impl Scheduler {
    /// Takes the results of the oldest plan in flight.
    pub fn commit(&mut self, output: StepOutput) -> CommitReport {
        let PlanInFlight { parts, load, decides: _ } = self.in_flight.pop_front().expect("a plan is in flight");
        self.estimates.observe_step(&load, output.timing.forward_s + output.timing.sample_s);
        self.copied(&output.copies);
        let mut report = CommitReport { deliveries: Vec::with_capacity(parts.len()), ..CommitReport::default() };
        self.ledger.deliver(&mut report.deliveries);
        let mut beams = BTreeMap::new();
        let mut outputs = output.seqs.into_iter();
        // Parts and running sequences are both in order of rank.
        let mut next = 0;
        for part in &parts {
            let has_output = outputs.as_slice().first().is_some_and(|output| output.seq == part.rank.seq);
            let output = if has_output { outputs.next() } else { None };
            // The sequence may have ended since the plan was made: by cancellation, or by a token that was pending
            // then.
            let Some(place) = self.seqs.running.place(next, &part.rank) else { continue };
            let num_running = self.seqs.running.len();
            let seq = self.seqs.running.at(place);
            let before = seq.num_computed;
            seq.num_computed += part.num_tokens;
            seq.computing -= part.num_tokens;
            seq.sampling -= usize::from(part.samples);
            let recomputed = seq.high_water.min(seq.num_computed).saturating_sub(before);
            if !seq.started && seq.num_computed > seq.high_water {
                report.prefilled.push((part.rank.request, seq.num_computed));
            }
            seq.high_water = seq.high_water.max(seq.num_computed);
            publish(seq, &self.seqs.hasher, self.config.block_size, &mut self.device.pending.publish);
            let is_embedding = seq.pooling.is_some();
            if recomputed > 0 {
                report.recomputed_tokens += recomputed;
                self.ledger.bill(part.rank.request).recomputed_tokens += recomputed;
                self.ledger.deliver(&mut report.deliveries);
            }
            match output {
                Some(output) if is_embedding => self.take_hidden(place, &output, part.hidden_rows, &mut report),
                Some(output) => self.take_output(place, output, &mut beams, &mut report),
                None => {}
            }
            // If it ended, the next sequence is now at its index. If it forked, the next one comes after its forks.
            next = (place + 1 + self.seqs.running.len()).saturating_sub(num_running);
        }
        assert!(outputs.next().is_none(), "results come in the order of the plan");
        for (request, next) in beams {
            self.advance_beams(request, &next, &mut report);
        }
        self.searches.recorded.clear();
        report
    }

    /// Takes in the hidden states of some tokens. The last of them completes the embedding.
    fn take_hidden(&mut self, place: usize, output: &SeqOutput, num_rows: usize, report: &mut CommitReport) {
        let seq = self.seqs.running.at(place);
        seq.pooled.add(&output.hidden, num_rows);
        if seq.num_computed == seq.num_tokens() {
            let (rank, cached_tokens) = (seq.rank, seq.cached_tokens.unwrap_or(0));
            let request = rank.request;
            report.deliveries.push((request, Delivery::Started { cached_tokens }));
            report.deliveries.push((request, Delivery::Embedding(seq.pooled.mean())));
            report.deliveries.push((request, Delivery::Finished { sample: 0, reason: FinishReason::Eos }));
            self.drop_seq(rank);
            self.note_end(request, report);
        }
    }

    /// `beams` collects the candidates of a request's beams until all of them have reported.
    fn take_output(
        &mut self,
        place: usize,
        output: SeqOutput,
        beams: &mut BTreeMap<RequestId, BTreeMap<Rank, PositionLogprobs>>,
        report: &mut CommitReport,
    ) {
        let deliveries = &mut report.deliveries;
        let seq = self.seqs.running.at(place);
        let rank = seq.rank;
        if !output.prompt_logprobs.is_empty() {
            seq.prompt_logprobs.extend(output.prompt_logprobs);
        }
        let mut sampled = output.sampled.into_iter();
        let Some(first) = sampled.next() else { return };
        let others = sampled.as_slice();
        if seq.is_beam() {
            let next = first.logprobs.expect("a search asks for log-probabilities");
            beams.entry(rank.request).or_default().insert(rank, *next);
            return;
        }
        let next = seq.next.take();
        let forced = match next.as_deref().map(NextToken::get) {
            None => &[][..],
            Some(Ok(next)) => &next.forced,
            Some(Err(message)) => {
                deliveries.push((rank.request, Delivery::Failed { message: message.clone() }));
                return self.cancel(rank.request);
            }
        };
        let mut tell = |delivery| deliveries.push((rank.request, delivery));
        if !std::mem::replace(&mut seq.started, true) {
            tell(Delivery::Started { cached_tokens: seq.cached_tokens.unwrap_or(0) });
            if seq.params.prompt_logprobs.is_some() {
                tell(Delivery::PromptLogprobs(std::mem::take(&mut seq.prompt_logprobs)));
            }
        }
        let parent = (!others.is_empty()).then(|| {
            seq.forks = 0;
            seq.tail_shared = !seq.num_computed.is_multiple_of(self.config.block_size);
            seq.clone()
        });
        let end = push(seq, first, forced, deliveries);
        if let Some(reason) = end {
            let seq = self.drop_seq(rank);
            self.estimates.observe_length(&seq, reason == FinishReason::Length);
        }
        if let Some(parent) = parent {
            self.fork(&parent, others, forced, deliveries);
        }
        if end.is_some() {
            self.note_end(rank.request, report);
        }
    }

    /// A sample has finished: perhaps it was the last of its request.
    pub(super) fn note_end(&self, request: RequestId, report: &mut CommitReport) {
        if !self.has_request(request) {
            report.ended.push(request);
        }
    }

    /// Makes the other samples of a request when its prompt has been computed.
    fn fork(&mut self, parent: &Sequence, samples: &[Sampled], forced: &[TokenId], deliveries: &mut Deliveries) {
        for (sampled, sample) in samples.iter().zip(parent.sample + 1..) {
            let rank = Rank { seq: self.seqs.new_id(), ..parent.rank };
            let mut seq = parent.fork(rank.seq, sample);
            if push(&mut seq, sampled.clone(), forced, deliveries).is_none() {
                self.insert_fork(rank, Box::new(seq));
            }
        }
    }

    /// Adds a running sequence that shares its parent's blocks.
    pub(super) fn insert_fork(&mut self, rank: Rank, mut seq: Box<Sequence>) {
        self.seqs.register(rank);
        if self.seqs.running.len() < self.config.max_num_seqs {
            self.device.pending.forks.push(seq.table.clone());
            self.seqs.running.insert(seq);
        } else {
            seq.preempt(None);
            self.seqs.waiting.insert(seq);
        }
    }
}

/// Appends the sampled token, or all forced tokens. `Some` if the sequence has ended.
fn push(seq: &mut Sequence, sampled: Sampled, forced: &[TokenId], deliveries: &mut Deliveries) -> Option<FinishReason> {
    if forced.is_empty() {
        seq.mu = sampled.mu;
        return push_one(seq, sampled, deliveries);
    }
    let mut forced = forced.iter().map(|token| Sampled::of(*token));
    forced.find_map(|sampled| push_one(seq, sampled, deliveries))
}

#[inline]
fn push_one(seq: &mut Sequence, sampled: Sampled, deliveries: &mut Deliveries) -> Option<FinishReason> {
    let (request, sample) = (seq.rank.request, seq.sample);
    let reason = seq.push(sampled.token);
    // Built in place, because building it elsewhere would move it.
    deliveries.extend(once_with(|| (request, Delivery::Token { sample, sampled })));
    deliveries.extend(reason.map(|reason| (request, Delivery::Finished { sample, reason })));
    reason
}
