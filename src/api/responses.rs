//! OpenAI's Responses. Nothing is stored: a conversation is sent whole with every request.

pub mod answer;
pub mod describe;
mod input;
mod namespaces;
pub mod request;
pub mod stream;

use crate::body::ParsedBody;
use crate::input_tokens::InputTokens;
use crate::model_info::ModelInfo;
use pagetide_base::budget::Budget;
use pagetide_base::error::ApiError;
use request::{ResponsesBody, ResponsesRequest};

/// A stream says log-probabilities five times, four of them when the text has ended.
pub const LOGPROBS_COPIES: usize = 8;

/// Tokens of the prompt that a response would have.
pub fn input_tokens(
    body: ParsedBody<ResponsesBody>,
    model: &ModelInfo,
    budget: &Budget,
) -> Result<(InputTokens, usize), ApiError> {
    InputTokens::of(&ResponsesRequest::parse(body, model)?.request, model, budget)
}
