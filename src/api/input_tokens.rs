//! The length of the prompt that a request would have.

use crate::model_info::ModelInfo;
use crate::request::ApiRequest;
use pagetide_base::budget::Budget;
use pagetide_base::error::ApiError;
use serde::Serialize;
use utoipa::ToSchema;

/// The length of a prompt, as OpenAI answers it.
#[derive(Serialize, ToSchema)]
pub struct InputTokens {
    input_tokens: usize,
    /// Always response.input_tokens.
    object: &'static str,
}

impl InputTokens {
    /// The tokens of all prompts of a request, and their number once more for the request's limits.
    pub fn of(request: &ApiRequest, model: &ModelInfo, budget: &Budget) -> Result<(Self, usize), ApiError> {
        let input_tokens = num_prompt_tokens(request, model, budget)?;
        Ok((Self { input_tokens, object: "response.input_tokens" }, input_tokens))
    }
}

/// The tokens of all prompts of a request.
pub fn num_prompt_tokens(request: &ApiRequest, model: &ModelInfo, budget: &Budget) -> Result<usize, ApiError> {
    let names = &request.each.names;
    request.prompts.iter().map(|prompt| model.encode(prompt, names, budget).map(|tokens| tokens.len())).sum()
}
