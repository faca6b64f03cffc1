//! `POST /tokenize` and `/detokenize`, as vLLM and llama.cpp have them.

use super::chat::{MessagesField, checked_messages};
use super::tools::ToolFields;
use crate::body::fields::{IdsField, WrongType, typed};
use crate::body::ids::{Ids, MixedPart, OneOf};
use crate::body::refused::Refused;
use crate::body::{ParsedBody, body, body_fields};
use crate::chat::TemplateFields;
use crate::checks::shown;
use crate::fields::model::ModelField;
use crate::fields::unsupported::UnsupportedFields;
use crate::llama_cpp::prompt::TextOrToken;
use crate::model_info::ModelInfo;
use crate::openapi::{Operation, Tag};
use crate::prompt::Prompt;
use crate::request::FieldNames;
use pagetide_base::budget::Budget;
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

body_fields! {
    struct TokenizeFields {
        /// A text.
        prompt: Option<String>,
        /// Whether the tokenizer adds its special tokens.
        #[schema(default = true)]
        add_special_tokens: Option<bool>,
    }
}

body_fields! {
    /// Of both forms.
    struct ReturnFields {
        /// The tokens' texts too.
        #[schema(default = false)]
        return_token_strs: bool,
    }
}

body_fields! {
    /// llama.cpp's form.
    struct ContentFields {
        /// A text, or an array of texts and token ids.
        #[schema(value_type = Option<ContentForms>)]
        content: IdsField,
        /// Whether the tokenizer adds its special tokens, if content begins with a text.
        #[schema(default = false)]
        add_special: bool,
        /// Whether special tokens that are written in a text are special tokens, or text.
        #[schema(default = true)]
        parse_special: Option<bool>,
        /// Each token with its text.
        #[schema(default = false)]
        with_pieces: bool,
    }
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum ContentForms {
    Text(String),
    Mixed(Vec<TextOrToken>),
}

/// The answer to the form that the request had.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum TokenizedForms {
    Counted(Tokenized),
    Ids(TokenIds),
    Pieces(TokensWithPieces),
}

/// With content.
#[derive(Debug, Serialize, ToSchema)]
pub struct TokenIds {
    #[schema(value_type = Vec<u32>)]
    tokens: Vec<TokenId>,
}

/// With content and with_pieces.
#[derive(Debug, Serialize, ToSchema)]
pub struct TokensWithPieces {
    tokens: Vec<TokenWithPiece>,
}

#[derive(Debug, Serialize, ToSchema)]
struct TokenWithPiece {
    #[schema(value_type = u32)]
    id: TokenId,
    piece: PieceText,
}

/// A text, or its bytes where they are no UTF-8.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
enum PieceText {
    Text(String),
    Bytes(Vec<u8>),
}

#[derive(Debug, Serialize, ToSchema)]
pub struct Tokenized {
    count: usize,
    max_model_len: u32,
    #[schema(value_type = Vec<u32>)]
    tokens: Vec<TokenId>,
    token_strs: Option<Vec<String>>,
}

