//! OpenAI's request and response bodies, with vLLM's additions: JSON in, a checked [`Request`] out; text in, JSON out.
//!
//! A body is read twice, once for the fields every endpoint has ([`sampling`]) and once for the endpoint's own
//! ([`chat`], [`completion`]), so that an error can name the path of the field at fault. `null` means "not given";
//! unknown fields are ignored, known ones that would change the answer but are not supported are refused
//! (`unsupported`).

pub mod accepted;
mod beams;
pub mod chat;
pub mod completion;
pub mod embeddings;
pub mod logprobs;
pub mod memory;
mod message;
pub mod response;
pub mod sampling;
pub mod stream;
pub mod structured;
pub mod tokenize;
pub mod tools;
pub mod unsupported;

use crate::actors::messages::{Prompt, Submit};
use crate::actors::runtime::ModelInfo;
use crate::engine::bill::{Tenant, Terms};
use crate::error::ApiError;
use crate::http::body::ids::Ids;
use crate::http::body::json::Json;
use crate::sampling::params::SamplingParams;
use crate::text::chat_output::ChatReading;
use crate::text::grammar::GrammarRequest;
use crate::text::output::OutputOptions;
use crate::text::truncation::Truncation;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt::Display;
use std::ops::RangeInclusive;
use utoipa::ToSchema;

/// Characters of a wrong value that a message repeats.
const MAX_SHOWN_CHARS: usize = 60;

/// Where a generation request came in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Endpoint {
    Chat,
    Completion,
}

impl Endpoint {
    /// The endpoint served under `path`, as batch files name it too.
    pub fn of_path(path: &str) -> Option<Self> {
        [Endpoint::Chat, Endpoint::Completion].into_iter().find(|endpoint| endpoint.path() == path)
    }

    pub fn path(self) -> &'static str {
        match self {
            Endpoint::Chat => "/v1/chat/completions",
            Endpoint::Completion => "/v1/completions",
        }
    }
}

/// A generation request that is right in itself; what depends on the prompt's length is checked at the intake.
#[derive(Debug)]
pub struct Request {
    pub endpoint: Endpoint,
    /// At least one; only completions have several.
    pub prompts: Vec<Prompt>,
    pub n: u32,
    /// Samples to choose the `n` best of; at least `n`.
    pub best_of: u32,
    /// `max_tokens` 0: as many as fit.
    pub params: SamplingParams,
    pub ignore_eos: bool,
    pub seed: Option<u64>,
    pub priority: i32,
    pub cache_salt: Option<String>,
    pub terms: Terms,
    /// How prompts that are too long are cut.
    pub truncation: Option<Truncation>,
    /// What the text of every choice has to be.
    pub grammar: Option<GrammarRequest>,
    pub answer: AnswerOptions,
    /// `Some`: answer as a stream of events.
    pub stream: Option<StreamOptions>,
}

/// How the answer is written; the engine does not see this.
#[derive(Clone, Debug, Default)]
pub struct AnswerOptions {
    /// The text is a chat message: how it is read as content, reasoning and tool calls.
    pub chat: Option<ChatReading>,
    /// A call of one tool was demanded: OpenAI's reason for the end is then `stop`.
    pub named_tool: bool,
    /// Special tokens, stop strings.
    pub text: OutputOptions,
    /// Most likely tokens reported with each token.
    pub logprobs: Option<u32>,
    /// The prompt's log-probabilities as a field of their own.
    pub prompt_logprobs: Option<u32>,
    /// The answer begins with the prompt.
    pub echo: bool,
    /// `max_tokens` was 0: the token that the engine must sample is dropped.
    pub prompt_only: bool,
    pub return_token_ids: bool,
    /// Bytes of a KV block, where usage says what memory pressure has cost.
    pub kv_block_bytes: Option<usize>,
    /// The stream says when it pauses.
    pub pause_comments: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(default)]
