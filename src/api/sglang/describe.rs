//! What the API's description says of SGLang's paths.
#![allow(dead_code, reason = "the shapes are only described: see answer, which writes them")]

use super::control::{AbortFields, ContinueFields, GenerationState, PauseFields};
use super::generate::{AcceptedInGenerate, GenerateFields};
use super::session::{CloseFields, OpenFields};
use crate::Object;
use crate::fields::memory::MemoryFields;
use crate::openapi::{Operation, Tag};
use crate::usage::KvUsage;
use serde_json::json;
use utoipa::ToSchema;

pub fn generate() -> Operation {
    generates("sglang_generate", "Continues texts, in the shape of SGLang")
}

pub fn generate_by_put() -> Operation {
    generates("sglang_generate_by_put", "The same as POST")
}

fn generates(id: &'static str, summary: &'static str) -> Operation {
    Operation::new(Tag::Generation, id, summary)
        .about("One of text and input_ids is given.")
        .body("GenerateRequest")
        .fields::<GenerateFields>()
        .fields::<AcceptedInGenerate>()
        .fields::<MemoryFields>()
        .generates()
        .answers::<GenerateAnswer>("The answer, or an array of answers; with stream its parts.")
        .streams::<GeneratedText>()
}

pub fn open_session() -> Operation {
    Operation::new(Tag::Generation, "open_session", "Opens a session: the server keeps the tokens of a conversation")
        .about("Requests of /generate say the session in session_params. Every client has sessions of its own.")
        .body("OpenSessionRequest")
        .fields::<OpenFields>()
        .fails(&[429])
        .answers_text("application/json", "The session's id.")
}

pub fn close_session() -> Operation {
    Operation::new(Tag::Generation, "close_session", "Forgets the tokens of a session")
        .about("A session that is not open is ignored: it may have been idle for too long. Requests under way go on.")
        .body("CloseSessionRequest")
        .fields::<CloseFields>()
        .requires(&["session_id"])
}

pub fn abort_request() -> Operation {
    Operation::new(Tag::Generation, "abort_request", "Ends requests under way, in the shape of SGLang")
        .about(
            "A request ends with the text that it has, and the finish reason abort. A client can end its own requests \
             alone. Ids of other requests are ignored: they may have ended.",
        )
        .body("AbortOneRequest")
        .fields::<AbortFields>()
}

const OPERATORS: &str = "Where any key is set, this path wants server.admin_key.";

pub fn pause() -> Operation {
    Operation::new(Tag::Server, "pause_generation", "Stops the generation of all requests")
        .about(format!("New requests wait until /continue_generation. {OPERATORS}"))
        .body("PauseGenerationRequest")
        .fields::<PauseFields>()
        .fails(&[403])
        .answers::<GenerationState>("The engine is paused.")
}

pub fn resume() -> Operation {
    Operation::new(Tag::Server, "continue_generation", "Goes on after /pause_generation")
        .about(OPERATORS)
        .body("ContinueGenerationRequest")
        .fields::<ContinueFields>()
        .fails(&[403])
        .answers::<GenerationState>("The engine goes on.")
}

pub fn server_info_with_config() -> Operation {
    Operation::new(Tag::Server, "server_info", "The server's sizes, in the shape of SGLang")
        .about(
            "With server.admin_key, the answer also has the settings in force, in config, as /admin/config shows them.",
        )
        .answers_json("The server.")
}

pub fn model_info() -> Operation {
    Operation::new(Tag::Models, "model_info", "The model that is served, in the shape of SGLang")
        .answers_json("The model.")
}

pub fn model_info_older() -> Operation {
    Operation::new(Tag::Models, "get_model_info", "The same as /model_info, which is newer").answers_json("The model.")
}

pub fn server_info() -> Operation {
    Operation::new(Tag::Server, "get_server_info", "The server's sizes, as in /server_info, which is newer")
        .answers_json("The server.")
}

