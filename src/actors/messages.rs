//! Every message between actors, in data-path order:
//!
//! http → [`Submit`] → intake → `Arrive` → scheduler → `Serve` → block allocator
//!      → (`Reserve` → swap pool) → `Execute` → executor → scheduler → [`Event`] → http

use crate::engine::params::{FinishReason, PositionLogprobs, SamplingParams};
use crate::error::ApiError;
use crate::ids::{RequestId, TokenId};
pub use crate::text::chat_template::ChatPrompt;
use std::sync::Arc;
use tokio::sync::mpsc;

/// What the client sent as its prompt.
#[derive(Clone, Debug)]
pub enum Prompt {
    Text {
        text: String,
        add_special_tokens: bool,
    },
    Tokens(Vec<TokenId>),
    /// A conversation, rendered through the chat template at the intake.
    Chat(ChatPrompt),
}

/// http → intake. The answer is an [`Accepted`] request or the client's error.
#[derive(Debug, actix::Message)]
#[rtype(result = "Result<Accepted, ApiError>")]
pub struct Submit {
    pub prompt: Prompt,
    /// Name of the prompt's field, for errors: `prompt`, `messages`.
    pub prompt_param: &'static str,
    /// `max_tokens` 0 here means "not given": as many as fit. `eos_token_ids` are filled in by the intake unless
    /// `ignore_eos`.
    pub params: SamplingParams,
    pub ignore_eos: bool,
    /// The client's seed; `None`: the intake draws one.
    pub seed: Option<u64>,
    /// Number of samples, at least 1.
    pub n: u32,
    /// Lower goes first under the priority policy.
    pub priority: i32,
    /// Separates prefix caches: equal prompts with different salts share nothing.
    pub cache_salt: Option<String>,
}

/// A request that is on its way to the scheduler.
#[derive(Debug)]
pub struct Accepted {
    pub id: RequestId,
    pub prompt_tokens: Arc<Vec<TokenId>>,
    /// As the engine will use them (`max_tokens` resolved).
    pub params: Arc<SamplingParams>,
    /// Events of all samples in the order they happen; closed after each sample has ended or the request failed.
    /// Dropping it cancels the request.
    pub events: EventStream,
}

/// What a request's owner hears.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Once, before the first token, when `prompt_logprobs` was asked for: one entry a prompt token from the second on.
    PromptLogprobs(Vec<PositionLogprobs>),
    /// The next token of sample `index`. A token that ended the sample (end token, stop token) is delivered too,
    /// before [`Event::Finished`].
    Token {
        index: u32,
        token: TokenId,
        logprobs: Option<PositionLogprobs>,
    },
    Finished {
        index: u32,
        reason: FinishReason,
    },
    /// The whole request failed; nothing follows.
    Failed(ApiError),
    /// Known when the prompt has been prefilled, before the first token: prompt tokens found in the prefix cache.
    Started {
        cached_tokens: u32,
    },
}

/// Receiving half of a request's events. Dropping it before the end cancels the request and frees its blocks.
#[derive(Debug)]
pub struct EventStream {
    pub(crate) id: RequestId,
    pub(crate) receiver: mpsc::UnboundedReceiver<Event>,
    pub(crate) on_drop: Option<CancelOnDrop>,
}

impl EventStream {
    /// The next event; `None` after the last.
    pub async fn next(&mut self) -> Option<Event> {
        self.receiver.recv().await
    }

    /// An event that is already there, without waiting.
    pub fn try_next(&mut self) -> Option<Event> {
        self.receiver.try_recv().ok()
    }
}

/// Tells the scheduler, when dropped, that nobody waits for the request any more.
#[derive(Debug)]
pub struct CancelOnDrop {
    pub(crate) id: RequestId,
    pub(crate) scheduler: actix::Recipient<Cancel>,
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.scheduler.do_send(Cancel(self.id));
    }
}

/// anyone → scheduler: the client is gone. Unknown ids (the request has ended) are ignored.
#[derive(Clone, Copy, Debug, actix::Message)]
#[rtype(result = "()")]
pub struct Cancel(pub RequestId);
