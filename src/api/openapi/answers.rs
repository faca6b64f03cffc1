//! Shapes of the answers that [`crate::openai::response`] writes. They are never made: the writer has one struct
//! for all four, with borrowed parts. `tests/http/openapi.rs` checks real answers against them.
#![allow(dead_code, reason = "only described")]

use crate::delta::StopReason;
use crate::openai::logprobs::{ChatLogprobs, CompletionLogprobs};
use crate::timings::{PromptProgress, Timings};
use crate::usage::Usage;
use std::collections::HashMap;
use utoipa::ToSchema;

/// The answer to a chat.
#[derive(ToSchema)]
pub struct ChatCompletion {
    id: String,
    #[schema(value_type = ObjectChatCompletion)]
    object: (),
    /// Unix time.
    created: u64,
    model: String,
    /// The server's version.
    system_fingerprint: String,
    choices: Vec<ChatChoice>,
    usage: Usage,
    /// With timings_per_token: of the first choice.
    timings: Option<Timings>,
    /// With verbose: the first choice as /completion would answer it, with its prompt and parameters.
    #[schema(rename = "__verbose")]
    verbose: Option<crate::Object>,
    /// With prompt_logprobs: for each token of the prompt the token itself and the most likely ones by id; null for the
    /// first.
    prompt_logprobs: Option<Vec<Option<HashMap<String, PromptLogprob>>>>,
    /// With return_token_ids.
    prompt_token_ids: Option<Vec<u32>>,
}

#[derive(ToSchema)]
struct ChatChoice {
    index: u32,
    message: AssistantMessage,
    logprobs: Option<ChatLogprobs>,
    finish_reason: FinishReasonSchema,
    /// The stop string or stop token that ended it.
    stop_reason: Option<StopReason>,
    /// The same, or the end token that ended it. In a stream only the last chunk has it.
    matched_stop: Option<StopReason>,
    /// With return_token_ids.
    token_ids: Option<Vec<u32>>,
}

#[derive(ToSchema)]
struct AssistantMessage {
    #[schema(value_type = RoleAssistant)]
    role: (),
    /// Null where the model only reasoned or called tools.
    content: Option<String>,
    refusal: Option<String>,
    /// Of a model that reasons.
    reasoning_content: Option<String>,
    /// The same as reasoning_content.
    reasoning: Option<String>,
    tool_calls: Option<Vec<ToolCall>>,
}

#[derive(ToSchema)]
struct ToolCall {
    id: String,
    #[schema(value_type = TypeFunction)]
    r#type: (),
    function: CalledFunction,
}

#[derive(ToSchema)]
struct CalledFunction {
    name: String,
    /// JSON. Where calls were not demanded (tool_choice) the model can have written it wrong.
    arguments: String,
}

/// A part of a streamed chat.
#[derive(ToSchema)]
pub struct ChatCompletionChunk {
    id: String,
    #[schema(value_type = ObjectChatCompletionChunk)]
    object: (),
    /// Unix time.
    created: u64,
    model: String,
    /// The server's version.
    system_fingerprint: String,
    /// Empty in the chunk with the usage of the whole request, and in those with the progress of the prompt.
    choices: Vec<ChatChunkChoice>,
    /// With stream_options.include_usage.
    usage: Option<Usage>,
    /// With timings_per_token: of the chunk's choice so far; in the chunk with the usage of the first choice.
    timings: Option<Timings>,
    /// With return_progress, in chunks without choices: how far the prompt is computed.
    prompt_progress: Option<PromptProgress>,
    /// With verbose: in a choice's last chunk, the choice as /completion would answer it, with its prompt and
    /// parameters.
    #[schema(rename = "__verbose")]
    verbose: Option<crate::Object>,
    /// With return_token_ids, in a choice's first chunk.
    prompt_token_ids: Option<Vec<u32>>,
}

#[derive(ToSchema)]
struct ChatChunkChoice {
    index: u32,
    delta: MessageDelta,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<FinishReasonSchema>,
    /// The stop string or stop token that ended it.
    stop_reason: Option<StopReason>,
    /// The same, or the end token that ended it. In a stream only the last chunk has it.
    matched_stop: Option<StopReason>,
    /// With return_token_ids.
    token_ids: Option<Vec<u32>>,
}

/// What a message gained.
#[derive(ToSchema)]
struct MessageDelta {
    #[schema(value_type = Option<RoleAssistant>)]
    role: (),
    content: Option<String>,
    /// Of a model that reasons.
    reasoning_content: Option<String>,
    /// The same as reasoning_content.
    reasoning: Option<String>,
    tool_calls: Option<Vec<ToolCallDelta>>,
}

