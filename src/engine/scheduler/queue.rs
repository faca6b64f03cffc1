//! How admission goes: which sequences ask, whether they were refused, and why sequences wait.

use super::SchedulerConfig;
use super::sequences::Sequences;
use super::wait_reason::{KeptWaiting, WaitReason};
use crate::allocation::{Admit, Grant, Lack};
use crate::bill::Tenant;
use crate::prefix_cache::BlockHasher;
use crate::sequence::{Rank, SeqState, Sequence};
use pagetide_base::sampling::params::Pooling;
use serde::{Deserialize, Serialize};

/// No sequence was admitted. So none need ask again for some steps, unless something is given back, or a sequence comes
/// that goes before.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct AdmissionRefusal {
    /// The sequence that asked first.
    first: Rank,
    steps_left: u32,
}

/// Steps after which refused sequences ask again. A step by itself may change what the caches hold and what is
/// expected.
pub(super) const REFUSED_STEPS: u32 = 8;

/// See [`AdmissionQueue::num_asked`].
const MIN_ASKED: usize = 32;

/// How admission went in the last steps.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct AdmissionQueue {
    /// The first sequence to ask for admission in the step being planned.
    asks: Option<Rank>,
    /// How many sequences were admitted when sequences last asked.
    num_admitted: usize,
    refusal: Option<AdmissionRefusal>,
    pub waits: KeptWaiting,
}

impl AdmissionQueue {
    /// Whether it is known that no sequence can be admitted in this step.
    pub fn is_refused(&mut self) -> bool {
        let Some(refusal) = &mut self.refusal else { return false };
        refusal.steps_left -= 1;
        if refusal.steps_left == 0 {
            self.refusal = None;
        }
        true
    }

    /// Something was given back, or may be had on other terms: sequences may ask again.
    pub fn end_refusal(&mut self) {
        self.refusal = None;
    }

    /// A sequence has come. Sequences may ask again where it goes before the one that was refused.
    pub fn arrive(&mut self, rank: Rank, tenant: Tenant, seqs: &Sequences, key_turns: bool) {
        // Whether its tenant could now go before the first, which was refused.
        let may_have_turn = |first: &Rank| {
            let is_others = seqs.waiting.get(first).is_none_or(|first| first.tenant != tenant);
            key_turns && is_others && !seqs.waiting.tenants().any(|waiting| waiting == tenant)
        };
        self.refusal = self.refusal.filter(|refusal| refusal.first < rank && !may_have_turn(&refusal.first));
    }

    /// These ask in the step being planned.
    pub fn ask(&mut self, admit: &[Admit], seqs: &Sequences) {
        self.asks = admit.first().map(|first| seqs.rank_of(first.seq));
    }

    /// Takes the device pool's answer. True where all that asked were refused for the first time.
    pub fn answer(&mut self, grant: &Grant, seqs: &Sequences) -> bool {
        let has_changed = grant.changes_who_runs();
        if self.asks.is_some() {
            self.num_admitted = grant.admitted.len();
        }
        let lack = |(seq, lack): &(_, Lack)| (seqs.rank_of(*seq), WaitReason::Lack(*lack));
        if let Some(refused) = &grant.refused {
            self.waits.first = Some(lack(refused));
        }
        self.waits.late = grant.late.iter().map(lack).collect();
        let refused = self.asks.take().filter(|_| !has_changed);
        self.refusal = match refused {
            Some(first) => Some(AdmissionRefusal { first, steps_left: REFUSED_STEPS }),
            None => self.refusal.filter(|_| !has_changed),
        };
        refused.is_some()
    }

    /// How many sequences may ask for admission in this step. Each takes time, whether it is admitted or not: mostly
    /// the step's tokens are soon gone, and where they are not, twice as many ask in the next step.
    pub fn num_asked(&self) -> usize {
        MIN_ASKED.max(2 * self.num_admitted)
    }
}

/// What a waiting sequence asks for. `is_one_of_many` says that it is one of several beams.
pub(super) fn ask(seq: &mut Sequence, hasher: &BlockHasher, config: &SchedulerConfig, is_one_of_many: bool) -> Admit {
    let (block_size, num_tokens) = (config.block_size, seq.num_tokens());
    let (held, num_held_tokens) = match &seq.state {
        SeqState::Swapped(blocks) => (vec![true; blocks.len()], seq.num_computed),
        _ => (Vec::new(), 0),
    };
    let mut usable_hashes = (num_tokens - 1) / block_size;
    if seq.params.prompt_logprobs.is_some() && seq.sample == 0 {
        // Prompt log-probabilities need the logits of every prompt token once.
        let missing = seq.prompt_logprobs.len() + 1 < seq.prompt.len();
        usable_hashes = if missing { seq.prompt_logprobs.len() / block_size } else { usable_hashes };
    }
    if seq.params.pooling == Some(Pooling::Mean) {
        // An embedding needs the hidden state of every token.
        usable_hashes = usable_hashes.min(seq.pooled.num_rows / block_size);
    }
    seq.extend_hashes(hasher, block_size, usable_hashes);
    Admit {
        seq: seq.rank.seq,
        hashes: seq.hashes.clone(),
        usable_hashes,
        num_tokens,
        held,
        num_held_tokens,
        seats: seq.seats().min(config.max_num_seqs),
        steps: 0,
        horizon: 0,
        // A beam holds its last token back until the other beams are there.
        num_held_back: usize::from(is_one_of_many),
    }
}
