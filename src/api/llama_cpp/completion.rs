//! `POST /completion`.

use super::answer::{NO_SLOT, NativeAnswer, grammar_text};
use super::logit_bias::{BAN, LogitBiasForms, logit_bias};
use super::prompt::{NativePromptForms, prompts};
use crate::body::fields::{FieldSource, IdsField};
use crate::body::refused::Refused;
use crate::body::{BodyFields, FieldProblems, ParsedBody, body, body_fields};
use crate::checks::in_range;
use crate::fields::llama_cpp::{ChatReadingFields, LlamaCppFields, TelemetryFields};
use crate::fields::memory::MemoryFields;
use crate::fields::model::ModelField;
use crate::fields::sampling::{SamplingFields, check_min_tokens, num_logprobs};
use crate::fields::structured::StructuredFields;
use crate::fields::unsupported::UnsupportedFields;
use crate::model_info::ModelInfo;
use crate::prompt::Prompt;
use crate::request::{ApiRequest, FieldNames, PromptRequest};
use pagetide_base::error::ApiError;
use pagetide_base::sampling::params::SamplingParams;
use serde_json::{Map, Value};

/// llama.cpp's defaults, where the model's authors recommend no others.
const TEMPERATURE: f64 = 0.8;
const TOP_K: i64 = 40;
const TOP_P: f64 = 0.95;
const MIN_P: f64 = 0.05;

const NAMES: FieldNames = FieldNames { max_tokens: "n_predict", ..FieldNames::COMPLETION };

/// Fields of samples that llama.cpp's completions do not have, or have in another form.
pub const NOT_NATIVE: &[&str] = &[
    "best_of",
    "early_stopping",
    "length_penalty",
    "logit_bias",
    "prompt_logprobs",
    "return_token_ids",
    "stream_options",
    "use_beam_search",
];

body_fields! {
    pub(super) struct PromptField {
        /// A text, an array of texts and token ids (one prompt, if there is any id in it), an object with
        /// prompt_string, or an array of these. Each has an answer.
        #[schema(value_type = Option<NativePromptForms>)]
        prompt: IdsField,
    }
}

body_fields! {
    pub(super) struct GenerationFields {
        /// Another name of n_predict.
        #[schema(minimum = -1, maximum = 4294967295_i64)]
        max_tokens: Option<i64>,
        /// Another name of n_predict.
        #[schema(minimum = -1, maximum = 4294967295_i64)]
        max_completion_tokens: Option<i64>,
        /// Another name of n_probs.
        #[schema(minimum = 0, maximum = 20)]
        logprobs: Option<i64>,
        /// Added to the logits: an object by token id or text, or an array of pairs. Of a text, to each of its tokens.
        /// false: the token does not come.
        #[schema(value_type = Option<LogitBiasForms>)]
        logit_bias: Option<Value>,
        /// With n_probs: probabilities behind all samplers, of the tokens that can still be drawn, instead of the
        /// model's log-probabilities.
        #[schema(default = false)]
        post_sampling_probs: bool,
        /// A whole answer has its tokens. Parts of a stream always have theirs.
        #[schema(default = false)]
        return_tokens: bool,
        /// The fields that a whole answer, or the last part of a stream, has; a slash leads into an object. Default:
        /// all.
        response_fields: Option<Vec<String>>,
        /// Without effect: the last part of a stream says how many tokens there were.
        #[schema(value_type = Option<Object>)]
        stream_options: Option<Map<String, Value>>,
        /// Whether llama.cpp repeats the input of a chat. Without effect.
        echo: Option<bool>,
    }
}

/// Sampling and the form of the text, but for [`NOT_NATIVE`].
#[derive(Debug, Default)]
pub(super) struct NativeSampling {
    sampling: SamplingFields,
    structured: StructuredFields,
}

impl BodyFields for NativeSampling {
    fn read<S: FieldSource>(&mut self, name: &str, source: &mut S) -> Result<bool, S::Error> {
        Ok(!NOT_NATIVE.contains(&name) && (self.sampling.read(name, source)? || self.structured.read(name, source)?))
    }

    fn add_names(names: &mut Vec<&'static str>) {
        let mut all = Vec::new();
        SamplingFields::add_names(&mut all);
        StructuredFields::add_names(&mut all);
        names.extend(all.into_iter().filter(|name| !NOT_NATIVE.contains(name)));
    }
}

body! {
    /// What all completions have beside their prompt.
    pub(super) struct GenerationBody {
        own: GenerationFields,
        llama_cpp: LlamaCppFields,
        telemetry: TelemetryFields,
        chat_reading: ChatReadingFields,
        model: ModelField,
        sampling: NativeSampling,
        refused: Refused<UnsupportedFields>,
    }
}

body! {
    /// The body of `/completion`.
    pub struct NativeCompletionBody {
        prompt: PromptField,
        generation: GenerationBody,
    }
}

/// A completion, and how it is answered.
pub struct NativeRequest {
    pub request: ApiRequest,
    pub answer: NativeAnswer,
}

pub fn parse(
    ParsedBody { body, problems }: ParsedBody<NativeCompletionBody>,
    model: &ModelInfo,
) -> Result<NativeRequest, ApiError> {
    body.generation.check(&problems, model)?;
    let prompts = prompts(NAMES.prompt, body.prompt.prompt, true, model.vocab_size)?;
    body.generation.into_request(prompts, NAMES, model)
}

/// What a body says of lengths.
struct OutputLength {
    /// `None`: as many tokens as fit.
    asked: Option<u32>,
    /// The field that says it.
    name: &'static str,
}

