//! The model that is served.

use crate::body::ids::MixedPart;
use crate::live_server::LiveServer;
use crate::prompt::{ChatPrompt, Prompt};
use crate::request::FieldNames;
use pagetide_base::budget::Budget;
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::{Pooling, SamplingDefaults};
use pagetide_config::Dialect;
use pagetide_text::chat_output::ChatFormat;
use pagetide_text::chat_template::{ChatTemplate, render_by_request};
use pagetide_text::fill_in::FillInMarks;
use pagetide_text::tokenizer::{SpecialToken, SpecialTokens, Tokenizer};
use pagetide_text::truncation::{Side, truncate};
use serde_json::{Map, Value};
use std::sync::Arc;

/// What the code that formats requests and answers needs to know about the model.
pub struct ModelInfo {
    /// The name in answers.
    pub served_name: String,
    /// Other names that requests may use.
    pub aliases: Vec<String>,
    /// Unix time of the start.
    pub created_s: u64,
    pub max_model_len: u32,
    pub vocab_size: u32,
    pub tokenizer: Arc<Tokenizer>,
    pub chat_template: Option<ChatTemplate>,
    /// How the model writes tool calls and reasoning.
    pub chat_format: ChatFormat,
    /// End tokens of generation, from `generation_config.json` and `config.json`.
    pub eos_token_ids: Vec<TokenId>,
    /// The dimensions of an embedding.
    pub embedding_size: u32,
    /// The pooling of embeddings if a request does not say.
    pub pooling: Pooling,
    /// The model's sampling defaults, for parameters that a request leaves out.
    pub default_sampling: SamplingDefaults,
    /// Bytes of a KV block.
    pub kv_block_bytes: usize,
    /// Bytes of a prompt's text at most (`intake.max_prompt_bytes`).
    pub max_prompt_bytes: usize,
    /// The server's limits and defaults for requests.
    pub server: LiveServer,
}

