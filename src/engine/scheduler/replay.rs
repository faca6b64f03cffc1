//! What the flight recorder needs: block hashes and results from a recording, in place of tokens, rules and searches
//! that it does not hold. See [`pagetide_recorder`].

use super::Scheduler;
use super::searches::SearchStep;
use crate::beam::BeamSearch;
use crate::prefix_cache::BlockHash;
use crate::sequence::Sequence;
use pagetide_base::ids::{RequestId, SeqId, TokenId};
use pagetide_base::rules::{Next, NextToken};
use pagetide_base::sampling::params::SamplingParams;
use std::collections::HashSet;
use std::sync::Arc;

/// What is known about the next results in addition to the model's output.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecordedResults {
    /// For sequences with rules: the forced tokens, or why the rules failed.
    pub rules: Vec<(SeqId, Result<Vec<TokenId>, String>)>,
    pub searches: Vec<SearchStep>,
}

impl Scheduler {
    /// Says before a commit what its rules and searches do: they are not asked then.
    pub fn use_recorded_results(&mut self, results: RecordedResults) {
        for (seq, forced) in &results.rules {
            // It may have ended since its step was planned.
            let Some(rank) = self.seqs.rank(*seq) else { continue };
            if let Some(seq) = self.seqs.running.get_mut(&rank) {
                let next = forced.clone().map(|forced| Next { forced, ..Next::default() });
                seq.next = Some(Arc::new(NextToken::known(next)));
            }
        }
        self.searches.recorded = results.searches;
    }

    /// Hashes all full blocks whose tokens are known. Returns the hashes that are new, for each sequence.
    pub fn name_blocks(&mut self) -> Vec<(SeqId, Vec<BlockHash>)> {
        self.seqs.hash_known_blocks(self.config.block_size)
    }

    /// Adds the hashes of a sequence's next blocks. Nothing happens where the sequence is not there.
    pub fn add_names(&mut self, seq: SeqId, names: &[BlockHash]) {
        if let Some(seq) = self.seqs.rank(seq).and_then(|rank| self.seqs.get_mut(rank)) {
            Arc::make_mut(&mut seq.hashes).extend_from_slice(names);
        }
    }

    /// The parameters of a sequence's request; `None` where the sequence is not there.
    pub fn params_of(&self, seq: SeqId) -> Option<&SamplingParams> {
        self.seqs.get(self.seqs.rank(seq)?).map(|seq| &*seq.params)
    }

    pub fn params_of_request(&self, request: RequestId) -> Option<&SamplingParams> {
        self.seqs.get(*self.seqs.of_request(request).first()?).map(|seq| &*seq.params)
    }

    /// The request of a sequence; `None` where the sequence is not there.
    pub fn request_of(&self, seq: SeqId) -> Option<RequestId> {
        self.seqs.rank(seq).map(|rank| rank.request)
    }

    /// Forgets the rules of outputs: they are code, with a state that the running engine goes on with.
    pub fn forget_rules(&mut self) {
        self.seqs.iter_mut().for_each(|seq| seq.forget_rules());
    }

    /// All sequences, to change what of them is written down.
    pub fn sequences_mut(&mut self) -> impl Iterator<Item = &mut Sequence> {
        self.seqs.iter_mut()
    }

    /// The beam searches that are open, likewise.
    pub fn searches_mut(&mut self) -> impl Iterator<Item = &mut BeamSearch> {
        self.searches.iter_mut()
    }

    /// Replaces the block hashes that the pools have not been told of yet.
    pub fn map_pending_hashes(&mut self, map: impl Fn(BlockHash) -> BlockHash) {
        self.device.pending.publish.iter_mut().for_each(|(_, hash)| *hash = map(*hash));
        self.tiers.pending.hashes_mut().for_each(|hash| *hash = map(*hash));
    }

    /// The approximate memory of its sequences in bytes.
    pub fn num_bytes(&self) -> usize {
        let mut counted = HashSet::new();
        self.seqs.iter().map(|seq| seq.num_bytes(&mut counted)).sum()
    }
}
