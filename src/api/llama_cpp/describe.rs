//! What the API's description says of llama.cpp's API.
#![allow(dead_code, reason = "the shapes are only described: see answer, stream and error, which write them")]

use super::completion::{GenerationFields, NOT_NATIVE, PromptField};
use super::embedding::{NativeEmbedding, NativeEmbeddingFields};
use super::infill::InfillFields;
use super::probabilities::TokenProbabilities;
use super::slots::{ErasedSlot, RestoredSlot, SavedSlot, Slot, SlotFileFields};
use super::template::RenderedChat;
use crate::Object;
use crate::fields::llama_cpp::{ChatReadingFields, LlamaCppFields, TelemetryFields};
use crate::fields::model::ModelField;
use crate::fields::sampling::SamplingFields;
use crate::fields::structured::StructuredFields;
use crate::input_tokens::InputTokens;
use crate::openai::chat;
use crate::openapi::answers::Status;
use crate::openapi::{Operation, Tag};
use crate::timings::{PromptProgress, Timings};
use serde_json::json;
use utoipa::ToSchema;

const OF_PROMPT: &str = "Takes the body of a chat. Of its fields, those that shape the prompt change the answer.";

pub fn completion() -> Operation {
    let operation = Operation::new(
        Tag::Generation,
        "native_completion",
        "Continues a text, as llama.cpp's server does",
    )
    .about("Fields that the body leaves out have llama.cpp's defaults, where the model's authors recommend no others.")
    .body("NativeCompletionRequest")
    .fields::<PromptField>();
    generation(operation, &["prompt"])
}

pub fn infill() -> Operation {
    let operation = Operation::new(Tag::Generation, "infill", "Fills the gap between two texts")
        .about("For models whose tokenizer has marks for it; 501 for others.")
        .body("InfillRequest")
        .fields::<InfillFields>();
    generation(operation, &["input_prefix", "input_suffix"]).fails(&[501])
}

