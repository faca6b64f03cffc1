//! `POST /v1/completions`.

use super::accepted::AcceptedFields;
use super::memory::MemoryFields;
use super::sampling::{SamplingFields, check_min_tokens, max_tokens, num_logprobs};
use super::structured::StructuredFields;
use super::{AnswerOptions, Endpoint, ModelField, Request, null_as_default, parse_fields, shown, structured, token_id};
use crate::actors::messages::Prompt;
use crate::actors::runtime::ModelInfo;
use crate::error::ApiError;
use crate::http::body::ids::{Ids, OneOf};
use crate::http::openapi::answers::TextCompletion;
use crate::http::openapi::{Operation, Tag};
use crate::ids::TokenId;
use crate::sampling::params::SamplingParams;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

/// `max_tokens` where the client does not say: OpenAI's own.
const DEFAULT_MAX_TOKENS: i64 = 16;

#[derive(Default, Deserialize, ToSchema)]
#[serde(default)]
struct CompletionFields {
    /// A string, an array of strings, token ids, or an array of arrays of token ids. Each gets n answers.
    #[schema(value_type = Option<PromptForms>)]
    prompt: Option<Value>,
    /// Tokens to generate at most; 0 only with echo or prompt_logprobs to any use.
    #[schema(minimum = 0, maximum = 4294967295_i64, default = 16)]
    max_tokens: Option<i64>,
    /// The answer begins with the prompt.
    #[serde(deserialize_with = "null_as_default")]
    #[schema(default = false)]
    echo: bool,
    /// Log-probabilities of the answer's tokens, each with this many most likely ones.
    #[schema(minimum = 0, maximum = 20)]
    logprobs: Option<i64>,
    /// Whether the tokenizer adds its special tokens to a text.
    #[schema(default = true)]
    add_special_tokens: Option<bool>,
}

/// What `prompt` may be.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described: the parser takes the forms apart itself, for its errors")]
pub enum PromptForms {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    TokenLists(Vec<Vec<u32>>),
}

pub fn describe() -> Operation {
    Operation::new(Tag::Generation, "completions", "Continues a text")
        .body("CompletionRequest")
        .fields::<CompletionFields>()
        .fields::<ModelField>()
        .fields::<SamplingFields>()
        .fields::<MemoryFields>()
        .fields::<StructuredFields>()
        .fields::<AcceptedFields>()
        .requires(&["prompt"])
        .answers::<TextCompletion>("The whole answer, or with stream its parts.")
        .streams::<TextCompletion>()
        .generates()
}

/// `ids`: the prompt, where it has been read as an array already.
pub fn parse(body: &Value, ids: Option<Ids>, model: &ModelInfo) -> Result<Request, ApiError> {
    let shared: SamplingFields = parse_fields(body)?;
    let memory: MemoryFields = parse_fields(body)?;
    let own: CompletionFields = parse_fields(body)?;
    parse_fields::<AcceptedFields>(body)?.check()?;
    let add_special_tokens = own.add_special_tokens.unwrap_or(true);
    let prompts = match ids {
        Some(ids) => batch("prompt", ids, add_special_tokens, model.vocab_size)?,
        None => prompts("prompt", own.prompt.as_ref(), add_special_tokens, model.vocab_size)?,
    };
    let mut params = shared.params(model)?;
    let mut answer = shared.answer(&params)?;
    answer.kv_block_bytes = memory.usage_block_bytes(model);
    answer.pause_comments = shared.pause_comments(model);
    answer.echo = own.echo;
    answer.logprobs = num_logprobs("logprobs", own.logprobs)?;
    set_max_tokens(own.max_tokens, &mut params, &mut answer)?;
    params.logprobs = answer.logprobs;
    if answer.echo {
        // The echoed tokens have log-probabilities as the generated ones do.
        params.prompt_logprobs = answer.prompt_logprobs.max(answer.logprobs);
    }
    let (n, best_of) = (shared.n()?, shared.best_of()?);
    let stream = shared.stream(memory.include_kv_usage == Some(true))?;
    shared.search(&mut params, &answer)?;
    shared.check_streamed_prompt_logprobs()?;
    Ok(Request {
        endpoint: Endpoint::Completion,
        prompts,
        n,
        best_of,
        params,
        ignore_eos: shared.ignore_eos,
        seed: shared.seed(),
        priority: shared.priority()?,
        cache_salt: shared.cache_salt()?,
        terms: memory.terms()?,
        truncation: shared.truncation(model)?,
        grammar: structured::grammar(body)?,
        answer,
        stream,
    })
}

