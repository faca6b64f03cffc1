//! The input of a step, and the requests about its logits.

use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::{PositionLogprobs, Sampled, SamplingParams, TokenLimits};
use pagetide_base::sampling::sampler::Draw;
use std::ops::Range;

/// Steps that a device has at once: one that runs, and one that is queued behind it, so that the device never waits for
/// the host.
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

/// The entry of [`Batch::token_sources`] for a token that the host knows.
pub const NO_SOURCE: u32 = u32::MAX;

/// A step's input: the new tokens of all its sequences, one row each.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// `[num_rows]`
    pub tokens: Vec<u32>,
    /// `[num_rows]`: [`NO_SOURCE`], or an index of a request of the previous step (see `Backend::sample`). In the
    /// latter case the row's token is the one sampled for that request, which the host may not know yet, and the row's
    /// entry of `tokens` is ignored.
    pub token_sources: Vec<u32>,
    /// `[num_rows]` position of each token in its sequence.
    pub positions: Vec<u32>,
    /// `[num_rows]` slots for each token's K and V: `block_id * block_size + offset`.
    pub slots: Vec<u32>,
    pub seqs: Vec<BatchSeq>,
    /// Block tables of all sequences, concatenated.
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

/// A request about one row of logits.
#[derive(Clone, Copy, Debug)]
pub struct LogitsRequest<'a> {
    /// Row of the logits of the last `Backend::logits`. Several requests may name the same row.
    pub row: usize,
    pub want: LogitsWant<'a>,
}

#[derive(Clone, Copy, Debug)]
pub enum LogitsWant<'a> {
    /// Sample the next token by the rules of `sampling::sampler`.
    Sample {
        params: &'a SamplingParams,
        /// Limits in addition to those of `params`.
        limits: Option<&'a TokenLimits>,
        /// The tokens that penalties count. They may be empty if the parameters have no penalties.
        prompt: &'a [TokenId],
        output: &'a [TokenId],
        /// Mirostat's mu behind the last token; 0 without mirostat.
        mu: f32,
        /// Set if the host does not know the last token of the output yet, so that `output` lacks it: the index of the
        /// request of the previous step that sampled it. `None` where the host draws
        /// ([`SamplingParams::draws_on_host`]); such a request is no source of tokens either.
        pending: Option<u32>,
        draw: Draw,
    },
    /// The log-probabilities at a position of a prompt: of `target`, the prompt's token there, and of the most likely
    /// tokens.
    PromptLogprobs { target: TokenId, num_top: u32 },
}

#[derive(Clone, Debug, PartialEq)]
pub enum LogitsResult {
    Sampled(Sampled),
    PromptLogprobs(PositionLogprobs),
    /// The rows of a `Backend::fetch_rows`: `[rows, cols]`.
    Rows(Vec<f32>),
}

/// A call of `Backend::swap_out` or `Backend::swap_in` that has ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FinishedCopy {
    pub to_device: bool,
    /// From the start of its first copy to the end of its last.
    pub seconds: f64,
}