pub struct StreamOptions {
    /// A last chunk says the usage of the whole request.
    #[serde(deserialize_with = "null_as_default")]
    pub include_usage: bool,
    /// With `include_usage`: usage in every chunk, not in the last alone.
    #[serde(deserialize_with = "null_as_default")]
    pub continuous_usage_stats: bool,
}

impl Request {
    pub fn parse(endpoint: Endpoint, body: &Value, model: &ModelInfo) -> Result<Self, ApiError> {
        Self::checked(endpoint, body, None, model)
    }

    /// The same of a body whose token ids have been read already.
    pub fn of_body(endpoint: Endpoint, body: Json, model: &ModelInfo) -> Result<Self, ApiError> {
        Self::checked(endpoint, &body.value, body.ids, model)
    }

    fn checked(endpoint: Endpoint, body: &Value, ids: Option<Ids>, model: &ModelInfo) -> Result<Self, ApiError> {
        if !body.is_object() {
            return Err(ApiError::bad_request("the request body must be a JSON object"));
        }
        check_model(body, model)?;
        unsupported::refuse(body)?;
        match endpoint {
            Endpoint::Chat => chat::parse(body, model),
            Endpoint::Completion => completion::parse(body, ids, model),
        }
    }

    /// Outputs that the engine gives for each prompt.
    pub fn num_samples(&self) -> u32 {
        if self.params.beam.is_some() { self.n } else { self.best_of }
    }

    /// The message to the intake for one of [`Request::prompts`].
    pub fn submit(&self, prompt: Prompt) -> Submit {
        Submit {
            prompt,
            truncation: self.truncation,
            prompt_param: match self.endpoint {
                Endpoint::Chat => "messages",
                Endpoint::Completion => "prompt",
            },
            params: self.params.clone(),
            ignore_eos: self.ignore_eos,
            seed: self.seed,
            n: self.num_samples(),
            priority: self.priority,
            cache_salt: self.cache_salt.clone(),
            grammar: self.grammar.clone(),
            terms: self.terms,
            tenant: Tenant::default(),
            observer: None,
            abandoned: None,
        }
    }
}

/// What every body may say.
#[derive(Default, Deserialize, ToSchema)]
#[serde(default)]
pub struct ModelField {
    /// The name of the model that is served, as /v1/models says it. Default: that one.
    pub model: Option<String>,
}

/// A body's `model` must be the one served, or absent.
pub fn check_model(body: &Value, model: &ModelInfo) -> Result<(), ApiError> {
    match parse_fields::<ModelField>(body)?.model {
        Some(name) if name != model.served_name => {
            Err(ApiError::model_not_found(&shortened(&name), &model.served_name))
        }
        _ => Ok(()),
    }
}

/// Some clients write 16 as 16.0, which to JSON is the same. Of the body's own fields and their arrays; what lies deeper
/// (a tool's schema) is text to the model and stays as it is.
pub fn whole_numbers(body: &mut Value) {
    fn read(value: &mut Value, depth: u32) {
        match value {
            Value::Number(number) if number.is_f64() => {
                let float = number.as_f64().unwrap_or_default();
                if float.fract() == 0.0 && float.abs() < 2f64.powi(53) {
                    *value = (float as i64).into();
                }
            }
            // A batch of prompts is two deep.
            Value::Array(items) if depth < 2 => items.iter_mut().for_each(|item| read(item, depth + 1)),
            _ => {}
        }
    }
    if let Value::Object(fields) = body {
        fields.values_mut().for_each(|value| read(value, 0));
    }
}

/// Reads the fields that `T` knows; an error names the field's path. What is parsed can be described: a path's
/// `describe` names the same structs.
pub fn parse_fields<'a, T: Deserialize<'a> + ToSchema>(body: &'a Value) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(body).map_err(|error| {
        let path = error.path().to_string();
        let message = type_error(&error.into_inner().to_string());
        if path == "." { ApiError::bad_request(message) } else { ApiError::invalid(&path, format!("{path} {message}")) }
    })
}

