//! `POST /score`: how similar texts are, by the cosine of their embeddings.

use crate::body::fields::IdsField;
use crate::body::refused::Refused;
use crate::body::{ParsedBody, body, body_fields};
use crate::embedding::normalize;
use crate::fields::memory::MemoryFields;
use crate::fields::model::ModelField;
use crate::fields::pooling::PoolingFields;
use crate::fields::request_id::RequestIdFields;
use crate::fields::unsupported::UnsupportedFields;
use crate::fold::AnsweredPrompt;
use crate::id::unix_time_s;
use crate::model_info::ModelInfo;
use crate::openai::accepted::AcceptedFields;
use crate::openai::completion::{PromptForms, prompts};
use crate::openapi::{Operation, Tag};
use crate::request::{ApiRequest, FieldNames};
use pagetide_base::error::ApiError;
use serde::Serialize;
use utoipa::ToSchema;

body_fields! {
    /// The two sides of a comparison have several names. Of each side one is given.
    struct ScoreFields {
        /// A text, token ids, or an array of either. One is compared with each of the other side; otherwise both sides
        /// have as many, and are compared pair by pair.
        #[schema(value_type = Option<PromptForms>)]
        text_1: IdsField,
        /// The other side.
        #[schema(value_type = Option<PromptForms>)]
        text_2: IdsField,
        /// The same as text_1.
        #[schema(value_type = Option<PromptForms>)]
        queries: IdsField,
        /// The same as text_2.
        #[schema(value_type = Option<PromptForms>)]
        documents: IdsField,
        /// The same as text_2.
        #[schema(value_type = Option<PromptForms>)]
        items: IdsField,
        /// The same as text_1.
        #[schema(value_type = Option<PromptForms>)]
        data_1: IdsField,
        /// The same as text_2.
        #[schema(value_type = Option<PromptForms>)]
        data_2: IdsField,
    }
}

body! {
    pub struct ScoreBody {
        own: ScoreFields,
        pooling: PoolingFields,
        model: ModelField,
        memory: MemoryFields,
        request_id: RequestIdFields,
        accepted: AcceptedFields,
        refused: Refused<UnsupportedFields>,
    }
}

/// The embeddings that a comparison needs: those of the one side, then those of the other.
#[derive(Debug)]
pub struct ScoreRequest {
    pub request: ApiRequest,
    pub num_first: usize,
}

#[derive(Serialize, ToSchema)]
pub struct ScoreList {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    data: Vec<Score>,
    usage: ScoreUsage,
}

#[derive(Serialize, ToSchema)]
struct Score {
    index: usize,
    object: &'static str,
    /// The cosine, in [-1, 1].
    score: f64,
}

#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub struct ScoreUsage {
    pub prompt_tokens: usize,
    pub total_tokens: usize,
}

/// `id`: the operation's name in generated clients.
pub fn describe(id: &'static str) -> Operation {
    Operation::new(Tag::Text, id, "How similar texts are: the cosine of their embeddings")
        .body("ScoreRequest")
        .fields::<ScoreFields>()
        .fields::<PoolingFields>()
        .fields::<MemoryFields>()
        .fields::<RequestIdFields>()
        .fields::<ModelField>()
        .fields::<AcceptedFields>()
        .answers::<ScoreList>("The score of each pair.")
        .generates()
}

pub fn parse(
    ParsedBody { body, problems }: ParsedBody<ScoreBody>,
    model: &ModelInfo,
) -> Result<ScoreRequest, ApiError> {
    problems.check_object()?;
    body.model.check(&problems, model)?;
    body.refused.check()?;
    problems.check()?;
    body.accepted.check()?;
    let ScoreBody { own, pooling, memory, request_id, .. } = body;
    let ScoreFields { text_1, text_2, queries, documents, items, data_1, data_2 } = own;
    let first = one_side([("text_1", text_1), ("queries", queries), ("data_1", data_1)])?;
    let second = one_side([("text_2", text_2), ("documents", documents), ("items", items), ("data_2", data_2)])?;
    let (first_name, second_name) = (first.0, second.0);
    let mut sides = prompts(first_name, first.1, true, model.vocab_size)?;
    let others = prompts(second_name, second.1, true, model.vocab_size)?;
    let num_first = sides.len();
    if num_first != 1 && num_first != others.len() {
        let message = format!(
            "{first_name} must have one text or as many as {second_name}, got {num_first} and {}",
            others.len()
        );
        return Err(ApiError::invalid(first_name, message));
    }
    sides.extend(others);
    let names = FieldNames { prompt: second_name, ..FieldNames::EMBEDDING };
    let each = pooling.request(names, &memory, model)?;
    Ok(ScoreRequest { request: request_id.name(ApiRequest::new(sides, each))?, num_first })
}

/// The one name of a side that is given.
fn one_side<const N: usize>(names: [(&'static str, IdsField); N]) -> Result<(&'static str, IdsField), ApiError> {
    let required = names[0].0;
    let mut given = names.into_iter().filter(|(_, field)| field.ids.is_some() || field.other.is_some());
    let Some(side) = given.next() else {
        return Err(ApiError::invalid(required, format!("{required} is required")));
    };
    match given.next() {
        None => Ok(side),
        Some((other, _)) => Err(ApiError::invalid(other, format!("{other} and {} cannot be combined", side.0))),
    }
}

/// The cosine of each pair: of each of the `num_first` first prompts with one of the others, or of the only first one
/// with each of the others. And the tokens of all prompts.
pub fn cosines(prompts: Vec<AnsweredPrompt>, num_first: usize) -> (Vec<f64>, ScoreUsage) {
    let num_tokens = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
    let unit = |prompt: AnsweredPrompt| {
        let mut values = prompt.facts.embedding.unwrap_or_default();
        normalize(&mut values);
        values
    };
    let mut first: Vec<Vec<f32>> = prompts.into_iter().map(unit).collect();
    let second = first.split_off(num_first);
    let cosine = |(one, other): (&Vec<f32>, &Vec<f32>)| {
        one.iter().zip(other).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
    };
    let scores = first.iter().cycle().zip(&second).map(cosine).collect();
    (scores, ScoreUsage { prompt_tokens: num_tokens, total_tokens: num_tokens })
}

impl ScoreList {
    pub fn new(id: &str, prompts: Vec<AnsweredPrompt>, num_first: usize, model: &ModelInfo) -> Self {
        let (scores, usage) = cosines(prompts, num_first);
        let scores = scores.into_iter().enumerate().map(|(index, score)| Score { index, object: "score", score });
        Self {
            id: format!("score-{id}"),
            object: "list",
            created: unix_time_s(),
            model: model.served_name.clone(),
            data: scores.collect(),
            usage,
        }
    }
}
