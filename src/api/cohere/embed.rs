//! `POST /v2/embed`.

use crate::body::fields::IdsField;
use crate::body::refused::{Refused, RefusedField, RefusedTable, refuse};
use crate::body::{ParsedBody, body, body_fields};
use crate::chat::template::words;
use crate::checks::{in_range, object, one_of, shown, string, wrong_type};
use crate::embedding::{embedding_of_each, normalize};
use crate::fields::model::ModelField;
use crate::fold::AnsweredPrompt;
use crate::id::random_hex;
use crate::model_info::ModelInfo;
use crate::openai::completion;
use crate::prompt::Prompt;
use crate::request::{ApiRequest, FieldNames};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pagetide_base::error::{ApiError, Violation};
use pagetide_text::truncation::{Side, Truncation};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

body_fields! {
    pub(super) struct CohereEmbedFields {
        /// The texts.
        #[schema(value_type = Option<Vec<String>>)]
        texts: IdsField,
        /// In place of texts: objects with content of type text.
        #[schema(value_type = Option<Vec<Object>>)]
        inputs: Option<Vec<Value>>,
        /// What the embeddings are for. Without effect: a text is embedded as it is.
        #[schema(value_type = Option<InputType>)]
        input_type: Option<String>,
        /// How embeddings are written: float, base64, binary and ubinary. Those of int8 and uint8 are refused.
        #[schema(value_type = Option<Vec<EmbeddingType>>)]
        embedding_types: Option<Vec<String>>,
        /// Keeps this many numbers of each embedding, and makes its length 1 again. Default: all.
        #[schema(minimum = 1)]
        output_dimension: Option<i64>,
        /// Tokens of a text at most; longer ones are cut as truncate says.
        #[schema(minimum = 1)]
        max_tokens: Option<i64>,
        /// END: a text that is too long loses its end; START: its beginning; NONE: it is refused.
        #[schema(value_type = Option<CohereTruncate>, default = "END")]
        truncate: Option<String>,
        /// Lower goes first, where the server schedules by priority.
        #[schema(minimum = -2147483648, maximum = 2147483647, default = 0)]
        priority: Option<i64>,
    }
}

words! {
    InputType {
        SearchDocument = "search_document", SearchQuery = "search_query", Classification = "classification",
        Clustering = "clustering"
    }
    EmbeddingType { Float = "float", Base64 = "base64", Binary = "binary", Ubinary = "ubinary" }
    CohereTruncate { None = "NONE", Start = "START", End = "END" }
}

/// Fields that ask for what this server does not have.
#[derive(Debug, Default)]
pub struct UnsupportedInEmbed;

impl RefusedTable for UnsupportedInEmbed {
    const FIELDS: &'static [RefusedField] = &[refuse("images", "this model reads text only")];

    fn message(name: &str, note: &str) -> String {
        format!("{name} is not supported; {note}")
    }
}

body! {
    /// The body of `/v2/embed`.
    pub struct CohereEmbedBody {
        own: CohereEmbedFields,
        model: ModelField,
        refused: Refused<UnsupportedInEmbed>,
    }
}

/// A request for embeddings, and how they are written.
#[derive(Debug)]
pub struct CohereEmbedding {
    pub request: ApiRequest,
    texts: Vec<String>,
    types: Vec<String>,
    dimensions: usize,
}

pub fn parse(
    ParsedBody { body, problems }: ParsedBody<CohereEmbedBody>,
    model: &ModelInfo,
) -> Result<CohereEmbedding, ApiError> {
    problems.check_object()?;
    let CohereEmbedBody { mut own, model: model_field, refused } = body;
    model_field.check(&problems, model)?;
    refused.check()?;
    problems.check()?;
    if let Some(unknown) = own.input_type.as_deref().filter(|word| !InputType::WORDS.contains(word)) {
        let message =
            format!("Unsupported input_type {}: use one of {}", shown(&unknown.into()), InputType::WORDS.join(", "));
        return Err(ApiError::invalid("input_type", message).with_violation(Violation::UnknownWord));
    }
    let texts = own.texts(model)?;
    let size = i64::from(model.embedding_size);
    let dimensions = in_range("output_dimension", own.output_dimension.unwrap_or(size), 1..=size)?;
    let types = own.embedding_types.take().filter(|types| !types.is_empty());
    let types = types.unwrap_or_else(|| vec!["float".into()]);
    for (i, name) in types.iter().enumerate() {
        one_of(&format!("embedding_types[{i}]"), Some(name), EmbeddingType::WORDS)?;
    }
    let is_packed = types.iter().any(|name| name.ends_with("binary"));
    if is_packed && dimensions % 8 != 0 {
        let message =
            format!("embedding_types: binary ones need a multiple of 8 dimensions, and there are {dimensions}");
        return Err(ApiError::invalid("embedding_types", message));
    }
    let mut each = embedding_of_each(FieldNames::COHERE_EMBED, model.pooling, own.truncation(model)?);
    let priority = i64::from(i32::MIN)..=i64::from(i32::MAX);
    each.core.priority = in_range("priority", own.priority.unwrap_or(0), priority)? as i32;
    let prompts = texts.iter().map(|text| Prompt::from(text.as_str())).collect();
    Ok(CohereEmbedding { request: ApiRequest::new(prompts, each), texts, types, dimensions: dimensions as usize })
}