/// serde's "invalid type: string "x", expected i64" in the words of JSON.
pub(in crate::http) fn type_error(message: &str) -> String {
    let parts = message.split_once(": ").and_then(|(_, rest)| rest.split_once(", expected "));
    let Some((got, expected)) = parts else { return format!("is wrong: {message}") };
    format!("must be {}, got {}", json_type(expected), shortened(json_type(got)))
}

fn json_type(serde_name: &str) -> &str {
    match serde_name {
        "i64" => "an integer",
        "f64" => "a number",
        "sequence" | "a sequence" => "an array",
        "map" | "a map" => "an object",
        name if name.starts_with("struct ") => "an object",
        name => name,
    }
}

/// A value the client sent, for a message: its JSON, cut where it is long.
pub(crate) fn shown(value: &Value) -> String {
    shortened(&value.to_string())
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// `null` is "not given" for fields that are not an `Option` too.
pub(crate) fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// Checks a number against its range and says both when it is outside.
pub(crate) fn in_range<T>(param: &str, value: T, range: RangeInclusive<T>) -> Result<T, ApiError>
where
    T: PartialOrd + Copy + Display,
{
    if range.contains(&value) {
        return Ok(value);
    }
    let (low, high) = (range.start(), range.end());
    Err(ApiError::invalid(param, format!("{param} must be in [{low}, {high}], got {value}")))
}

/// A token id that the model has.
pub(crate) fn token_id(param: impl Display, id: i64, vocab_size: u32) -> Result<u32, ApiError> {
    u32::try_from(id).ok().filter(|id| *id < vocab_size).ok_or_else(|| {
        let message = format!("{param} must be a token id in [0, {}], got {id}", vocab_size.saturating_sub(1));
        ApiError::invalid(param.to_string(), message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_wrong_type_names_its_path_in_the_words_of_json() {
        let error = parse_fields::<sampling::SamplingFields>(&json!({"n": "two"})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("n"));
        assert_eq!(error.message, "n must be an integer, got string \"two\"");
        let error =
            parse_fields::<sampling::SamplingFields>(&json!({"stream_options": {"include_usage": 1}})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("stream_options.include_usage"));
        assert_eq!(error.message, "stream_options.include_usage must be a boolean, got integer `1`");
        let error = parse_fields::<sampling::SamplingFields>(&json!({"stream_options": 5})).unwrap_err();
        assert_eq!(error.message, "stream_options must be an object, got integer `5`");
        let error = parse_fields::<sampling::SamplingFields>(&json!({"n": "long".repeat(1000)})).unwrap_err();
        assert!(error.message.len() < 200, "{error}");
    }

    #[test]
    fn a_whole_number_may_be_written_as_a_float() {
        let mut body =
            json!({"n": 2.0, "top_p": 0.5, "prompt": [[1.0, 2], [3.5]], "tools": [{"a": 1.0}], "seed": 1e300});
        whole_numbers(&mut body);
        let expected = json!({"n": 2, "top_p": 0.5, "prompt": [[1, 2], [3.5]], "tools": [{"a": 1.0}], "seed": 1e300});
        assert_eq!(body, expected);
    }

    #[test]
    fn null_is_not_given() {
        let fields: sampling::SamplingFields =
            parse_fields(&json!({"n": null, "ignore_eos": null, "stream_options": {"include_usage": null}})).unwrap();
        assert_eq!(fields.n, None);
        assert!(!fields.ignore_eos);
        assert_eq!(fields.stream_options, Some(StreamOptions::default()));
    }

    #[test]
    fn endpoints_are_known_by_path() {
        assert_eq!(Endpoint::of_path("/v1/completions"), Some(Endpoint::Completion));
        assert_eq!(Endpoint::of_path("/v1/embeddings"), None);
    }
}