body_fields! {
    struct DetokenizeFields {
        /// Token ids.
        #[schema(value_type = Option<Vec<i64>>)]
        tokens: IdsField,
        /// Leaves special tokens out of the text.
        #[schema(default = false)]
        skip_special_tokens: bool,
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub struct Detokenized {
    prompt: String,
    /// The same, under llama.cpp's name. Not where the request names a model, as llama.cpp's clients do not.
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

body! {
    /// The body of `/tokenize`.
    pub struct TokenizeBody {
        text: TokenizeFields,
        content: ContentFields,
        messages: MessagesField,
        model: ModelField,
        template: TemplateFields,
        tools: ToolFields,
        returns: ReturnFields,
        refused: Refused<UnsupportedFields>,
    }
}

body! {
    /// The body of `/detokenize`.
    pub struct DetokenizeBody {
        own: DetokenizeFields,
        model: ModelField,
        refused: Refused<UnsupportedFields>,
    }
}

pub fn describe_tokenize() -> Operation {
    Operation::new(Tag::Text, "tokenize", "Token ids of a text or a chat")
        .about(
            "Either prompt, or messages, which go through the chat template first, or content, which is llama.cpp's \
             form and has an answer of its own.",
        )
        .body("TokenizePromptRequest")
        .fields::<ModelField>()
        .fields::<TokenizeFields>()
        .fields::<ReturnFields>()
        .requires(&["prompt"])
        .body("TokenizeChatRequest")
        .fields::<ModelField>()
        .fields::<MessagesField>()
        .fields::<TemplateFields>()
        .fields::<ToolFields>()
        .fields::<ReturnFields>()
        .requires(&["messages"])
        .body("TokenizeContentRequest")
        .fields::<ModelField>()
        .fields::<ContentFields>()
        .requires(&["content"])
        .answers::<Tokenized>("The token ids, in the form that the request had.")
        .or_answers::<TokenIds>()
        .or_answers::<TokensWithPieces>()
}

pub fn describe_detokenize() -> Operation {
    Operation::new(Tag::Text, "detokenize", "Text of token ids")
        .body("DetokenizeRequest")
        .fields::<ModelField>()
        .fields::<DetokenizeFields>()
        .requires(&["tokens"])
        .answers::<Detokenized>("The text.")
}

/// Token ids of `prompt`, of `content`, or of `messages` through the chat template, and how many there are.
pub fn tokenize(
    ParsedBody { body, problems }: ParsedBody<TokenizeBody>,
    model: &ModelInfo,
    budget: &Budget,
) -> Result<(TokenizedForms, usize), ApiError> {
    problems.check_object()?;
    body.model.check(&problems, model)?;
    body.refused.check()?;
    if body.text.prompt.is_none() && body.content.is_given() {
        problems.check()?;
        return body.content.tokenize(model, budget);
    }
    // What is said of a chat does not matter where there is a text.
    ["prompt", "add_special_tokens", "return_token_strs"].iter().try_for_each(|name| problems.check_field(name))?;
    let TokenizeBody { text, messages, template, tools, returns, .. } = body;
    let (prompt, names) = match text.prompt {
        Some(prompt) => {
            // A text and a chat have a field of this name each, with another default.
            let add_special_tokens = text.add_special_tokens.unwrap_or(true);
            (Prompt::Text { text: prompt, add_special_tokens }, FieldNames::COMPLETION)
        }
        None => {
            problems.check()?;
            if messages.messages.is_none() {
                return Err(ApiError::invalid("prompt", "prompt or messages is required"));
            }
            let mut tools = tools.check()?;
            let given = messages.given()?;
            let add_special_tokens = text.add_special_tokens.unwrap_or(false);
            let settings = TemplateFields { add_special_tokens, ..template }.check("reasoning_effort", model)?;
            let messages = checked_messages(given)?;
            (Prompt::Chat(settings.prompt(messages, tools.take_shown())), FieldNames::CHAT)
        }
    };
    let tokens = model.encode(&prompt, &names, budget)?;
    let strings = || tokens.iter().map(|token| model.tokenizer.token_name(*token)).collect();
    let count = tokens.len();
    let token_strs = returns.return_token_strs.then(strings);
    let tokenized = Tokenized { count, max_model_len: model.max_model_len, token_strs, tokens };
    Ok((TokenizedForms::Counted(tokenized), count))
}

impl ContentFields {
    fn is_given(&self) -> bool {
        self.content.ids.is_some() || self.content.other.is_some()
    }

    fn tokenize(self, model: &ModelInfo, budget: &Budget) -> Result<(TokenizedForms, usize), ApiError> {
        const PARAM: &str = "content";
        let wrong = |got: &Value| {
            let message = format!("{PARAM} must be a string or an array of texts and token ids, got {}", shown(got));
            ApiError::invalid(PARAM, message)
        };
        let parts = match self.content {
            IdsField { ids: Some(Ids::One(list)), .. } if list.is_empty() => Vec::new(),
            IdsField { ids: Some(Ids::One(list) | Ids::Mixed(list)), .. } => list.mixed(PARAM, model.vocab_size)?,
            IdsField { ids: Some(Ids::Several { prompts, .. }), .. } => {
                let text = |prompt| match prompt {
                    OneOf::Text(text) => Ok(MixedPart::Text(text)),
                    other => Err(wrong(&other.into_value())),
                };
                prompts.into_iter().map(text).collect::<Result<_, _>>()?
            }
            IdsField { other: Some(Value::String(text)), .. } => vec![MixedPart::Text(text)],
            IdsField { other, .. } => return Err(wrong(&other.unwrap_or_default())),
        };
        let (most, got) = (model.max_prompt_bytes, parts.iter().map(MixedPart::num_bytes).sum());
        if got > most {
            return Err(ApiError::prompt_too_long(PARAM, got, most));
        }
        budget.look().map_err(|why| why.in_param(PARAM))?;
        let tokenizer = &model.tokenizer;
        let mut tokens = Vec::new();
        for (i, part) in parts.into_iter().enumerate() {
            let add_special = self.add_special && i == 0;
            match part {
                MixedPart::Ids(ids) => tokens.extend(ids),
                MixedPart::Text(text) if self.parse_special == Some(false) => {
                    tokens.extend(tokenizer.encode_plain(&text, add_special)?);
                }
                MixedPart::Text(text) => tokens.extend(tokenizer.encode(&text, add_special)?),
            }
        }
        let count = tokens.len();
        let piece = |id: TokenId| {
            let piece = String::from_utf8(tokenizer.token_bytes(id));
            let piece = piece.map_or_else(|error| PieceText::Bytes(error.into_bytes()), PieceText::Text);
            TokenWithPiece { id, piece }
        };
        let answer = match self.with_pieces {
            true => TokenizedForms::Pieces(TokensWithPieces { tokens: tokens.into_iter().map(piece).collect() }),
            false => TokenizedForms::Ids(TokenIds { tokens }),
        };
        Ok((answer, count))
    }
}

/// Text of `tokens`, and how many these are.
pub fn detokenize(
    ParsedBody { body, problems }: ParsedBody<DetokenizeBody>,
    model: &ModelInfo,
    budget: &Budget,
) -> Result<(Detokenized, usize), ApiError> {
    problems.check_object()?;
    body.model.check(&problems, model)?;
    body.refused.check()?;
    problems.check_field("skip_special_tokens")?;
    let DetokenizeFields { tokens, skip_special_tokens } = body.own;
    let list = match tokens {
        IdsField { ids: Some(Ids::One(list) | Ids::Mixed(list)), .. } => list,
        // The first element is no number.
        IdsField { ids: Some(Ids::Several { prompts, .. }), .. } => {
            let first = prompts.into_iter().next().map_or(Value::Null, OneOf::into_value);
            return Err(wrong_tokens(Value::Array(vec![first])));
        }
        IdsField { other: Some(other), .. } => return Err(wrong_tokens(other)),
        IdsField { other: None, .. } => return Err(ApiError::invalid("tokens", "tokens is required")),
    };
    // A prompt or an output cannot be longer than this.
    let (most, got) = (model.max_prompt_bytes, list.len());
    if got > most {
        let message = format!("tokens must have at most {most} ids (intake.max_prompt_bytes), got {got}");
        return Err(ApiError::invalid("tokens", message));
    }
    let tokens: Vec<TokenId> = list.tokens("tokens", model.vocab_size)?;
    budget.look().map_err(|why| why.in_param("tokens"))?;
    model.tokenizer.check_present("tokens", "the text of tokens")?;
    let prompt = model.tokenizer.decode(&tokens, skip_special_tokens)?;
    let content = body.model.model.is_none().then(|| prompt.clone());
    Ok((Detokenized { content, prompt }, tokens.len()))
}

/// What is wrong with a value that is no array of numbers.
fn wrong_tokens(value: Value) -> ApiError {
    match typed::<Vec<i64>>(value) {
        Err(wrong) => WrongType::in_field(wrong, "tokens"),
        Ok(_) => ApiError::invalid("tokens[0]", "tokens[0] must be an integer"),
    }
}