/// The engine samples at least one token; for `max_tokens: 0` it is dropped.
fn set_max_tokens(given: Option<i64>, params: &mut SamplingParams, answer: &mut AnswerOptions) -> Result<(), ApiError> {
    params.max_tokens = max_tokens("max_tokens", given.unwrap_or(DEFAULT_MAX_TOKENS), 0)?;
    if params.max_tokens == 0 && params.min_tokens > 0 {
        return Err(ApiError::invalid("min_tokens", "min_tokens must be 0 where max_tokens is 0"));
    }
    answer.prompt_only = params.max_tokens == 0;
    params.max_tokens = params.max_tokens.max(1);
    check_min_tokens(params)
}

/// A string, an array of strings, token ids, or an array of arrays of token ids.
pub fn prompts(
    param: &str,
    prompt: Option<&Value>,
    add_special_tokens: bool,
    vocab_size: u32,
) -> Result<Vec<Prompt>, ApiError> {
    let text = |text: &String| Prompt::Text { text: text.clone(), add_special_tokens };
    match prompt {
        None | Some(Value::Null) => Err(ApiError::invalid(param, format!("{param} is required"))),
        Some(Value::String(prompt)) => Ok(vec![text(prompt)]),
        Some(Value::Array(items)) => match items.first() {
            None => Err(ApiError::invalid(param, format!("{param} must not be an empty array"))),
            Some(Value::Number(_)) => Ok(vec![Prompt::Tokens(tokens(param, items, vocab_size)?)]),
            Some(_) => items
                .iter()
                .enumerate()
                .map(|(i, item)| match item {
                    Value::String(prompt) => Ok(text(prompt)),
                    Value::Array(ids) => Ok(Prompt::Tokens(tokens(&format!("{param}[{i}]"), ids, vocab_size)?)),
                    other => Err(wrong_prompt(&format!("{param}[{i}]"), other)),
                })
                .collect(),
        },
        Some(other) => Err(wrong_prompt(param, other)),
    }
}

/// The same of an array that has been read already.
pub fn batch(param: &str, ids: Ids, add_special_tokens: bool, vocab_size: u32) -> Result<Vec<Prompt>, ApiError> {
    let (prompts, num) = match ids {
        Ids::One(list) if list.is_empty() => {
            return Err(ApiError::invalid(param, format!("{param} must not be an empty array")));
        }
        Ids::One(list) => return Ok(vec![Prompt::Tokens(list.prompt(param, vocab_size)?)]),
        Ids::Several { prompts, num } => (prompts, num),
    };
    let most = prompts.len();
    let read = prompts.into_iter().enumerate().map(|(i, prompt)| match prompt {
        OneOf::Text(text) => Ok(Prompt::Text { text, add_special_tokens }),
        OneOf::Ids(list) => list.prompt(&format!("{param}[{i}]"), vocab_size).map(Prompt::Tokens),
        OneOf::Other(other) => Err(wrong_prompt(&format!("{param}[{i}]"), &other)),
    });
    let read = read.collect::<Result<Vec<_>, _>>()?;
    if num > most {
        // The others have not been kept.
        return Err(too_many(param, most, num));
    }
    Ok(read)
}

/// Not a 429: trying again would not help.
pub fn too_many(param: &str, most: usize, got: usize) -> ApiError {
    let message = format!("a batch may have at most {most} {param}s on this server (server.max_requests), got {got}");
    ApiError::invalid(param, message)
}

