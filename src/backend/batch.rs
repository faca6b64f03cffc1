//! The input of a step, what is wanted of its logits, and the shape of the KV cache.

use super::tensors::DType;
use crate::ids::TokenId;
use crate::sampling::params::{PositionLogprobs, Sampled, SamplingParams, TokenLimits};
use crate::sampling::sampler::Draw;
use std::ops::Range;

/// Shape of the KV cache. One block holds `block_size` tokens of every layer and is contiguous:
/// `[num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]` of `dtype`, so that moving a block is one copy. How the
/// last two lie within a head's part is the backend's own matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    pub num_layers: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub block_size: usize,
    pub dtype: DType,
}

impl KvLayout {
    pub fn block_bytes(&self) -> usize {
        self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.size_bytes()
    }
}

/// Steps that a device works on at once: one that runs, and one behind it so that the device never waits for the host.
pub const MAX_STEPS_IN_FLIGHT: usize = 2;

/// One sequence's part of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSeq {
    /// Rows `first_row .. first_row + num_rows` of the batch are this sequence's new tokens, in order.
    pub first_row: usize,
    pub num_rows: usize,
    /// Tokens whose KV is in the cache before this step; the first new token has this position.
    pub num_computed: usize,
    /// `block_tables[first_block .. first_block + num_blocks]` is its block table, long enough for all its tokens.
    pub first_block: usize,
    pub num_blocks: usize,
}

/// Entry of [`Batch::token_sources`] where the token is known.
pub const NO_SOURCE: u32 = u32::MAX;

/// A step's input: the new tokens of all its sequences, one row each.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// `[num_rows]`
    pub tokens: Vec<u32>,
    /// `[num_rows]`: [`NO_SOURCE`], or the place among the requests of the step before (see [`Backend::sample`]) whose
    /// sampled token is this row's, whatever `tokens` says: the host may not know it yet.
    pub token_sources: Vec<u32>,
    /// `[num_rows]` position of each token in its sequence.
    pub positions: Vec<u32>,
    /// `[num_rows]` where each token's K and V go: `block_id * block_size + offset`.
    pub slots: Vec<u32>,
    pub seqs: Vec<BatchSeq>,
    /// Block tables of all sequences, one after the other.
    pub block_tables: Vec<u32>,
    /// Rows whose logits are wanted.
    pub logit_rows: Vec<u32>,
    /// Rows whose final hidden states are wanted.
    pub hidden_rows: Vec<Range<usize>>,
}

impl Batch {
    pub fn num_rows(&self) -> usize {
        self.tokens.len()
    }
}

/// Something wanted of one row of logits.
#[derive(Clone, Copy, Debug)]
pub struct LogitsRequest<'a> {
    /// Row of the logits, counted from the first of the last [`Backend::logits`]. Several requests may have one row.
    pub row: usize,
    pub want: LogitsWant<'a>,
}

#[derive(Clone, Copy, Debug)]
pub enum LogitsWant<'a> {
    /// The next token, as `sampling::sampler` says.
    Sample {
        params: &'a SamplingParams,
        /// Where they are more than what `params` says.
        limits: Option<&'a TokenLimits>,
        /// Of the parameters' penalties; where there are none, these may be empty.
        prompt: &'a [TokenId],
        output: &'a [TokenId],
        /// The last token of the output, where `output` lacks it because the host does not know it yet: the place
        /// among the requests of the step before whose sampled token it is.
        pending: Option<u32>,
        draw: Draw,
    },
    /// The log-probabilities at a prompt's position: of `target`, which stands there, and of the most likely.
    PromptLogprobs { target: TokenId, num_top: u32 },
}

#[derive(Clone, Debug, PartialEq)]
pub enum LogitsResult {
    Sampled(Sampled),
    PromptLogprobs(PositionLogprobs),
    /// Of [`Backend::fetch_rows`], `[rows, cols]`.
    Rows(Vec<f32>),
}

/// A call of [`Backend::swap_out`] or [`Backend::swap_in`] that has ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FinishedCopy {
    pub to_device: bool,
    /// From when it was its turn to its end.
    pub seconds: f64,
}
