//! `POST /tokenize` and `/detokenize`, as vLLM has them.

use super::tools::{ToolFields, Tools};
use super::{ModelField, chat, check_model, null_as_default, parse_fields};
use crate::actors::messages::Prompt;
use crate::actors::runtime::ModelInfo;
use crate::budget::Budget;
use crate::error::ApiError;
use crate::http::body::ids::{Ids, OneOf};
use crate::http::body::json::Json;
use crate::http::openapi::{Operation, Tag};
use crate::ids::TokenId;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::ToSchema;

#[derive(Default, Deserialize, ToSchema)]
#[serde(default)]
struct TokenizeFields {
    /// A text.
    prompt: Option<String>,
    /// Whether the tokenizer adds its special tokens.
    #[schema(default = true)]
    add_special_tokens: Option<bool>,
}

/// Of both forms.
#[derive(Default, Deserialize, ToSchema)]
#[serde(default)]
struct ReturnFields {
    /// The tokens' texts too.
    #[serde(deserialize_with = "null_as_default")]
    return_token_strs: bool,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct Tokenized {
    count: usize,
    max_model_len: u32,
    #[schema(value_type = Vec<u32>)]
    tokens: Vec<TokenId>,
    token_strs: Option<Vec<String>>,
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(default)]
struct DetokenizeFields {
    /// Token ids.
    #[allow(dead_code, reason = "read straight from the body, but for a wrong type")]
    tokens: Option<Vec<i64>>,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct Detokenized {
    prompt: String,
}

pub fn describe_tokenize() -> Operation {
    Operation::new(Tag::Text, "tokenize", "Token ids of a text or a chat")
        .about("Either prompt, or messages, which go through the chat template first.")
        .body("TokenizePromptRequest")
        .fields::<ModelField>()
        .fields::<TokenizeFields>()
        .fields::<ReturnFields>()
        .requires(&["prompt"])
        .body("TokenizeChatRequest")
        .fields::<ModelField>()
        .fields::<chat::TemplateFields>()
        .fields::<ToolFields>()
        .fields::<ReturnFields>()
        .requires(&["messages"])
        .answers::<Tokenized>("The token ids.")
}

pub fn describe_detokenize() -> Operation {
    Operation::new(Tag::Text, "detokenize", "Text of token ids, special tokens included")
        .body("DetokenizeRequest")
        .fields::<ModelField>()
        .fields::<DetokenizeFields>()
        .requires(&["tokens"])
        .answers::<Detokenized>("The text.")
}

/// Token ids of `prompt`, or of `messages` through the chat template, and how many there are.
pub fn tokenize(body: Json, model: &ModelInfo, budget: &Budget) -> Result<(Tokenized, usize), ApiError> {
    let body = &body.value;
    check_model(body, model)?;
    let fields: TokenizeFields = parse_fields(body)?;
    let returns: ReturnFields = parse_fields(body)?;
    let (prompt, param) = match (fields.prompt, body.get("messages")) {
        (Some(text), _) => {
            let add_special_tokens = fields.add_special_tokens.unwrap_or(true);
            (Prompt::Text { text, add_special_tokens }, "prompt")
        }
        (None, Some(_)) => (Prompt::Chat(chat::chat_prompt(body, &Tools::read(body)?, model)?), "messages"),
        (None, None) => return Err(ApiError::invalid("prompt", "prompt or messages is required")),
    };
    let tokens = model.encode(&prompt, param, budget)?;
    let strings = || tokens.iter().map(|token| model.tokenizer.token_name(*token)).collect();
    let count = tokens.len();
    let token_strs = returns.return_token_strs.then(strings);
    Ok((Tokenized { count, max_model_len: model.max_model_len, token_strs, tokens }, count))
}

/// Text of `tokens`, special tokens included, and how many these are.
pub fn detokenize(body: Json, model: &ModelInfo, budget: &Budget) -> Result<(Detokenized, usize), ApiError> {
    let Json { value, ids } = body;
    check_model(&value, model)?;
    let list = match ids {
        Some(Ids::One(list)) => list,
        // What the first element is when it is no number.
        Some(Ids::Several { prompts, .. }) => {
            let first = prompts.into_iter().next().map_or(Value::Null, OneOf::into_value);
            parse_fields::<DetokenizeFields>(&json!({ "tokens": [first] }))?;
            return Err(ApiError::invalid("tokens[0]", "tokens[0] must be an integer"));
        }
        None => {
            parse_fields::<DetokenizeFields>(&value)?;
            return Err(ApiError::invalid("tokens", "tokens is required"));
        }
    };
    // Nobody has more than a model can take; what was cut from that is shorter.
    let (most, got) = (model.max_prompt_bytes, list.len());
    if got > most {
        let message = format!("tokens must have at most {most} ids (intake.max_prompt_bytes), got {got}");
        return Err(ApiError::invalid("tokens", message));
    }
    let tokens: Vec<TokenId> = list.tokens("tokens", model.vocab_size)?;
    budget.look().map_err(|why| why.in_param("tokens"))?;
    Ok((Detokenized { prompt: model.tokenizer.decode(&tokens, false)? }, tokens.len()))
}
