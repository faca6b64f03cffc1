//! What the API's description says of Ollama's paths.
#![allow(dead_code, reason = "the shapes are only described: see answer, models and error, which write them")]

use super::chat::OllamaChatFields;
use super::embed::{AcceptedInEmbed, OllamaEmbedFields, OllamaEmbeddings, OllamaEmbeddingsFields, OllamaOneEmbedding};
use super::fields::OllamaFields;
use super::generate::OllamaGenerateFields;
use super::models::OllamaShowFields;
use crate::Object;
use crate::fields::memory::MemoryFields;
use crate::fields::model::ModelField;
use crate::openai::logprobs::ChatPosition;
use crate::openapi::answers::Version;
use crate::openapi::{Operation, Tag};
use crate::usage::KvUsage;
use utoipa::ToSchema;

pub fn chat() -> Operation {
    Operation::new(Tag::Generation, "ollama_chat", "Answers a conversation, in the shape of Ollama")
        .body("OllamaChatRequest")
        .fields::<OllamaChatFields>()
        .fields::<OllamaFields>()
        .fields::<ModelField>()
        .fields::<MemoryFields>()
        .generates()
        .errors_as::<OllamaError>()
        .answers::<OllamaChat>("The whole answer with stream: false, else its parts.")
        .streams_lines::<OllamaChat>()
}

pub fn generate() -> Operation {
    Operation::new(Tag::Generation, "ollama_generate", "Answers a text, in the shape of Ollama")
        .body("OllamaGenerateRequest")
        .fields::<OllamaGenerateFields>()
        .fields::<OllamaFields>()
        .fields::<ModelField>()
        .fields::<MemoryFields>()
        .generates()
        .errors_as::<OllamaError>()
        .answers::<OllamaText>("The whole answer with stream: false, else its parts.")
        .streams_lines::<OllamaText>()
}

pub fn embed() -> Operation {
    Operation::new(Tag::Text, "ollama_embed", "Embeddings of texts, in the shape of Ollama")
        .body("OllamaEmbedRequest")
        .fields::<OllamaEmbedFields>()
        .fields::<AcceptedInEmbed>()
        .fields::<ModelField>()
        .generates()
        .errors_as::<OllamaError>()
        .answers::<OllamaEmbeddings>("An embedding of each input, in their order.")
}

pub fn embeddings() -> Operation {
    Operation::new(Tag::Text, "ollama_embeddings", "The embedding of a text. See /api/embed, which is newer")
        .body("OllamaEmbeddingsRequest")
        .fields::<OllamaEmbeddingsFields>()
        .fields::<AcceptedInEmbed>()
        .fields::<ModelField>()
        .generates()
        .errors_as::<OllamaError>()
        .answers::<OllamaOneEmbedding>("The embedding.")
}

pub fn tags() -> Operation {
    Operation::new(Tag::Models, "ollama_tags", "The models that are served, in the shape of Ollama")
        .errors_as::<OllamaError>()
        .answers::<OllamaModels>("Each name of the model.")
}

pub fn running() -> Operation {
    Operation::new(Tag::Models, "ollama_ps", "The model in memory, in the shape of Ollama")
        .errors_as::<OllamaError>()
        .answers::<OllamaModels>("The model.")
}

pub fn show() -> Operation {
    Operation::new(Tag::Models, "ollama_show", "What is known of the model, in the shape of Ollama")
        .body("OllamaShowRequest")
        .fields::<OllamaShowFields>()
        .fields::<ModelField>()
        .errors_as::<OllamaError>()
        .answers::<OllamaModel>("The model.")
}

pub fn version() -> Operation {
    Operation::new(Tag::Server, "ollama_version", "The version of Ollama whose API this is")
        .errors_as::<OllamaError>()
        .answers::<Version>("The version.")
}

/// A path that manages models, which this server does not.
fn managing(id: &'static str, summary: &'static str) -> Operation {
    Operation::new(Tag::Models, id, summary)
        .about("Not served: the server serves the model that it was started with.")
        .errors_as::<OllamaError>()
        .fails(&[501])
        .answers_json("Never.")
}

