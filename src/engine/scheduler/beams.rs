//! Beam search in the scheduler (Kwon et al. 2023, section 4.4): beams are sequences that fork and are dropped.
//!
//! The beams of a request go on in lockstep: a step has all of them or none. Where one was preempted, the others keep
//! their blocks and wait for it. No other request waits for them: should it come to where only waiting beams run and
//! nothing can be admitted beside them, all of them give their blocks up ([`Scheduler::unblock`]).

use super::searches::SearchStep;
use super::{CommitReport, Scheduler};
use crate::beam::{Beam, Continuation, OpenBeam};
use crate::plan::Delivery;
use crate::sequence::{Rank, Sequence};
use pagetide_base::ids::{RequestId, TokenId};
use pagetide_base::sampling::params::{PositionLogprobs, Sampled};
use std::collections::BTreeMap;

impl Scheduler {
    /// Takes one step of a request's search: chooses the continuations of its beams.
    pub(super) fn advance_beams(
        &mut self,
        request: RequestId,
        next: &BTreeMap<Rank, PositionLogprobs>,
        report: &mut CommitReport,
    ) {
        let ranks = self.seqs.of_request(request).to_vec();
        let parents: Vec<Sequence> = ranks.iter().map(|rank| self.seqs.running[rank].clone()).collect();
        let Some(first) = parents.first() else { return };
        let room = (first.params.max_tokens as usize).min(self.config.max_model_len - first.prompt.len());
        let (n, cached_tokens) = (first.num_results, first.cached_tokens.unwrap_or(0));
        if first.output.is_empty() {
            report.deliveries.push((request, Delivery::Started { cached_tokens }));
        }
        let open: Vec<OpenBeam<'_>> = parents
            .iter()
            .map(|seq| OpenBeam { beam: &seq.beam, output: &seq.output, next: &next[&seq.rank] })
            .collect();
        let beams = self.searches.step(request, &first.params, room, &open);
        report.searches.push(SearchStep::of(request, &beams));
        let has_children = |place| beams.iter().any(|beam| beam.parent == place);
        // Beams that end leave their seats before others take them.
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

    /// The parent's sequence becomes its first child.
    fn continue_beam(&mut self, parent: &Sequence, child: &Continuation) {
        let block_size = self.config.block_size;
        let seq = self.seqs.running.get_mut(&parent.rank).expect("a parent runs until its children are made");
        (seq.forks, seq.started) = (0, true);
        seq.tail_shared = !seq.num_computed.is_multiple_of(block_size);
        seq.follow(child.token, child.beam.clone());
    }

    fn fork_beam(&mut self, parent: &Sequence, child: &Continuation) {
        let rank = Rank { seq: self.seqs.new_id(), ..parent.rank };
        let mut seq = parent.fork(rank.seq, parent.sample);
        seq.started = true;
        seq.tail_shared = !seq.num_computed.is_multiple_of(self.config.block_size);
        seq.follow(child.token, child.beam.clone());
        self.insert_fork(rank, Box::new(seq));
    }

    fn deliver_results(&mut self, request: RequestId, n: u32, report: &mut CommitReport) {
        let results = self.searches.end(request);
        if let Some(step) = report.searches.last_mut() {
            step.results = results.iter().map(|result| (result.output.len(), result.reason)).collect();
        }
        for (sample, result) in (0..n).zip(results) {
            let mut logprobs = result.logprobs.into_iter();
            for token in result.output {
                let sampled = Sampled { logprobs: logprobs.next().map(Box::new), ..Sampled::of(token) };
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
