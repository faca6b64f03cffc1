//! Anthropic's Messages, and its shapes of errors and models.

pub mod answer;
pub mod describe;
pub mod error;
mod messages;
pub mod models;
pub mod request;
pub mod stream;

use crate::body::ParsedBody;
use crate::input_tokens::num_prompt_tokens;
use crate::model_info::ModelInfo;
use pagetide_base::budget::Budget;
use pagetide_base::error::ApiError;
use request::CountedBody;
use serde_json::{Value, json};

/// Tokens of the prompt that `/v1/messages` would make of `body`.
pub fn count_tokens(
    body: ParsedBody<CountedBody>,
    model: &ModelInfo,
    budget: &Budget,
) -> Result<(Value, usize), ApiError> {
    let request = request::counted(body, model)?;
    let tokens = num_prompt_tokens(&request, model, budget)?;
    Ok((json!({ "input_tokens": tokens }), tokens))
}
