//! `POST /v1/embeddings`.

use super::accepted::AcceptedFields;
use super::memory::MemoryFields;
use super::response::{KvUsage, new_id};
use super::{ModelField, check_model, completion, in_range, parse_fields, shown};
use crate::actors::messages::{Accepted, Event, Prompt, Submit};
use crate::actors::runtime::{ModelInfo, RuntimeHandle};
use crate::engine::bill::{KvBill, Tenant, Terms};
use crate::error::ApiError;
use crate::http::body::json::Json;
use crate::http::deadline::Deadline;
use crate::http::openapi::{Operation, Tag};
use crate::sampling::params::{Pooling, SamplingParams};
use crate::text::truncation::Truncation;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::time::{SystemTime, UNIX_EPOCH};
use utoipa::ToSchema;

#[derive(Default, Deserialize, ToSchema)]
#[serde(default)]
struct EmbeddingFields {
    /// A text, token ids, or an array of either.
    #[schema(value_type = completion::PromptForms)]
    input: Option<Value>,
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

pub struct Request {
    prompts: Vec<Prompt>,
    params: SamplingParams,
    truncation: Option<Truncation>,
    priority: i32,
    terms: Terms,
    kv_block_bytes: Option<usize>,
    normalize: bool,
    base64: bool,
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

impl Request {
    pub fn num_prompts(&self) -> usize {
        self.prompts.len()
    }

    /// Of a body.
    pub fn parse(Json { value: body, ids }: Json, model: &ModelInfo) -> Result<Self, ApiError> {
        let body = &body;
        check_model(body, model)?;
        let fields: EmbeddingFields = parse_fields(body)?;
        let memory: MemoryFields = parse_fields(body)?;
        parse_fields::<AcceptedFields>(body)?.check()?;
        let add_special_tokens = fields.add_special_tokens.unwrap_or(true);
        let prompts = match ids {
            Some(ids) => completion::batch("input", ids, add_special_tokens, model.vocab_size)?,
            None => completion::prompts("input", fields.input.as_ref(), add_special_tokens, model.vocab_size)?,
        };
        if let Some(dimensions) = fields.dimensions {
            let size = i64::from(model.embedding_size);
            in_range("dimensions", dimensions, size..=size)?;
        }
        let pooling = match one_of("pooling", &fields.pooling, &["last", "mean"])? {
            Some("last") => Pooling::Last,
            Some(_) => Pooling::Mean,
            None => model.pooling,
        };
        let keep = match fields.truncate_prompt_tokens {
            None => None,
            Some(-1) => Some(model.max_model_len),
            Some(keep) => Some(in_range("truncate_prompt_tokens", keep, 1..=model.max_model_len.into())? as u32),
        };
        let priority = i64::from(i32::MIN)..=i64::from(i32::MAX);
        Ok(Self {
            prompts,
            params: SamplingParams { pooling: Some(pooling), max_tokens: 1, ..SamplingParams::default() },
            truncation: keep.map(|keep| Truncation { keep: Some(keep), side: None }),
            priority: in_range("priority", fields.priority.unwrap_or(0), priority)? as i32,
            terms: memory.terms()?,
            kv_block_bytes: memory.usage_block_bytes(model),
            normalize: fields.normalize.unwrap_or(true),
            base64: one_of("encoding_format", &fields.encoding_format, &["float", "base64"])? == Some("base64"),
        })
    }

    fn submit(&self, prompt: Prompt) -> Submit {
        Submit {
            prompt,
            truncation: self.truncation,
            prompt_param: "input",
            params: self.params.clone(),
            ignore_eos: true,
            seed: Some(0),
            n: 1,
            priority: self.priority,
            cache_salt: None,
            grammar: None,
            terms: self.terms,
            tenant: Tenant::default(),
            observer: None,
            abandoned: None,
        }
    }
}

/// Answers a request. Dropping the future cancels what has not been computed.
pub async fn embeddings(handle: &RuntimeHandle, mut request: Request) -> Result<EmbeddingList, ApiError> {
    let model = handle.model();
    let prompts = std::mem::take(&mut request.prompts);
    if prompts.len() > handle.max_requests() {
        return Err(completion::too_many("input", handle.max_requests(), prompts.len()));
    }
    let mut deadline = Deadline::new(handle);
    let mut accepted = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        accepted.push(deadline.or(handle.submit(request.submit(prompt))).await?);
    }
    let mut usage = EmbeddingUsage::default();
    let mut data = Vec::with_capacity(accepted.len());
    for (index, accepted) in accepted.into_iter().enumerate() {
        usage.prompt_tokens += accepted.prompt_tokens.len();
        let (mut values, bill) = deadline.or(embedding(accepted)).await?;
        if let Some(block_bytes) = request.kv_block_bytes {
            usage.kv = Some(usage.kv.unwrap_or_default() + KvUsage::new(&bill, block_bytes));
        }
        if request.normalize {
            normalize(&mut values);
        }
        let embedding = match request.base64 {
            true => Numbers::Base64(STANDARD.encode(values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())),
            false => Numbers::Float(values),
        };
        data.push(Embedding { object: "embedding", index, embedding });
    }
    usage.total_tokens = usage.prompt_tokens;
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    Ok(EmbeddingList { id: new_id("embd"), object: "list", created, model: model.served_name.clone(), data, usage })
}

/// With what memory pressure has cost it.
async fn embedding(mut accepted: Accepted) -> Result<(Vec<f32>, KvBill), ApiError> {
    let mut bill = KvBill::default();
    while let Some(event) = accepted.events.next().await {
        match event {
            Event::Bill(so_far) => bill = so_far,
            Event::Embedding(values) => return Ok((values, bill)),
            Event::Failed(error) => return Err(error),
            _ => {}
        }
    }
    Err(ApiError::engine("the engine stopped before the request was complete"))
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
