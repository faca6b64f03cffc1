//! `POST /v1/completions`.

use super::accepted::AcceptedFields;
use crate::body::fields::IdsField;
use crate::body::ids::{Ids, OneOf};
use crate::body::refused::Refused;
use crate::body::{ParsedBody, body, body_fields};
use crate::checks::shown;
use crate::fields::llama_cpp::{ChatReadingFields, LlamaCppFields, NativeShapeFields, TelemetryFields};
use crate::fields::memory::MemoryFields;
use crate::fields::model::ModelField;
use crate::fields::request_id::RequestIdFields;
use crate::fields::sampling::{SamplingFields, check_min_tokens, max_tokens, num_logprobs};
use crate::fields::structured::StructuredFields;
use crate::fields::unsupported::UnsupportedFields;
use crate::model_info::{ModelInfo, no_marks};
use crate::openapi::answers::TextCompletion;
use crate::openapi::{Operation, Tag};
use crate::prompt::{FillIn, Prompt};
use crate::request::{AnswerOptions, ApiRequest, FieldNames, PromptRequest};
use pagetide_base::error::ApiError;
use pagetide_base::sampling::params::SamplingParams;
use pagetide_text::fill_in::FillInMarks;
use serde_json::Value;
use utoipa::ToSchema;

/// `max_tokens` where the client does not say: OpenAI's own.
const DEFAULT_MAX_TOKENS: i64 = 16;

body_fields! {
    struct CompletionFields {
        /// A string, an array of strings, token ids, or an array of arrays of token ids. Each gets n answers.
        #[schema(value_type = Option<PromptForms>)]
        prompt: IdsField,
        /// Tokens to generate at most; 0 only with echo or prompt_logprobs to any use.
        #[schema(minimum = 0, maximum = 4294967295_i64, default = 16)]
        max_tokens: Option<i64>,
        /// The same, where max_tokens is not given.
        #[schema(minimum = 0, maximum = 4294967295_i64)]
        max_completion_tokens: Option<i64>,
        /// The answer begins with the prompt.
        #[schema(default = false)]
        echo: bool,
        /// Log-probabilities of the answer's tokens, each with this many most likely ones.
        #[schema(minimum = 0, maximum = 20)]
        logprobs: Option<i64>,
        /// Whether the tokenizer adds its special tokens to a text.
        #[schema(default = true)]
        add_special_tokens: Option<bool>,
        /// What stands behind the answer, which fills the gap between prompt and suffix. For models whose tokenizer has
        /// marks for that.
        suffix: Option<String>,
    }
}

body! {
    /// The body of a completion.
    pub struct CompletionBody {
        own: CompletionFields,
        model: ModelField,
        sampling: SamplingFields,
        memory: MemoryFields,
        structured: StructuredFields,
        request_id: RequestIdFields,
        llama_cpp: LlamaCppFields,
        telemetry: TelemetryFields,
        chat_reading: ChatReadingFields,
        native_shape: NativeShapeFields,
        accepted: AcceptedFields,
        refused: Refused<UnsupportedFields>,
    }
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
    let operation = Operation::new(Tag::Generation, "completions", "Continues a text").body("CompletionRequest");
    describe_fields(operation)
        .answers::<TextCompletion>("The whole answer, or with stream its parts.")
        .streams::<TextCompletion>()
        .generates()
}

/// The operation with all fields of a completion.
pub fn describe_fields(operation: Operation) -> Operation {
    operation
        .fields::<CompletionFields>()
        .fields::<ModelField>()
        .fields::<SamplingFields>()
        .fields::<MemoryFields>()
        .fields::<StructuredFields>()
        .fields::<RequestIdFields>()
        .fields::<LlamaCppFields>()
        .fields::<TelemetryFields>()
        .fields::<ChatReadingFields>()
        .fields::<NativeShapeFields>()
        .fields::<AcceptedFields>()
        .requires(&["prompt"])
}

pub fn parse(
    ParsedBody { body, problems }: ParsedBody<CompletionBody>,
    model: &ModelInfo,
) -> Result<ApiRequest, ApiError> {
    problems.check_object()?;
    body.model.check(&problems, model)?;
    body.refused.check()?;
    problems.check()?;
    body.accepted.check()?;
    let CompletionBody { own, mut sampling, memory, structured, llama_cpp, telemetry, request_id, .. } = body;
    llama_cpp.check()?;
    sampling.n = llama_cpp.n_cmpl.or(sampling.n);
    let n_predict = llama_cpp.max_tokens()?.map(|most| most.map_or(-1, i64::from));
    let (name, asked) = match (own.max_tokens, own.max_completion_tokens) {
        (Some(given), _) => ("max_tokens", Some(given)),
        (None, Some(given)) => ("max_completion_tokens", Some(given)),
        (None, None) if n_predict.is_some() => ("n_predict", n_predict),
        (None, None) => ("max_tokens", None),
    };
    let names = FieldNames { max_tokens: name, ..FieldNames::COMPLETION };
    let mut prompts = prompts(names.prompt, own.prompt, own.add_special_tokens.unwrap_or(true), model.vocab_size)?;
    if let Some(suffix) = own.suffix.filter(|suffix| !suffix.is_empty()) {
        if own.echo {
            return Err(ApiError::invalid("suffix", "suffix and echo cannot be combined; leave one of them out"));
        }
        let marks = FillInMarks::find(&model.tokenizer).map_err(|missing| no_marks("suffix", &missing))?;
        let ends = marks.ends.iter().copied().map(i64::from);
        sampling.stop_token_ids.get_or_insert_default().extend(ends);
        let max_tokens = asked.unwrap_or(DEFAULT_MAX_TOKENS).clamp(0, i64::from(u32::MAX)) as u32;
        prompts = prompts.into_iter().map(|prompt| fill_in(prompt, &suffix, max_tokens)).collect::<Result<_, _>>()?;
    }
    let mut params = sampling.params(model)?;
    let mut answer = sampling.answer(&params, &names, model)?;
    answer.kv_block_bytes = memory.usage_block_bytes(model);
    answer.pause_comments = sampling.pause_comments(model);
    answer.echo = own.echo;
    answer.logprobs = num_logprobs("logprobs", own.logprobs, model)?.or(llama_cpp.num_probs(model)?);
    set_max_tokens(asked, &mut params, &mut answer, &names)?;
    params.logprobs = answer.logprobs;
    if answer.echo {
        // The echoed tokens have log-probabilities as the generated ones do.
        params.prompt_logprobs = answer.prompt_logprobs.max(answer.logprobs);
    }
    sampling.log_tokens(&mut params, &mut answer, model.vocab_size)?;
    let grammar = structured.check(&sampling)?;
    let each = PromptRequest { names, grammar, ..PromptRequest::without_prompt(params) };
    let mut request = request_id.name(sampling.into_request(prompts, each, answer, &memory, model)?)?;
    llama_cpp.apply(&mut request, model)?;
    telemetry.apply(&mut request, model);
    Ok(request)
}

