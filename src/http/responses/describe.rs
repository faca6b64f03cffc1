//! What the API's description says of Responses.
#![allow(dead_code, reason = "the shapes are only described: see answer and stream, which write them")]

use super::request::ResponsesFields;
use crate::http::openai::ModelField;
use crate::http::openai::chat::TemplateFields;
use crate::http::openai::sampling::SamplingFields;
use crate::http::openai::structured::StructuredFields;
use crate::http::openapi::{Operation, Tag};
use crate::http::translate::SAME_IN_CHAT;
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// Any object.
type Object = Map<String, Value>;

pub fn create() -> Operation {
    Operation::new(Tag::Generation, "create_response", "Answers a conversation, in the shape of OpenAI's Responses")
        .about(
            "Nothing is stored: previous_response_id, conversation, prompt, background and item references are refused.",
        )
        .body("ResponseRequest")
        .fields::<ResponsesFields>()
        .fields::<ModelField>()
        .some_fields::<SamplingFields>(SAME_IN_CHAT)
        .some_fields::<SamplingFields>(&["stop"])
        .some_fields::<TemplateFields>(SAME_IN_CHAT)
        .some_fields::<StructuredFields>(SAME_IN_CHAT)
        .requires(&["input"])
        .generates()
        .answers::<ResponseObject>("The response; with stream: true its events, up to response.completed.")
        .streams::<ResponseEvent>()
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

/// A response of OpenAI's. It repeats the request's settings besides.
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
    model: String,
    /// Items of type reasoning, message and function_call.
    output: Vec<Object>,
    parallel_tool_calls: bool,
    temperature: Option<f64>,
    top_p: Option<f64>,
    max_output_tokens: Option<u64>,
    tools: Vec<Object>,
    usage: Option<ResponseUsage>,
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

/// An event of a streamed response. What else it has depends on its type.
#[derive(ToSchema)]
struct ResponseEvent {
    /// response.created, response.in_progress, response.output_item.added, …
    r#type: String,
    /// Counted from 0.
    sequence_number: u64,
}
