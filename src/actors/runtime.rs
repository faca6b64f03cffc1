//! The running engine: wiring of the actors, and the handle that everything outside talks to.

use crate::actors::messages::{Accepted, Prompt, Submit};
use crate::engine::params::SamplingDefaults;
use crate::error::ApiError;
use crate::ids::TokenId;
use crate::text::{chat_template::ChatTemplate, tokenizer::Tokenizer};
use actix::Recipient;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What is served, for those who format requests and answers.
pub struct ModelInfo {
    pub served_name: String,
    /// Unix time of the start.
    pub created_s: u64,
    pub max_model_len: u32,
    pub vocab_size: u32,
    pub tokenizer: Arc<Tokenizer>,
    pub chat_template: Option<ChatTemplate>,
    /// End tokens of generation, from `generation_config.json` and `config.json`.
    pub eos_token_ids: Vec<TokenId>,
    /// The model's own sampling, for what a request leaves out.
    pub default_sampling: SamplingDefaults,
}

impl ModelInfo {
    /// Token ids of a prompt, its chat rendered. `param` names the prompt's field in errors.
    pub fn encode(&self, prompt: &Prompt, param: &str) -> Result<Vec<TokenId>, ApiError> {
        match prompt {
            Prompt::Text { text, add_special_tokens } => self.tokenizer.encode(text, *add_special_tokens),
            Prompt::Tokens(tokens) => Ok(tokens.clone()),
            Prompt::Chat(chat) => match &self.chat_template {
                // The template writes the special tokens.
                Some(template) => self.tokenizer.encode(&template.render(chat)?, false),
                None => {
                    let message = format!(
                        "the model '{}' has no chat template; send its prompt to /v1/completions",
                        self.served_name
                    );
                    Err(ApiError::invalid(param, message))
                }
            },
        }
    }
}

/// A cheap clone that submits requests to the engine from any thread.
#[derive(Clone)]
pub struct RuntimeHandle {
    intake: Recipient<Submit>,
    model: Arc<ModelInfo>,
    draining: Arc<AtomicBool>,
}

impl RuntimeHandle {
    pub fn new(intake: Recipient<Submit>, model: Arc<ModelInfo>, draining: Arc<AtomicBool>) -> Self {
        Self { intake, model, draining }
    }

    pub fn model(&self) -> &ModelInfo {
        &self.model
    }

    /// Validates, tokenises and queues a request.
    pub async fn submit(&self, submit: Submit) -> Result<Accepted, ApiError> {
        if self.is_draining() {
            return Err(ApiError::draining());
        }
        match self.intake.send(submit).await {
            Ok(answer) => answer,
            Err(_) => Err(ApiError::draining()),
        }
    }

    /// True from the first SIGTERM on: nothing new is admitted.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }
}