impl ModelInfo {
    /// Every name that requests may use.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.served_name.as_str()).chain(self.aliases.iter().map(String::as_str))
    }

    /// Whose answers OpenAI's paths give.
    pub fn dialect(&self) -> Dialect {
        self.server.get().dialect
    }

    /// Whether OpenAI's paths give llama.cpp's answers, where these differ.
    pub fn speaks_llama_cpp(&self) -> bool {
        self.dialect() == Dialect::LlamaCpp
    }

    /// Renders a chat and tokenises a prompt. Errors name the fields by `names`. The time grows with the text, so it
    /// must not run on a thread that must not block.
    pub fn encode(&self, prompt: &Prompt, names: &FieldNames, budget: &Budget) -> Result<Vec<TokenId>, ApiError> {
        self.encode_within(self.max_prompt_bytes, prompt, names, budget)
    }

    /// [`ModelInfo::encode`] for a text of at most `max_bytes`.
    fn encode_within(
        &self,
        max_bytes: usize,
        prompt: &Prompt,
        names: &FieldNames,
        budget: &Budget,
    ) -> Result<Vec<TokenId>, ApiError> {
        let param = names.prompt;
        if !matches!(prompt, Prompt::Tokens(_)) {
            self.tokenizer.check_present(param, "a prompt of text")?;
        }
        let check_length = |num_bytes: usize| match num_bytes > max_bytes {
            true => Err(ApiError::prompt_too_long(param, num_bytes, max_bytes)),
            false => Ok(()),
        };
        let encode = |text: &str, add_special_tokens| {
            check_length(text.len())?;
            // Tokenising cannot be interrupted from here on.
            budget.look().map_err(|why| why.in_param(param))?;
            self.tokenizer.encode(text, add_special_tokens)
        };
        match prompt {
            Prompt::Tokens(tokens) => Ok(tokens.clone()),
            Prompt::Text { text, add_special_tokens } => encode(text, *add_special_tokens),
            Prompt::Mixed(parts) => {
                check_length(prompt.num_bytes())?;
                budget.look().map_err(|why| why.in_param(param))?;
                let mut tokens = Vec::new();
                for (i, part) in parts.iter().enumerate() {
                    match part {
                        MixedPart::Text(text) => tokens.extend(self.tokenizer.encode(text, i == 0)?),
                        MixedPart::Ids(ids) => tokens.extend(ids),
                    }
                }
                Ok(tokens)
            }
            Prompt::ChatAfter(tokens, chat) => {
                let mut all = tokens.clone();
                all.extend(encode(&self.rendered(max_bytes, chat, names)?, chat.add_special_tokens)?);
                Ok(all)
            }
            Prompt::FillIn(fill_in) => {
                check_length(fill_in.num_bytes())?;
                budget.look().map_err(|why| why.in_param(param))?;
                let marks = FillInMarks::find(&self.tokenizer).map_err(|missing| no_marks(param, &missing))?;
                fill_in.encode(&self.tokenizer, &marks, self.max_model_len as usize)
            }
            Prompt::Chat(chat) => encode(&self.rendered(max_bytes, chat, names)?, chat.add_special_tokens),
        }
    }

    /// What the tokenizer's configuration says of special tokens and of chats.
    pub fn tokenizer_info(&self) -> Map<String, Value> {
        let mut info = self.special_tokens();
        info.insert("tokenizer_class".into(), self.tokenizer.class().into());
        info.insert("model_max_length".into(), self.max_model_len.into());
        info.insert("vocab_size".into(), self.vocab_size.into());
        info.insert("eos_token_ids".into(), self.eos_token_ids.as_slice().into());
        info.insert("chat_template".into(), self.chat_template.as_ref().map(ChatTemplate::source).into());
        info
    }

    /// The text that a chat becomes. Errors name the fields by `names`.
    pub fn render(&self, chat: &ChatPrompt, names: &FieldNames) -> Result<String, ApiError> {
        self.rendered(self.max_prompt_bytes, chat, names)
    }

    /// A chat of at most `max_bytes` through its template.
    fn rendered(&self, max_bytes: usize, chat: &ChatPrompt, names: &FieldNames) -> Result<String, ApiError> {
        let num_bytes = chat.num_bytes();
        if num_bytes > max_bytes {
            return Err(ApiError::prompt_too_long(names.prompt, num_bytes, max_bytes));
        }
        let text = match (&chat.template, &self.chat_template) {
            (Some(source), _) => render_by_request(source, self.special_tokens(), chat),
            (None, Some(template)) => template.render_chat(chat),
            (None, None) => return Err(ApiError::invalid(names.prompt, NO_TEMPLATE)),
        };
        text.map_err(|error| of_template(error, names))
    }

    /// `bos_token` and the like, as templates know them.
    fn special_tokens(&self) -> Map<String, Value> {
        let SpecialTokens { bos, eos, pad, unk } = self.tokenizer.special_tokens();
        let named = [("bos_token", bos), ("eos_token", eos), ("pad_token", pad), ("unk_token", unk)];
        let text =
            |(name, token): (&str, &Option<SpecialToken>)| Some((name.into(), token.as_ref()?.text.clone().into()));
        named.into_iter().filter_map(text).collect()
    }

    /// [`ModelInfo::encode`], cut to `keep` tokens.
    pub fn encode_truncated(
        &self,
        prompt: &Prompt,
        keep: usize,
        side: Option<Side>,
        names: &FieldNames,
        budget: &Budget,
    ) -> Result<Vec<TokenId>, ApiError> {
        let text = match prompt {
            Prompt::Text { text, add_special_tokens: true } => Some((&*self.tokenizer, text.as_str())),
            _ => None,
        };
        let max_bytes = self.max_prompt_bytes.saturating_mul(CUT_FACTOR);
        truncate(self.encode_within(max_bytes, prompt, names, budget)?, keep, side, text)
    }
}

/// The model cannot fill in the middle.
pub fn no_marks(param: &str, missing: &str) -> ApiError {
    let message = format!(
        "{param}: this model cannot fill in the middle: its tokenizer has no mark for {missing} (such as \
         <|fim_prefix|>, <|fim_suffix|> and <|fim_middle|>)"
    );
    ApiError::invalid(param, message)
}

/// An error of a template, which calls what it is given as a chat does, about the client's field.
fn of_template(error: ApiError, names: &FieldNames) -> ApiError {
    let param = match error.param.as_deref() {
        Some("messages") => Some(names.prompt.to_owned()),
        Some("continue_final_message") => Some(names.continued.to_string()),
        _ => return error,
    };
    ApiError { param, ..error }
}

/// A prompt that is truncated may be this many times longer than others.
const CUT_FACTOR: usize = 4;
const NO_TEMPLATE: &str =
    "this model has no chat template: use /v1/completions, or add chat_template.jinja to the model";
