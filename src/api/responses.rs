//! OpenAI's Responses. Nothing is stored: a conversation is sent whole with every request.

pub mod answer;
pub mod describe;
mod input;
mod namespaces;
pub mod request;
pub mod stream;

/// A stream says log-probabilities five times, four of them when the text has ended.
pub const LOGPROBS_COPIES: usize = 8;
