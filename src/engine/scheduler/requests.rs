//! Requests that come, and that go before they have ended.

use super::{Arrival, Scheduler, SchedulingPolicy};
use crate::engine::bill::Tenant;
use crate::engine::prefix_cache::BlockHash;
use crate::engine::sequence::{Rank, SeqState, Sequence};
use crate::ids::{RequestId, SeqId};
use std::sync::Arc;

impl Scheduler {
    pub fn arrive(&mut self, arrival: Arrival) {
        self.arrive_named(arrival, Vec::new());
    }

    /// The same, of a prompt whose leading full blocks have these names: nobody has to compute them, or look at its
    /// tokens. Blocks behind them get names as ever.
    pub fn arrive_named(&mut self, arrival: Arrival, names: Vec<BlockHash>) {
        assert!(
            names.len() <= arrival.prompt.len() / self.config.block_size,
            "only full blocks of a prompt have names"
        );
        let priority = match self.config.policy {
            SchedulingPolicy::Fcfs => 0,
            SchedulingPolicy::Priority => arrival.priority,
        };
        let rank = Rank { priority, request: arrival.id, seq: self.new_seq_id() };
        let salt = match (self.config.prefix_caching, &arrival.cache_salt) {
            (true, None) => Vec::new(),
            (true, Some(salt)) => salt.clone().into_bytes(),
            (false, _) => arrival.id.0.to_le_bytes().to_vec(),
        };
        self.make_room_for_beams(&arrival.params);
        self.requests.insert(arrival.id, vec![rank]);
        let tenant = arrival.tenant;
        let mut seq = Sequence::new(rank, arrival, self.config.max_model_len, &self.hasher, &salt);
        seq.hashes = Arc::new(names);
        self.ranks.insert(rank.seq, rank);
        self.refusal =
            self.refusal.filter(|refusal| refusal.first < rank && !self.may_have_turn(tenant, refusal.first));
        self.waiting.insert(Box::new(seq));
    }

    /// Whether a tenant, of whom somebody comes, could now go before `first`, who asked and was refused.
    fn may_have_turn(&self, tenant: Tenant, first: Rank) -> bool {
        let is_others = self.waiting.get(&first).is_none_or(|first| first.tenant != tenant);
        self.config.key_turns && is_others && !self.waiting.tenants().any(|waiting| waiting == tenant)
    }

    pub(super) fn new_seq_id(&mut self) -> SeqId {
        self.next_seq += 1;
        SeqId(self.next_seq)
    }

    /// Drops a request, wherever it is. Nothing happens where it is not there (any more).
    pub fn cancel(&mut self, request: RequestId) {
        for rank in self.requests.get(&request).cloned().unwrap_or_default() {
            self.learn_length(rank, false);
        }
        self.drop_request(request);
    }

    pub(super) fn drop_request(&mut self, request: RequestId) {
        self.searches.remove(&request);
        for rank in self.requests.get(&request).cloned().unwrap_or_default() {
            self.drop_seq(rank);
        }
    }

    /// Drops one sample of a request.
    pub fn stop_sample(&mut self, request: RequestId, sample: u32) {
        let ranks = self.requests.get(&request).cloned().unwrap_or_default();
        let is_it = |seq: &Sequence| seq.sample == sample && seq.forks == 0 && !seq.is_beam();
        let is_it = |rank: &Rank| self.seq(*rank).is_some_and(is_it);
        if let Some(rank) = ranks.into_iter().find(is_it) {
            self.learn_length(rank, false);
            self.drop_seq(rank);
        }
    }

    pub(super) fn seq(&self, rank: Rank) -> Option<&Sequence> {
        self.running.get(&rank).or_else(|| self.waiting.get(&rank))
    }

    /// Forgets a sequence; its blocks are released with the next demands.
    pub(super) fn drop_seq(&mut self, rank: Rank) {
        let seq = self.running.remove(&rank).or_else(|| self.waiting.remove(&rank));
        let mut seq = seq.expect("a request's ranks are those of its living sequences");
        self.refusal = None;
        self.limited.remove(&rank);
        self.give_backing_up(&mut seq);
        if let Some(coming) = seq.swap_in.take() {
            self.swap_ins.remove(&coming.id);
            self.pending_swap.release.push(coming.from);
        }
        match seq.state {
            SeqState::Running => self.pending.release.push(seq.table),
            SeqState::Swapped(blocks) => {
                self.num_swapped -= 1;
                self.pending_swap.release.push(blocks);
            }
            SeqState::Waiting => {}
        }
        self.ranks.remove(&rank.seq);
        if let Some(ranks) = self.requests.get_mut(&rank.request) {
            ranks.retain(|other| *other != rank);
            if ranks.is_empty() {
                self.requests.remove(&rank.request);
                self.bills.remove(&rank.request);
                self.reserved.remove(&rank.request);
            }
        }
    }
}
