//! The body of `POST /v1/messages` as a chat.

use super::messages::{self, text_blocks};
use crate::Object;
use crate::body::fields::{FieldSource, typed_fields};
use crate::body::refused::{Refused, RefusedField, RefusedTable, refuse};
use crate::body::{BodyFields, FieldProblems, ParsedBody, body, body_fields};
use crate::chat::Chat;
use crate::chat::tools::{AskedTool, CallableFunction, FunctionPath, Tools, shown_tool};
use crate::checks::{in_range, object, optional_string, string, wrong_type};
use crate::fields::model::ModelField;
use crate::fields::sampling::max_tokens;
use crate::fields::shared::SharedFields;
use crate::fields::unsupported::UnsupportedFields;
use crate::model_info::ModelInfo;
use crate::request::{ApiRequest, FieldNames};
use pagetide_base::error::ApiError;
use pagetide_text::chat_output::ReasoningPlace;
use pagetide_text::grammar::{GrammarRequest, GrammarSpec};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

const MIN_THINKING_TOKENS: i64 = 1;

/// Fields that ask for something that this server does not run.
#[derive(Debug, Default)]
pub struct UnsupportedInMessages;

impl RefusedTable for UnsupportedInMessages {
    const FIELDS: &'static [RefusedField] =
        &[refuse("container", "containers"), refuse("mcp_servers", "servers of tools")];

    fn message(name: &str, what: &str) -> String {
        format!("{name} is not supported: this server runs no {what}")
    }
}

body_fields! {
    /// As they stand in the body.
    pub(super) struct MessagesFields {
        /// Tokens to generate at most.
        #[schema(minimum = 1)]
        max_tokens: Option<i64>,
        /// The conversation. Where the last message is the assistant's, the answer goes on from it.
        #[schema(value_type = Option<Vec<InputMessage>>)]
        messages: Option<Vec<Value>>,
        /// A text or text blocks.
        #[schema(value_type = Option<BlocksOrText>)]
        system: Option<Value>,
        /// Up to 16 strings that end the answer, left out of it.
        stop_sequences: Option<Vec<String>>,
        /// 0 takes the most likely token; higher is more varied. Default: the model's own, else 1.
        #[schema(minimum = 0, maximum = 1)]
        temperature: Option<f64>,
        /// Functions that the model may call. Tools that run on Anthropic's servers are refused.
        #[schema(value_type = Option<Vec<MessageTool>>)]
        tools: Option<Vec<Value>>,
        /// Answer as events with names, the last of which is message_stop, or error.
        #[schema(default = false)]
        stream: bool,
        /// An object of type auto, any, tool (with a name) or none; disable_parallel_tool_use: true for one call at
        /// most.
        #[schema(value_type = Option<Object>)]
        tool_choice: Option<Map<String, Value>>,
        /// An object of type enabled (with budget_tokens), disabled or adaptive: the chat template's
        /// enable_thinking. budget_tokens: tokens of reasoning at most.
        #[schema(value_type = Option<Object>)]
        thinking: Option<Map<String, Value>>,
        /// How the answer is to be.
        output_config: Option<OutputConfig>,
        /// About the request.
        metadata: Option<Metadata>,
    }
}