fn wrong_prompt(param: &str, got: &Value) -> ApiError {
    let message = format!("{param} must be a string, an array of token ids, or an array of either, got {}", shown(got));
    ApiError::invalid(param, message)
}

fn tokens(param: &str, ids: &[Value], vocab_size: u32) -> Result<Vec<TokenId>, ApiError> {
    if ids.is_empty() {
        return Err(ApiError::invalid(param, format!("{param} must have at least one token id")));
    }
    ids.iter()
        .enumerate()
        .map(|(i, id)| match id.as_i64() {
            Some(id) => token_id(format_args!("{param}[{i}]"), id, vocab_size),
            None => {
                let param = format!("{param}[{i}]");
                Err(ApiError::invalid(&param, format!("{param} must be a token id, got {}", shown(id))))
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::body::json::{Bounds, Json};
    use serde_json::json;

    fn parsed(prompt: Value) -> Result<Vec<Prompt>, ApiError> {
        prompts("prompt", Some(&prompt), true, 100)
    }

    /// As a request's body is read.
    fn read(prompt: &Value) -> Result<Vec<Prompt>, ApiError> {
        let body = json!({"prompt": prompt}).to_string();
        let bounds = Bounds { max_values: 100, max_prompts: 3 };
        let body = Json::read(body.as_bytes(), &|_| false, Some("prompt"), bounds)?;
        batch("prompt", body.ids.expect("it is an array"), true, 100)
    }

    #[test]
    fn prompts_are_the_same_whether_read_from_a_value_or_from_the_bytes() {
        for prompt in [
            json!(["a", "b", "c"]),
            json!([1, 2.0, 99]),
            json!([[1], [2, 3.0]]),
            json!([[1], "a"]),
            json!([[1, [2, 3]]]),
            json!([1, [2, 3]]),
            json!([1, {"a": 1}]),
            json!([[], 1]),
            json!([[1, 1e300]]),
            json!([u64::MAX]),
            json!([[i64::MIN]]),
            json!([[1], true]),
        ] {
            let mut body = json!({ "prompt": prompt });
            crate::http::openai::whole_numbers(&mut body);
            let expected = format!("{:?}", parsed(body["prompt"].take()));
            assert_eq!(format!("{:?}", read(&prompt)), expected, "{prompt}");
        }
        let many = read(&json!([[1], [2], [3], [4], [5]])).unwrap_err();
        assert!(many.message.contains("at most 3 prompts") && many.message.contains("got 5"), "{many}");
    }

    #[test]
    fn every_form_of_prompt_is_read() {
        assert!(matches!(&parsed(json!("a")).unwrap()[..], [Prompt::Text { text, .. }] if text == "a"));
        assert_eq!(parsed(json!(["a", "b", "c"])).unwrap().len(), 3);
        assert!(matches!(&parsed(json!([1, 2])).unwrap()[..], [Prompt::Tokens(ids)] if *ids == [1, 2]));
        assert!(matches!(&parsed(json!([[1], [2, 3]])).unwrap()[..],
            [Prompt::Tokens(a), Prompt::Tokens(b)] if *a == [1] && *b == [2, 3]));
    }

    #[test]
    fn a_wrong_prompt_is_refused_where_it_is_wrong() {
        for (prompt, param) in [
            (json!([]), "prompt"),
            (json!(7), "prompt"),
            (json!({"text": "a"}), "prompt"),
            (json!([1, "a"]), "prompt[1]"),
            (json!([1, 2.5]), "prompt[1]"),
            (json!([1, 100]), "prompt[1]"),
            (json!([-1]), "prompt[0]"),
            (json!([[1], []]), "prompt[1]"),
            (json!([[1], [2, -3]]), "prompt[1][1]"),
            (json!(["a", 3]), "prompt[1]"),
            (json!(["a", null]), "prompt[1]"),
        ] {
            let error = parsed(prompt.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{prompt}");
            if prompt.is_array() {
                assert_eq!(read(&prompt).unwrap_err(), error, "{prompt}");
            }
        }
        assert_eq!(prompts("prompt", None, true, 100).unwrap_err().message, "prompt is required");
    }
}
