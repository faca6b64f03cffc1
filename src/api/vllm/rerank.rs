//! `POST /rerank`: documents in the order of their similarity to a query. vLLM, llama.cpp, Jina and Cohere have nearly
//! the same fields and answers, and one body reads all of them.

use super::score::{ScoreUsage, cosines};
use crate::body::refused::Refused;
use crate::body::{ParsedBody, body, body_fields};
use crate::checks::{in_range, shown};
use crate::fields::memory::MemoryFields;
use crate::fields::model::ModelField;
use crate::fields::pooling::PoolingFields;
use crate::fields::request_id::RequestIdFields;
use crate::fields::unsupported::UnsupportedFields;
use crate::fold::AnsweredPrompt;
use crate::model_info::ModelInfo;
use crate::openai::accepted::AcceptedFields;
use crate::openapi::{Operation, Tag};
use crate::prompt::Prompt;
use crate::request::{ApiRequest, FieldNames};
use pagetide_base::error::ApiError;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

body_fields! {
    struct RerankFields {
        /// A text.
        query: Option<String>,
        /// Texts, or objects with a text. Either this or texts.
        #[schema(value_type = Option<Vec<RerankDocumentForms>>, min_items = 1)]
        documents: Option<Vec<Value>>,
        /// As text-embeddings-inference has it: texts, and the answer is an array of indices and scores.
        #[schema(value_type = Option<Vec<String>>, min_items = 1)]
        texts: Option<Vec<Value>>,
        /// The answer has this many documents. 0 or left out: all.
        #[schema(minimum = 0)]
        top_n: Option<i64>,
        /// Whether the answer repeats the documents.
        #[schema(default = true)]
        return_documents: Option<bool>,
        /// With texts: whether the answer repeats them.
        #[schema(default = false)]
        return_text: bool,
    }
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum RerankDocumentForms {
    Text(String),
    Document { text: String },
}

body! {
    pub struct RerankBody {
        own: RerankFields,
        pooling: PoolingFields,
        model: ModelField,
        memory: MemoryFields,
        request_id: RequestIdFields,
        accepted: AcceptedFields,
        refused: Refused<UnsupportedFields>,
    }
}

/// The query's embedding and those of the documents, and what is answered of them.
#[derive(Debug)]
pub struct RerankRequest {
    pub request: ApiRequest,
    pub order: RerankOrder,
}

#[derive(Debug)]
pub struct RerankOrder {
    id: String,
    documents: Vec<String>,
    most: usize,
    repeats: bool,
    /// The answer is an array, as text-embeddings-inference has it.
    is_array: bool,
}

/// The answer.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub enum RerankAnswer {
    List(RerankList),
    Array(Vec<RankedText>),
}

#[derive(Serialize, ToSchema)]
pub struct RerankList {
    id: String,
    object: &'static str,
    model: String,
    usage: ScoreUsage,
    /// The most similar first.
    results: Vec<RankedDocument>,
}

#[derive(Serialize, ToSchema)]
struct RankedDocument {
    /// Its place in the request.
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<DocumentText>,
    /// The cosine of the embeddings, in [-1, 1].
    relevance_score: f64,
}

#[derive(Serialize, ToSchema)]
struct DocumentText {
    text: String,
}

#[derive(Serialize, ToSchema)]
pub struct RankedText {
    index: usize,
    score: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
}

/// `id`: the operation's name in generated clients.
pub fn describe(id: &'static str) -> Operation {
    Operation::new(Tag::Text, id, "Documents in the order of their similarity to a query")
        .about("A decoder ranks by the cosine of its embeddings.")
        .body("RerankRequest")
        .fields::<RerankFields>()
        .fields::<PoolingFields>()
        .fields::<MemoryFields>()
        .fields::<RequestIdFields>()
        .fields::<ModelField>()
        .fields::<AcceptedFields>()
        .requires(&["query"])
        .answers::<RerankAnswer>("The documents, the most similar first.")
        .generates()
}

pub fn parse(
    ParsedBody { body, problems }: ParsedBody<RerankBody>,
    model: &ModelInfo,
) -> Result<RerankRequest, ApiError> {
    problems.check_object()?;
    body.model.check(&problems, model)?;
    body.refused.check()?;
    problems.check()?;
    body.accepted.check()?;
    let RerankBody { own, pooling, memory, request_id, .. } = body;
    let query = own.query.ok_or_else(|| ApiError::invalid("query", "query is required"))?;
    let (param, given, is_array) = match (own.documents, own.texts) {
        (Some(_), Some(_)) => return Err(ApiError::invalid("texts", "texts and documents cannot be combined")),
        (Some(documents), None) => ("documents", documents, false),
        (None, Some(texts)) => ("texts", texts, true),
        (None, None) => return Err(ApiError::invalid("documents", "documents is required")),
    };
    if given.is_empty() {
        return Err(ApiError::invalid(param, format!("{param} must have at least one document")));
    }
    let documents =
        given.into_iter().enumerate().map(|(i, document)| document_text(&format!("{param}[{i}]"), document));
    let documents = documents.collect::<Result<Vec<String>, _>>()?;
    let most = match in_range("top_n", own.top_n.unwrap_or(0), 0..=i64::MAX)? {
        0 => documents.len(),
        most => documents.len().min(most as usize),
    };
    let texts = std::iter::once(&query).chain(&documents);
    let prompts = texts.map(|text| Prompt::Text { text: text.clone(), add_special_tokens: true }).collect();
    let each = pooling.request(FieldNames { prompt: param, ..FieldNames::EMBEDDING }, &memory, model)?;
    let request = request_id.name(ApiRequest::new(prompts, each))?;
    let repeats = if is_array { own.return_text } else { own.return_documents.unwrap_or(true) };
    let order = RerankOrder { id: request.id.clone(), documents, most, repeats, is_array };
    Ok(RerankRequest { request, order })
}

fn document_text(param: &str, document: Value) -> Result<String, ApiError> {
    match document {
        Value::String(text) => Ok(text),
        Value::Object(mut fields) => match fields.remove("text") {
            Some(Value::String(text)) => Ok(text),
            other => {
                let got = other.as_ref().map_or("nothing".into(), shown);
                let param = format!("{param}.text");
                Err(ApiError::invalid(&param, format!("{param} must be a string, got {got}")))
            }
        },
        other => {
            let message = format!("{param} must be a string or an object with a text, got {}", shown(&other));
            Err(ApiError::invalid(param, message))
        }
    }
}

impl RerankOrder {
    /// The answer, of the query's embedding and those of the documents.
    pub fn answer(mut self, prompts: Vec<AnsweredPrompt>, model: &ModelInfo) -> RerankAnswer {
        let (scores, usage) = cosines(prompts, 1);
        let mut ranked: Vec<(usize, f64)> = scores.into_iter().enumerate().collect();
        ranked.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        ranked.truncate(self.most);
        let mut text = |index: usize| self.repeats.then(|| std::mem::take(&mut self.documents[index]));
        if self.is_array {
            let texts = ranked.into_iter().map(|(index, score)| RankedText { index, score, text: text(index) });
            return RerankAnswer::Array(texts.collect());
        }
        let results = ranked.into_iter().map(|(index, relevance_score)| {
            let document = text(index).map(|text| DocumentText { text });
            RankedDocument { index, document, relevance_score }
        });
        RerankAnswer::List(RerankList {
            results: results.collect(),
            id: format!("rerank-{}", self.id),
            object: "list",
            model: model.served_name.clone(),
            usage,
        })
    }
}