/// The fields that shape the prompt: those that counting its tokens reads.
pub(super) const PROMPT_FIELDS: &[&str] = &[
    "chat_template",
    "chat_template_kwargs",
    "messages",
    "model",
    "output_config",
    "system",
    "thinking",
    "tool_choice",
    "tools",
];

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
struct InputMessage {
    /// user, assistant or system.
    role: String,
    /// A text, or blocks of type text, tool_use, tool_result or thinking.
    content: BlocksOrText,
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum BlocksOrText {
    Text(String),
    Blocks(Vec<Object>),
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
struct MessageTool {
    name: String,
    description: Option<String>,
    /// A JSON schema.
    input_schema: Object,
    strict: Option<bool>,
}

#[derive(Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(default)]
struct OutputConfig {
    /// How much the model is to think, for chat templates that know it.
    effort: Option<String>,
    /// An object of type json_schema with the schema that the text has to follow.
    #[schema(value_type = Option<Object>)]
    format: Option<Map<String, Value>>,
}

#[derive(Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(default)]
struct Metadata {
    /// An id of the client's user. Without effect.
    user_id: Option<String>,
}

typed_fields!(OutputConfig, Metadata);

body! {
    /// The body of `/v1/messages`.
    pub struct MessagesBody {
        own: MessagesFields,
        model: ModelField,
        shared: SharedFields,
        refused: Refused<UnsupportedInMessages>,
        of_peers: Refused<UnsupportedFields>,
    }
}

/// The body of `/v1/messages/count_tokens`: of the same fields those that shape the prompt.
#[derive(Debug, Default)]
pub struct CountedBody(MessagesBody);

impl BodyFields for CountedBody {
    fn read<S: FieldSource>(&mut self, name: &str, source: &mut S) -> Result<bool, S::Error> {
        Ok(PROMPT_FIELDS.contains(&name) && self.0.read(name, source)?)
    }

    fn add_names(names: &mut Vec<&'static str>) {
        names.extend(PROMPT_FIELDS);
    }
}

/// The chat that a body of `/v1/messages` asks for.
pub fn message(
    ParsedBody { body, problems }: ParsedBody<MessagesBody>,
    model: &ModelInfo,
) -> Result<ApiRequest, ApiError> {
    problems.check_object()?;
    body.refused.check()?;
    body.of_peers.check()?;
    problems.check()?;
    if body.own.max_tokens.is_none() {
        return Err(ApiError::invalid("max_tokens", "max_tokens is required"));
    }
    chat(body, &problems, model)
}

/// The same of `/v1/messages/count_tokens`.
pub fn counted(
    ParsedBody { body, problems }: ParsedBody<CountedBody>,
    model: &ModelInfo,
) -> Result<ApiRequest, ApiError> {
    problems.check()?;
    chat(body.0, &problems, model)
}

fn chat(body: MessagesBody, problems: &FieldProblems, model: &ModelInfo) -> Result<ApiRequest, ApiError> {
    let MessagesBody { own: mut fields, model: model_field, shared, .. } = body;
    let SharedFields { mut sampling, memory, mut template, structured } = shared;
    if let Some(temperature) = fields.temperature {
        in_range("temperature", temperature, 0.0..=1.0)?;
    }
    let mut names = FieldNames::MESSAGE;
    let given = fields.messages.take().ok_or_else(|| ApiError::invalid("messages", "messages is required"))?;
    let last = format!("messages[{}]", given.len().saturating_sub(1));
    let (messages, continues) = conversation(given, fields.system.as_ref(), model)?;
    if continues {
        // The answer goes on where the assistant's last message ends.
        template.continue_final_message = true;
        names.continued = last.into();
    }
    let tools = fields.checked_tools()?;
    // llama.cpp takes any budget.
    if let Some(thinks) = fields.thinks()? {
        // Templates of models that may think or not know this variable; others do not look at it.
        template.chat_template_kwargs.entry("enable_thinking").or_insert(thinks.into());
    }
    let thinking_budget = fields.thinking_budget()?;
    let format = fields.format()?;
    template.reasoning_effort = fields.output_config.as_ref().and_then(|config| config.effort.clone());
    sampling.stop = fields.stop_sequences.take().map(Value::from);
    sampling.temperature = fields.temperature;
    sampling.stream = fields.stream;
    model_field.check(problems, model)?;
    let chat = Chat {
        prompt_tokens: None,
        messages,
        template: template.check("output_config.effort", model)?,
        tools,
        max_tokens: fields.max_tokens.map(|given| max_tokens(names.max_tokens, given, 1)).transpose()?,
        logprobs: None,
        grammar: structured.check_with(format, &sampling)?,
        thinking_budget,
        echo: false,
        reasoning_place: ReasoningPlace::Apart,
        sampling,
        memory,
        names,
    };
    chat.into_request(model)
}

/// The messages that the template is given. True where the last one is the beginning of the answer.
fn conversation(given: Vec<Value>, system: Option<&Value>, model: &ModelInfo) -> Result<(Vec<Value>, bool), ApiError> {
    const NONE: &str = "messages must have at least one message";
    if given.is_empty() {
        return Err(ApiError::invalid("messages", NONE));
    }
    let mut written = Vec::with_capacity(given.len() + 1);
    if let Some(system) = system {
        written.push(json!({"role": "system", "content": text_blocks("system", Some(system))?.into_content()}));
    }
    let system_first = model.chat_template.as_ref().is_some_and(|template| !template.takes_later_system());
    let continues = messages::messages(given, &mut written, system_first)?;
    if written.is_empty() {
        return Err(ApiError::invalid("messages", NONE));
    }
    Ok((written, continues))
}

impl MessagesFields {
    /// The functions that may be called, and which of them have to be.
    fn checked_tools(&self) -> Result<Tools, ApiError> {
        let given = self.tools.as_deref().unwrap_or_default();
        let tools = given.iter().enumerate().map(|(i, given)| tool(format!("tools[{i}]"), given));
        let tools = tools.collect::<Result<_, ApiError>>()?;
        let (asked, several) = self.tool_choice()?;
        let mut tools = Tools::new(tools, several)?;
        tools.choose(asked)?;
        Ok(tools)
    }

    /// The choice among the tools, and whether there may be several calls.
    fn tool_choice(&self) -> Result<(AskedTool<'_>, bool), ApiError> {
        let Some(choice) = &self.tool_choice else { return Ok((AskedTool::Default, true)) };
        let asked = match string("tool_choice", choice, "type")? {
            "auto" => AskedTool::Auto,
            "any" => AskedTool::Required,
            "none" => AskedTool::None,
            "tool" => {
                let name = string("tool_choice", choice, "name")?;
                AskedTool::Function { name, param: "tool_choice.name" }
            }
            kind => {
                let message = format!("tool_choice.type must be one of auto, any, tool, none, got {kind:?}");
                return Err(ApiError::invalid("tool_choice.type", message));
            }
        };
        match choice.get("disable_parallel_tool_use") {
            None | Some(Value::Null) => Ok((asked, true)),
            Some(Value::Bool(disabled)) => Ok((asked, !disabled)),
            other => Err(wrong_type("tool_choice.disable_parallel_tool_use", "a boolean", other)),
        }
    }

    /// Whether the model is to think; `None`: nothing is said.
    fn thinks(&self) -> Result<Option<bool>, ApiError> {
        let Some(thinking) = &self.thinking else { return Ok(None) };
        let kind = string("thinking", thinking, "type")?;
        match kind {
            "enabled" => drop(self.thinking_budget()?),
            "disabled" | "adaptive" | "between_tools" => {}
            _ => {
                let message =
                    format!("thinking.type must be one of enabled, disabled, adaptive, between_tools, got {kind:?}");
                return Err(ApiError::invalid("thinking.type", message));
            }
        }
        Ok(Some(kind != "disabled"))
    }

    /// Tokens of reasoning at most, where it is enabled.
    fn thinking_budget(&self) -> Result<Option<(u32, &'static str)>, ApiError> {
        const PARAM: &str = "thinking.budget_tokens";
        let Some(thinking) = &self.thinking else { return Ok(None) };
        if thinking.get("type").and_then(Value::as_str) != Some("enabled") {
            return Ok(None);
        }
        let budget = thinking.get("budget_tokens");
        let budget = budget.and_then(Value::as_i64).ok_or_else(|| wrong_type(PARAM, "an integer", budget))?;
        in_range(PARAM, budget, MIN_THINKING_TOKENS..=i64::from(u32::MAX))?;
        if let Some(max_tokens) = self.max_tokens
            && budget >= max_tokens
        {
            let message = format!("{PARAM} must be less than max_tokens = {max_tokens}, got {budget}");
            return Err(ApiError::invalid(PARAM, message));
        }
        Ok(Some((budget as u32, PARAM)))
    }

    /// The form of the answer's text.
    fn format(&self) -> Result<Option<GrammarRequest>, ApiError> {
        let Some(format) = self.output_config.as_ref().and_then(|config| config.format.as_ref()) else {
            return Ok(None);
        };
        let path = "output_config.format";
        let kind = string(path, format, "type")?;
        if kind != "json_schema" {
            let message = format!("{path}.type must be \"json_schema\", got {kind:?}");
            return Err(ApiError::invalid(format!("{path}.type"), message));
        }
        let schema = format.get("schema").filter(|schema| schema.is_object());
        let wrong = || wrong_type("output_config.format.schema", "an object", format.get("schema"));
        let schema = schema.ok_or_else(wrong)?.clone();
        Ok(Some(GrammarRequest::new(GrammarSpec::JsonSchema(schema), "output_config.format.schema")))
    }
}

/// A tool as the template is given it, and its function.
fn tool(path: String, tool: &Value) -> Result<(Value, CallableFunction), ApiError> {
    let fields = object(&path, tool)?;
    if let Some(kind) = optional_string(&path, fields, "type")?
        && kind != "custom"
    {
        let message = format!("{path}: tools of type {kind:?} are not supported, only \"custom\" ones are");
        return Err(ApiError::invalid(format!("{path}.type"), message));
    }
    let name = string(&path, fields, "name")?;
    let schema = fields.get("input_schema");
    let parameters = schema.filter(|schema| schema.is_object());
    let parameters = parameters.ok_or_else(|| wrong_type(&format!("{path}.input_schema"), "an object", schema))?;
    let mut shown = Map::from_iter([("name".to_owned(), name.into()), ("parameters".to_owned(), parameters.clone())]);
    for field in ["description", "strict"] {
        if let Some(value) = fields.get(field).filter(|value| !value.is_null()) {
            shown.insert(field.to_owned(), value.clone());
        }
    }
    let path = FunctionPath { parameters: format!("{path}.input_schema"), function: path };
    let function = CallableFunction::new(path, fields, Some(parameters))?;
    Ok((shown_tool(shown), function))
}
