//! The body of `POST /v1/messages` as a chat request's.

use super::messages::{self, text_blocks};
use crate::actors::runtime::ModelInfo;
use crate::error::ApiError;
use crate::http::openai::{Request, in_range, null_as_default, parse_fields};
use crate::http::translate::{ChatBody, FieldNames, object, optional_string, string, wrong_type};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

const MIN_THINKING_TOKENS: i64 = 1024;

/// Fields that ask for something that this server does not run.
pub const UNSUPPORTED: &[(&str, &str)] = &[("container", "containers"), ("mcp_servers", "servers of tools")];

/// Any object, for the description.
type Object = Map<String, Value>;

/// As they stand in the body.
#[derive(Default, Deserialize, ToSchema)]
#[serde(default)]
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
    #[allow(dead_code, reason = "the chat request has it too, and reads it")]
    #[serde(deserialize_with = "null_as_default")]
    #[schema(default = false)]
    stream: bool,
    /// An object of type auto, any, tool (with a name) or none; disable_parallel_tool_use: true for one call at most.
    #[schema(value_type = Option<Object>)]
    tool_choice: Option<Map<String, Value>>,
    /// An object of type enabled (with budget_tokens, of at least 1024), disabled or adaptive: the chat template's
    /// enable_thinking. The budget is not kept to.
    #[schema(value_type = Option<Object>)]
    thinking: Option<Map<String, Value>>,
    /// How the answer is to be.
    output_config: Option<OutputConfig>,
    /// About the request.
    metadata: Option<Metadata>,
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

#[derive(Default, Deserialize, Serialize, ToSchema)]
#[serde(default)]
struct OutputConfig {
    /// How much the model is to think, for chat templates that know it.
    effort: Option<String>,
    /// An object of type json_schema with the schema that the text has to follow.
    #[schema(value_type = Option<Object>)]
    format: Option<Map<String, Value>>,
}

#[derive(Default, Deserialize, Serialize, ToSchema)]
#[serde(default)]
struct Metadata {
    /// Who asks. Without effect.
    user_id: Option<String>,
}

/// The chat that a body of `/v1/messages` asks for.
pub fn message(body: &Value, model: &ModelInfo) -> Result<(Request, FieldNames), ApiError> {
    let fields = fields(body)?;
    let max_tokens = fields.max_tokens.ok_or_else(|| ApiError::invalid("max_tokens", "max_tokens is required"))?;
    let mut chat = chat_body(&fields, body)?;
    chat.set("max_tokens", max_tokens);
    chat.parse(model)
}

/// The same of `/v1/messages/count_tokens`, of which only the prompt matters.
pub fn counted(body: &Value, model: &ModelInfo) -> Result<(Request, FieldNames), ApiError> {
    let Value::Object(body) = body else { return Err(not_an_object()) };
    let shaping = body.iter().filter(|(name, _)| PROMPT_FIELDS.contains(&name.as_str()));
    let body = shaping.map(|(name, value)| (name.clone(), value.clone())).collect();
    chat_body(&fields(&body)?, &body)?.parse(model)
}

fn not_an_object() -> ApiError {
    ApiError::bad_request("the request body must be a JSON object")
}

fn fields(body: &Value) -> Result<MessagesFields, ApiError> {
    if !body.is_object() {
        return Err(not_an_object());
    }
    for (name, what) in UNSUPPORTED {
        let asked = body.get(*name).is_some_and(|value| !value.is_null() && *value != json!([]));
        if asked {
            return Err(ApiError::invalid(*name, format!("{name} is not supported: this server runs no {what}")));
        }
    }
    parse_fields(body)
}

fn chat_body(fields: &MessagesFields, body: &Value) -> Result<ChatBody, ApiError> {
    let mut chat = ChatBody::new(body);
    if let Some(temperature) = fields.temperature {
        in_range("temperature", temperature, 0.0..=1.0)?;
    }
    set_messages(fields, &mut chat)?;
    if let Some(stop) = &fields.stop_sequences {
        chat.set("stop", stop.as_slice());
    }
    chat.names.name("stop", "stop_sequences");
    set_tools(fields, &mut chat)?;
    set_tool_choice(fields, &mut chat)?;
    set_thinking(fields, &mut chat)?;
    set_output_config(fields, &mut chat)?;
    if let Some(user) = fields.metadata.as_ref().and_then(|metadata| metadata.user_id.as_deref()) {
        chat.set_named("user", "metadata.user_id", user);
    }
    Ok(chat)
}

fn set_messages(fields: &MessagesFields, chat: &mut ChatBody) -> Result<(), ApiError> {
    let given = fields.messages.as_deref().ok_or_else(|| ApiError::invalid("messages", "messages is required"))?;
    if given.is_empty() {
        return Err(ApiError::invalid("messages", "messages must have at least one message"));
    }
    let mut written = Vec::with_capacity(given.len() + 1);
    if let Some(system) = fields.system.as_ref().filter(|system| !system.is_null()) {
        written.push(json!({"role": "system", "content": text_blocks("system", Some(system))?}));
        chat.names.name("messages[0].content", "system");
        chat.names.name("messages[0]", "system");
    }
    let continues = messages::messages(given, &mut written, &mut chat.names)?;
    chat.set("messages", written);
    if continues {
        // The answer goes on where the assistant's last message ends.
        chat.set("continue_final_message", true);
        chat.names.name("continue_final_message", format!("messages[{}]", given.len() - 1));
    }
    Ok(())
}

