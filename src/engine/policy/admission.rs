//! Who comes in: new requests, and those that had yielded.

use super::Scheduler;
use super::commit::publish;
use super::running::Running;
use crate::engine::allocation::{Admit, Demand};
use crate::engine::plan::StepPlan;
use crate::engine::policy::Admission;
use crate::engine::sequence::{Rank, SeqState, Sequence};
use crate::ids::{BlockId, IdMap, RequestId};
use crate::sampling::params::Pooling;
use std::sync::Arc;

impl Scheduler {
    /// The head of the queue, as long as it might fit.
    pub(super) fn candidates(&mut self, demand: &Demand) -> Vec<Admit> {
        let released: usize = demand.release.iter().map(|table| table.len()).sum();
        let mut room = self.available + released;
        let most = demand.seats.min(demand.token_budget);
        let block_size = self.config.block_size;
        let mut admit = Vec::new();
        let mut holdings = self.device_holdings();
        for seq in self.waiting.values_mut() {
            if admit.len() == most {
                break;
            }
            // Who has run before may come back: where beams wait for it, they hold blocks too.
            let is_new = seq.cached_tokens.is_none();
            if is_new && !holdings.take(seq.tenant, seq.num_tokens().div_ceil(block_size)) {
                continue;
            }
            // The prompt of a search comes in like any other.
            let is_one_of_many = seq.is_beam() && self.requests[&seq.rank.request].len() > 1;
            if is_one_of_many && !may_join(seq, &self.running, &self.requests, block_size) {
                break;
            }
            let (num_tokens, num_swapped) = match &seq.state {
                SeqState::Swapped(_) => (seq.num_tokens(), seq.num_computed),
                _ => (seq.num_tokens(), 0),
            };
            let mut usable_hashes = (num_tokens - 1) / block_size;
            if seq.params.prompt_logprobs.is_some() && seq.sample == 0 {
                // The logits of every prompt token are wanted once.
                let missing = seq.prompt_logprobs.len() + 1 < seq.prompt.len();
                usable_hashes = if missing { seq.prompt_logprobs.len() / block_size } else { usable_hashes };
            }
            if seq.params.pooling == Some(Pooling::Mean) {
                // So are the states of every token.
                usable_hashes = usable_hashes.min(seq.pooled.num_rows / block_size);
            }
            seq.extend_hashes(&self.hasher, block_size, usable_hashes);
            let blocks = num_tokens.div_ceil(block_size);
            admit.push(Admit {
                seq: seq.rank.seq,
                hashes: seq.hashes.clone(),
                usable_hashes,
                num_tokens,
                num_swapped,
                seats: seq.seats().min(self.config.max_num_seqs),
                // The last token of a beam waits for the other beams.
                num_held_back: usize::from(is_one_of_many),
            });
            if blocks > room {
                break; // only cached blocks could make it fit: ask for this one, and no further
            }
            room -= blocks;
            if is_one_of_many {
                break;
            }
        }
        admit
    }

    /// Takes up a sequence with the blocks that it was given.
    pub(super) fn admit(
        &mut self,
        seq: &mut Sequence,
        cached: Vec<BlockId>,
        blocks: Vec<BlockId>,
        scheduled: usize,
        plan: &mut StepPlan,
    ) {
        let num_cached = cached.len();
        let cached_tokens = num_cached * self.config.block_size;
        let mut table = cached;
        table.extend(blocks);
        match std::mem::replace(&mut seq.state, SeqState::Running) {
            SeqState::Swapped(swapped) => {
                let pairs = swapped.iter().copied().zip(table.iter().copied()).skip(num_cached);
                let num_copied = swapped.len().saturating_sub(num_cached);
                self.stats.blocks_in += num_copied;
                self.bill(seq.rank.request).swapped_in_blocks += num_copied;
                plan.swap_in.extend(pairs);
                seq.num_computed = seq.num_computed.max(cached_tokens);
                self.num_swapped -= 1;
                self.pending_swap.push(swapped);
            }
            _ => seq.num_computed = cached_tokens,
        }
        if seq.cached_tokens.is_none() {
            let (request, prompt_tokens) = (seq.rank.request, seq.prompt.len());
            self.admissions.push(Admission { request, prompt_tokens, cached_tokens });
            seq.cached_tokens = Some(cached_tokens);
            seq.high_water = cached_tokens;
            if cached_tokens > 0 {
                self.bill(request).cached_device_tokens += cached_tokens;
            }
        }
        self.resume(seq);
        seq.admitted_tokens = seq.num_tokens();
        seq.table = Arc::new(table);
        seq.num_published = num_cached;
        // What was copied in can be shared at once: no plan reads it before this one has been carried out.
        publish(seq, &self.hasher, self.config.block_size, &mut self.pending.publish);
        seq.scheduled = scheduled;
    }
}

/// Whether a waiting beam can be admitted: one after the other, so that each finds the blocks that it shares with those
/// before it under their names. Otherwise beams that have yielded could need more memory than they had.
fn may_join(seq: &Sequence, running: &Running, requests: &IdMap<RequestId, Vec<Rank>>, block_size: usize) -> bool {
    let mut others = requests[&seq.rank.request].iter().filter_map(|rank| running.get(rank));
    let is_complete = |beam: &Sequence| {
        beam.num_computed + 1 == beam.num_tokens() && beam.num_published == beam.num_computed / block_size
    };
    others.all(is_complete)
}
