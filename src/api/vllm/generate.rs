//! `POST /inference/v1/generate`: token ids in, token ids out. `POST …/render` ([`super::render`]) makes its bodies.

use crate::body::fields::IdsField;
use crate::body::ids::Ids;
use crate::body::refused::{Off, Refused, RefusedField, RefusedTable, refuse};
use crate::body::{ParsedBody, body, body_fields, read_value};
use crate::checks::{one_of, within};
use crate::fields::memory::MemoryFields;
use crate::fields::model::ModelField;
use crate::fields::request_id::RequestIdFields;
use crate::fields::sampling::{SamplingFields, check_min_tokens, max_tokens, num_logprobs};
use crate::fields::structured::StructuredFields;
use crate::fields::unsupported::UnsupportedFields;
use crate::model_info::ModelInfo;
use crate::openapi::{Operation, Tag};
use crate::prompt::Prompt;
use crate::request::{ApiRequest, FieldNames, PromptRequest, StreamOptions};
use pagetide_base::error::ApiError;
use serde_json::{Map, Value};
use utoipa::ToSchema;

body_fields! {
    struct TokenIdsFields {
        /// The prompt.
        #[schema(value_type = Option<Vec<u32>>, min_items = 1)]
        token_ids: IdsField,
        /// As in a completion, with vLLM's names.
        #[schema(value_type = Option<Object>)]
        sampling_params: Option<Map<String, Value>>,
        /// tokens: the answer has token ids. text: it has their text too.
        #[schema(value_type = Option<OutputMode>, default = "tokens")]
        output_mode: Option<String>,
        /// The answer has the prompt's token ids.
        #[schema(default = false)]
        return_token_ids: bool,
        /// Lower goes first under the priority policy.
        #[schema(default = 0)]
        priority: Option<i64>,
        /// Of a model that reasons: whether structured_outputs holds from the first token on. Otherwise it holds from
        /// the end of the reasoning on, if the prompt has not ended it.
        reasoning_ended: Option<bool>,
        /// Requests share cached prefixes only with those of the same salt.
        cache_salt: Option<String>,
        /// Answer as server-sent events, the last of which is `[DONE]`.
        #[schema(default = false)]
        stream: bool,
        /// Only with stream.
        stream_options: Option<StreamOptions>,
    }
}

#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "only described")]
enum OutputMode {
    Tokens,
    Text,
}

/// Fields that a rendered request has and that change nothing here, and those of images.
#[derive(Debug, Default)]
pub struct RenderedFields;

impl RefusedTable for RenderedFields {
    const FIELDS: &'static [RefusedField] = &[
        refuse("content_parts", "this server reads text only"),
        refuse("features", "this server reads text only"),
        refuse("reasoning_parser_kwargs", "").unless(Off::Any),
        refuse("token_offsets", "").unless(Off::Any),
    ];

    fn message(name: &str, why: &str) -> String {
        format!("{name} is not supported: {why}")
    }
}

body! {
    pub struct TokenIdsBody {
        own: TokenIdsFields,
        model: ModelField,
        memory: MemoryFields,
        request_id: RequestIdFields,
        rendered: Refused<RenderedFields>,
        refused: Refused<UnsupportedFields>,
    }
}

body_fields! {
    struct LengthFields {
        max_tokens: Option<i64>,
        logprobs: Option<i64>,
        /// Text is made where the answer has it.
        detokenize: Option<bool>,
    }
}

/// Fields of vLLM's engine that a client does not need, or that this one does not have.
#[derive(Debug, Default)]
pub struct EngineFields;

impl RefusedTable for EngineFields {
    const FIELDS: &'static [RefusedField] = &[
        refuse("extra_args", "leave it out"),
        refuse("flat_logprobs", "").unless(Off::Any),
        refuse("output_kind", "").unless(Off::Any),
        refuse("output_text_buffer_length", "").unless(Off::Any),
        refuse("prompt_logprob_start", "leave it out").unless(Off::Number(0.0)),
        refuse("prompt_logprob_token_ids", "use prompt_logprobs"),
        refuse("skip_clone", "").unless(Off::Any),
        refuse("skip_reading_prefix_cache", "").unless(Off::Any),
        refuse("trace_decode_token_ids", "leave it out"),
    ];

    fn message(name: &str, instead: &str) -> String {
        format!("{name} is not supported; {instead}")
    }
}

body! {
    /// The object `sampling_params`.
    pub struct SamplingParamsBody {
        lengths: LengthFields,
        sampling: SamplingFields,
        structured: StructuredFields,
        engine: Refused<EngineFields>,
        refused: Refused<UnsupportedFields>,
    }
}

/// A request, and how its answer is written.
#[derive(Debug)]
pub struct TokenIdsRequest {
    pub request: ApiRequest,
    pub with_text: bool,
}

