//! `POST /apply-template`, the text that a chat becomes, and `POST /v1/chat/completions/input_tokens`, its length.

use crate::body::ParsedBody;
use crate::input_tokens::InputTokens;
use crate::model_info::ModelInfo;
use crate::openai::chat::{self, ChatBody};
use crate::prompt::Prompt;
use pagetide_base::budget::Budget;
use pagetide_base::error::ApiError;
use serde::Serialize;
use utoipa::ToSchema;

#[derive(Serialize, ToSchema)]
pub struct RenderedChat {
    prompt: String,
}

/// The text that a chat becomes, and 0: no tokens are converted.
pub fn apply(
    body: ParsedBody<ChatBody>,
    model: &ModelInfo,
    budget: &Budget,
) -> Result<(RenderedChat, usize), ApiError> {
    let request = chat::parse_prompt(body, model)?;
    let names = &request.each.names;
    let mut prompt = String::new();
    for part in &request.prompts {
        budget.look().map_err(|why| why.in_param(names.prompt))?;
        if let Prompt::Chat(chat) = part {
            prompt += &model.render(chat, names)?;
        }
    }
    Ok((RenderedChat { prompt }, 0))
}

/// Tokens of the prompt that a chat would have.
pub fn input_tokens(
    body: ParsedBody<ChatBody>,
    model: &ModelInfo,
    budget: &Budget,
) -> Result<(InputTokens, usize), ApiError> {
    InputTokens::of(&chat::parse_prompt(body, model)?, model, budget)
}
