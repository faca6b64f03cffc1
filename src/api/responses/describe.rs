//! What the API's description says of Responses.
#![allow(dead_code, reason = "the shapes are only described: see answer and stream, which write them")]

use super::request::ResponsesFields;
use crate::Object;
use crate::chat::TemplateFields;
use crate::fields::llama_cpp::TelemetryFields;
use crate::fields::memory::MemoryFields;
use crate::fields::model::ModelField;
use crate::fields::request_id::RequestIdFields;
use crate::fields::sampling::SamplingFields;
use crate::fields::shared::SHARED;
use crate::fields::structured::StructuredFields;
use crate::input_tokens::InputTokens;
use crate::openapi::{Operation, Tag};
use crate::timings::Timings;
use crate::usage::KvUsage;
use serde_json::Value;
use utoipa::ToSchema;

pub fn create() -> Operation {
    let operation = Operation::new(
        Tag::Generation,
        "create_response",
        "Answers a conversation, in the shape of OpenAI's Responses",
    )
    .about("Nothing is stored: previous_response_id, conversation, prompt, background and item references are refused.")
    .body("ResponseRequest");
    fields(operation)
        .generates()
        .answers::<ResponseObject>("The response; with stream: true its events, up to response.completed.")
        .streams::<ResponseEvent>()
}

/// The fields of a body, which counting its tokens reads as well.
fn fields(operation: Operation) -> Operation {
    operation
        .fields::<ResponsesFields>()
        .fields::<ModelField>()
        .some_fields::<SamplingFields>(SHARED)
        .fields::<MemoryFields>()
        .fields::<RequestIdFields>()
        .fields::<TelemetryFields>()
        .some_fields::<SamplingFields>(&["stop"])
        .some_fields::<TemplateFields>(SHARED)
        .some_fields::<StructuredFields>(SHARED)
        .requires(&["input"])
}

pub fn input_tokens() -> Operation {
    let operation =
        Operation::new(Tag::Text, "response_input_tokens", "Tokens of the prompt that a response would have")
            .about("Takes the body of /v1/responses, checks it as that path does, and runs nothing.")
            .body("ResponsePromptRequest");
    fields(operation).answers::<InputTokens>("Their number.")
}

fn stored(id: &'static str, summary: &'static str) -> Operation {
    Operation::new(Tag::Generation, id, summary)
        .about("Nothing is stored, so this is always 404.")
        .path_parameter("id", "A response's id.")
        .answers::<ResponseObject>("Never.")
}

pub fn retrieve() -> Operation {
    stored("retrieve_response", "A stored response")
}

pub fn delete() -> Operation {
    stored("delete_response", "Deletes a stored response")
}

pub fn input_items() -> Operation {
    stored("list_input_items", "The input of a stored response")
}

pub fn cancel() -> Operation {
    stored("cancel_response", "Cancels a background response")
}

/// A response of OpenAI's.
#[derive(ToSchema)]
struct ResponseObject {
    id: String,
    /// "response".
    object: String,
    /// Unix time.
    created_at: u64,
    /// Unix time of its end.
    completed_at: Option<u64>,
    /// in_progress, completed, incomplete or failed.
    status: String,
    error: Option<ResponseFailure>,
    incomplete_details: Option<IncompleteDetails>,
    /// Items of type reasoning, message and function_call.
    output: Vec<Object>,
    usage: Option<ResponseUsage>,
    model: String,
    /// Always "default".
    service_tier: String,
    /// Always false.
    store: bool,
    /// Always false.
    background: bool,
    /// Always null.
    previous_response_id: Option<String>,
    /// With timings_per_token.
    timings: Option<Timings>,
    #[schema(inline)]
    #[serde(flatten)]
    settings: Repeated,
}

/// What a response repeats of its request.
#[derive(ToSchema)]
struct Repeated {
    instructions: Option<String>,
    max_output_tokens: Option<i64>,
    max_tool_calls: Option<i64>,
    metadata: Object,
    parallel_tool_calls: bool,
    prompt_cache_key: Option<String>,
    reasoning: Object,
    safety_identifier: Option<String>,
    temperature: Option<f64>,
    text: Object,
    tool_choice: Value,
    tools: Vec<Object>,
    top_logprobs: i64,
    top_p: Option<f64>,
    truncation: String,
    user: Option<String>,
}

#[derive(ToSchema)]
struct ResponseFailure {
    /// "server_error".
    code: String,
    message: String,
}

#[derive(ToSchema)]
struct IncompleteDetails {
    /// "max_output_tokens".
    reason: String,
}

#[derive(ToSchema)]
struct ResponseUsage {
    input_tokens: u64,
    input_tokens_details: InputTokensDetails,
    output_tokens: u64,
    output_tokens_details: OutputTokensDetails,
    total_tokens: u64,
    /// With include_kv_usage.
    kv: Option<KvUsage>,
}

#[derive(ToSchema)]
struct InputTokensDetails {
    /// Input tokens whose KV was in the prefix cache.
    cached_tokens: u64,
    /// Always 0.
    cache_write_tokens: u64,
}

#[derive(ToSchema)]
struct OutputTokensDetails {
    reasoning_tokens: u64,
}

/// An event of a streamed response. What it has depends on its type: response.created, response.output_item.added, ….
#[derive(ToSchema)]
struct ResponseEvent(Object);