/// The prompt before the gap, and the suffix behind it.
fn fill_in(prompt: Prompt, suffix: &str, max_tokens: u32) -> Result<Prompt, ApiError> {
    match prompt {
        Prompt::Text { text, .. } => {
            let suffix = suffix.to_owned();
            Ok(Prompt::FillIn(FillIn { prefix: text, suffix, max_tokens, ..FillIn::default() }))
        }
        _ => Err(ApiError::invalid("suffix", "suffix is only allowed with a prompt that is a text")),
    }
}

/// `given`: -1 is as many as fit. The engine samples at least one token; for `max_tokens: 0` it is dropped.
fn set_max_tokens(
    given: Option<i64>,
    params: &mut SamplingParams,
    answer: &mut AnswerOptions,
    names: &FieldNames,
) -> Result<(), ApiError> {
    if given == Some(-1) && names.max_tokens == "n_predict" {
        return Ok(());
    }
    params.max_tokens = max_tokens(names.max_tokens, given.unwrap_or(DEFAULT_MAX_TOKENS), 0)?;
    if params.max_tokens == 0 && params.min_tokens > 0 {
        return Err(ApiError::invalid("min_tokens", "min_tokens must be 0 where max_tokens is 0"));
    }
    answer.prompt_only = params.max_tokens == 0;
    params.max_tokens = params.max_tokens.max(1);
    check_min_tokens(params, names)
}

/// A string, an array of strings, token ids, or an array of arrays of token ids.
pub fn prompts(
    param: &str,
    field: IdsField,
    add_special_tokens: bool,
    vocab_size: u32,
) -> Result<Vec<Prompt>, ApiError> {
    match field {
        IdsField { ids: Some(ids), .. } => batch(param, ids, add_special_tokens, vocab_size),
        IdsField { other: Some(Value::String(text)), .. } => Ok(vec![Prompt::Text { text, add_special_tokens }]),
        IdsField { other: Some(other), .. } => Err(wrong_prompt(param, &other)),
        IdsField { other: None, .. } => Err(ApiError::invalid(param, format!("{param} is required"))),
    }
}

fn batch(param: &str, ids: Ids, add_special_tokens: bool, vocab_size: u32) -> Result<Vec<Prompt>, ApiError> {
    let (prompts, num) = match ids {
        Ids::One(list) if list.is_empty() => {
            return Err(ApiError::invalid(param, format!("{param} must not be an empty array")));
        }
        Ids::One(list) => return Ok(vec![Prompt::Tokens(list.prompt(param, vocab_size)?)]),
        Ids::Mixed(list) => {
            let (place, number) = list.behind_texts();
            return Err(wrong_prompt(&format!("{param}[{place}]"), &number));
        }
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
        return Err(ApiError::too_many_prompts(param, most, num));
    }
    Ok(read)
}

fn wrong_prompt(param: &str, got: &Value) -> ApiError {
    let message = format!("{param} must be a string, an array of token ids, or an array of either, got {}", shown(got));
    ApiError::invalid(param, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::{Bounds, read, read_value};
    use serde_json::json;

    fn prompts_of(body: ParsedBody<CompletionBody>) -> Result<Vec<Prompt>, ApiError> {
        prompts("prompt", body.body.own.prompt, true, 100)
    }

    fn parsed(prompt: Value) -> Result<Vec<Prompt>, ApiError> {
        prompts_of(read_value(&json!({ "prompt": prompt }))?)
    }

    /// As a request's body is read.
    fn read_bytes(prompt: &Value) -> Result<Vec<Prompt>, ApiError> {
        let body = json!({"prompt": prompt}).to_string();
        prompts_of(read(body.as_bytes(), Bounds { max_values: 100, max_prompts: 3 })?)
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
            let expected = format!("{:?}", parsed(prompt.clone()));
            assert_eq!(format!("{:?}", read_bytes(&prompt)), expected, "{prompt}");
        }
        let many = read_bytes(&json!([[1], [2], [3], [4], [5]])).unwrap_err();
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
                assert_eq!(read_bytes(&prompt).unwrap_err(), error, "{prompt}");
            }
        }
        assert_eq!(prompts_of(read_value(&json!({})).unwrap()).unwrap_err().message, "prompt is required");
    }
}
