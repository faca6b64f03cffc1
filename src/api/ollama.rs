//! Ollama's API: chat, generate, embeddings, and what its clients ask about the model.

pub mod answer;
pub mod chat;
pub mod describe;
pub mod embed;
pub mod error;
pub mod fields;
pub mod generate;
mod messages;
pub mod models;
pub mod options;

use crate::request::ApiRequest;
use answer::OllamaAnswer;
use serde_json::Value;

/// What a request to chat or generate asks for.
#[derive(Debug)]
pub enum OllamaTask {
    /// Nothing is to be generated: the request only asks for the model to be loaded.
    Load(Value),
    Generate(Box<ApiRequest>, Box<OllamaAnswer>),
}
