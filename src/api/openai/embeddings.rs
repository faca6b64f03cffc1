//! `POST /v1/embeddings` and vLLM's `POST /pooling`.

use super::accepted::AcceptedFields;
use super::chat::{MessagesField, checked_messages};
use crate::body::fields::IdsField;
use crate::body::refused::Refused;
use crate::body::{ParsedBody, body, body_fields};
use crate::chat::TemplateFields;
use crate::embedding::normalize;
use crate::fields::encoding::{EncodedNumbers, Encoding, EncodingFields, EncodingForm};
use crate::fields::memory::MemoryFields;
use crate::fields::model::ModelField;
use crate::fields::pooling::PoolingFields;
use crate::fields::request_id::RequestIdFields;
use crate::fields::unsupported::UnsupportedFields;
use crate::fold::AnsweredPrompt;
use crate::id::unix_time_s;
use crate::llama_cpp::prompt::{self, NativePromptForms};
use crate::model_info::ModelInfo;
use crate::openapi::{Operation, Tag};
use crate::prompt::Prompt;
use crate::request::{ApiRequest, FieldNames};
use crate::usage::KvUsage;
use crate::vllm::error::VllmError;
use pagetide_base::error::ApiError;
use serde::Serialize;
use serde_json::json;
use utoipa::ToSchema;

body_fields! {
    struct InputFields {
        /// A text, texts and token ids, an object with prompt_string or content, or an array of these. Either this or
        /// messages.
        #[schema(value_type = Option<NativePromptForms>)]
        input: IdsField,
        /// Whether the tokenizer adds its special tokens. Default: to a text, but not to a chat.
        add_special_tokens: Option<bool>,
    }
}

body_fields! {
    struct TaskField {
        /// What is made of the final hidden states: one embedding of each input.
        #[schema(value_type = Option<PoolingTask>)]
        task: Option<String>,
    }
}

#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "only described")]
enum PoolingTask {
    Embed,
}

body! {
    /// The body of a request for embeddings.
    pub struct EmbeddingBody {
        own: InputFields,
        messages: MessagesField,
        template: TemplateFields,
        pooling: PoolingFields,
        encoding: EncodingFields,
        model: ModelField,
        memory: MemoryFields,
        request_id: RequestIdFields,
        accepted: AcceptedFields,
        refused: Refused<UnsupportedFields>,
    }
}

body! {
    /// The body of vLLM's `/pooling`.
    pub struct PoolingBody {
        task: TaskField,
        embedding: EmbeddingBody,
    }
}

/// A request for embeddings, and how they are written.
#[derive(Debug)]
pub struct EmbeddingRequest {
    pub request: ApiRequest,
    pub format: EmbeddingFormat,
}

#[derive(Clone, Debug)]
pub struct EmbeddingFormat {
    object: &'static str,
    id: String,
    normalize: bool,
    encoding: Encoding,
    kv_block_bytes: Option<usize>,
}

/// The answer.
#[derive(Serialize, ToSchema)]
pub struct EmbeddingList {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    data: Vec<EmbeddingObject>,
    usage: EmbeddingUsage,
}

/// One embedding: `embedding` of /v1/embeddings, `data` of /pooling.
#[derive(Serialize, ToSchema)]
struct EmbeddingObject {
    object: &'static str,
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    embedding: Option<EncodedNumbers>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<EncodedNumbers>,
}

#[derive(Clone, Copy, Default, Serialize, ToSchema)]
struct EmbeddingUsage {
    prompt_tokens: usize,
    total_tokens: usize,
    /// With include_kv_usage: what memory pressure has cost the inputs together.
    #[serde(skip_serializing_if = "Option::is_none")]
    kv: Option<KvUsage>,
}

/// What is answered.
pub enum EmbeddingAnswer {
    Json(EmbeddingList),
    Bytes {
        body: Vec<u8>,
        /// JSON that says where each embedding is.
        metadata: Option<String>,
    },
}

fn operation(id: &'static str, summary: &'static str, body: &'static str) -> Operation {
    Operation::new(Tag::Text, id, summary)
        .body(body)
        .fields::<InputFields>()
        .fields::<MessagesField>()
        .fields::<TemplateFields>()
        .fields::<PoolingFields>()
        .fields::<EncodingFields>()
        .fields::<MemoryFields>()
        .fields::<RequestIdFields>()
        .fields::<ModelField>()
        .fields::<AcceptedFields>()
        .answers::<EmbeddingList>("An embedding of each input, in their order; bytes where encoding_format says so.")
        .answers_bytes()
        .generates()
}

pub fn describe() -> Operation {
    operation("embeddings", "Embeddings of texts: the model's final hidden states, pooled", "EmbeddingRequest")
}

pub fn describe_pooling() -> Operation {
    operation("pooling", "Embeddings in the shape of vLLM's /pooling", "PoolingRequest")
        .fields::<TaskField>()
        .errors_as::<VllmError>()
}

pub fn parse(parsed: ParsedBody<EmbeddingBody>, model: &ModelInfo) -> Result<EmbeddingRequest, ApiError> {
    parse_as("embedding", "embd", parsed, model)
}

