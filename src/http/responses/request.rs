//! The body of `POST /v1/responses` as a chat request's.

use super::input;
use crate::actors::runtime::ModelInfo;
use crate::error::ApiError;
use crate::http::openai::{Request, in_range, null_as_default, parse_fields, shown};
use crate::http::translate::{ChatBody, FieldNames, object, string, wrong_type};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

const LOGPROBS: &str = "message.output_text.logprobs";
/// What `include` may name. All but [`LOGPROBS`] belong to what is refused as input or as a tool, or, as encrypted
/// reasoning, is made for servers that store.
const INCLUDABLE: [&str; 8] = [
    LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
];

/// Fields that name something stored, and what to do instead.
pub const STORED: &[(&str, &str)] = &[
    ("previous_response_id", "send the whole conversation as input"),
    ("conversation", "send the whole conversation as input"),
    ("prompt", "send the prompt's text as instructions and input"),
];

/// Any object, for the description.
type Object = Map<String, Value>;

/// As they stand in the body.
#[derive(Default, Deserialize, ToSchema)]
#[serde(default)]
pub(super) struct ResponsesFields {
    /// A text, or the items of a conversation: messages, function calls and their outputs, reasoning.
    #[schema(value_type = Option<Input>)]
    input: Option<Value>,
    /// A system message before the input.
    instructions: Option<String>,
    /// Tokens to generate at most. Without it the answer may fill the model's context.
    #[schema(minimum = 1)]
    max_output_tokens: Option<i64>,
    /// Of built-in tools, of which there are none.
    max_tool_calls: Option<i64>,
    /// Functions that the model may call. Built-in tools are refused.
    #[schema(value_type = Option<Vec<FunctionTool>>)]
    tools: Option<Vec<Value>>,
    /// auto, required, none, or an object: one function by its name, or several that are allowed.
    #[schema(value_type = Option<ToolChoiceField>)]
    tool_choice: Option<Value>,
    /// Whether an answer may have several calls.
    #[schema(default = true)]
    parallel_tool_calls: Option<bool>,
    /// The format of the answer's text.
    text: Option<TextFields>,
    /// How much the model is to think.
    reasoning: Option<ReasoningFields>,
    /// What the response is to have besides. message.output_text.logprobs: log-probabilities of the text's tokens.
    include: Option<Vec<String>>,
    /// With message.output_text.logprobs: each with this many most likely tokens.
    #[schema(minimum = 0, maximum = 20, default = 0)]
    top_logprobs: Option<i64>,
    /// auto cuts off the beginning of an input that is too long; disabled refuses it.
    #[schema(default = "disabled")]
    truncation: Option<String>,
    /// Notes of the client's own, a string for each name; the response repeats them.
    #[schema(value_type = Option<HashMap<String, String>>)]
    metadata: Option<Map<String, Value>>,
    /// Who asks; the response repeats it.
    user: Option<String>,
    /// A stable name of the end user; the response repeats it.
    safety_identifier: Option<String>,
    /// Names requests with a common prefix. Without effect: equal prefixes are found by themselves.
    prompt_cache_key: Option<String>,
    /// Accepted, as true is OpenAI's default. Nothing is stored.
    #[allow(dead_code, reason = "only its type is checked")]
    store: Option<bool>,
    /// Answer as events with names, the last of which is response.completed, response.incomplete or response.failed.
    #[allow(dead_code, reason = "the chat request has it too, and reads it")]
    #[serde(deserialize_with = "null_as_default")]
    #[schema(default = false)]
    stream: bool,
    /// Only false: background responses would have to be stored.
    #[serde(deserialize_with = "null_as_default")]
    #[schema(default = false)]
    background: bool,
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum Input {
    Text(String),
    Items(Vec<Object>),
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum ToolChoiceField {
    Mode(String),
    Function(Object),
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
struct FunctionTool {
    /// "function".
    r#type: String,
    name: String,
    description: Option<String>,
    /// A JSON schema.
    parameters: Option<Object>,
    strict: Option<bool>,
}

#[derive(Default, Deserialize, Serialize, ToSchema)]
#[serde(default)]
struct TextFields {
    /// An object of type text, json_object or json_schema; the last with name and schema.
    #[schema(value_type = Option<Object>)]
    format: Option<Value>,
    /// How long the answer should be. Without effect.
    verbosity: Option<String>,
}

#[derive(Default, Deserialize, Serialize, ToSchema)]
#[serde(default)]
struct ReasoningFields {
    /// For chat templates that know it.
    effort: Option<String>,
    /// Reasoning is given as it is, not summed up.
    summary: Option<String>,
}

/// A checked request.
pub struct ResponsesRequest {
    pub chat: Request,
    pub names: FieldNames,
    pub settings: Settings,
}

/// What the response repeats of its request.
#[derive(Debug, Default)]
pub struct Settings {
    pub instructions: Option<String>,
    pub max_output_tokens: Option<i64>,
    pub max_tool_calls: Option<i64>,
    pub metadata: Map<String, Value>,
    pub parallel_tool_calls: bool,
    pub prompt_cache_key: Option<String>,
    pub reasoning: Value,
    pub safety_identifier: Option<String>,
    pub temperature: Option<f64>,
    pub text: Value,
    pub tool_choice: Value,
    pub tools: Vec<Value>,
    pub top_logprobs: i64,
    pub top_p: Option<f64>,
    pub truncation: String,
    pub user: Option<String>,
}

impl ResponsesRequest {
    pub fn parse(body: &Value, model: &ModelInfo) -> Result<Self, ApiError> {
        if !body.is_object() {
            return Err(ApiError::bad_request("the request body must be a JSON object"));
        }
        refuse_stored(body)?;
        let fields: ResponsesFields = parse_fields(body)?;
        if fields.background {
            let message = "background responses are not supported: this server stores nothing; use stream: true";
            return Err(ApiError::invalid("background", message));
        }
        let mut chat = ChatBody::new(body);
        for name in ["metadata", "stop", "user"] {
            chat.copy(body, name);
        }
        let input = fields.input.as_ref().ok_or_else(|| ApiError::invalid("input", "input is required"))?;
        chat.names.name("messages", "input");
        let messages = input::messages(input, fields.instructions.as_deref(), &mut chat.names)?;
        chat.set("messages", messages);
        if let Some(max) = fields.max_output_tokens {
            chat.set("max_tokens", max);
        }
        chat.names.name("max_tokens", "max_output_tokens");
        set_tools(&fields, &mut chat)?;
        set_format(&fields, &mut chat)?;
        set_logprobs(&fields, &mut chat)?;
        set_truncation(&fields, &mut chat)?;
        if let Some(effort) = fields.reasoning.as_ref().and_then(|reasoning| reasoning.effort.as_deref()) {
            chat.set_named("reasoning_effort", "reasoning.effort", effort);
        }
        let (chat, names) = chat.parse(model)?;
        let settings = fields.settings(body, &chat);
        Ok(Self { chat, names, settings })
    }
}

impl ResponsesFields {
    fn settings(self, body: &Value, chat: &Request) -> Settings {
        let number = |name: &str, used: f32| body.get(name).and_then(Value::as_f64).or_else(|| shortest(used));
        let text = self.text.unwrap_or_default();
        let reasoning = self.reasoning.unwrap_or_default();
        let mut written_text = json!({"format": text.format.unwrap_or_else(|| json!({"type": "text"}))});
        if let Some(verbosity) = text.verbosity {
            written_text["verbosity"] = verbosity.into();
        }
        Settings {
            instructions: self.instructions,
            max_output_tokens: self.max_output_tokens,
            max_tool_calls: self.max_tool_calls,
            metadata: self.metadata.unwrap_or_default(),
            parallel_tool_calls: self.parallel_tool_calls.unwrap_or(true),
            prompt_cache_key: self.prompt_cache_key,
            reasoning: json!({"effort": reasoning.effort, "summary": reasoning.summary}),
            safety_identifier: self.safety_identifier,
            temperature: number("temperature", chat.params.temperature),
            text: written_text,
            tool_choice: self.tool_choice.unwrap_or_else(|| "auto".into()),
            tools: self.tools.unwrap_or_default(),
            top_logprobs: self.top_logprobs.unwrap_or(0),
            top_p: number("top_p", chat.params.top_p),
            truncation: self.truncation.unwrap_or_else(|| "disabled".into()),
            user: self.user,
        }
    }
}

/// 0.7 for the float32 nearest to it.
fn shortest(value: f32) -> Option<f64> {
    value.to_string().parse().ok()
}

/// Refuses what needs something stored.
fn refuse_stored(body: &Value) -> Result<(), ApiError> {
    for (name, instead) in STORED {
        if body.get(*name).is_some_and(|value| !value.is_null()) {
            let message = format!("{name} is not supported: this server stores nothing; {instead}");
            return Err(ApiError::invalid(*name, message));
        }
    }
    Ok(())
}

fn set_tools(fields: &ResponsesFields, chat: &mut ChatBody) -> Result<(), ApiError> {
    let tools = fields.tools.as_deref().unwrap_or_default();
    let names = tools.iter().enumerate().map(|(i, tool)| check_tool(&format!("tools[{i}]"), tool));
    let names = names.collect::<Result<Vec<_>, _>>()?;
    let (choice, allowed) = tool_choice(fields.tool_choice.as_ref(), &names)?;
    let mut written = Vec::with_capacity(tools.len());
    for (i, tool) in tools.iter().enumerate() {
        if allowed.as_ref().is_none_or(|allowed| allowed.contains(&names[i])) {
            let own = format!("tools[{i}]");
            let chats = format!("tools[{}]", written.len());
            chat.names.name(format!("{chats}.function"), own.clone());
            chat.names.name(chats, own);
            written.push(chat_tool(tool));
        }
    }
    if !written.is_empty() {
        chat.set("tools", written);
    }
    if let Some(choice) = choice {
        chat.set("tool_choice", choice);
        chat.names.name("tool_choice.function", "tool_choice");
    }
    if let Some(parallel) = fields.parallel_tool_calls {
        chat.set("parallel_tool_calls", parallel);
    }
    Ok(())
}

/// The name of a function tool; every other kind of tool would have to run on the server.
fn check_tool<'a>(path: &str, tool: &'a Value) -> Result<&'a str, ApiError> {
    let tool = object(path, tool)?;
    match string(path, tool, "type")? {
        "function" => string(path, tool, "name"),
        kind => {
            let message = format!("{path}: tools of type {kind:?} are not supported, only \"function\" is");
            Err(ApiError::invalid(format!("{path}.type"), message))
        }
    }
}

/// The flat tool of this API as the nested one of chat.
fn chat_tool(tool: &Value) -> Value {
    let fields = ["name", "description", "parameters", "strict"];
    let function: Map<String, Value> = fields
        .into_iter()
        .filter_map(|field| Some((field.to_owned(), tool.get(field).filter(|value| !value.is_null())?.clone())))
        .collect();
    json!({"type": "function", "function": function})
}

/// Chat's `tool_choice`, and the names that it is confined to.
fn tool_choice<'a>(
    choice: Option<&'a Value>,
    tools: &[&str],
) -> Result<(Option<Value>, Option<Vec<&'a str>>), ApiError> {
    let choice = match choice {
        None => return Ok((None, None)),
        Some(Value::String(mode)) => return Ok((Some(mode.as_str().into()), None)),
        Some(choice) => object("tool_choice", choice)?,
    };
    match string("tool_choice", choice, "type")? {
        "function" => {
            let name = string("tool_choice", choice, "name")?;
            Ok((Some(json!({"type": "function", "function": {"name": name}})), None))
        }
        "allowed_tools" => {
            let mode = string("tool_choice", choice, "mode")?;
            if !["auto", "required"].contains(&mode) {
                let message = format!("tool_choice.mode must be \"auto\" or \"required\", got {mode:?}");
                return Err(ApiError::invalid("tool_choice.mode", message));
            }
            let allowed = choice.get("tools");
            let allowed = allowed.and_then(Value::as_array);
            let allowed = allowed.ok_or_else(|| wrong_type("tool_choice.tools", "an array", choice.get("tools")))?;
            let name = |(i, tool): (usize, &'a Value)| {
                let path = format!("tool_choice.tools[{i}]");
                let name = check_tool(&path, tool)?;
                if tools.contains(&name) {
                    return Ok(name);
                }
                Err(ApiError::invalid(format!("{path}.name"), format!("{path}.name: tools has no function {name:?}")))
            };
            Ok((Some(mode.into()), Some(allowed.iter().enumerate().map(name).collect::<Result<_, _>>()?)))
        }
        kind => {
            let message = format!("tool_choice of type {kind:?} is not supported: only functions can be called");
            Err(ApiError::invalid("tool_choice.type", message))
        }
    }
}