pub fn health() -> Operation {
    Operation::new(Tag::Server, "health_generate", "The engine generates a token")
        .about("At most one token a second is generated for all who ask.")
        .fails(&[503])
        .answers_nothing("It did.")
}

fn flush(id: &'static str) -> Operation {
    Operation::new(Tag::Server, id, "Drops the prefix caches on the device and in CPU memory")
        .about(
            "While requests run or wait, nothing is dropped, and the answer is 400. Where any key is set, this path \
             wants server.admin_key.",
        )
        .query_parameter("timeout", "Seconds to wait for requests to end.", json!({"type": "number", "minimum": 0}))
        .fails(&[400, 403])
        .answers_text("text/plain", "They are empty.")
}

pub fn flush_by_get() -> Operation {
    flush("flush_cache")
}

pub fn flush_by_post() -> Operation {
    flush("flush_cache_by_post")
}

pub fn loads() -> Operation {
    let sections = json!({"type": "string"});
    Operation::new(Tag::Server, "loads", "How many requests there are, and what they hold, in the shape of SGLang")
        .about("Where keys are set, this path wants server.metrics_key or server.admin_key.")
        .query_parameter("include", "Sections, with commas: core, memory, queues, all (the default).", sections)
        .fails(&[400, 403])
        .answers_json("The load.")
}

pub fn load() -> Operation {
    Operation::new(Tag::Server, "get_load", "A part of /v1/loads, which is newer")
        .about("Where keys are set, this path wants server.metrics_key or server.admin_key.")
        .fails(&[403])
        .answers_several::<LoadOfEngine>("The load of the only engine.")
}

#[derive(ToSchema)]
struct LoadOfEngine {
    /// Always 0.
    dp_rank: u32,
    num_reqs: u64,
    num_waiting_reqs: u64,
    /// Tokens in the KV cache.
    num_tokens: u64,
    /// Unix time.
    ts_tic: f64,
}

#[derive(ToSchema)]
#[serde(untagged)]
enum GenerateAnswer {
    One(Box<GeneratedText>),
    /// For several texts, or n above 1.
    Several(Vec<GeneratedText>),
}

#[derive(ToSchema)]
struct GeneratedText {
    text: String,
    output_ids: Vec<u32>,
    meta_info: GenerateMeta,
    /// With return_prompt_token_ids.
    prompt_token_ids: Option<Vec<u32>>,
    /// In a stream of several texts.
    index: Option<u64>,
}

#[derive(ToSchema)]
struct GenerateMeta {
    id: String,
    /// An object of type stop (with what matched), length or abort; null in a stream before the end.
    finish_reason: Option<Object>,
    prompt_tokens: u64,
    /// Always "default".
    weight_version: String,
    /// Times that the answer had to give its memory up.
    num_retractions: u64,
    reasoning_tokens: u64,
    completion_tokens: u64,
    cached_tokens: u64,
    /// Seconds, at the end.
    e2e_latency: Option<f64>,
    /// With return_logprob: log-probability, token id, and text or null.
    output_token_logprobs: Option<Vec<Vec<Option<TripleValue>>>>,
    output_token_logprobs_length: Option<u64>,
    /// From logprob_start_len on; the first has none.
    input_token_logprobs: Option<Vec<Vec<Option<TripleValue>>>>,
    /// With top_logprobs_num.
    output_top_logprobs: Option<Vec<Vec<Vec<Option<TripleValue>>>>>,
    /// With top_logprobs_num; the first is null.
    #[allow(clippy::type_complexity, reason = "the derived description cannot read an alias")]
    input_top_logprobs: Option<Vec<Option<Vec<Vec<Option<TripleValue>>>>>>,
    /// With include_kv_usage.
    kv: Option<KvUsage>,
}

#[derive(ToSchema)]
#[serde(untagged)]
enum TripleValue {
    Number(f64),
    Text(String),
}
