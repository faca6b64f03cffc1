//! Requests that arrive, and requests that are cancelled.

use super::{EngineRequest, Scheduler, SchedulingPolicy};
use crate::prefix_cache::BlockHash;
use crate::sequence::{Rank, SeqState, Sequence};
use pagetide_base::ids::RequestId;
use std::sync::Arc;

impl Scheduler {
    pub fn arrive(&mut self, arrival: EngineRequest) {
        self.arrive_named(arrival, Vec::new());
    }

    /// The same for a prompt whose leading full blocks have these hashes, which then need not be computed. Later blocks
    /// are hashed as usual.
    pub fn arrive_named(&mut self, arrival: EngineRequest, names: Vec<BlockHash>) {
        assert!(
            names.len() <= arrival.prompt.len() / self.config.block_size,
            "only full blocks of a prompt have names"
        );
        let priority = match self.config.policy {
            SchedulingPolicy::Fcfs => 0,
            SchedulingPolicy::Priority => arrival.priority,
        };
        let rank = Rank { priority, request: arrival.id, seq: self.seqs.new_id() };
        let salt = match (self.config.prefix_caching, &arrival.cache_salt) {
            (true, None) => Vec::new(),
            (true, Some(salt)) => salt.clone().into_bytes(),
            (false, _) => arrival.id.0.to_le_bytes().to_vec(),
        };
        self.resize.make_room_for_beams(&arrival.params, &mut self.config);
        let tenant = arrival.tenant;
        let mut seq = Sequence::new(rank, arrival, self.config.max_model_len, &self.seqs.hasher, &salt);
        seq.hashes = Arc::new(names);
        self.seqs.register(rank);
        self.admission.arrive(rank, tenant, &self.seqs, self.config.key_turns);
        self.seqs.waiting.insert(Box::new(seq));
    }

    /// Drops a request, whatever its state. An unknown request is ignored.
    pub fn cancel(&mut self, request: RequestId) {
        for rank in self.seqs.of_request(request) {
            if let Some(seq) = self.seqs.get(*rank) {
                self.estimates.observe_length(seq, false);
            }
        }
        self.drop_request(request);
    }

    pub(super) fn drop_request(&mut self, request: RequestId) {
        self.searches.end(request);
        for rank in self.seqs.of_request(request).to_vec() {
            self.drop_seq(rank);
        }
    }

    /// Drops one sample of a request.
    pub fn stop_sample(&mut self, request: RequestId, sample: u32) {
        let is_it = |seq: &&Sequence| seq.sample == sample && seq.forks == 0 && !seq.is_beam();
        let mut seqs = self.seqs.of_request(request).iter().filter_map(|rank| self.seqs.get(*rank));
        if let Some(rank) = seqs.find(is_it).map(|seq| seq.rank) {
            let seq = self.drop_seq(rank);
            self.estimates.observe_length(&seq, false);
        }
    }

    /// Forgets a sequence. Its blocks are released with the next demands.
    pub(super) fn drop_seq(&mut self, rank: Rank) -> Box<Sequence> {
        let mut seq = self.seqs.remove(rank);
        self.admission.end_refusal();
        self.contracts.resume(&rank);
        self.tiers.release_backing(&mut seq);
        if let Some(coming) = seq.swap_in.take() {
            self.tiers.end_swap_in(coming.id);
            self.tiers.pending.release.push(coming.from);
        }
        match std::mem::replace(&mut seq.state, SeqState::Waiting) {
            SeqState::Running => self.device.pending.release.push(std::mem::take(&mut seq.table)),
            SeqState::Swapped(blocks) => self.tiers.pending.release.push(blocks),
            SeqState::Waiting => {}
        }
        if !self.seqs.has_request(rank.request) {
            self.ledger.end(rank.request);
            self.contracts.end(rank.request);
        }
        seq
    }
}
