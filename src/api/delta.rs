//! What an answer gains, piece by piece. Whole answers and streams are written from the same pieces.

use crate::timings::{PromptProgress, Timings};
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::{FinishReason, PositionLogprobs};
use pagetide_text::chat_output::{self, ChatPiece};
use std::time::Duration;

/// What one choice gained.
#[derive(Debug, Default, PartialEq)]
pub struct Delta {
    pub choice: u32,
    pub text: String,
    /// Of a chat: what `text` says.
    pub pieces: Vec<ChatPiece>,
    /// Generated tokens. Their text may still be held back (half a character, the beginning of a stop string).
    pub tokens: Vec<TokenId>,
    /// Where log-probabilities were asked for: the positions of `tokens`, after those of an echoed prompt.
    pub positions: Vec<Position>,
    /// Sum of the log-probabilities of `tokens`, where the engine gave them.
    pub sum_logprob: f64,
    /// The choice is complete.
    pub finish: Option<Finish>,
}

/// Memory pressure has paused a choice, or it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PauseNotice {
    pub choice: u32,
    /// It goes on, and was paused this long.
    pub after: Option<Duration>,
}

/// How far the prompt of a choice is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProgressNotice {
    /// The first that the prompt has.
    pub choice: u32,
    pub progress: PromptProgress,
    /// `None`: the client does not want them in every part.
    pub timings: Option<Timings>,
}

/// A token of the answer with its log-probabilities; the first token of a prompt has none.
#[derive(Clone, Debug, PartialEq)]
pub struct Position {
    pub token: TokenId,
    /// Characters of the answer's text before this token.
    pub text_offset: usize,
    pub logprobs: Option<PositionLogprobs>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Finish {
    /// `stop`, `length`, `tool_calls` or `abort`.
    pub reason: &'static str,
    /// The stop string or stop token that ended it, where it was one of the client's.
    pub stop_reason: Option<StopReason>,
}

#[derive(Clone, Debug, PartialEq, serde::Serialize, utoipa::ToSchema)]
#[serde(untagged)]
pub enum StopReason {
    Text(String),
    #[schema(value_type = u32)]
    Token(TokenId),
}

impl Finish {
    pub fn length() -> Self {
        Self { reason: "length", stop_reason: None }
    }

    /// The request was aborted by its id.
    pub fn aborted() -> Self {
        Self { reason: "abort", stop_reason: None }
    }

    pub fn stop() -> Self {
        Self { reason: "stop", stop_reason: None }
    }

    /// A stop string ended it.
    pub fn by_text(stop: String) -> Self {
        Self { reason: "stop", stop_reason: Some(StopReason::Text(stop)) }
    }

    /// As the engine says it.
    pub fn of_engine(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Length => Self::length(),
            FinishReason::Eos => Self::stop(),
            FinishReason::StopToken(id) => Self { reason: "stop", stop_reason: Some(StopReason::Token(id)) },
        }
    }

    /// What the engine said; `None` where a stop string ended the text.
    pub fn by_engine(&self) -> Option<FinishReason> {
        match &self.stop_reason {
            Some(StopReason::Text(_)) => None,
            Some(StopReason::Token(id)) => Some(FinishReason::StopToken(*id)),
            None if self.reason == "length" => Some(FinishReason::Length),
            None => Some(FinishReason::Eos),
        }
    }
}

impl Delta {
    pub(super) fn push_token(&mut self, token: TokenId, text_offset: usize, logprobs: Option<PositionLogprobs>) {
        self.tokens.push(token);
        if let Some(logprobs) = &logprobs {
            self.sum_logprob += f64::from(logprobs.chosen.logprob);
        }
        if logprobs.is_some() {
            self.positions.push(Position { token, text_offset, logprobs });
        }
    }

    /// The mean of its tokens' log-probabilities: what `best_of` goes by.
    pub fn mean_logprob(&self) -> f64 {
        self.sum_logprob / self.tokens.len().max(1) as f64
    }

    /// Adds what came after; `self` and `next` are of one choice.
    pub fn append(&mut self, next: Delta) {
        debug_assert_eq!(self.choice, next.choice);
        self.text.push_str(&next.text);
        for piece in next.pieces {
            chat_output::append(&mut self.pieces, piece);
        }
        self.tokens.extend(next.tokens);
        self.positions.extend(next.positions);
        self.sum_logprob += next.sum_logprob;
        self.finish = next.finish;
    }
}
