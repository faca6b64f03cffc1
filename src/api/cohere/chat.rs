//! The body of `POST /v2/chat` as a chat.

use super::messages::messages;
use crate::body::{ParsedBody, body, body_fields};
use crate::chat::template::words;
use crate::chat::tools::{AskedTool, CallableFunction, Tools};
use crate::chat::{Chat, TemplateFields};
use crate::checks::{in_range, object, one_of, optional_string, string, wrong_type};
use crate::fields::memory::MemoryFields;
use crate::fields::model::ModelField;
use crate::fields::nested::{NestedNames, NestedSampling, as_nested};
use crate::fields::sampling::{SamplingFields, max_tokens};
use crate::model_info::ModelInfo;
use crate::request::{ApiRequest, FieldNames};
use pagetide_base::error::ApiError;
use pagetide_text::chat_output::ReasoningPlace;
use pagetide_text::grammar::{GrammarRequest, GrammarSpec};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

/// Cohere's defaults, for what neither the request nor the model says.
const TEMPERATURE: f64 = 0.3;
const P: f64 = 0.75;

/// Cohere's names of sampling fields.
#[derive(Debug, Default)]
pub struct CohereNames;

impl NestedNames for CohereNames {
    const BASE: &'static str = "";
    const NAMES: &'static [(&'static str, &'static str)] = &[
        ("frequency_penalty", "frequency_penalty"),
        ("k", "top_k"),
        ("p", "top_p"),
        ("presence_penalty", "presence_penalty"),
        ("priority", "priority"),
        ("seed", "seed"),
        ("stop_sequences", "stop"),
        ("stream", "stream"),
        ("temperature", "temperature"),
    ];
}

body_fields! {
    pub(super) struct CohereChatFields {
        /// The conversation so far.
        #[schema(value_type = Option<Vec<Object>>, min_items = 1)]
        messages: Option<Vec<Value>>,
        /// Tokens to generate at most. Default: as many as fit the model.
        #[schema(minimum = 1, maximum = 4294967295_i64)]
        max_tokens: Option<i64>,
        /// Functions that the model may call.
        #[schema(value_type = Option<Vec<Object>>)]
        tools: Option<Vec<Value>>,
        /// REQUIRED: a function has to be called; NONE: none may be. Default: the model chooses.
        #[schema(value_type = Option<CohereToolChoice>)]
        tool_choice: Option<String>,
        /// Whether arguments keep to their schemas. Those of demanded calls do either way, others do not.
        strict_tools: Option<bool>,
        /// Texts, or objects with data, for chat templates that know documents.
        #[schema(value_type = Option<Vec<DocumentForms>>)]
        documents: Option<Vec<Value>>,
        /// An object of type text or json_object, the latter with a json_schema or without.
        #[schema(value_type = Option<Object>)]
        response_format: Option<Map<String, Value>>,
        /// An object of type enabled or disabled: the chat template's enable_thinking. token_budget: tokens of
        /// reasoning at most.
        #[schema(value_type = Option<Object>)]
        thinking: Option<Map<String, Value>>,
        /// The chat template's safety_mode, where it knows one.
        #[schema(value_type = Option<SafetyMode>)]
        safety_mode: Option<String>,
        /// How citations are made. Without effect: answers have none.
        #[schema(value_type = Option<Object>)]
        citation_options: Option<Map<String, Value>>,
        /// Log-probabilities of the answer's tokens.
        #[schema(default = false)]
        logprobs: bool,
    }
}