/// The beginning of a call, or more of its arguments.
#[derive(ToSchema)]
struct ToolCallDelta {
    /// Which call of the message.
    index: u32,
    id: Option<String>,
    #[schema(value_type = Option<TypeFunction>)]
    r#type: (),
    function: CalledFunctionDelta,
}

#[derive(ToSchema)]
struct CalledFunctionDelta {
    name: Option<String>,
    arguments: String,
}

/// The answer to a completion, or a part of a streamed one.
#[derive(ToSchema)]
pub struct TextCompletion {
    id: String,
    #[schema(value_type = ObjectTextCompletion)]
    object: (),
    /// Unix time.
    created: u64,
    model: String,
    /// The server's version.
    system_fingerprint: String,
    choices: Vec<TextChoice>,
    /// In a stream with stream_options.include_usage.
    usage: Option<Usage>,
    /// With timings_per_token: of the first choice; in a stream of the chunk's choice so far.
    timings: Option<Timings>,
    /// With return_progress, in chunks without choices: how far the prompt is computed.
    prompt_progress: Option<PromptProgress>,
    /// With verbose: the first choice, or in a stream the chunk's, as /completion would answer it, with its prompt and
    /// parameters.
    #[schema(rename = "__verbose")]
    verbose: Option<crate::Object>,
}

#[derive(ToSchema)]
struct TextChoice {
    index: u32,
    text: String,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<FinishReasonSchema>,
    /// The stop string or stop token that ended it.
    stop_reason: Option<StopReason>,
    /// The same, or the end token that ended it. In a stream only the last chunk has it.
    matched_stop: Option<StopReason>,
    /// With return_token_ids.
    token_ids: Option<Vec<u32>>,
    /// With prompt_logprobs: for each token of the prompt the token itself and the most likely ones by id; null for the
    /// first.
    prompt_logprobs: Option<Vec<Option<HashMap<String, PromptLogprob>>>>,
    /// With return_token_ids; in a stream in a choice's first chunk.
    prompt_token_ids: Option<Vec<u32>>,
}

#[derive(ToSchema)]
struct PromptLogprob {
    logprob: f64,
    /// 1 for the most likely token.
    rank: u32,
    decoded_token: String,
}

/// Why an answer ended.
#[derive(ToSchema)]
#[schema(as = FinishReason, rename_all = "snake_case")]
enum FinishReasonSchema {
    /// An end token, stop token or stop string.
    Stop,
    /// max_tokens, or the model's length.
    Length,
    /// The model has called tools; stop where tool_choice named one.
    ToolCalls,
    /// The request was aborted by its id.
    Abort,
    /// Of a derendered answer: the other server failed.
    Error,
    /// Of a derendered answer: the other server ended a repetition.
    Repetition,
}

/// The models that are served.
#[derive(ToSchema)]
pub struct ModelList {
    #[schema(value_type = ObjectList)]
    object: (),
    data: Vec<ModelCard>,
}

#[derive(ToSchema)]
pub struct ModelCard {
    id: String,
    #[schema(value_type = ObjectModel)]
    object: (),
    /// Unix time of the server's start.
    created: u64,
    owned_by: String,
    /// The model's first name.
    root: String,
    /// Always null.
    parent: Option<String>,
    /// Tokens of prompt and output together at most.
    max_model_len: u32,
    /// In the dialect llama.cpp: every name of the model.
    aliases: Option<Vec<String>>,
    /// The same: server.model_tags.
    tags: Option<Vec<String>>,
    /// The same: the sizes of its vocabulary, context and embeddings.
    meta: Option<crate::Object>,
}

#[derive(ToSchema)]
pub struct Status {
    status: String,
}

#[derive(ToSchema)]
pub struct Version {
    version: String,
}

/// Strings that are always the same.
macro_rules! words {
    ($($name:ident = $word:literal),+ $(,)?) => {
        $(#[derive(ToSchema)]
        enum $name {
            #[schema(rename = $word)]
            It,
        })+
    };
}

words!(
    ObjectChatCompletion = "chat.completion",
    ObjectChatCompletionChunk = "chat.completion.chunk",
    ObjectTextCompletion = "text_completion",
    ObjectList = "list",
    ObjectModel = "model",
    RoleAssistant = "assistant",
    TypeFunction = "function",
);
