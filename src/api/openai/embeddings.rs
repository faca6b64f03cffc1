//! `POST /v1/embeddings`.

use super::accepted::AcceptedFields;
use super::completion;
use super::response::{new_id, unix_time_s};
use crate::body::fields::IdsField;
use crate::body::{ParsedBody, body, body_fields};
use crate::checks::{in_range, shown};
use crate::fields::memory::MemoryFields;
use crate::fields::model::ModelField;
use crate::fold::AnsweredPrompt;
use crate::model_info::ModelInfo;
use crate::openapi::{Operation, Tag};
use crate::request::{ApiRequest, FieldNames, PromptRequest};
use crate::usage::KvUsage;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pagetide_base::error::ApiError;
use pagetide_base::sampling::params::{Pooling, SamplingParams};
use pagetide_text::truncation::Truncation;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

body_fields! {
    struct EmbeddingFields {
        /// A text, token ids, or an array of either.
        #[schema(value_type = completion::PromptForms)]
        input: IdsField,
        /// base64: of the numbers in little-endian float32.
        #[schema(value_type = Option<Encoding>, default = "float")]
        encoding_format: Option<Value>,
        /// Numbers of an embedding: the model's own, no other is available.
        dimensions: Option<i64>,
        /// Which of the final hidden states are taken: the last token's, or the mean of all. Default: what the model's
        /// authors recommend (1_Pooling/config.json), else last.
        #[schema(value_type = Option<PoolingName>)]
        pooling: Option<Value>,
        /// Whether an embedding has length 1.
        #[schema(default = true)]
        normalize: Option<bool>,
        /// Whether the tokenizer adds its special tokens to a text.
        #[schema(default = true)]
        add_special_tokens: Option<bool>,
        /// Keeps the last so many tokens of each input; -1: as many as the model has room for.
        #[schema(minimum = -1)]
        truncate_prompt_tokens: Option<i64>,
        /// Lower goes first under the priority policy.
        #[schema(default = 0)]
        priority: Option<i64>,
    }
}

#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "only described")]
enum Encoding {
    Float,
    Base64,
}

#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "only described")]
enum PoolingName {
    Last,
    Mean,
}

/// The answer.
#[derive(Serialize, ToSchema)]
pub struct EmbeddingList {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    data: Vec<Embedding>,
    usage: EmbeddingUsage,
}

#[derive(Serialize, ToSchema)]
struct Embedding {
    object: &'static str,
    index: usize,
    embedding: Numbers,
}

#[derive(Serialize, ToSchema)]
#[serde(untagged)]
enum Numbers {
    Float(Vec<f32>),
    Base64(String),
}

#[derive(Clone, Copy, Default, Serialize, ToSchema)]
struct EmbeddingUsage {
    prompt_tokens: usize,
    total_tokens: usize,
    /// With include_kv_usage: what memory pressure has cost the inputs together.
    #[serde(skip_serializing_if = "Option::is_none")]
    kv: Option<KvUsage>,
}

body! {
    /// The body of a request for embeddings.
    pub struct EmbeddingBody {
        own: EmbeddingFields,
        model: ModelField,
        memory: MemoryFields,
        accepted: AcceptedFields,
    }
}

/// A request for embeddings, and how they are written.
#[derive(Debug)]
pub struct EmbeddingRequest {
    pub request: ApiRequest,
    pub format: EmbeddingFormat,
}

#[derive(Clone, Copy, Debug)]
pub struct EmbeddingFormat {
    normalize: bool,
    base64: bool,
    kv_block_bytes: Option<usize>,
}

pub fn describe() -> Operation {
    Operation::new(Tag::Text, "embeddings", "Embeddings of texts: the model's final hidden states, pooled")
        .body("EmbeddingRequest")
        .fields::<EmbeddingFields>()
        .fields::<MemoryFields>()
        .fields::<AcceptedFields>()
        .fields::<ModelField>()
        .fields::<AcceptedFields>()
        .requires(&["input"])
        .answers::<EmbeddingList>("An embedding of each input, in their order.")
        .generates()
}

