//! The body of `POST /generate`.

use super::answer::AnswerSettings;
use super::sampling::{DescribedParams, SglangNames, SglangSampling, params};
use super::session::{SessionFields, SessionPlace};
use crate::body::fields::IdsField;
use crate::body::ids::Ids;
use crate::body::refused::{Off, Refused, RefusedField, RefusedTable, refuse};
use crate::body::{ParsedBody, body, body_fields};
use crate::checks::{object, shown, wrong_type};
use crate::fields::memory::MemoryFields;
use crate::fields::nested::as_nested;
use crate::fields::sampling::{check_min_tokens, num_logprobs};
use crate::id::random_hex;
use crate::model_info::ModelInfo;
use crate::openai::completion::prompts;
use crate::prompt::Prompt;
use crate::request::{ApiRequest, FieldNames, PromptRequest};
use pagetide_base::error::ApiError;
use pagetide_text::chat_output::{ChatFormat, ChatReading, ReasoningStart};
use pagetide_text::grammar::GrammarRequest;
use serde_json::{Map, Value};
use std::time::Instant;
use utoipa::ToSchema;

body_fields! {
    pub(super) struct GenerateFields {
        /// A text or an array of texts.
        #[schema(value_type = Option<TextForms>)]
        text: IdsField,
        /// Token ids in place of a text, or an array of arrays of them.
        #[schema(value_type = Option<InputIdForms>)]
        input_ids: IdsField,
        /// How to sample; an array has one object for each text.
        #[schema(value_type = Option<ParamForms>)]
        sampling_params: Option<Value>,
        /// Log-probabilities of the answer's tokens; an array has one for each text.
        #[schema(value_type = Option<FlagForms>)]
        return_logprob: Option<Value>,
        /// With return_logprob: the first token of the prompt that has one; -1: none has. An array has one for each
        /// text.
        #[schema(value_type = Option<NumberForms>)]
        logprob_start_len: Option<Value>,
        /// With return_logprob: each with this many most likely tokens. An array has one for each text.
        #[schema(value_type = Option<NumberForms>)]
        top_logprobs_num: Option<Value>,
        /// Log-probabilities have their tokens' texts too.
        #[schema(default = false)]
        return_text_in_logprobs: bool,
        /// The answer says the prompt's token ids.
        #[schema(default = false)]
        return_prompt_token_ids: bool,
        /// Answer as server-sent events, each with all of the answer so far; the last is `[DONE]`.
        #[schema(default = false)]
        stream: bool,
        /// Lower goes first, where the server schedules by priority.
        #[schema(minimum = -2147483648, maximum = 2147483647)]
        priority: Option<i64>,
        /// Requests share cached prefixes only with those of the same salt.
        #[schema(min_length = 1, max_length = 1024)]
        cache_salt: Option<String>,
        /// As cache_salt, which it is put before.
        extra_key: Option<String>,
        /// The request's id in the answer, or an array with one for each text.
        #[schema(value_type = Option<RidForms>)]
        rid: Option<Value>,
        /// The session of /open_session that the text goes on in. For a single text.
        #[schema(value_type = Option<SessionFields>)]
        session_params: Option<Map<String, Value>>,
        /// The answer begins with reasoning: reasoning_tokens counts it, and a form that is asked for holds behind it.
        /// For models that reason.
        #[schema(default = false)]
        require_reasoning: bool,
    }
}