impl CohereEmbedFields {
    fn texts(&mut self, model: &ModelInfo) -> Result<Vec<String>, ApiError> {
        let given = std::mem::take(&mut self.texts);
        match (given.ids.is_some() || given.other.is_some(), self.inputs.take()) {
            (true, Some(_)) => Err(ApiError::invalid("inputs", "inputs and texts cannot be combined")),
            (false, None) => Err(ApiError::invalid("texts", "texts or inputs is required")),
            (false, Some(inputs)) if inputs.is_empty() => {
                Err(ApiError::invalid("inputs", "inputs must not be an empty array"))
            }
            (false, Some(inputs)) => {
                inputs.iter().enumerate().map(|(i, input)| input_text(&format!("inputs[{i}]"), input)).collect()
            }
            (true, None) => {
                let text = |(i, prompt)| match prompt {
                    Prompt::Text { text, .. } => Ok(text),
                    _ => Err(ApiError::invalid(format!("texts[{i}]"), format!("texts[{i}] must be a string"))),
                };
                completion::prompts("texts", given, true, model.vocab_size)?.into_iter().enumerate().map(text).collect()
            }
        }
    }

    fn truncation(&self, model: &ModelInfo) -> Result<Option<Truncation>, ApiError> {
        one_of("truncate", self.truncate.as_deref(), CohereTruncate::WORDS)?;
        let keep = match self.max_tokens {
            None => model.max_model_len,
            Some(most) => in_range("max_tokens", most, 1..=i64::from(u32::MAX))?.min(model.max_model_len.into()) as u32,
        };
        let side = match self.truncate.as_deref() {
            Some("NONE") if self.max_tokens.is_some() => {
                let message = "max_tokens is not available with truncate: \"NONE\"";
                return Err(ApiError::invalid("max_tokens", message));
            }
            Some("NONE") => return Ok(None),
            // The tokenizer's special tokens stay in front.
            Some("START") => None,
            _ => Some(Side::Right),
        };
        Ok(Some(Truncation { keep: Some(keep), side }))
    }
}

/// The texts of an input's content, one after the other.
fn input_text(path: &str, input: &Value) -> Result<String, ApiError> {
    let fields = object(path, input)?;
    let param = format!("{path}.content");
    let Some(Value::Array(blocks)) = fields.get("content") else {
        return Err(wrong_type(&param, "an array", fields.get("content")));
    };
    let text = |(i, block): (usize, &Value)| {
        let path = format!("{param}[{i}]");
        let block = object(&path, block)?;
        match string(&path, block, "type")? {
            "text" => string(&path, block, "text").map(str::to_owned),
            kind => {
                let message = format!("{path}: content of type {kind:?} is not supported, this model reads text only");
                Err(ApiError::invalid(format!("{path}.type"), message))
            }
        }
    };
    let texts: Vec<String> = blocks.iter().enumerate().map(text).collect::<Result<_, ApiError>>()?;
    Ok(texts.join("\n"))
}

impl CohereEmbedding {
    /// The answer. `prompts`: each with its embedding.
    pub fn answer(self, prompts: Vec<AnsweredPrompt>) -> Value {
        let num_tokens: usize = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
        let numbers = |prompt: AnsweredPrompt| {
            let mut values = prompt.facts.embedding.unwrap_or_default();
            values.truncate(self.dimensions);
            normalize(&mut values);
            values
        };
        let all: Vec<Vec<f32>> = prompts.into_iter().map(numbers).collect();
        let mut embeddings = Map::new();
        for name in &self.types {
            let written = all.iter().map(|values| written(name, values)).collect();
            embeddings.insert(name.clone(), written);
        }
        let meta = json!({
            "api_version": {"version": "2"},
            "billed_units": {"input_tokens": num_tokens, "image_tokens": 0},
            "tokens": {"input_tokens": num_tokens},
        });
        json!({
            "id": random_hex(),
            "embeddings": embeddings,
            "texts": self.texts,
            "meta": meta,
            "response_type": "embeddings_by_type",
        })
    }
}

fn written(name: &str, values: &[f32]) -> Value {
    match name {
        "base64" => STANDARD.encode(values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>()).into(),
        "ubinary" => packed(values).map(i64::from).collect(),
        // Signed bytes: 0 to 255 become -128 to 127.
        "binary" => packed(values).map(|byte| i64::from(byte) - 128).collect(),
        _ => values.iter().map(|x| json!(x)).collect(),
    }
}

/// A bit for each number, whether it is above 0; the first is the highest of its byte.
fn packed(values: &[f32]) -> impl Iterator<Item = u8> {
    values
        .chunks(8)
        .map(|eight| eight.iter().enumerate().fold(0, |byte, (place, x)| byte | (u8::from(*x > 0.0) << (7 - place))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_are_packed_highest_bit_first() {
        let values = [1.0, -1.0, 0.0, 0.5, -0.5, -1.0, 2.0, 1.0];
        assert_eq!(written("ubinary", &values), json!([0b1001_0011]));
        assert_eq!(written("binary", &values), json!([0b1001_0011 - 128]));
        assert_eq!(written("base64", &[1.0]), json!("AACAPw=="));
        assert_eq!(written("float", &[0.5]), json!([0.5]));
    }
}
