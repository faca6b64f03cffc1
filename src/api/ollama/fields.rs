//! Fields that chat and generate share.

use super::options::OllamaOptions;
use crate::Object;
use crate::body::refused::{Off, RefusedField, RefusedTable, refuse};
use crate::body::{FieldProblems, body_fields};
use crate::chat::TemplateFields;
use crate::chat::template::{TemplateSettings, words};
use crate::checks::{one_of, shown, wrong_type};
use crate::fields::model::{ModelField, check_model_name};
use crate::fields::sampling::num_logprobs;
use crate::model_info::ModelInfo;
use pagetide_base::error::ApiError;
use pagetide_text::grammar::{GrammarRequest, GrammarSpec};
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// What Ollama's names end with where the client does not say a version.
pub const LATEST: &str = ":latest";

body_fields! {
    pub struct OllamaFields {
        /// Samplers, limits, and how a model is loaded.
        #[schema(value_type = Option<OllamaOptions>)]
        pub(super) options: Option<Map<String, Value>>,
        /// Answer as lines of JSON, one for each part of the answer.
        #[schema(default = true)]
        pub(super) stream: Option<bool>,
        /// json: any JSON object; or the JSON schema of the answer's text.
        #[schema(value_type = Option<OllamaFormat>)]
        format: Option<Value>,
        /// Whether the model thinks before it answers, or how much. Default: as its chat template is made.
        #[schema(value_type = Option<ThinkForms>)]
        think: Option<Value>,
        /// Log-probabilities of the answer's tokens.
        #[schema(default = false)]
        logprobs: bool,
        /// With logprobs: each with this many most likely tokens.
        #[schema(minimum = 0, maximum = 20, default = 0)]
        top_logprobs: Option<i64>,
        /// How long the model stays loaded: a number or a text such as 5m. Without effect: it stays as long as the
        /// server runs.
        #[schema(value_type = Option<KeepAlive>)]
        keep_alive: Option<Value>,
        /// Whether a prompt that is too long is cut. Without effect: it is refused.
        truncate: Option<bool>,
        /// Whether an answer goes on where the context is full. Without effect: it ends there, with done_reason length.
        shift: Option<bool>,
    }
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum OllamaFormat {
    Word(String),
    Schema(Object),
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
pub(super) enum KeepAlive {
    Seconds(f64),
    Text(String),
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum ThinkForms {
    Whether(bool),
    Level(ThinkLevel),
}

words! {
    ThinkLevel { Low = "low", Medium = "medium", High = "high", Max = "max" }
}

/// Fields of Ollama's that would change the answer and are not served.
#[derive(Debug, Default)]
pub struct UnsupportedInOllama;

impl RefusedTable for UnsupportedInOllama {
    const FIELDS: &'static [RefusedField] = &[
        refuse("_debug_render_only", "leave it out"),
        refuse("height", "the model makes no images").unless(Off::Number(0.0)),
        refuse("images", "this model reads text only"),
        refuse("steps", "the model makes no images").unless(Off::Number(0.0)),
        refuse("suffix", "use /api/generate"),
        refuse("template", "the model's own chat template is used, or none with raw"),
        refuse("width", "the model makes no images").unless(Off::Number(0.0)),
    ];

    fn message(name: &str, note: &str) -> String {
        format!("{name} is not supported; {note}")
    }
}

impl OllamaFields {
    /// Refuses a wrong `keep_alive`, which has no other effect.
    pub(super) fn check(&self) -> Result<(), ApiError> {
        match &self.keep_alive {
            None | Some(Value::Number(_) | Value::String(_)) => Ok(()),
            other => Err(wrong_type("keep_alive", "a number of seconds or a string", other.as_ref())),
        }
    }

    /// Most likely tokens reported with each token.
    pub(super) fn logprobs(&self, model: &ModelInfo) -> Result<Option<u32>, ApiError> {
        let top = num_logprobs("top_logprobs", self.top_logprobs, model)?;
        Ok(self.logprobs.then(|| top.unwrap_or(0)))
    }

    pub(super) fn format(&mut self) -> Result<Option<GrammarRequest>, ApiError> {
        let spec = match self.format.take() {
            None => return Ok(None),
            Some(Value::String(none)) if none.is_empty() => return Ok(None),
            Some(Value::String(json)) if json == "json" => GrammarSpec::JsonObject,
            Some(schema @ Value::Object(_)) => GrammarSpec::JsonSchema(schema),
            Some(other) => {
                let message = format!("format must be \"json\" or a JSON schema, got {}", shown(&other));
                return Err(ApiError::invalid("format", message));
            }
        };
        Ok(Some(GrammarRequest::new(spec, "format")))
    }

    /// What the chat template is told of `think`. `continues`: the answer goes on from the last message.
    pub(super) fn template(&self, continues: bool, model: &ModelInfo) -> Result<TemplateSettings, ApiError> {
        let mut template = TemplateFields { continue_final_message: continues, ..TemplateFields::default() };
        let thinks = match &self.think {
            None => None,
            Some(Value::Bool(thinks)) => Some(*thinks),
            Some(Value::String(level)) => {
                one_of("think", Some(level), ThinkLevel::WORDS)?;
                template.reasoning_effort = Some(level.clone());
                Some(true)
            }
            other => return Err(wrong_type("think", "a boolean or one of low, medium, high, max", other.as_ref())),
        };
        if let Some(thinks) = thinks {
            if thinks && model.chat_format.reasoning.is_none() {
                let message = "think: this model does not think; leave it out, or set it to false";
                return Err(ApiError::invalid("think", message));
            }
            template.chat_template_kwargs.insert("enable_thinking".into(), thinks.into());
        }
        template.check("think", model)
    }
}

/// The model must be the one that is served, with or without `:latest`. Gives the name as the client wrote it.
pub(super) fn model_name(field: ModelField, problems: &FieldProblems, model: &ModelInfo) -> Result<String, ApiError> {
    problems.check_field("model")?;
    let Some(name) = field.model else { return Ok(tagged(&model.served_name)) };
    let without = name.strip_suffix(LATEST).filter(|_| model.names().all(|known| known != name));
    check_model_name(without.unwrap_or(&name), model)?;
    Ok(name)
}

/// A model's name as Ollama lists it: with a version.
pub fn tagged(name: &str) -> String {
    if name.contains(':') { name.to_owned() } else { format!("{name}{LATEST}") }
}