pub fn pull() -> Operation {
    managing("ollama_pull", "Fetches a model")
}

pub fn push() -> Operation {
    managing("ollama_push", "Publishes a model")
}

pub fn create() -> Operation {
    managing("ollama_create", "Makes a model")
}

pub fn copy() -> Operation {
    managing("ollama_copy", "Copies a model")
}

pub fn delete() -> Operation {
    managing("ollama_delete", "Removes a model")
}

pub fn blob() -> Operation {
    managing("ollama_blob", "Takes a file of a model").path_parameter("digest", "SHA-256 of the file.")
}

/// An error in Ollama's format.
#[derive(ToSchema)]
struct OllamaError {
    error: String,
}

/// A chat's answer, or a part of it. What follows done is only in the last part.
#[derive(ToSchema)]
struct OllamaChat {
    /// As the request has it.
    model: String,
    created_at: String,
    message: OllamaAnswerMessage,
    done: bool,
    /// stop, length or load.
    done_reason: Option<String>,
    /// With logprobs.
    logprobs: Option<Vec<ChatPosition>>,
    /// Nanoseconds from the request to the end.
    total_duration: Option<u64>,
    /// Nanoseconds until the engine had the request.
    load_duration: Option<u64>,
    prompt_eval_count: Option<u64>,
    /// Nanoseconds from there to the first token.
    prompt_eval_duration: Option<u64>,
    eval_count: Option<u64>,
    /// Nanoseconds from there to the end.
    eval_duration: Option<u64>,
    /// With include_kv_usage.
    kv: Option<KvUsage>,
}

#[derive(ToSchema)]
struct OllamaAnswerMessage {
    /// assistant.
    role: String,
    content: String,
    /// Of a model that thinks.
    thinking: Option<String>,
    /// Each whole, with its arguments as an object.
    tool_calls: Option<Vec<Object>>,
}

/// A text's answer, or a part of it. What follows done is only in the last part.
#[derive(ToSchema)]
struct OllamaText {
    /// As the request has it.
    model: String,
    created_at: String,
    response: String,
    /// Of a model that thinks.
    thinking: Option<String>,
    done: bool,
    /// stop, length or load.
    done_reason: Option<String>,
    /// With logprobs.
    logprobs: Option<Vec<ChatPosition>>,
    /// Token ids of prompt and answer, for the next request; not with raw.
    context: Option<Vec<u32>>,
    /// Nanoseconds from the request to the end.
    total_duration: Option<u64>,
    /// Nanoseconds until the engine had the request.
    load_duration: Option<u64>,
    prompt_eval_count: Option<u64>,
    /// Nanoseconds from there to the first token.
    prompt_eval_duration: Option<u64>,
    eval_count: Option<u64>,
    /// Nanoseconds from there to the end.
    eval_duration: Option<u64>,
    /// With include_kv_usage.
    kv: Option<KvUsage>,
}

#[derive(ToSchema)]
struct OllamaModels {
    models: Vec<OllamaModelCard>,
}

#[derive(ToSchema)]
struct OllamaModelCard {
    /// With :latest where the server's name has no version.
    name: String,
    /// The same.
    model: String,
    /// Bytes of the weights.
    size: u64,
    /// Empty: there is none.
    digest: String,
    details: Object,
    /// Of tags: when the server was started.
    modified_at: Option<String>,
    /// Of ps: never.
    expires_at: Option<String>,
    /// Of ps: bytes on the GPU.
    size_vram: Option<u64>,
    /// Of ps: tokens of prompt and answer at most.
    context_length: Option<u64>,
}

#[derive(ToSchema)]
struct OllamaModel {
    /// Empty: there is none.
    license: String,
    /// Empty: there is none.
    modelfile: String,
    /// The model's own sampling defaults, a line each.
    parameters: String,
    /// The chat template, in Jinja.
    template: String,
    details: Object,
    model_info: Object,
    /// completion, tools, thinking.
    capabilities: Vec<String>,
    modified_at: String,
}
