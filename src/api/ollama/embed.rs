//! `POST /api/embed`, and `POST /api/embeddings`, which came before it.

use super::fields::{KeepAlive, model_name};
use super::options::{OllamaOptions, options};
use crate::body::fields::IdsField;
use crate::body::ids::Ids;
use crate::body::{ParsedBody, body, body_fields};
use crate::checks::{in_range, wrong_type};
use crate::embedding::{embedding_of_each, normalize};
use crate::fields::model::ModelField;
use crate::fold::AnsweredPrompt;
use crate::model_info::ModelInfo;
use crate::openai::completion;
use crate::request::{ApiRequest, FieldNames};
use pagetide_base::error::ApiError;
use pagetide_text::truncation::{Side, Truncation};
use serde::Serialize;
use serde_json::{Map, Value};
use std::time::Instant;
use utoipa::ToSchema;

body_fields! {
    pub(super) struct OllamaEmbedFields {
        /// A text or an array of texts.
        #[schema(value_type = Option<completion::PromptForms>)]
        input: IdsField,
        /// Whether a text that is too long is cut at its end. Where not, it is refused.
        #[schema(default = true)]
        truncate: Option<bool>,
        /// Keeps this many numbers of each embedding, and makes its length 1 again. Default: all.
        #[schema(minimum = 0)]
        dimensions: Option<i64>,
    }
}

body_fields! {
    pub(super) struct OllamaEmbeddingsFields {
        /// A text.
        prompt: Option<String>,
    }
}

body_fields! {
    /// Of both.
    pub(super) struct AcceptedInEmbed {
        /// Without effect on embeddings.
        #[schema(value_type = Option<OllamaOptions>)]
        options: Option<Map<String, Value>>,
        /// How long the model stays loaded. Without effect: it stays as long as the server runs.
        #[schema(value_type = Option<KeepAlive>)]
        keep_alive: Option<Value>,
    }
}

body! {
    /// The body of `/api/embed`.
    pub struct OllamaEmbedBody {
        own: OllamaEmbedFields,
        accepted: AcceptedInEmbed,
        model: ModelField,
    }
}

body! {
    /// The body of `/api/embeddings`.
    pub struct OllamaEmbeddingsBody {
        own: OllamaEmbeddingsFields,
        accepted: AcceptedInEmbed,
        model: ModelField,
    }
}

/// A request for embeddings, and how they are written.
#[derive(Debug)]
pub struct OllamaEmbedding {
    /// Without prompts there is nothing to compute.
    pub request: ApiRequest,
    model: String,
    dimensions: Option<usize>,
    begun: Instant,
}

pub fn parse(
    ParsedBody { body, problems }: ParsedBody<OllamaEmbedBody>,
    model: &ModelInfo,
) -> Result<OllamaEmbedding, ApiError> {
    problems.check_object()?;
    let OllamaEmbedBody { own, accepted, model: model_field } = body;
    let name = model_name(model_field, &problems, model)?;
    problems.check()?;
    accepted.check(model)?;
    let prompts = match own.input {
        IdsField { ids: None, other: None } => Vec::new(),
        IdsField { ids: Some(Ids::One(list)), .. } if list.is_empty() => Vec::new(),
        IdsField { other: Some(Value::String(text)), .. } if text.is_empty() => Vec::new(),
        given => completion::prompts("input", given, true, model.vocab_size)?,
    };
    let dimensions = own.dimensions.map(|given| in_range("dimensions", given, 0..=i64::from(u32::MAX))).transpose()?;
    // A text keeps its beginning.
    let cut = Truncation { keep: Some(model.max_model_len), side: Some(Side::Right) };
    let truncation = own.truncate.unwrap_or(true).then_some(cut);
    let each = embedding_of_each(FieldNames::EMBEDDING, model.pooling, truncation);
    Ok(OllamaEmbedding {
        request: ApiRequest::new(prompts, each),
        model: name,
        dimensions: dimensions.filter(|given| *given > 0).map(|given| given as usize),
        begun: Instant::now(),
    })
}

pub fn parse_older(
    ParsedBody { body, problems }: ParsedBody<OllamaEmbeddingsBody>,
    model: &ModelInfo,
) -> Result<ApiRequest, ApiError> {
    problems.check_object()?;
    let OllamaEmbeddingsBody { own, accepted, model: model_field } = body;
    model_name(model_field, &problems, model)?;
    problems.check()?;
    accepted.check(model)?;
    let prompt = own.prompt.filter(|prompt| !prompt.is_empty());
    let each = embedding_of_each(FieldNames::COMPLETION, model.pooling, None);
    Ok(ApiRequest::new(prompt.into_iter().map(Into::into).collect(), each))
}

impl AcceptedInEmbed {
    fn check(self, model: &ModelInfo) -> Result<(), ApiError> {
        options(self.options, model)?.check(model)?;
        match &self.keep_alive {
            None | Some(Value::Number(_) | Value::String(_)) => Ok(()),
            other => Err(wrong_type("keep_alive", "a number of seconds or a string", other.as_ref())),
        }
    }
}

/// The answer of `/api/embed`.
#[derive(Serialize, ToSchema)]
pub struct OllamaEmbeddings {
    model: String,
    /// Each of length 1.
    embeddings: Vec<Vec<f32>>,
    /// Nanoseconds from the request to its answer.
    total_duration: u64,
    /// The model is loaded when the server starts, so 0.
    load_duration: u64,
    prompt_eval_count: usize,
}

impl OllamaEmbeddings {
    /// `prompts`: each with its embedding.
    pub fn new(request: OllamaEmbedding, prompts: Vec<AnsweredPrompt>) -> Self {
        let prompt_eval_count = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
        let numbers = |prompt: AnsweredPrompt| {
            let mut values = prompt.facts.embedding.unwrap_or_default();
            values.truncate(request.dimensions.unwrap_or(usize::MAX));
            normalize(&mut values);
            values
        };
        let embeddings = prompts.into_iter().map(numbers).collect();
        let total_duration = u64::try_from(request.begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        Self { model: request.model, embeddings, total_duration, load_duration: 0, prompt_eval_count }
    }
}

/// The answer of `/api/embeddings`.
#[derive(Serialize, ToSchema)]
pub struct OllamaOneEmbedding {
    /// As the model gives it, of any length.
    embedding: Vec<f32>,
}

impl OllamaOneEmbedding {
    pub fn new(prompts: Vec<AnsweredPrompt>) -> Self {
        let first = prompts.into_iter().next();
        Self { embedding: first.and_then(|prompt| prompt.facts.embedding).unwrap_or_default() }
    }
}
