//! The beam searches, and what a recording says of them.

use crate::beam::{Beam, BeamSearch, Continuation, Hypothesis, OpenBeam};
use pagetide_base::ids::{IdMap, RequestId, TokenId};
use pagetide_base::sampling::params::{FinishReason, SamplingParams};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The searches of requests whose beams have made a step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct BeamSearches {
    open: IdMap<RequestId, BeamSearch>,
    /// What the searches of the next commit do, where a recording says so.
    #[serde(skip)]
    pub recorded: Vec<SearchStep>,
}

impl BeamSearches {
    /// One step of a request's search: what its beams are followed by. A new search has `room` for so many tokens.
    pub fn step(
        &mut self,
        request: RequestId,
        params: &Arc<SamplingParams>,
        room: usize,
        beams: &[OpenBeam<'_>],
    ) -> Vec<Continuation> {
        let search = self.open.entry(request).or_insert_with(|| BeamSearch::new(params.clone(), room));
        match self.recorded.iter().find(|step| step.request == request) {
            Some(step) => {
                search.set_results(step.hypotheses());
                step.continuations()
            }
            None => search.step(beams),
        }
    }

    /// The results of a search that is over, best first.
    pub fn end(&mut self, request: RequestId) -> Vec<Hypothesis> {
        self.open.remove(&request).map(BeamSearch::results).unwrap_or_default()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut BeamSearch> {
        self.open.values_mut()
    }
}

/// One step of a beam search.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SearchStep {
    pub request: RequestId,
    /// The beams of the next step, best first: the index of each beam's parent, and its token. Empty if the search has
    /// ended.
    pub beams: Vec<(usize, TokenId)>,
    /// If the search has ended: the number of tokens of each result, and what ended it.
    pub results: Vec<(usize, FinishReason)>,
}

impl SearchStep {
    pub(super) fn of(request: RequestId, beams: &[Continuation]) -> Self {
        Self { request, beams: beams.iter().map(|beam| (beam.parent, beam.token)).collect(), results: Vec::new() }
    }

    /// The same, without scores.
    fn continuations(&self) -> Vec<Continuation> {
        self.beams.iter().map(|&(parent, token)| Continuation { parent, token, beam: Beam::default() }).collect()
    }

    /// The results without their tokens.
    fn hypotheses(&self) -> Vec<Hypothesis> {
        let of_length = |&(len, reason)| Hypothesis { score: 0.0, output: vec![0; len], logprobs: Vec::new(), reason };
        self.results.iter().map(of_length).collect()
    }
}