words! {
    CohereToolChoice { Required = "REQUIRED", None = "NONE" }
    SafetyMode { Contextual = "CONTEXTUAL", Strict = "STRICT", Off = "OFF" }
    CitationMode {
        Enabled = "ENABLED", Disabled = "DISABLED", Fast = "FAST", Accurate = "ACCURATE", Off = "OFF"
    }
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum DocumentForms {
    Text(String),
    Document(crate::Object),
}

/// The sampling fields, described.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only described: they are read into SamplingFields")]
pub(super) struct CohereSampling {
    /// 0 takes the most likely token; higher is more varied. Default: the model's own, else 0.3.
    #[schema(minimum = 0, maximum = 100)]
    temperature: Option<f64>,
    /// Samples from this many most likely tokens; 0: from all. Default: the model's own, else 0.
    #[schema(minimum = -1, maximum = 4294967295_i64)]
    k: Option<i64>,
    /// Samples from the most likely tokens that together have this probability. Default: the model's own, else 0.75.
    #[schema(exclusive_minimum = 0, maximum = 1)]
    p: Option<f64>,
    /// The same seed and request give the same answer. Default: a random one.
    seed: Option<i64>,
    /// Up to 16 strings that end the answer, left out of it.
    stop_sequences: Option<Vec<String>>,
    /// Above 0: tokens become less likely with each time they were generated.
    #[schema(minimum = -2, maximum = 2, default = 0)]
    frequency_penalty: Option<f64>,
    /// Above 0: tokens that were generated already become less likely.
    #[schema(minimum = -2, maximum = 2, default = 0)]
    presence_penalty: Option<f64>,
    /// Lower goes first, where the server schedules by priority.
    #[schema(minimum = -2147483648, maximum = 2147483647, default = 0)]
    priority: Option<i64>,
    /// Answer as events with names, the last of which is message-end.
    #[schema(default = false)]
    stream: Option<bool>,
}

body! {
    /// The body of `/v2/chat`.
    pub struct CohereChatBody {
        own: CohereChatFields,
        shared: NestedSampling<CohereNames>,
        model: ModelField,
        memory: MemoryFields,
    }
}

pub fn parse(
    ParsedBody { body, problems }: ParsedBody<CohereChatBody>,
    model: &ModelInfo,
) -> Result<ApiRequest, ApiError> {
    problems.check_object()?;
    let CohereChatBody { mut own, shared, model: model_field, memory } = body;
    model_field.check(&problems, model)?;
    problems.check().map_err(as_nested::<CohereNames>)?;
    let given = own.messages.take().filter(|messages| !messages.is_empty());
    let given = given.ok_or_else(|| ApiError::invalid("messages", "messages must have at least one message"))?;
    let names = FieldNames::MESSAGE;
    let mut sampling = shared.sampling;
    set_defaults(&mut sampling, model);
    own.check_accepted()?;
    let chat = Chat {
        prompt_tokens: None,
        messages: messages(given)?,
        thinking_budget: own.thinking_budget()?,
        template: own.template(model)?.check("thinking", model)?,
        tools: own.tools()?,
        max_tokens: own.max_tokens.map(|given| max_tokens(names.max_tokens, given, 1)).transpose()?,
        logprobs: own.logprobs.then_some(0),
        grammar: own.format()?,
        echo: false,
        reasoning_place: ReasoningPlace::Apart,
        sampling,
        memory,
        names,
    };
    chat.into_request(model).map_err(as_nested::<CohereNames>)
}

fn set_defaults(sampling: &mut SamplingFields, model: &ModelInfo) {
    if model.default_sampling.temperature.is_none() {
        sampling.temperature.get_or_insert(TEMPERATURE);
    }
    if model.default_sampling.top_p.is_none() {
        sampling.top_p.get_or_insert(P);
    }
}

impl CohereChatFields {
    fn check_accepted(&self) -> Result<(), ApiError> {
        one_of("safety_mode", self.safety_mode.as_deref(), SafetyMode::WORDS)?;
        let Some(options) = &self.citation_options else { return Ok(()) };
        let mode = optional_string("citation_options", options, "mode")?.map(str::to_uppercase);
        one_of("citation_options.mode", mode.as_deref(), CitationMode::WORDS)
    }

    fn thinking_budget(&self) -> Result<Option<(u32, &'static str)>, ApiError> {
        const PARAM: &str = "thinking.token_budget";
        match self.thinking.as_ref().and_then(|thinking| thinking.get("token_budget")) {
            None | Some(Value::Null) => Ok(None),
            given => {
                let budget = given.and_then(Value::as_i64).ok_or_else(|| wrong_type(PARAM, "an integer", given))?;
                Ok(Some((in_range(PARAM, budget, 1..=i64::from(u32::MAX))? as u32, PARAM)))
            }
        }
    }

    fn template(&self, model: &ModelInfo) -> Result<TemplateFields, ApiError> {
        let mut template = TemplateFields::default();
        if let Some(thinking) = &self.thinking {
            let kind = string("thinking", thinking, "type")?;
            one_of("thinking.type", Some(kind), &["enabled", "disabled"])?;
            template.chat_template_kwargs.insert("enable_thinking".into(), (kind == "enabled").into());
        }
        if let Some(mode) = &self.safety_mode {
            template.chat_template_kwargs.insert("safety_mode".into(), mode.clone().into());
        }
        if let Some(documents) = self.documents.as_deref().filter(|documents| !documents.is_empty()) {
            if !model.chat_template.as_ref().is_some_and(|template| template.mentions("documents")) {
                let message = "documents: this model's chat template knows no documents; write them into a message";
                return Err(ApiError::invalid("documents", message));
            }
            let documents = documents.iter().enumerate().map(|(i, given)| document(&format!("documents[{i}]"), given));
            template.documents = Some(documents.collect::<Result<_, ApiError>>()?);
        }
        Ok(template)
    }

    fn tools(&mut self) -> Result<Tools, ApiError> {
        let with_function = |(i, tool): (usize, Value)| {
            let function = CallableFunction::of_tool(&format!("tools[{i}]"), &tool)?;
            Ok((tool, function))
        };
        let given = self.tools.take().unwrap_or_default().into_iter().enumerate().map(with_function);
        let mut tools = Tools::new(given.collect::<Result<_, ApiError>>()?, true)?;
        let choice = self.tool_choice.as_deref();
        one_of("tool_choice", choice, CohereToolChoice::WORDS)?;
        tools.choose(match choice {
            Some("REQUIRED") => AskedTool::Required,
            Some(_) => AskedTool::None,
            None => AskedTool::Default,
        })?;
        Ok(tools)
    }

    /// The form of the answer's text.
    fn format(&self) -> Result<Option<GrammarRequest>, ApiError> {
        let Some(format) = &self.response_format else { return Ok(None) };
        match string("response_format", format, "type")? {
            "text" => Ok(None),
            "json_object" => {
                let given = ["json_schema", "schema"].into_iter().find_map(|name| Some((name, format.get(name)?)));
                let Some((name, schema)) = given.filter(|(_, schema)| !schema.is_null()) else {
                    return Ok(Some(GrammarRequest::new(GrammarSpec::JsonObject, "response_format")));
                };
                let param = format!("response_format.{name}");
                object(&param, schema)?;
                Ok(Some(GrammarRequest::new(GrammarSpec::JsonSchema(schema.clone()), param)))
            }
            kind => {
                let message = format!("response_format.type must be one of text, json_object, got {kind:?}");
                Err(ApiError::invalid("response_format.type", message))
            }
        }
    }
}

/// A document as chat templates know it: an object with text, or with the client's fields.
fn document(path: &str, given: &Value) -> Result<Map<String, Value>, ApiError> {
    if let Value::String(text) = given {
        return Ok(Map::from_iter([("text".to_owned(), json!(text))]));
    }
    let document = object(path, given)?;
    let param = format!("{path}.data");
    let data = document.get("data");
    let mut fields = match data {
        Some(Value::String(text)) => Map::from_iter([("text".to_owned(), json!(text))]),
        Some(Value::Object(fields)) => fields.clone(),
        other => return Err(wrong_type(&param, "an object", other)),
    };
    if let Some(id) = optional_string(path, document, "id")? {
        fields.entry("id").or_insert(id.into());
    }
    Ok(fields)
}