pub fn describe() -> Operation {
    Operation::new(Tag::Generation, "generate_tokens", "Continues token ids with token ids")
        .about("The bodies are what /v1/chat/completions/render and the like answer.")
        .body("TokenIdsRequest")
        .fields::<TokenIdsFields>()
        .fields::<ModelField>()
        .fields::<MemoryFields>()
        .fields::<RequestIdFields>()
        .requires(&["token_ids", "sampling_params"])
        .generates()
        .answers_json("The token ids of each output, or with stream their parts.")
        .streams_json()
}

pub fn parse(
    ParsedBody { body, problems }: ParsedBody<TokenIdsBody>,
    model: &ModelInfo,
) -> Result<TokenIdsRequest, ApiError> {
    const PROMPT: &str = "token_ids";
    problems.check_object()?;
    body.model.check(&problems, model)?;
    body.rendered.check()?;
    body.refused.check()?;
    problems.check()?;
    let TokenIdsBody { own, memory, request_id, .. } = body;
    one_of("output_mode", own.output_mode.as_deref(), &["tokens", "text"])?;
    let with_text = own.output_mode.as_deref() == Some("text");
    if with_text {
        model.tokenizer.check_present("output_mode", "output_mode: \"text\"")?;
    }
    let prompt = match own.token_ids {
        IdsField { ids: Some(Ids::One(list)), .. } if !list.is_empty() => list.prompt(PROMPT, model.vocab_size)?,
        IdsField { ids: None, other: None } => return Err(ApiError::invalid(PROMPT, "token_ids is required")),
        _ => return Err(ApiError::invalid(PROMPT, "token_ids must be an array of at least one token id")),
    };
    let sampling_params = own.sampling_params.ok_or_else(|| {
        ApiError::invalid("sampling_params", "sampling_params is required: an object, which may be empty")
    })?;
    let parsed = read_value(&Value::Object(sampling_params))?;
    let names = FieldNames { prompt: PROMPT, max_tokens: "sampling_params.max_tokens", ..FieldNames::COMPLETION };
    let outer = |sampling: SamplingFields| SamplingFields {
        stream: own.stream,
        stream_options: own.stream_options,
        priority: own.priority,
        cache_salt: own.cache_salt,
        return_token_ids: own.return_token_ids,
        ..sampling
    };
    let (mut each, answer, sampling) = params(parsed, names, with_text, model).map_err(in_sampling_params)?;
    if let (Some(grammar), Some(format), None | Some(false)) =
        (&mut each.grammar, model.chat_format.reasoning, own.reasoning_ended)
    {
        grammar.starts_after = Some(format.end().to_owned());
    }
    let request = outer(sampling).into_request(vec![Prompt::Tokens(prompt)], each, answer, &memory, model)?;
    let mut request = request_id.name(request)?;
    request.answer.return_token_ids = own.return_token_ids;
    Ok(TokenIdsRequest { request, with_text })
}

/// What `sampling_params` asks for.
fn params(
    ParsedBody { body, problems }: ParsedBody<SamplingParamsBody>,
    names: FieldNames,
    with_text: bool,
    model: &ModelInfo,
) -> Result<(PromptRequest, crate::request::AnswerOptions, SamplingFields), ApiError> {
    body.engine.check()?;
    body.refused.check()?;
    problems.check()?;
    let SamplingParamsBody { lengths, sampling, structured, .. } = body;
    if with_text && lengths.detokenize == Some(false) {
        return Err(ApiError::invalid("detokenize", "detokenize must be true with output_mode: \"text\""));
    }
    let mut params = sampling.params(model)?;
    let mut answer = sampling.answer(&params, &names, model)?;
    if lengths.detokenize == Some(false) && !answer.text.stop.is_empty() {
        let message = "stop strings are found in the text: stop is not allowed with detokenize: false";
        return Err(ApiError::invalid("stop", message));
    }
    answer.logprobs = num_logprobs("logprobs", lengths.logprobs, model)?;
    params.logprobs = answer.logprobs;
    sampling.log_tokens(&mut params, &mut answer, model.vocab_size)?;
    if let Some(given) = lengths.max_tokens {
        params.max_tokens = max_tokens("max_tokens", given, 1)?;
    }
    check_min_tokens(&params, &names)?;
    let grammar = structured.check(&sampling)?;
    Ok((PromptRequest { names, grammar, ..PromptRequest::without_prompt(params) }, answer, sampling))
}

/// The error about a field of `sampling_params`.
fn in_sampling_params(error: ApiError) -> ApiError {
    match &error.param {
        Some(param) if !param.starts_with("sampling_params.") => within("sampling_params", error),
        _ => error,
    }
}