pub fn parse(
    ParsedBody { body, problems }: ParsedBody<EmbeddingBody>,
    model: &ModelInfo,
) -> Result<EmbeddingRequest, ApiError> {
    problems.check_object()?;
    body.model.check(&problems, model)?;
    problems.check()?;
    body.accepted.check()?;
    let EmbeddingBody { own, memory, .. } = body;
    let names = FieldNames::EMBEDDING;
    let add_special_tokens = own.add_special_tokens.unwrap_or(true);
    let prompts = completion::prompts(names.prompt, own.input, add_special_tokens, model.vocab_size)?;
    if let Some(dimensions) = own.dimensions {
        let size = i64::from(model.embedding_size);
        in_range("dimensions", dimensions, size..=size)?;
    }
    let pooling = match one_of("pooling", &own.pooling, &["last", "mean"])? {
        Some("last") => Pooling::Last,
        Some(_) => Pooling::Mean,
        None => model.pooling,
    };
    let keep = match own.truncate_prompt_tokens {
        None => None,
        Some(-1) => Some(model.max_model_len),
        Some(keep) => Some(in_range("truncate_prompt_tokens", keep, 1..=model.max_model_len.into())? as u32),
    };
    let priority = i64::from(i32::MIN)..=i64::from(i32::MAX);
    let params = SamplingParams { pooling: Some(pooling), max_tokens: 1, ..SamplingParams::default() };
    let mut each = PromptRequest {
        names,
        truncation: keep.map(|keep| Truncation { keep: Some(keep), side: None }),
        ignore_eos: true,
        seed: Some(0),
        ..PromptRequest::without_prompt(params)
    };
    each.core.priority = in_range("priority", own.priority.unwrap_or(0), priority)? as i32;
    each.core.terms = memory.terms()?;
    let format = EmbeddingFormat {
        normalize: own.normalize.unwrap_or(true),
        base64: one_of("encoding_format", &own.encoding_format, &["float", "base64"])? == Some("base64"),
        kv_block_bytes: memory.usage_block_bytes(model),
    };
    Ok(EmbeddingRequest { request: ApiRequest::new(prompts, each), format })
}

impl EmbeddingList {
    /// The answer. `prompts`: each with its embedding.
    pub fn new(prompts: Vec<AnsweredPrompt>, format: EmbeddingFormat, model: &ModelInfo) -> Self {
        let mut usage = EmbeddingUsage::default();
        let mut data = Vec::with_capacity(prompts.len());
        for (index, AnsweredPrompt { tokens, facts }) in prompts.into_iter().enumerate() {
            usage.prompt_tokens += tokens.len();
            if let Some(block_bytes) = format.kv_block_bytes {
                usage.kv = Some(usage.kv.unwrap_or_default() + KvUsage::new(&facts.bill, block_bytes));
            }
            data.push(Embedding {
                object: "embedding",
                index,
                embedding: format.numbers(facts.embedding.unwrap_or_default()),
            });
        }
        usage.total_tokens = usage.prompt_tokens;
        let (id, created, model) = (new_id("embd"), unix_time_s(), model.served_name.clone());
        Self { id, object: "list", created, model, data, usage }
    }
}

impl EmbeddingFormat {
    fn numbers(self, mut values: Vec<f32>) -> Numbers {
        if self.normalize {
            normalize(&mut values);
        }
        match self.base64 {
            true => Numbers::Base64(STANDARD.encode(values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())),
            false => Numbers::Float(values),
        }
    }
}

/// To length 1; zeros stay.
fn normalize(values: &mut [f32]) {
    let norm = values.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
    if norm > 0.0 {
        values.iter_mut().for_each(|x| *x = (f64::from(*x) / norm) as f32);
    }
}

fn one_of<'a>(param: &str, given: &'a Option<Value>, names: &[&str]) -> Result<Option<&'a str>, ApiError> {
    match given {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(name)) if names.contains(&name.as_str()) => Ok(Some(name)),
        Some(other) => {
            let message = format!("{param} must be one of {}, got {}", names.join(", "), shown(other));
            Err(ApiError::invalid(param, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_embedding_has_length_one() {
        let mut values = [3.0, -4.0];
        normalize(&mut values);
        assert_eq!(values, [0.6, -0.8]);
        let mut zeros = [0.0; 3];
        normalize(&mut zeros);
        assert_eq!(zeros, [0.0; 3]);
    }
}