pub fn parse_pooling(
    ParsedBody { body, problems }: ParsedBody<PoolingBody>,
    model: &ModelInfo,
) -> Result<EmbeddingRequest, ApiError> {
    problems.check_field("task")?;
    match body.task.task.as_deref() {
        None | Some("embed") => {}
        Some("plugin") => {
            let message = "No IOProcessor plugin installed. This server has none; task must be embed";
            return Err(ApiError::invalid("task", message));
        }
        Some(other) => {
            return Err(ApiError::invalid("task", format!("Unsupported task: '{other}'. Supported tasks: embed")));
        }
    }
    parse_as("pooling", "pool", ParsedBody { body: body.embedding, problems }, model)
}

/// `object`: what the answer calls an embedding. `prefix`: that of the answer's id.
fn parse_as(
    object: &'static str,
    prefix: &str,
    ParsedBody { body, problems }: ParsedBody<EmbeddingBody>,
    model: &ModelInfo,
) -> Result<EmbeddingRequest, ApiError> {
    problems.check_object()?;
    body.model.check(&problems, model)?;
    body.refused.check()?;
    problems.check()?;
    body.accepted.check()?;
    let EmbeddingBody { own, messages, template, pooling, encoding, memory, request_id, .. } = body;
    let is_chat = messages.messages.is_some();
    let (prompts, names) = match own.input {
        IdsField { ids: None, other: None } if is_chat => {
            let add_special_tokens = own.add_special_tokens.unwrap_or(false);
            // An embedding is of what has been said; no answer is to come.
            let add_generation_prompt = template.add_generation_prompt.or(Some(false));
            let template = TemplateFields { add_special_tokens, add_generation_prompt, ..template };
            let settings = template.check("reasoning_effort", model)?;
            let messages = checked_messages(messages.given()?)?;
            (vec![Prompt::Chat(settings.prompt(messages, None))], FieldNames::CHAT)
        }
        _ if is_chat => return Err(ApiError::invalid("messages", "messages and input cannot be combined")),
        input => {
            let names = FieldNames::EMBEDDING;
            let add_special_tokens = own.add_special_tokens.unwrap_or(true);
            (prompt::prompts(names.prompt, input, add_special_tokens, model.vocab_size)?, names)
        }
    };
    let (normalize, encoding) = (pooling.normalize()?, encoding.check(model)?);
    let each = pooling.request(names, &memory, model)?;
    let request = request_id.name(ApiRequest::new(prompts, each))?;
    let id = format!("{prefix}-{}", request.id);
    let format = EmbeddingFormat { object, id, normalize, encoding, kv_block_bytes: memory.usage_block_bytes(model) };
    Ok(EmbeddingRequest { request, format })
}

impl EmbeddingFormat {
    /// Whether the answer is bytes and not JSON.
    pub fn is_bytes(&self) -> bool {
        matches!(self.encoding.form, EncodingForm::Bytes { .. })
    }

    /// The answer. `prompts`: each with its embedding.
    pub fn answer(self, prompts: Vec<AnsweredPrompt>, model: &ModelInfo) -> EmbeddingAnswer {
        let mut usage = EmbeddingUsage::default();
        let embeddings = prompts.into_iter().map(|AnsweredPrompt { tokens, facts }| {
            usage.prompt_tokens += tokens.len();
            if let Some(block_bytes) = self.kv_block_bytes {
                usage.kv = Some(usage.kv.unwrap_or_default() + KvUsage::new(&facts.bill, block_bytes));
            }
            let mut values = facts.embedding.unwrap_or_default();
            if self.normalize {
                normalize(&mut values);
            }
            values
        });
        let embeddings: Vec<Vec<f32>> = embeddings.collect();
        usage.total_tokens = usage.prompt_tokens;
        let (created, model) = (unix_time_s(), model.served_name.clone());
        if let EncodingForm::Bytes { with_metadata } = self.encoding.form {
            return self.bytes(&embeddings, with_metadata, created, &model, usage);
        }
        let data = embeddings.into_iter().enumerate().map(|(index, values)| {
            let numbers = Some(self.encoding.json(values));
            let (embedding, data) = if self.object == "embedding" { (numbers, None) } else { (None, numbers) };
            EmbeddingObject { object: self.object, index, embedding, data }
        });
        EmbeddingAnswer::Json(EmbeddingList {
            data: data.collect(),
            id: self.id,
            object: "list",
            created,
            model,
            usage,
        })
    }

    fn bytes(
        self,
        embeddings: &[Vec<f32>],
        with_metadata: bool,
        created: u64,
        model: &str,
        usage: EmbeddingUsage,
    ) -> EmbeddingAnswer {
        let (mut body, mut items) = (Vec::new(), Vec::new());
        for (index, values) in embeddings.iter().enumerate() {
            let start = body.len();
            body.extend(self.encoding.bytes(values));
            items.push(json!({
                "index": index,
                "embed_dtype": self.encoding.dtype_name(),
                "endianness": self.encoding.endianness_name(),
                "start": start,
                "end": body.len(),
                "shape": [values.len()],
            }));
        }
        let metadata = json!({"id": self.id, "created": created, "model": model, "data": items, "usage": usage});
        EmbeddingAnswer::Bytes { body, metadata: with_metadata.then(|| metadata.to_string()) }
    }
}