fn set_format(fields: &ResponsesFields, chat: &mut ChatBody) -> Result<(), ApiError> {
    chat.names.name("response_format", "text.format");
    chat.names.name("response_format.json_schema", "text.format");
    let format = fields.text.as_ref().and_then(|text| text.format.as_ref());
    let Some(format) = format.filter(|format| !format.is_null()) else { return Ok(()) };
    let format = object("text.format", format)?;
    let kind = string("text.format", format, "type")?;
    if kind == "json_schema" {
        let mut schema = format.clone();
        schema.remove("type");
        chat.set("response_format", json!({"type": kind, "json_schema": schema}));
    } else {
        chat.set("response_format", json!({"type": kind}));
    }
    Ok(())
}

fn set_logprobs(fields: &ResponsesFields, chat: &mut ChatBody) -> Result<(), ApiError> {
    let include = fields.include.as_deref().unwrap_or_default();
    if let Some(i) = include.iter().position(|name| !INCLUDABLE.contains(&name.as_str())) {
        let param = format!("include[{i}]");
        let message =
            format!("{param} must be one of {}, got {}", INCLUDABLE.join(", "), shown(&include[i].as_str().into()));
        return Err(ApiError::invalid(param, message));
    }
    let top = fields.top_logprobs.map(|top| in_range("top_logprobs", top, 0..=20)).transpose()?;
    if include.iter().any(|name| name == LOGPROBS) {
        chat.set("logprobs", true);
        chat.set("top_logprobs", top.unwrap_or(0));
    }
    Ok(())
}

fn set_truncation(fields: &ResponsesFields, chat: &mut ChatBody) -> Result<(), ApiError> {
    match fields.truncation.as_deref() {
        None | Some("disabled") => Ok(()),
        Some("auto") => {
            // As much of the end as the model has room for.
            chat.set_named("truncate_prompt_tokens", "truncation", -1);
            Ok(())
        }
        Some(other) => {
            let message = format!("truncation must be \"auto\" or \"disabled\", got {other:?}");
            Err(ApiError::invalid("truncation", message))
        }
    }
}
