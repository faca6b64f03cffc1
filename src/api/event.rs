//! What the engine says about a request.

use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::{FinishReason, PositionLogprobs};
use pagetide_engine::bill::KvBill;
use std::time::Duration;

/// What a request's owner hears.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Sent once, before the first token, if `prompt_logprobs` was asked for: one entry for each prompt token from the
    /// second on.
    PromptLogprobs(Vec<PositionLogprobs>),
    /// The next token of sample `index`. A token that ended the sample (end token, stop token) is delivered too,
    /// before [`Event::Finished`].
    Token {
        index: u32,
        token: TokenId,
        logprobs: Option<PositionLogprobs>,
    },
    /// `[embed]`. Sent once, before the end, if the request was for an embedding.
    Embedding(Vec<f32>),
    Finished {
        index: u32,
        reason: FinishReason,
    },
    /// The whole request failed; nothing follows.
    Failed(ApiError),
    /// What memory pressure has cost the request so far. Sent whenever that has changed, and before the token or the
    /// end that the cost belongs to: the last bill before an end is complete.
    Bill(KvBill),
    /// Sample `index` has given up its blocks and waits to resume.
    Paused {
        index: u32,
    },
    /// The sample runs again.
    Resumed {
        index: u32,
        after: Duration,
    },
    /// So many tokens of the prompt are there, those that the prefix cache held included. Sent only where it is asked
    /// for: when the request starts, and whenever more have been computed.
    Prefilled {
        cached_tokens: u32,
        computed: u32,
    },
    /// The prompt has been prefilled. Sent before the first token, with the prompt tokens found in the prefix cache.
    Started {
        cached_tokens: u32,
    },
}
