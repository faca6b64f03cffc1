//! The body of `POST /api/generate`: one prompt, with or without the chat template.

use super::OllamaTask;
use super::answer::{AnswerShape, OllamaAnswer};
use super::chat::request;
use super::fields::{OllamaFields, UnsupportedInOllama, model_name};
use super::options::{MaxTokens, OptionNames, options};
use crate::body::fields::IdsField;
use crate::body::ids::Ids;
use crate::body::refused::Refused;
use crate::body::{ParsedBody, body, body_fields};
use crate::chat::tools::Tools;
use crate::fields::memory::MemoryFields;
use crate::fields::model::ModelField;
use crate::fields::nested::as_nested;
use crate::model_info::{ModelInfo, no_marks};
use crate::prompt::{FillIn, Prompt};
use crate::request::{ApiRequest, FieldNames, PromptRequest};
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_text::fill_in::FillInMarks;
use serde_json::{Value, json};
use std::time::Instant;

body_fields! {
    pub(super) struct OllamaGenerateFields {
        /// The text that the model is given, as a user's message. Without it nothing is generated.
        prompt: Option<String>,
        /// What stands behind the answer, which fills the gap between prompt and suffix. For models whose tokenizer has
        /// marks for that.
        suffix: Option<String>,
        /// A system message before it.
        system: Option<String>,
        /// The prompt is given to the model as it is, without the chat template.
        #[schema(default = false)]
        raw: bool,
        /// The context of an earlier answer, from which the conversation goes on. See /api/chat, which is newer.
        #[schema(value_type = Option<Vec<u32>>)]
        context: IdsField,
    }
}

body! {
    /// The body of `/api/generate`.
    pub struct OllamaGenerateBody {
        own: OllamaGenerateFields,
        fields: OllamaFields,
        model: ModelField,
        memory: MemoryFields,
        refused: Refused<UnsupportedInOllama>,
    }
}

pub fn parse(
    ParsedBody { body, problems }: ParsedBody<OllamaGenerateBody>,
    model: &ModelInfo,
) -> Result<OllamaTask, ApiError> {
    let begun = Instant::now();
    problems.check_object()?;
    let OllamaGenerateBody { own, mut fields, model: model_field, memory, refused } = body;
    let name = model_name(model_field, &problems, model)?;
    refused.check()?;
    problems.check()?;
    fields.check()?;
    let context = context(own.context, model)?;
    let system = own.system.filter(|system| !system.is_empty());
    let suffix = own.suffix.filter(|suffix| !suffix.is_empty());
    let without = if own.raw { Some("raw: true") } else { suffix.as_ref().map(|_| "suffix") };
    for (field, is_given) in
        [("system", system.is_some()), ("context", !context.is_empty()), ("suffix", own.raw && suffix.is_some())]
    {
        if let (Some(without), true) = (without, is_given) {
            return Err(ApiError::invalid(field, format!("{field} is not available with {without}")));
        }
    }
    let shape = if without.is_some() { AnswerShape::Raw } else { AnswerShape::Text };
    let answer = OllamaAnswer::new(shape, name, begun, model);
    let prompt = own.prompt.unwrap_or_default();
    let only_loads = prompt.is_empty() && suffix.is_none();
    let request = if without.is_some() {
        raw(prompt, suffix, &mut fields, &memory, model)?
    } else {
        let system = system.map(|system| json!({"role": "system", "content": system}));
        let messages: Vec<Value> = system.into_iter().chain([json!({"role": "user", "content": prompt})]).collect();
        let names = FieldNames::OLLAMA_GENERATE;
        let mut request = request(messages, false, Tools::default(), &mut fields, memory, names, model)?;
        if !context.is_empty() {
            request.prompts = request.prompts.into_iter().map(|prompt| prompt.after(context.clone())).collect();
        }
        request
    };
    // Without a prompt, the fields have to be right all the same.
    if only_loads {
        return Ok(OllamaTask::Load(answer.loaded()));
    }
    Ok(OllamaTask::Generate(Box::new(request), Box::new(answer)))
}

/// A prompt that goes by the chat template, or the gap before a suffix.
fn raw(
    prompt: String,
    suffix: Option<String>,
    fields: &mut OllamaFields,
    memory: &MemoryFields,
    model: &ModelInfo,
) -> Result<ApiRequest, ApiError> {
    let options = options(fields.options.take(), model)?;
    let mut sampling = options.sampling;
    sampling.stream = fields.stream.unwrap_or(true);
    // A wrong value is refused, although there is no template to tell.
    fields.template(false, model)?;
    let prompt = match suffix {
        None => prompt.into(),
        Some(suffix) => {
            let marks = FillInMarks::find(&model.tokenizer).map_err(|missing| no_marks("suffix", &missing))?;
            sampling.stop_token_ids.get_or_insert_default().extend(marks.ends.iter().copied().map(i64::from));
            let max_tokens = options.max_tokens.sampled().unwrap_or(0);
            Prompt::FillIn(FillIn { prefix: prompt, suffix, max_tokens, ..FillIn::default() })
        }
    };
    let names = FieldNames::OLLAMA_GENERATE;
    let within = || -> Result<ApiRequest, ApiError> {
        let mut params = sampling.params(model)?;
        let mut answer = sampling.answer(&params, &names, model)?;
        answer.kv_block_bytes = memory.usage_block_bytes(model);
        answer.logprobs = fields.logprobs(model)?;
        answer.prompt_only = options.max_tokens == MaxTokens::Zero;
        params.logprobs = answer.logprobs;
        params.max_tokens = options.max_tokens.sampled().unwrap_or(0);
        let grammar = fields.format()?;
        let each = PromptRequest { names, grammar, shortens_output: true, ..PromptRequest::without_prompt(params) };
        sampling.into_request(vec![prompt], each, answer, memory, model)
    };
    within().map_err(as_nested::<OptionNames>)
}

/// Token ids; none where nothing is given.
fn context(given: IdsField, model: &ModelInfo) -> Result<Vec<TokenId>, ApiError> {
    match given {
        IdsField { ids: None, other: None } => Ok(Vec::new()),
        IdsField { ids: Some(Ids::One(list)), .. } => list.tokens("context", model.vocab_size),
        _ => Err(ApiError::invalid("context", "context must be an array of token ids")),
    }
}
