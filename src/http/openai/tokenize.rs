//! `POST /tokenize` and `/detokenize`, as vLLM has them.

use super::tools::Tools;
use super::{chat, null_as_default, parse_fields, token_id};
use crate::actors::messages::Prompt;
use crate::actors::runtime::ModelInfo;
use crate::error::ApiError;
use crate::ids::TokenId;
use serde::{Deserialize, Serialize};
use serde_json::Value;

#[derive(Default, Deserialize)]
#[serde(default)]
struct TokenizeFields {
    prompt: Option<String>,
    add_special_tokens: Option<bool>,
    #[serde(deserialize_with = "null_as_default")]
    return_token_strs: bool,
}

#[derive(Debug, Serialize)]
pub struct Tokenized {
    count: usize,
    max_model_len: u32,
    tokens: Vec<TokenId>,
    token_strs: Option<Vec<String>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct DetokenizeFields {
    tokens: Option<Vec<i64>>,
}

#[derive(Debug, Serialize)]
pub struct Detokenized {
    prompt: String,
}

/// Token ids of `prompt`, or of `messages` through the chat template.
pub fn tokenize(body: &Value, model: &ModelInfo) -> Result<Tokenized, ApiError> {
    let fields: TokenizeFields = parse_fields(body)?;
    let (prompt, param) = match (fields.prompt, body.get("messages")) {
        (Some(text), _) => {
            let add_special_tokens = fields.add_special_tokens.unwrap_or(true);
            (Prompt::Text { text, add_special_tokens }, "prompt")
        }
        (None, Some(_)) => (Prompt::Chat(chat::chat_prompt(body, &Tools::read(body)?, model)?), "messages"),
        (None, None) => return Err(ApiError::invalid("prompt", "prompt or messages is required")),
    };
    let tokens = model.encode(&prompt, param)?;
    let strings = || tokens.iter().map(|token| model.tokenizer.token_text(*token)).collect();
    Ok(Tokenized {
        count: tokens.len(),
        max_model_len: model.max_model_len,
        token_strs: fields.return_token_strs.then(strings),
        tokens,
    })
}

/// Text of `tokens`, special tokens included.
pub fn detokenize(body: &Value, model: &ModelInfo) -> Result<Detokenized, ApiError> {
    let fields: DetokenizeFields = parse_fields(body)?;
    let tokens = fields.tokens.ok_or_else(|| ApiError::invalid("tokens", "tokens is required"))?;
    let tokens: Vec<TokenId> = tokens
        .iter()
        .enumerate()
        .map(|(i, id)| token_id(format_args!("tokens[{i}]"), *id, model.vocab_size))
        .collect::<Result<_, _>>()?;
    Ok(Detokenized { prompt: model.tokenizer.decode(&tokens, false)? })
}