impl GenerationBody {
    pub fn check(&self, problems: &FieldProblems, model: &ModelInfo) -> Result<(), ApiError> {
        problems.check_object()?;
        self.model.check(problems, model)?;
        self.refused.check()?;
        problems.check()?;
        self.llama_cpp.check()
    }

    fn length(&self) -> Result<OutputLength, ApiError> {
        let GenerationFields { max_tokens, max_completion_tokens, .. } = self.own;
        let length = |name, given: i64| {
            let given = in_range(name, given, -1..=i64::from(u32::MAX))?;
            Ok(OutputLength { asked: u32::try_from(given).ok(), name })
        };
        if let Some(asked) = self.llama_cpp.max_tokens()? {
            return Ok(OutputLength { asked, name: "n_predict" });
        }
        match (max_completion_tokens, max_tokens) {
            (Some(given), _) => length("max_completion_tokens", given),
            (None, Some(given)) => length("max_tokens", given),
            (None, None) => Ok(OutputLength { asked: None, name: "n_predict" }),
        }
    }

    /// Tokens to generate at most; 0: as many as fit.
    pub fn most_tokens(&self) -> Result<u32, ApiError> {
        Ok(self.length()?.asked.unwrap_or(0))
    }

    /// Adds tokens that end the output.
    pub fn stop_at(&mut self, tokens: &[u32]) {
        let ids = self.sampling.sampling.stop_token_ids.get_or_insert_default();
        ids.extend(tokens.iter().copied().map(i64::from));
    }

    pub fn into_request(
        self,
        prompts: Vec<Prompt>,
        names: FieldNames,
        model: &ModelInfo,
    ) -> Result<NativeRequest, ApiError> {
        let OutputLength { asked, name } = self.length()?;
        let names = FieldNames { max_tokens: name, ..names };
        let Self { own, llama_cpp, telemetry, sampling: NativeSampling { mut sampling, structured }, .. } = self;
        fill_in(&mut sampling, model);
        sampling.n = llama_cpp.n_cmpl.or(sampling.n);
        let mut params = sampling.params(model)?;
        params.logit_bias = logit_bias(own.logit_bias.as_ref(), model)?;
        if sampling.ignore_eos {
            // As in llama.cpp: end tokens do not come at all.
            params.logit_bias.extend(model.eos_token_ids.iter().map(|eos| (*eos, BAN)));
        }
        let mut answer = sampling.answer(&params, &names, model)?;
        answer.pause_comments = sampling.pause_comments(model);
        answer.timings = true;
        let num_probs = num_logprobs("logprobs", own.logprobs, model)?.filter(|num| *num > 0);
        answer.logprobs = llama_cpp.num_probs(model)?.or(num_probs);
        answer.prompt_only = asked == Some(0);
        params.logprobs = answer.logprobs;
        let post_sampling_probs = own.post_sampling_probs && answer.logprobs.is_some();
        if post_sampling_probs {
            params.extra.get_or_insert_default().logprobs_of_draw = true;
        }
        params.max_tokens = asked.map_or(0, |asked| asked.max(1));
        check_min_tokens(&params, &names)?;
        let grammar = structured.check(&sampling)?;
        let stop = answer.text.stop.clone();
        let (ignore_eos, stream) = (sampling.ignore_eos, sampling.stream);
        let each = PromptRequest { names, grammar, shortens_output: true, ..PromptRequest::without_prompt(params) };
        let mut request = sampling.into_request(prompts, each, answer, &MemoryFields::default(), model)?;
        llama_cpp.apply(&mut request, model)?;
        telemetry.apply(&mut request, model);
        let answer = NativeAnswer {
            model: model.served_name.clone(),
            tokenizer: model.tokenizer.clone(),
            max_model_len: model.max_model_len as usize,
            asked_tokens: asked,
            num_probs: request.answer.logprobs,
            post_sampling_probs,
            id_slot: llama_cpp.id_slot.unwrap_or(NO_SLOT),
            n_keep: llama_cpp.n_keep.unwrap_or(0),
            n_discard: llama_cpp.n_discard.unwrap_or(0),
            return_tokens: own.return_tokens,
            timings_per_token: telemetry.timings_per_token,
            response_fields: own.response_fields.unwrap_or_default(),
            grammar: request.each.grammar.as_ref().and_then(grammar_text),
            stop,
            ignore_eos,
            stream,
        };
        Ok(NativeRequest { request, answer })
    }
}

/// The parameters of a request that says nothing.
pub fn default_params(model: &ModelInfo) -> Result<SamplingParams, ApiError> {
    let mut sampling = SamplingFields::default();
    fill_in(&mut sampling, model);
    sampling.params(model)
}

/// llama.cpp's defaults where neither the request nor the model's authors say anything.
fn fill_in(sampling: &mut SamplingFields, model: &ModelInfo) {
    let own = &model.default_sampling;
    let default = |given: &mut Option<f64>, own: Option<f32>, default: f64| {
        if given.is_none() && own.is_none() {
            *given = Some(default);
        }
    };
    default(&mut sampling.temperature, own.temperature, TEMPERATURE);
    default(&mut sampling.top_p, own.top_p, TOP_P);
    default(&mut sampling.min_p, own.min_p, MIN_P);
    sampling.top_k = sampling.top_k.or(own.top_k.is_none().then_some(TOP_K));
    // -1, and the same number in 32 bits, is llama.cpp's word for a random seed.
    sampling.seed = sampling.seed.filter(|seed| *seed != -1 && *seed != i64::from(u32::MAX));
    if let Some(Value::Array(stop)) = &mut sampling.stop {
        stop.retain(|text| text.as_str() != Some(""));
    }
    if sampling.stop.as_ref().and_then(Value::as_str) == Some("") {
        sampling.stop = None;
    }
}
