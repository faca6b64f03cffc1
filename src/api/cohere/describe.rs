//! What the API's description says of Cohere's paths.
#![allow(dead_code, reason = "the shapes are only described: see answer, embed and error, which write them")]

use super::chat::{CohereChatFields, CohereSampling};
use super::embed::CohereEmbedFields;
use crate::Object;
use crate::fields::memory::MemoryFields;
use crate::fields::model::ModelField;
use crate::openapi::{Operation, Tag};
use crate::usage::KvUsage;
use crate::vllm::render;
use utoipa::ToSchema;

/// `id`: the operation's name in generated clients.
pub fn chat(id: &'static str) -> Operation {
    with_chat(Operation::new(Tag::Generation, id, "Answers a conversation, in the shape of Cohere"))
        .generates()
        .errors_as::<CohereError>()
        .answers::<CohereMessage>("The answer; with stream: true its events, up to message-end and [DONE].")
        .streams::<CohereEvent>()
}

pub fn render() -> Operation {
    with_chat(render::describe("render_cohere_chat", "/cohere/v2/chat")).errors_as::<CohereError>()
}

/// The body of a chat.
fn with_chat(operation: Operation) -> Operation {
    operation
        .body("CohereChatRequest")
        .fields::<CohereChatFields>()
        .fields::<CohereSampling>()
        .fields::<ModelField>()
        .fields::<MemoryFields>()
        .requires(&["messages"])
}

pub fn embed() -> Operation {
    Operation::new(Tag::Text, "cohere_embed", "Embeddings of texts, in the shape of Cohere")
        .body("CohereEmbedRequest")
        .fields::<CohereEmbedFields>()
        .fields::<ModelField>()
        .generates()
        .errors_as::<CohereError>()
        .answers::<CohereEmbeddings>("An embedding of each text, in their order.")
}

/// An error in Cohere's format.
#[derive(ToSchema)]
struct CohereError {
    /// The request's.
    id: String,
    message: String,
}

#[derive(ToSchema)]
struct CohereMessage {
    id: String,
    /// COMPLETE, STOP_SEQUENCE, MAX_TOKENS or TOOL_CALL.
    finish_reason: String,
    message: CohereAnswerMessage,
    usage: CohereUsage,
    /// With logprobs: one for each token of the text.
    logprobs: Option<Vec<CohereLogprob>>,
}

#[derive(ToSchema)]
struct CohereAnswerMessage {
    /// assistant.
    role: String,
    /// Blocks of type thinking and text.
    content: Option<Vec<Object>>,
    tool_calls: Option<Vec<Object>>,
}

#[derive(ToSchema)]
struct CohereUsage {
    billed_units: CohereTokens,
    tokens: CohereTokens,
    /// Input tokens that were in the prefix cache.
    cached_tokens: u64,
    /// With include_kv_usage.
    kv: Option<KvUsage>,
}

#[derive(ToSchema)]
struct CohereTokens {
    input_tokens: u64,
    output_tokens: u64,
}

#[derive(ToSchema)]
struct CohereLogprob {
    text: String,
    token_ids: Vec<u32>,
    logprobs: Vec<f64>,
}

/// An event of a streamed answer. What it has depends on its type: message-start, content-start, ….
#[derive(ToSchema)]
struct CohereEvent(Object);

#[derive(ToSchema)]
struct CohereEmbeddings {
    id: String,
    /// Arrays by their type: float, base64, binary, ubinary.
    embeddings: Object,
    /// The texts of the request.
    texts: Vec<String>,
    meta: Object,
    /// embeddings_by_type.
    response_type: String,
}
