//! What a plan decided, in few bytes: enough to compare two plans, and to say how they differ.

use crate::allocation::{Grant, SwapBlock, SwapGrant};
use crate::arbiter::Decision;
use crate::plan::StepPlan;
use pagetide_base::ids::{BlockId, CopyId, SeqId};
use serde::{Deserialize, Serialize};
use std::fmt::{self, Display};

/// A checksum of decisions. It depends on their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Digest(u64);

impl Digest {
    pub fn add(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    pub fn add_all(&mut self, numbers: impl IntoIterator<Item = usize>) {
        numbers.into_iter().for_each(|number| self.add(number as u64));
    }

    /// Adds a list with its length, so that lists cannot run into each other.
    fn add_blocks(&mut self, blocks: &[BlockId]) {
        self.add(blocks.len() as u64);
        blocks.iter().for_each(|block| self.add(u64::from(block.0)));
    }

    fn add_pairs(&mut self, pairs: &[(BlockId, BlockId)]) {
        self.add(pairs.len() as u64);
        pairs.iter().for_each(|(from, to)| self.add(u64::from(from.0) << 32 | u64::from(to.0)));
    }

    fn add_swap_blocks(&mut self, blocks: &[SwapBlock]) {
        self.add(blocks.len() as u64);
        blocks.iter().for_each(|swap| self.add(u64::from(swap.block.0) << 1 | u64::from(swap.copy)));
    }
}

/// A plan and what the pools granted for it: the parts that people ask about, and a digest of everything.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlanSummary {
    pub num_seqs: usize,
    pub num_tokens: usize,
    /// Sequences with more than one token: prompts.
    pub pieces: Vec<(SeqId, usize)>,
    /// Admitted sequences, each with the number of tokens that need not be computed.
    pub admitted: Vec<(SeqId, usize)>,
    /// Preempted sequences, each with the sequence that caused it.
    pub preempted: Vec<(SeqId, SeqId)>,
    /// Blocks copied to the swap pool.
    pub swap_out: usize,
    /// Blocks copied back.
    pub swap_in: Vec<(CopyId, usize)>,
    pub digest: Digest,
}

impl PlanSummary {
    /// The summary of the device pool's grant.
    pub fn new(grant: &Grant) -> Self {
        let mut digest = Digest::default();
        for grown in &grant.grown {
            digest.add(grown.seq.0);
            digest.add_blocks(&grown.blocks);
            if let Some((place, from, to)) = grown.copy {
                digest.add_all([place, from.index(), to.index()]);
            }
        }
        for admitted in &grant.admitted {
            digest.add(admitted.seq.0);
            digest.add_blocks(&admitted.table);
            digest.add_all(admitted.swap_in.iter().copied().chain([admitted.num_computed, admitted.num_new_tokens]));
        }
        // Without the hash, which is different in the recording.
        digest.add_all(grant.evicted.iter().map(|(block, _)| block.index()));
        let stats = &grant.stats;
        digest.add_all([stats.used, stats.cached, stats.free]);
        Self {
            admitted: grant.admitted.iter().map(|admitted| (admitted.seq, admitted.num_computed)).collect(),
            preempted: grant.preempted.iter().copied().zip(grant.causes.iter().copied()).collect(),
            digest,
            ..Self::default()
        }
    }

    /// Adds what the swap pool granted.
    pub fn add_swap(&mut self, swap: &SwapGrant) {
        let digest = &mut self.digest;
        swap.taken.iter().for_each(|blocks| digest.add_blocks(blocks));
        for stored in &swap.stored {
            digest.add_swap_blocks(stored.as_deref().unwrap_or(&[]));
        }
        swap.backed.iter().for_each(|blocks| digest.add_swap_blocks(blocks));
        digest.add_all(swap.kept.iter().map(|block| block.map_or(usize::MAX, BlockId::index)));
    }

    /// Adds the plan, and what the arbiter decided for it.
    pub fn add_plan(&mut self, plan: &StepPlan, decisions: &[Decision]) {
        let digest = &mut self.digest;
        digest.add_pairs(&plan.swap_out);
        digest.add_pairs(&plan.copy);
        for swap_in in &plan.swap_in {
            digest.add(swap_in.id.0);
            digest.add_pairs(&swap_in.pairs);
        }
        for seq in &plan.batch {
            let samples = seq.sample.as_ref().map_or(0, |sample| 1 + sample.num_samples as usize);
            digest.add(seq.seq.0);
            digest.add((seq.num_computed as u64) << 1 | u64::from(seq.pending));
            digest.add((seq.tokens.len() as u64) << 32 | samples as u64);
        }
        for decision in decisions {
            digest.add(decision.request.0 << 2 | decision.choice as u64);
            let seconds = [decision.swap_s, decision.swap_full_s, decision.recompute_s];
            seconds.into_iter().for_each(|seconds| digest.add(seconds.to_bits()));
        }
        self.num_seqs = plan.batch.len();
        self.num_tokens = plan.num_tokens();
        let pieces = plan.batch.iter().filter(|seq| seq.tokens.len() > 1);
        self.pieces = pieces.map(|seq| (seq.seq, seq.tokens.len())).collect();
        self.swap_out = plan.swap_out.len();
        self.swap_in = plan.swap_in.iter().map(|swap_in| (swap_in.id, swap_in.pairs.len())).collect();
    }

    /// How `other` differs. `None` if it does not.
    pub fn difference(&self, other: &Self) -> Option<String> {
        if self == other {
            return None;
        }
        let parts = [
            differ("it preempts", &ListedPairs(&self.preempted, "for"), &ListedPairs(&other.preempted, "for")),
            differ(
                "it admits",
                &ListedPairs(&self.admitted, "with tokens"),
                &ListedPairs(&other.admitted, "with tokens"),
            ),
            differ("prompts get", &ListedPairs(&self.pieces, "tokens"), &ListedPairs(&other.pieces, "tokens")),
            differ("blocks to the swap pool", &self.swap_out, &other.swap_out),
            differ("blocks back", &ListedPairs(&self.swap_in, "blocks"), &ListedPairs(&other.swap_in, "blocks")),
            differ("sequences", &self.num_seqs, &other.num_seqs),
            differ("tokens", &self.num_tokens, &other.num_tokens),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        Some(match parts.is_empty() {
            true => "other blocks, other sequences that decode, or other costs that the arbiter weighed".into(),
            false => parts.join("; "),
        })
    }
}

/// Formats a list of pairs.
struct ListedPairs<'a, A, B>(&'a [(A, B)], &'static str);

impl<A: Display, B: Display> Display for ListedPairs<'_, A, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        for (place, (a, b)) in self.0.iter().enumerate() {
            write!(f, "{}{a} ({} {b})", if place > 0 { ", " } else { "" }, self.1)?;
        }
        Ok(())
    }
}

/// What is said of a thing that differs; `None` where it does not.
pub fn differ(what: &str, recorded: &impl Display, replayed: &impl Display) -> Option<String> {
    let (recorded, replayed) = (recorded.to_string(), replayed.to_string());
    (recorded != replayed).then(|| format!("{what}: {recorded} in the recording, {replayed} now"))
}
