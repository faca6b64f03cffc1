//! What a recording says in place of what it does not hold: tokens, the names they give, the rules and the searches that
//! choose them. See `crate::recorder`.

use super::Scheduler;
use crate::engine::beam::{Beam, BeamSearch, Continuation, Hypothesis};
use crate::engine::constraint::{Next, NextToken};
use crate::engine::prefix_cache::BlockHash;
use crate::ids::{RequestId, SeqId, TokenId};
use crate::sampling::params::{FinishReason, SamplingParams};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::sync::Arc;

/// What is known of the next results beside what the model said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Foretold {
    /// Of sequences with rules: the tokens that had to come whatever the model said, or why the rules failed.
    pub rules: Vec<(SeqId, Result<Vec<TokenId>, String>)>,
    pub searches: Vec<SearchStep>,
}

/// One step of a beam search.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SearchStep {
    pub request: RequestId,
    /// The beams of the next step, best first: each one's parent, by its place, and its token. None: it is over.
    pub beams: Vec<(usize, TokenId)>,
    /// Then: how many tokens each result has, and what ended it.
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

    /// The results, but for what they say.
    fn hypotheses(&self) -> Vec<Hypothesis> {
        let of_length = |&(len, reason)| Hypothesis { score: 0.0, output: vec![0; len], logprobs: Vec::new(), reason };
        self.results.iter().map(of_length).collect()
    }
}

impl Scheduler {
    /// Before a commit: what is not asked of rules and searches, but told.
    pub fn foretell(&mut self, told: Foretold) {
        for (seq, forced) in &told.rules {
            // It may have ended since its step was planned.
            let Some(rank) = self.ranks.get(seq) else { continue };
            if let Some(seq) = self.running.get_mut(rank) {
                let next = forced.clone().map(|forced| Next { forced, ..Next::default() });
                seq.next = Some(Arc::new(NextToken::told(next)));
            }
        }
        self.foretold = told;
    }

    /// What a search's step was, where that was told.
    pub(super) fn told_step(&mut self, request: RequestId, search: &mut BeamSearch) -> Option<Vec<Continuation>> {
        let told = self.foretold.searches.iter().find(|told| told.request == request)?;
        search.set_results(told.hypotheses());
        Some(told.continuations())
    }

    /// Names all full blocks whose tokens are known. Those that had no name, for each sequence.
    pub fn name_blocks(&mut self) -> Vec<(SeqId, Vec<BlockHash>)> {
        let block_size = self.config.block_size;
        let mut named = Vec::new();
        for seq in self.running.iter_mut().chain(self.waiting.iter_mut()) {
            let (before, num_full) = (seq.hashes.len(), seq.num_tokens() / block_size);
            if before < num_full {
                seq.extend_hashes(&self.hasher, block_size, num_full);
                named.push((seq.rank.seq, seq.hashes[before..].to_vec()));
            }
        }
        named
    }

    /// The names of a sequence's next blocks, from whoever knows. Nothing happens where it is not there.
    pub fn add_names(&mut self, seq: SeqId, names: &[BlockHash]) {
        let Some(rank) = self.ranks.get(&seq) else { return };
        if let Some(seq) = self.running.get_mut(rank).or_else(|| self.waiting.get_mut(rank)) {
            Arc::make_mut(&mut seq.hashes).extend_from_slice(names);
        }
    }

    /// What a sequence was asked for with; `None` where it is not there.
    pub fn params_of(&self, seq: SeqId) -> Option<&SamplingParams> {
        self.seq(*self.ranks.get(&seq)?).map(|seq| &*seq.params)
    }

    pub fn params_of_request(&self, request: RequestId) -> Option<&SamplingParams> {
        self.seq(*self.requests.get(&request)?.first()?).map(|seq| &*seq.params)
    }

    /// Whose a sequence is; `None` where it is not there.
    pub fn request_of(&self, seq: SeqId) -> Option<RequestId> {
        self.ranks.get(&seq).map(|rank| rank.request)
    }

    /// Forgets rules, which are code with a state that others go on with.
    pub fn forget_rules(&mut self) {
        self.running.iter_mut().chain(self.waiting.iter_mut()).for_each(|seq| seq.forget_rules());
    }

    /// Gives all content other names, and forgets tokens, unless they are to be kept, and everything that tells of them.
    /// What is decided from then on does not change, as long as results are foretold.
    pub fn redact(&mut self, keep_tokens: bool, rename: impl Fn(BlockHash) -> BlockHash + Copy) {
        for seq in self.running.iter_mut().chain(self.waiting.iter_mut()) {
            seq.redact(keep_tokens, rename);
        }
        for (_, search) in self.searches.iter_mut() {
            search.redact(keep_tokens);
        }
        self.pending.publish.iter_mut().for_each(|(_, name)| *name = rename(*name));
        self.pending_swap.rename(rename);
    }

    /// About how many bytes of memory its sequences take.
    pub fn num_bytes(&self) -> usize {
        let mut counted = HashSet::new();
        self.running.iter().chain(self.waiting.iter()).map(|seq| seq.num_bytes(&mut counted)).sum()
    }
}