fn generation(operation: Operation, required: &[&'static str]) -> Operation {
    operation
        .fields::<GenerationFields>()
        .fields::<LlamaCppFields>()
        .fields::<TelemetryFields>()
        .fields::<ChatReadingFields>()
        .fields::<ModelField>()
        .fields_but::<SamplingFields>(NOT_NATIVE)
        .fields::<StructuredFields>()
        .requires(required)
        .generates()
        .errors_as::<NativeError>()
        .answers::<NativeAnswerForms>("The whole completion, an array for several; with stream its parts.")
        .streams::<NativeEvent>()
}

pub fn embedding() -> Operation {
    Operation::new(Tag::Text, "native_embedding", "Embeddings of texts, as llama.cpp's server gives them")
        .body("NativeEmbeddingRequest")
        .fields::<NativeEmbeddingFields>()
        .fields::<ModelField>()
        .generates()
        .errors_as::<NativeError>()
        .answers::<NativeEmbeddings>("An embedding of each text, in their order.")
}

pub fn apply_template() -> Operation {
    let operation = Operation::new(Tag::Text, "apply_template", "The text that a chat becomes")
        .about(OF_PROMPT)
        .body("ChatPromptRequest");
    chat::describe_fields(operation).errors_as::<NativeError>().answers::<RenderedChat>("The text.")
}

pub fn input_tokens() -> Operation {
    let operation = Operation::new(Tag::Text, "chat_input_tokens", "Tokens of the prompt that a chat would have")
        .about(OF_PROMPT)
        .body("ChatPromptRequest");
    chat::describe_fields(operation).answers::<InputTokens>("Their number.")
}

pub fn props() -> Operation {
    Operation::new(Tag::Server, "props", "What llama.cpp's clients ask of the server: its model, defaults and template")
        .errors_as::<NativeError>()
        .answers_json("The properties.")
}

pub fn change_props() -> Operation {
    not_served("change_props", "Not served: settings are changed through /admin/config")
}

pub fn slots() -> Operation {
    Operation::new(Tag::Server, "slots", "The seats of a step, with the sequences that hold blocks")
        .about(
            "Shows the requests of all clients, so where server.api_keys or server.metrics_key is set this path wants \
             server.metrics_key or server.admin_key. 501 where server.slots is false.",
        )
        .query_parameter("fail_on_no_slot", "Any value: 503 if no slot is idle.", json!({"type": "string"}))
        .fails(&[403, 501, 503])
        .errors_as::<NativeError>()
        .answers::<Slots>("The slots.")
}

pub fn slot_action() -> Operation {
    Operation::new(Tag::Server, "slot_action", "Writes what a slot's last completion has left in the caches to a file")
        .about(
            "save writes the KV of the prompt and the answer to a file of the server's folder, restore reads it back \
             into the prefix cache, and erase forgets it. Each API key with a prefix cache of its own has its own \
             slots and files. 501 where server.slot_folder is empty, or there is no prefix cache.",
        )
        .path_parameter("id", "A slot: a number below scheduler.max_num_seqs.")
        .query_parameter("action", "save, restore or erase.", json!({"type": "string"}))
        .body("SlotFile")
        .fields::<SlotFileFields>()
        .fails(&[400, 500, 501])
        .errors_as::<NativeError>()
        .answers::<SavedSlot>("What was saved, restored or erased.")
        .or_answers::<RestoredSlot>()
        .or_answers::<ErasedSlot>()
}

pub fn lora_adapters() -> Operation {
    Operation::new(Tag::Models, "lora_adapters", "The LoRA adapters that are loaded: none")
        .errors_as::<NativeError>()
        .answers::<LoraAdapters>("An empty list.")
}

pub fn change_lora_adapters() -> Operation {
    not_served("change_lora_adapters", "Not served: there are no adapters")
}

pub fn health() -> Operation {
    Operation::new(Tag::Server, "native_health", "The same as /health").answers::<Status>("The process lives.")
}

fn not_served(id: &'static str, summary: &'static str) -> Operation {
    Operation::new(Tag::Server, id, summary).fails(&[501]).errors_as::<NativeError>()
}

/// An error in llama.cpp's format.
#[derive(ToSchema)]
pub struct NativeError {
    error: NativeErrorDetails,
}

#[derive(ToSchema)]
struct NativeErrorDetails {
    /// The HTTP status.
    code: u16,
    message: String,
    /// invalid_request_error, exceed_context_size_error, not_supported_error, …
    r#type: String,
    /// Of a prompt that is too long: its tokens.
    n_prompt_tokens: Option<usize>,
    /// The most tokens of prompt and output.
    n_ctx: Option<usize>,
}

#[derive(ToSchema)]
#[serde(untagged)]
enum NativeAnswerForms {
    One(Box<NativeCompletion>),
    Several(Vec<NativeCompletion>),
}

/// A whole completion, or the last part of a streamed one.
#[derive(ToSchema)]
struct NativeCompletion {
    /// The place of its prompt, and of its sample of it.
    index: u32,
    /// The text; empty in a stream.
    content: String,
    /// With return_tokens; empty in a stream.
    tokens: Vec<u32>,
    /// The slot that holds the request's tokens; where slots are not kept, the id_slot of the request, or -1.
    id_slot: i64,
    /// true.
    stop: bool,
    model: String,
    /// Tokens of the output.
    tokens_predicted: usize,
    /// Tokens of the prompt.
    tokens_evaluated: usize,
    /// The parameters that the completion was made with.
    generation_settings: Object,
    /// The text of the prompt's tokens.
    prompt: String,
    has_new_line: bool,
    /// The output ended because there was no room for more.
    truncated: bool,
    /// eos, word or limit.
    stop_type: String,
    /// The stop string that ended it, or an empty text.
    stopping_word: String,
    /// Tokens whose KV may be cached.
    tokens_cached: usize,
    timings: Timings,
    /// With n_probs; not in a stream.
    completion_probabilities: Option<Vec<TokenProbabilities>>,
}

#[derive(ToSchema)]
#[serde(untagged)]
enum NativeEvent {
    Part(Box<NativePart>),
    Last(Box<NativeCompletion>),
}

/// A part of a streamed completion.
#[derive(ToSchema)]
struct NativePart {
    index: u32,
    content: String,
    tokens: Vec<u32>,
    /// false.
    stop: bool,
    id_slot: i64,
    /// Tokens of the output so far.
    tokens_predicted: usize,
    tokens_evaluated: usize,
    /// With timings_per_token.
    timings: Option<Timings>,
    /// With return_progress, in the parts before the first token.
    prompt_progress: Option<PromptProgress>,
    /// With n_probs: of the tokens of this part.
    completion_probabilities: Option<Vec<TokenProbabilities>>,
}

#[derive(ToSchema)]
struct NativeEmbeddings(Vec<NativeEmbedding>);

#[derive(ToSchema)]
struct Slots(Vec<Slot>);

#[derive(ToSchema)]
struct LoraAdapters(Vec<Object>);
