//! What the API's description says of Messages.
#![allow(dead_code, reason = "the shapes are only described: see answer, stream and error, which write them")]

use super::request::{MessagesFields, PROMPT_FIELDS};
use crate::Object;
use crate::chat::TemplateFields;
use crate::fields::memory::MemoryFields;
use crate::fields::model::ModelField;
use crate::fields::sampling::SamplingFields;
use crate::fields::shared::SHARED;
use crate::fields::structured::StructuredFields;
use crate::openapi::{Operation, Tag};
use crate::usage::KvUsage;
use utoipa::ToSchema;

pub fn create() -> Operation {
    Operation::new(Tag::Generation, "create_message", "Answers a conversation, in the shape of Anthropic's Messages")
        .about("cache_control is accepted without effect: equal prefixes are found by themselves.")
        .body("MessageRequest")
        .fields::<MessagesFields>()
        .fields::<ModelField>()
        .some_fields::<SamplingFields>(SHARED)
        .fields::<MemoryFields>()
        .some_fields::<TemplateFields>(SHARED)
        .some_fields::<StructuredFields>(SHARED)
        .requires(&["max_tokens", "messages"])
        .generates()
        .errors_as::<MessageError>()
        .answers::<AnthropicMessage>("The message; with stream: true its events, up to message_stop.")
        .streams::<MessageEvent>()
}

pub fn count_tokens() -> Operation {
    Operation::new(Tag::Text, "count_message_tokens", "Tokens of the prompt that a message request would make")
        .body("CountTokensRequest")
        .some_fields::<MessagesFields>(PROMPT_FIELDS)
        .fields::<ModelField>()
        .some_fields::<TemplateFields>(PROMPT_FIELDS)
        .requires(&["messages"])
        .errors_as::<MessageError>()
        .answers::<CountedTokens>("Their number.")
}

/// An error in Anthropic's format.
#[derive(ToSchema)]
pub struct MessageError {
    /// "error".
    r#type: String,
    error: MessageErrorDetails,
    request_id: String,
}

#[derive(ToSchema)]
struct MessageErrorDetails {
    /// invalid_request_error, authentication_error, not_found_error, …
    r#type: String,
    message: String,
}

/// A message of Anthropic's.
#[derive(ToSchema)]
struct AnthropicMessage {
    id: String,
    /// "message".
    r#type: String,
    /// "assistant".
    role: String,
    model: String,
    /// Blocks of type thinking, text and tool_use.
    content: Vec<Object>,
    /// end_turn, max_tokens, stop_sequence or tool_use.
    stop_reason: Option<String>,
    /// The stop sequence that ended it.
    stop_sequence: Option<String>,
    usage: MessageUsage,
}

#[derive(ToSchema)]
struct MessageUsage {
    /// Input tokens that were not in the prefix cache.
    input_tokens: u64,
    /// Always 0.
    cache_creation_input_tokens: u64,
    /// Input tokens that were.
    cache_read_input_tokens: u64,
    output_tokens: u64,
    output_tokens_details: MessageOutputTokens,
    /// With include_kv_usage.
    kv: Option<KvUsage>,
}

#[derive(ToSchema)]
struct MessageOutputTokens {
    thinking_tokens: u64,
}

/// An event of a streamed message. What it has depends on its type: message_start, content_block_start, ….
#[derive(ToSchema)]
struct MessageEvent(Object);

#[derive(ToSchema)]
struct CountedTokens {
    input_tokens: u64,
}