body_fields! {
    /// What changes nothing here.
    pub(super) struct AcceptedInGenerate {
        /// Without effect.
        session_id: Option<String>,
        /// Without effect.
        conversation_id: Option<String>,
        /// Without effect: there is one worker.
        routing_key: Option<String>,
        /// Without effect: there is one worker.
        routed_dp_rank: Option<i64>,
        /// Without effect: there is one worker.
        data_parallel_rank: Option<i64>,
        /// Without effect: there is one worker.
        disagg_prefill_dp_rank: Option<i64>,
        /// Without effect: there is one worker.
        kv_hints: Option<Map<String, Value>>,
        /// Without effect.
        log_metrics: Option<bool>,
        /// Without effect: texts are not logged.
        no_logs: Option<bool>,
        /// Without effect.
        background: Option<bool>,
        /// Without effect.
        custom_labels: Option<Map<String, Value>>,
        /// Without effect: traces follow the request's headers.
        external_trace_header: Option<Map<String, Value>>,
        /// Without effect.
        received_time: Option<f64>,
        /// Without effect without media.
        modalities: Option<Vec<String>>,
        /// Without effect without media.
        use_audio_in_video: Option<bool>,
    }
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum TextForms {
    One(String),
    Several(Vec<String>),
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum InputIdForms {
    One(Vec<u32>),
    Several(Vec<Vec<u32>>),
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum ParamForms {
    One(Box<DescribedParams>),
    Several(Vec<DescribedParams>),
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum FlagForms {
    One(bool),
    Several(Vec<bool>),
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum NumberForms {
    One(i64),
    Several(Vec<i64>),
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum RidForms {
    One(String),
    Several(Vec<String>),
}

/// Fields that would change the answer and are not served.
#[derive(Debug, Default)]
pub struct UnsupportedInGenerate;

const NO_MEDIA: &str = "this model reads text only";
const NO_WORKERS: &str = "there is one worker";
const LEAVE_OUT: &str = "leave it out";

impl RefusedTable for UnsupportedInGenerate {
    const FIELDS: &'static [RefusedField] = &[
        refuse("audio_data", NO_MEDIA),
        refuse("bootstrap_host", NO_WORKERS),
        refuse("bootstrap_pair_key", NO_WORKERS),
        refuse("bootstrap_port", NO_WORKERS),
        refuse("bootstrap_room", NO_WORKERS),
        refuse("custom_logit_processor", LEAVE_OUT),
        refuse("decode_tp_size", NO_WORKERS).unless(Off::Number(0.0)),
        refuse("encoder_urls", NO_WORKERS),
        refuse("http_worker_ipc", NO_WORKERS),
        refuse("image_data", NO_MEDIA),
        refuse("image_max_dynamic_patch", NO_MEDIA),
        refuse("images_config", NO_MEDIA),
        refuse("input_embeds", "use input_ids"),
        refuse("lora_id", LEAVE_OUT),
        refuse("lora_path", LEAVE_OUT),
        refuse("max_dynamic_patch", NO_MEDIA),
        refuse("max_thinking_tokens", LEAVE_OUT).unless(Off::Number(0.0)),
        refuse("min_dynamic_patch", NO_MEDIA),
        refuse("mm_content_hashes", NO_MEDIA),
        refuse("mm_hashes", NO_MEDIA),
        refuse("mm_processor_kwargs", NO_MEDIA),
        refuse("multi_item_delimiter_indices", LEAVE_OUT),
        refuse("need_wait_for_mm_inputs", NO_MEDIA),
        refuse("num_items_assigned", NO_MEDIA).unless(Off::Number(0.0)),
        refuse("positional_embed_overrides", LEAVE_OUT),
        refuse("return_bytes", LEAVE_OUT),
        refuse("return_entropy", LEAVE_OUT),
        refuse("return_flat_raw_output_top_logprobs", "use top_logprobs_num alone"),
        refuse("return_flat_raw_top_logprobs", "use top_logprobs_num alone"),
        refuse("return_flat_raw_top_logprobs_b64", "use top_logprobs_num alone"),
        refuse("return_hidden_states", LEAVE_OUT),
        refuse("return_indexer_topk", LEAVE_OUT),
        refuse("return_routed_experts", LEAVE_OUT),
        refuse("return_sampling_mask", LEAVE_OUT),
        refuse("routed_experts_start_len", LEAVE_OUT).unless(Off::Number(0.0)),
        refuse("sampling_logprobs_mode", LEAVE_OUT),
        refuse("token_ids_logprob", "use top_logprobs_num"),
        refuse("token_indices_to_pool", LEAVE_OUT),
        refuse("video_config", NO_MEDIA),
        refuse("video_data", NO_MEDIA),
        refuse("video_max_dynamic_patch", NO_MEDIA),
        refuse("watermark", LEAVE_OUT),
    ];

    fn message(name: &str, instead: &str) -> String {
        format!("{name} is not supported; {instead}")
    }
}

body! {
    /// The body of `/generate`.
    pub struct GenerateBody {
        own: GenerateFields,
        accepted: AcceptedInGenerate,
        memory: MemoryFields,
        refused: Refused<UnsupportedInGenerate>,
    }
}

/// A request to generate.
#[derive(Debug)]
pub struct GenerateTask {
    /// One for all texts, or one for each text where they are sampled in several ways. Their answers follow one
    /// another.
    pub requests: Vec<(ApiRequest, AnswerSettings)>,
    /// The answer is an array.
    pub is_batch: bool,
    /// The session that the only text goes on in.
    pub session: Option<SessionPlace>,
}

pub fn parse(
    ParsedBody { body, problems }: ParsedBody<GenerateBody>,
    model: &ModelInfo,
) -> Result<GenerateTask, ApiError> {
    let begun = Instant::now();
    problems.check_object()?;
    let GenerateBody { mut own, memory, refused, .. } = body;
    refused.check()?;
    problems.check()?;
    let (prompts, is_batch) = own.prompts(model)?;
    let num = prompts.len();
    let params_of_each = own.sampling_params.take().unwrap_or_else(|| Map::new().into());
    let ids = own.rids(num, is_batch)?;
    let session = own.session_params.take().map(SessionPlace::parse).transpose()?;
    let logprobs = Each::new("return_logprob", own.return_logprob.take(), num, flag, false)?;
    let top = Each::new("top_logprobs_num", own.top_logprobs_num.take(), num, number, 0)?;
    let start = Each::new("logprob_start_len", own.logprob_start_len.take(), num, number, -1)?;
    let asked = |i: usize| AskedLogprobs { logprobs: logprobs.of(i), top: top.of(i), start: start.of(i) };
    let several = matches!(params_of_each, Value::Array(_)) || logprobs.several || top.several || start.several;
    if several && own.stream && num > 1 {
        let message = "stream: a stream needs the same sampling_params and log-probabilities for every text";
        return Err(ApiError::invalid("stream", message));
    }
    let requests = if several {
        let mut params_of_each = GivenParams::new(params_of_each, num)?;
        let requests = prompts.into_iter().zip(ids).enumerate().map(|(i, (prompt, id))| {
            own.request(vec![prompt], vec![id], params_of_each.next()?, asked(i), &memory, begun, model)
        });
        requests.collect::<Result<Vec<_>, ApiError>>()?
    } else {
        let params = GivenParams::new(params_of_each, 1)?.next()?;
        vec![own.request(prompts, ids, params, asked(0), &memory, begun, model)?]
    };
    let has_several = requests.first().is_some_and(|(request, _)| request.n > 1);
    let is_batch = is_batch || has_several;
    if session.is_some() && is_batch {
        let message = "session_params is only available for a single text with n = 1";
        return Err(ApiError::invalid("session_params", message));
    }
    Ok(GenerateTask { requests, is_batch, session })
}

/// What is asked of the log-probabilities of one text.
#[derive(Clone, Copy)]
struct AskedLogprobs {
    logprobs: bool,
    top: i64,
    start: i64,
}

impl GenerateFields {
    /// The prompts, and whether there is an array of them.
    fn prompts(&mut self, model: &ModelInfo) -> Result<(Vec<Prompt>, bool), ApiError> {
        let is_given = |field: &IdsField| field.ids.is_some() || field.other.is_some();
        let (param, field) = match (is_given(&self.text), is_given(&self.input_ids)) {
            (true, true) => return Err(ApiError::invalid("input_ids", "input_ids and text cannot be combined")),
            (true, false) => ("text", std::mem::take(&mut self.text)),
            (false, true) => ("input_ids", std::mem::take(&mut self.input_ids)),
            (false, false) => return Err(ApiError::invalid("text", "text or input_ids is required")),
        };
        let is_batch = matches!(field.ids, Some(Ids::Several { .. }));
        let prompts = prompts(param, field, true, model.vocab_size)?;
        let is_text = |prompt: &Prompt| matches!(prompt, Prompt::Text { .. });
        if prompts.iter().any(|prompt| is_text(prompt) != (param == "text")) {
            let wanted = if param == "text" { "a text or an array of texts" } else { "token ids, or arrays of them" };
            return Err(ApiError::invalid(param, format!("{param} must be {wanted}")));
        }
        Ok((prompts, is_batch))
    }

    /// The id of each text in the answer.
    fn rids(&mut self, num: usize, is_batch: bool) -> Result<Vec<String>, ApiError> {
        match self.rid.take() {
            None => Ok((0..num).map(|_| random_hex()).collect()),
            Some(Value::String(id)) if !is_batch => Ok(vec![id]),
            Some(Value::String(prefix)) => Ok((0..num).map(|i| format!("{prefix}_{i}")).collect()),
            Some(Value::Array(ids)) if ids.len() == num => {
                let text = |(i, id): (usize, Value)| match id {
                    Value::String(id) => Ok(id),
                    other => Err(wrong_type(&format!("rid[{i}]"), "a string", Some(&other))),
                };
                ids.into_iter().enumerate().map(text).collect()
            }
            Some(other) => {
                let message = format!("rid must be a string, or an array of {num} strings, got {}", shown(&other));
                Err(ApiError::invalid("rid", message))
            }
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the parts of one request, which are read in different ways")]
    fn request(
        &self,
        prompts: Vec<Prompt>,
        ids: Vec<String>,
        params: SglangSampling,
        asked: AskedLogprobs,
        memory: &MemoryFields,
        begun: Instant,
        model: &ModelInfo,
    ) -> Result<(ApiRequest, AnswerSettings), ApiError> {
        let names = FieldNames::GENERATE;
        let SglangSampling { mut sampling, max_tokens, grammar } = params;
        sampling.stream = self.stream;
        sampling.priority = self.priority;
        sampling.cache_salt = match (&self.extra_key, &self.cache_salt) {
            (None, salt) => salt.clone(),
            (Some(key), salt) => Some(format!("{key}\n{}", salt.as_deref().unwrap_or_default())),
        };
        let top = num_logprobs("top_logprobs_num", Some(asked.top), model)?;
        if asked.start < -1 {
            let message = format!("logprob_start_len must be at least -1, got {}", asked.start);
            return Err(ApiError::invalid("logprob_start_len", message));
        }
        let answered = || -> Result<ApiRequest, ApiError> {
            let mut params = sampling.params(model)?;
            let mut answer = sampling.answer(&params, &names, model)?;
            answer.kv_block_bytes = memory.usage_block_bytes(model);
            answer.logprobs = top.filter(|_| asked.logprobs);
            params.logprobs = answer.logprobs;
            if asked.start >= 0 {
                params.prompt_logprobs = answer.logprobs;
            }
            answer.prompt_only = max_tokens == Some(0);
            params.max_tokens = max_tokens.map_or(0, |most| most.max(1));
            check_min_tokens(&params, &names)?;
            let mut grammar = grammar;
            if self.require_reasoning {
                answer.chat = Some(reasoning(&mut grammar, model)?);
                answer.text.kept_tokens = reasoning_format(model)?.marker_tokens(&model.tokenizer).into();
                answer.counts_reasoning_end = true;
            }
            let each = PromptRequest { names, grammar, ..PromptRequest::without_prompt(params) };
            sampling.into_request(prompts, each, answer, memory, model)
        };
        let mut request = answered().map_err(as_nested::<SglangNames>)?;
        request.prompt_ids.clone_from(&ids);
        let settings = AnswerSettings {
            ids,
            num_top: request.answer.logprobs,
            logprob_start: usize::try_from(asked.start).ok(),
            with_texts: self.return_text_in_logprobs,
            with_prompt_ids: self.return_prompt_token_ids,
            begun,
        };
        Ok((request, settings))
    }
}

/// How the model marks reasoning.
fn reasoning_format(model: &ModelInfo) -> Result<ChatFormat, ApiError> {
    let reasoning = model.chat_format.reasoning.ok_or_else(|| {
        let message = "require_reasoning: this model does not reason (model.reasoning_parser); leave it out";
        ApiError::invalid("require_reasoning", message)
    })?;
    Ok(ChatFormat { tools: None, reasoning: Some(reasoning) })
}

/// How an answer is read that begins with reasoning, whatever the prompt ends with. `grammar` holds from its end on.
fn reasoning(grammar: &mut Option<GrammarRequest>, model: &ModelInfo) -> Result<ChatReading, ApiError> {
    let format = reasoning_format(model)?;
    if let (Some(grammar), Some(reasoning)) = (grammar, format.reasoning) {
        grammar.starts_after = Some(reasoning.end().to_owned());
    }
    Ok(ChatReading { format, start: Some(ReasoningStart::Inside), ..ChatReading::default() })
}

/// One object of parameters for all texts, or one for each.
enum GivenParams {
    One(Map<String, Value>),
    Several(std::vec::IntoIter<Value>),
}

impl GivenParams {
    fn new(given: Value, num: usize) -> Result<Self, ApiError> {
        match given {
            Value::Array(items) if items.len() == num => Ok(Self::Several(items.into_iter())),
            Value::Object(fields) => Ok(Self::One(fields)),
            other => {
                let message =
                    format!("sampling_params must be an object, or an array of {num} objects, got {}", shown(&other));
                Err(ApiError::invalid("sampling_params", message))
            }
        }
    }

    /// The next text's.
    fn next(&mut self) -> Result<SglangSampling, ApiError> {
        match self {
            Self::One(fields) => params(fields.clone()),
            Self::Several(items) => {
                let item = items.next().unwrap_or_default();
                params(object("sampling_params", &item)?.clone())
            }
        }
    }
}

/// A field that has one value for all texts, or an array with one for each.
struct Each<T> {
    values: Vec<T>,
    several: bool,
}

impl<T: Copy> Each<T> {
    fn new(
        param: &str,
        given: Option<Value>,
        num: usize,
        read: fn(&str, &Value) -> Result<T, ApiError>,
        default: T,
    ) -> Result<Self, ApiError> {
        let values = match &given {
            None => vec![default],
            Some(Value::Array(items)) if items.len() == num => {
                let item = |(i, item): (usize, &Value)| read(&format!("{param}[{i}]"), item);
                items.iter().enumerate().map(item).collect::<Result<_, ApiError>>()?
            }
            Some(Value::Array(items)) => {
                let message = format!("{param} must have one value for each of the {num} texts, got {}", items.len());
                return Err(ApiError::invalid(param, message));
            }
            Some(one) => vec![read(param, one)?],
        };
        Ok(Self { several: matches!(given, Some(Value::Array(_))), values })
    }

    fn of(&self, place: usize) -> T {
        self.values[if self.several { place } else { 0 }]
    }
}

fn flag(param: &str, value: &Value) -> Result<bool, ApiError> {
    value.as_bool().ok_or_else(|| wrong_type(param, "a boolean", Some(value)))
}

fn number(param: &str, value: &Value) -> Result<i64, ApiError> {
    value.as_i64().ok_or_else(|| wrong_type(param, "an integer", Some(value)))
}
