//! Beam search in the scheduler (Kwon et al. 2023, section 4.4): beams are sequences that fork and are dropped.
//!
//! The beams of a request go on in lockstep: a step has all of them or none. Where one has yielded, the others keep
//! their blocks and wait for it. Nothing else waits for them: should it come to where only waiting beams run and nobody
//! can be admitted beside them, all of them give their blocks up (`unblock`).

use super::{CommitReport, Scheduler, SearchStep};
use crate::engine::beam::{Beam, BeamSearch, Continuation, Open};
use crate::engine::plan::Delivery;
use crate::engine::sequence::{Rank, Sequence};
use crate::ids::{RequestId, SeqId, TokenId};
use crate::sampling::params::{PositionLogprobs, Sampled};
use std::collections::BTreeMap;

impl Scheduler {
    /// Beams of which not all are there yet do not compute their last token in this step.
    pub(super) fn hold_beams_back(&mut self) {
        let held = self.running.iter().filter(|seq| self.holds_back(seq)).map(|seq| seq.rank);
        for rank in held.collect::<Vec<_>>() {
            let seq = self.running.get_mut(&rank).expect("it runs");
            seq.scheduled = seq.scheduled.saturating_sub(1); // none where its KV has yet to come
        }
    }

    fn holds_back(&self, seq: &Sequence) -> bool {
        seq.is_beam() && {
            let ranks = &self.requests[&seq.rank.request];
            let is_there = |rank: &Rank| self.running.get(rank).is_some_and(|beam| beam.remaining() == 1);
            ranks.len() > 1 && !ranks.iter().all(is_there)
        }
    }

    /// The beams whose others have just yielded wait for them.
    pub(super) fn hold_back_others(&mut self, preempted: &[SeqId]) {
        for seq in preempted {
            let Some(ranks) = self.requests.get(&self.ranks[seq].request) else { continue };
            for rank in ranks {
                if let Some(beam) = self.running.get_mut(rank).filter(|seq| seq.is_beam()) {
                    let most = beam.num_tokens() - 1 - beam.num_planned();
                    beam.scheduled = beam.scheduled.min(most);
                }
            }
        }
    }

    /// Where everything that runs is a beam that waits for another, and nothing was admitted: all give their blocks up,
    /// and who comes first starts over. Most of their content stays cached.
    pub(super) fn unblock(&mut self) {
        for mut seq in self.running.take() {
            self.pending.release.push(seq.preempt(None));
            self.give_backing_up(&mut seq);
            self.report.stats.preempted_recompute += 1;
            self.pause(&mut seq);
            self.waiting.insert(seq);
        }
    }

    /// One step of a request's search: what its beams are followed by.
    pub(super) fn advance_beams(
        &mut self,
        request: RequestId,
        next: &BTreeMap<Rank, PositionLogprobs>,
        report: &mut CommitReport,
    ) {
        let ranks = self.requests[&request].clone();
        let parents: Vec<Sequence> = ranks.iter().map(|rank| self.running[rank].clone()).collect();
        let Some(first) = parents.first() else { return };
        let room = (first.params.max_tokens as usize).min(self.config.max_model_len - first.prompt.len());
        let (n, cached_tokens) = (first.num_results, first.cached_tokens.unwrap_or(0));
        let mut search = self.searches.remove(&request).unwrap_or_else(|| BeamSearch::new(first.params.clone(), room));
        if first.output.is_empty() {
            report.deliveries.push((request, Delivery::Started { cached_tokens }));
        }
        let open: Vec<Open<'_>> =
            parents.iter().map(|seq| Open { beam: &seq.beam, output: &seq.output, next: &next[&seq.rank] }).collect();
        let beams = match self.told_step(request, &mut search) {
            Some(told) => told,
            None => search.step(&open),
        };
        self.searches.insert(request, search);
        report.searches.push(SearchStep::of(request, &beams));
        let has_children = |place| beams.iter().any(|beam| beam.parent == place);
        // Who ends first leaves its seat.
        for (_, parent) in parents.iter().enumerate().filter(|(place, _)| !has_children(*place)) {
            self.drop_seq(parent.rank);
        }
        for (place, parent) in parents.iter().enumerate() {
            let mut children = beams.iter().filter(|beam| beam.parent == place);
            if let Some(first) = children.next() {
                self.continue_beam(parent, first);
                children.for_each(|beam| self.fork_beam(parent, beam));
            }
        }
        if beams.is_empty() {
            self.deliver_results(request, n, report);
        }
    }

    /// The parent itself goes on as its first child.
    fn continue_beam(&mut self, parent: &Sequence, child: &Continuation) {
        let block_size = self.config.block_size;
        let seq = self.running.get_mut(&parent.rank).expect("a parent runs until its children are made");
        (seq.forks, seq.started) = (0, true);
        seq.tail_shared = !seq.num_computed.is_multiple_of(block_size);
        seq.follow(child.token, child.beam.clone());
    }

    fn fork_beam(&mut self, parent: &Sequence, child: &Continuation) {
        let rank = Rank { seq: self.new_seq_id(), ..parent.rank };
        let mut seq = parent.fork(rank.seq, parent.sample);
        seq.started = true;
        seq.tail_shared = !seq.num_computed.is_multiple_of(self.config.block_size);
        seq.follow(child.token, child.beam.clone());
        self.insert_fork(rank, Box::new(seq));
    }

    fn deliver_results(&mut self, request: RequestId, n: u32, report: &mut CommitReport) {
        let results = self.searches.remove(&request).map(BeamSearch::results).unwrap_or_default();
        if let Some(step) = report.searches.last_mut() {
            step.results = results.iter().map(|result| (result.output.len(), result.reason)).collect();
        }
        for (sample, result) in (0..n).zip(results) {
            let mut logprobs = result.logprobs.into_iter();
            for token in result.output {
                let sampled = Sampled { token, logprobs: logprobs.next().map(Box::new) };
                report.deliveries.push((request, Delivery::Token { sample, sampled }));
            }
            report.deliveries.push((request, Delivery::Finished { sample, reason: result.reason }));
        }
        self.note_end(request, report);
    }
}

impl Sequence {
    fn follow(&mut self, token: TokenId, beam: Beam) {
        self.output.push(token);
        self.beam = beam;
    }
}