fn set_tools(fields: &MessagesFields, chat: &mut ChatBody) -> Result<(), ApiError> {
    let tools = fields.tools.as_deref().unwrap_or_default();
    let mut written = Vec::with_capacity(tools.len());
    for (i, tool) in tools.iter().enumerate() {
        let path = format!("tools[{i}]");
        let tool = object(&path, tool)?;
        if let Some(kind) = optional_string(&path, tool, "type")?
            && kind != "custom"
        {
            let message = format!("{path}: tools of type {kind:?} are not supported, only \"custom\" ones are");
            return Err(ApiError::invalid(format!("{path}.type"), message));
        }
        let mut function = json!({"name": string(&path, tool, "name")?});
        let schema = tool.get("input_schema");
        let schema = schema.filter(|schema| schema.is_object());
        let wrong = || wrong_type(&format!("{path}.input_schema"), "an object", tool.get("input_schema"));
        function["parameters"] = schema.ok_or_else(wrong)?.clone();
        for field in ["description", "strict"] {
            if let Some(value) = tool.get(field).filter(|value| !value.is_null()) {
                function[field] = value.clone();
            }
        }
        written.push(json!({"type": "function", "function": function}));
        chat.names.name(format!("{path}.function.parameters"), format!("{path}.input_schema"));
        chat.names.name(format!("{path}.function"), path);
    }
    if !written.is_empty() {
        chat.set("tools", written);
    }
    Ok(())
}

fn set_tool_choice(fields: &MessagesFields, chat: &mut ChatBody) -> Result<(), ApiError> {
    let Some(choice) = &fields.tool_choice else { return Ok(()) };
    match string("tool_choice", choice, "type")? {
        "auto" => chat.set("tool_choice", "auto"),
        "any" => chat.set("tool_choice", "required"),
        "none" => chat.set("tool_choice", "none"),
        "tool" => {
            let name = string("tool_choice", choice, "name")?;
            chat.set("tool_choice", json!({"type": "function", "function": {"name": name}}));
            chat.names.name("tool_choice.function", "tool_choice");
        }
        kind => {
            let message = format!("tool_choice.type must be one of auto, any, tool, none, got {kind:?}");
            return Err(ApiError::invalid("tool_choice.type", message));
        }
    }
    match choice.get("disable_parallel_tool_use") {
        None | Some(Value::Null) => Ok(()),
        Some(Value::Bool(disabled)) => {
            chat.set_named("parallel_tool_calls", "tool_choice.disable_parallel_tool_use", !disabled);
            Ok(())
        }
        other => Err(wrong_type("tool_choice.disable_parallel_tool_use", "a boolean", other)),
    }
}

/// Templates of models that may think or not know `enable_thinking`; others do not look at it. How long the model
/// thinks is its own affair.
fn set_thinking(fields: &MessagesFields, chat: &mut ChatBody) -> Result<(), ApiError> {
    let Some(thinking) = &fields.thinking else { return Ok(()) };
    let kind = string("thinking", thinking, "type")?;
    match kind {
        "enabled" => {
            let path = "thinking.budget_tokens";
            let budget = thinking.get("budget_tokens");
            let budget = budget.and_then(Value::as_i64).ok_or_else(|| wrong_type(path, "an integer", budget))?;
            in_range(path, budget, MIN_THINKING_TOKENS..=i64::from(u32::MAX))?;
            if let Some(max_tokens) = fields.max_tokens
                && budget >= max_tokens
            {
                let message = format!("{path} must be less than max_tokens = {max_tokens}, got {budget}");
                return Err(ApiError::invalid(path, message));
            }
        }
        "disabled" | "adaptive" | "between_tools" => {}
        _ => {
            let message =
                format!("thinking.type must be one of enabled, disabled, adaptive, between_tools, got {kind:?}");
            return Err(ApiError::invalid("thinking.type", message));
        }
    }
    chat.set_template_kwarg("enable_thinking", kind != "disabled");
    Ok(())
}

fn set_output_config(fields: &MessagesFields, chat: &mut ChatBody) -> Result<(), ApiError> {
    let Some(config) = &fields.output_config else { return Ok(()) };
    if let Some(effort) = &config.effort {
        chat.set_named("reasoning_effort", "output_config.effort", effort.as_str());
    }
    let Some(format) = &config.format else { return Ok(()) };
    let path = "output_config.format";
    let kind = string(path, format, "type")?;
    if kind != "json_schema" {
        let message = format!("{path}.type must be \"json_schema\", got {kind:?}");
        return Err(ApiError::invalid(format!("{path}.type"), message));
    }
    let schema = format.get("schema").filter(|schema| schema.is_object());
    let wrong = || wrong_type("output_config.format.schema", "an object", format.get("schema"));
    let schema = schema.ok_or_else(wrong)?;
    let schema = json!({"name": "output", "schema": schema, "strict": true});
    chat.set_named("response_format", path, json!({"type": "json_schema", "json_schema": schema}));
    chat.names.name("response_format.json_schema", path);
    Ok(())
}
