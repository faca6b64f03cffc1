//! The body of `POST /v1/responses` as a chat.

use super::input;
use super::namespaces::{self, Namespaces, ResponseFunction, function_tool};
use crate::Object;
use crate::body::fields::{FieldSource, typed_fields};
use crate::body::refused::{Off, Refused, RefusedField, RefusedTable, refuse};
use crate::body::{BodyFields, ParsedBody, body_fields};
use crate::chat::Chat;
use crate::chat::tools::{AskedTool, CallableFunction, FunctionPath, Tools, no_such_tool, shown_tool};
use crate::checks::{check_metadata, in_range, object, one_of, shown, string, wrong_type};
use crate::fields::llama_cpp::TelemetryFields;
use crate::fields::model::ModelField;
use crate::fields::request_id::RequestIdFields;
use crate::fields::sampling::max_tokens;
use crate::fields::shared::SharedFields;
use crate::fields::structured::{json_schema, text_format};
use crate::fields::unsupported::UnsupportedFields;
use crate::model_info::ModelInfo;
use crate::openai::accepted::ServiceTier;
use crate::request::{ApiRequest, FieldNames};
use pagetide_base::error::ApiError;
use pagetide_text::chat_output::ReasoningPlace;
use pagetide_text::grammar::GrammarRequest;
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

/// Fields that name something stored.
#[derive(Debug, Default)]
pub struct StoredFields;

impl RefusedTable for StoredFields {
    /// Each with what to do instead.
    const FIELDS: &'static [RefusedField] = &[
        refuse("previous_response_id", "send the whole conversation as input"),
        refuse("conversation", "send the whole conversation as input"),
        refuse("prompt", "send the prompt's text as instructions and input"),
        refuse("previous_input_messages", "send the whole conversation as input"),
    ];

    fn message(name: &str, instead: &str) -> String {
        format!("{name} is not supported: this server stores nothing; {instead}")
    }
}

/// Fields of chats that peers take here too.
#[derive(Debug, Default)]
pub struct ChatFieldsOfPeers;

impl RefusedTable for ChatFieldsOfPeers {
    /// Each with what to do instead.
    const FIELDS: &'static [RefusedField] = &[
        refuse("add_generation_prompt", "the answer is a new message").unless(Off::True),
        refuse("continue_final_message", "the answer is a new message"),
        refuse("echo", "the answer is a new message"),
        refuse("grammar", "use structured_outputs"),
        refuse("include_reasoning", "the answer has its reasoning").unless(Off::True),
        refuse("json_schema", "use text.format"),
        refuse("logprobs", "use include: [\"message.output_text.logprobs\"]"),
        refuse("max_completion_tokens", "use max_output_tokens"),
        refuse("max_tokens", "use max_output_tokens"),
        refuse("messages", "use input"),
        refuse("n", "a response has one answer").unless(Off::Number(1.0)),
        refuse("reasoning_effort", "use reasoning.effort"),
        refuse("response_format", "use text.format"),
        refuse("stream_options", "").unless(Off::Any),
    ];

    fn message(name: &str, instead: &str) -> String {
        format!("{name} is not supported in a response; {instead}")
    }
}

body_fields! {
    /// As they stand in the body.
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
        /// Functions that the model may call, and namespaces of such. Built-in tools are refused.
        #[schema(value_type = Option<Vec<ResponseTool>>)]
        tools: Option<Vec<Value>>,
        /// auto, required, none, or an object: one function by its name, or several that are allowed.
        #[schema(value_type = Option<ToolChoiceField>)]
        tool_choice: Option<Value>,
        /// Whether an answer may have several calls.
        #[schema(default = true)]
        parallel_tool_calls: Option<bool>,
        /// Which of OpenAI's queues takes the request. Without effect; see priority.
        #[schema(value_type = Option<ServiceTier>)]
        service_tier: Option<String>,
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
        /// An id of the client's user; the response repeats it.
        user: Option<String>,
        /// A stable name of the end user; the response repeats it.
        safety_identifier: Option<String>,
        /// Names requests with a common prefix. Without effect: equal prefixes are found by themselves.
        prompt_cache_key: Option<String>,
        /// Accepted, as true is OpenAI's default. Nothing is stored.
        store: Option<bool>,
        /// Answer as events with names, the last of which is response.completed, response.incomplete or
        /// response.failed.
        #[schema(default = false)]
        stream: bool,
        /// The response says in input_messages and output_messages which tokens the model was given and gave.
        #[schema(default = false)]
        enable_response_messages: bool,
        /// Only false: background responses would have to be stored.
        #[schema(default = false)]
        background: bool,
    }
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum Input {
    Text(String),
    AnswerItems(Vec<Object>),
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum ToolChoiceField {
    Mode(String),
    Function(Object),
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum ResponseTool {
    Function(FunctionTool),
    Namespace(ToolNamespace),
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
struct ToolNamespace {
    /// "namespace".
    r#type: String,
    /// Calls of its functions name it. The model reads NAMESPACE__FUNCTION.
    name: String,
    description: Option<String>,
    tools: Vec<FunctionTool>,
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

typed_fields!(TextFields, ReasoningFields);

#[derive(Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(default)]
struct TextFields {
    /// An object of type text, json_object or json_schema; the last with name and schema.
    #[schema(value_type = Option<Object>)]
    format: Option<Value>,
    /// How long the answer should be. Without effect.
    verbosity: Option<String>,
}

#[derive(Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(default)]
struct ReasoningFields {
    /// For chat templates that know it.
    effort: Option<String>,
    /// Reasoning is given as it is, not summed up.
    summary: Option<String>,
}

/// A checked request.
#[derive(Debug)]
pub struct ResponsesRequest {
    pub request: ApiRequest,
    pub settings: ResponseSettings,
}

/// The body of a response.
#[derive(Debug, Default)]
pub struct ResponsesBody {
    own: ResponsesFields,
    model: ModelField,
    shared: SharedFields,
    stored: Refused<StoredFields>,
    of_chats: Refused<ChatFieldsOfPeers>,
    of_peers: Refused<UnsupportedFields>,
    request_id: RequestIdFields,
    telemetry: TelemetryFields,
}

impl BodyFields for ResponsesBody {
    fn read<S: FieldSource>(&mut self, name: &str, source: &mut S) -> Result<bool, S::Error> {
        Ok(self.own.read(name, source)?
            || self.model.read(name, source)?
            || self.shared.read(name, source)?
            || (name == "stop" && self.shared.sampling.read(name, source)?)
            || self.request_id.read(name, source)?
            || self.telemetry.read(name, source)?
            || self.stored.read(name, source)?
            || self.of_chats.read(name, source)?
            || self.of_peers.read(name, source)?)
    }

    fn add_names(names: &mut Vec<&'static str>) {
        ResponsesFields::add_names(names);
        ModelField::add_names(names);
        SharedFields::add_names(names);
        names.push("stop");
        RequestIdFields::add_names(names);
        TelemetryFields::add_names(names);
        Refused::<StoredFields>::add_names(names);
        Refused::<ChatFieldsOfPeers>::add_names(names);
        Refused::<UnsupportedFields>::add_names(names);
    }
}

/// What the response repeats of its request.
#[derive(Debug, Default)]
pub struct ResponseSettings {
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
    /// The functions of namespaces, by the names that the model reads.
    pub namespaces: Namespaces,
    /// The response says the tokens of input and output.
    pub with_messages: bool,
    pub top_logprobs: i64,
    pub top_p: Option<f64>,
    pub truncation: String,
    pub user: Option<String>,
}

impl ResponsesRequest {
    pub fn parse(
        ParsedBody { body, problems }: ParsedBody<ResponsesBody>,
        model: &ModelInfo,
    ) -> Result<Self, ApiError> {
        problems.check_object()?;
        body.stored.check()?;
        body.of_chats.check()?;
        body.of_peers.check()?;
        problems.check()?;
        let ResponsesBody { own: mut fields, model: model_field, shared, request_id, telemetry, .. } = body;
        let SharedFields { mut sampling, memory, mut template, structured } = shared;
        if fields.background {
            let message = "background responses are not supported: this server stores nothing; use stream: true";
            return Err(ApiError::invalid("background", message));
        }
        check_metadata(fields.metadata.as_ref())?;
        one_of("service_tier", fields.service_tier.as_deref(), ServiceTier::WORDS)?;
        let input = fields.input.take().ok_or_else(|| ApiError::invalid("input", "input is required"))?;
        let messages = input::messages(input, fields.instructions.as_deref())?;
        let (tools, namespaces) = fields.checked_tools()?;
        let format = fields.format()?;
        let logprobs = fields.logprobs()?;
        if fields.cuts_input()? {
            // As much of the end as the model has room for.
            sampling.truncate_prompt_tokens = Some(-1);
        }
        template.reasoning_effort = fields.reasoning.as_ref().and_then(|reasoning| reasoning.effort.clone());
        sampling.stream = fields.stream;
        model_field.check(&problems, model)?;
        let names = FieldNames::RESPONSE;
        let given = (sampling.temperature, sampling.top_p);
        let chat = Chat {
            prompt_tokens: None,
            messages,
            template: template.check("reasoning.effort", model)?,
            tools,
            max_tokens: fields.max_output_tokens.map(|given| max_tokens(names.max_tokens, given, 1)).transpose()?,
            logprobs,
            grammar: structured.check_with(format, &sampling)?,
            thinking_budget: None,
            echo: false,
            reasoning_place: ReasoningPlace::Apart,
            sampling,
            memory,
            names,
        };
        let mut request = request_id.name(chat.into_request(model)?)?;
        telemetry.apply(&mut request, model);
        let settings = ResponseSettings { namespaces, ..fields.settings(given, &request) };
        Ok(Self { request, settings })
    }
}

impl ResponsesFields {
    /// `given`: the client's temperature and top_p.
    fn settings(self, given: (Option<f64>, Option<f64>), request: &ApiRequest) -> ResponseSettings {
        let (used, (temperature, top_p)) = (&request.each.core.params, given);
        let text = self.text.unwrap_or_default();
        let reasoning = self.reasoning.unwrap_or_default();
        let mut written_text = json!({"format": text.format.unwrap_or_else(|| json!({"type": "text"}))});
        if let Some(verbosity) = text.verbosity {
            written_text["verbosity"] = verbosity.into();
        }
        ResponseSettings {
            instructions: self.instructions,
            max_output_tokens: self.max_output_tokens,
            max_tool_calls: self.max_tool_calls,
            metadata: self.metadata.unwrap_or_default(),
            parallel_tool_calls: self.parallel_tool_calls.unwrap_or(true),
            prompt_cache_key: self.prompt_cache_key,
            reasoning: json!({"effort": reasoning.effort, "summary": reasoning.summary}),
            safety_identifier: self.safety_identifier,
            temperature: temperature.or_else(|| shortest(used.temperature)),
            text: written_text,
            tool_choice: self.tool_choice.unwrap_or_else(|| "auto".into()),
            tools: self.tools.unwrap_or_default(),
            namespaces: Namespaces::default(),
            with_messages: self.enable_response_messages,
            top_logprobs: self.top_logprobs.unwrap_or(0),
            top_p: top_p.or_else(|| shortest(used.top_p)),
            truncation: self.truncation.unwrap_or_else(|| "disabled".into()),
            user: self.user,
        }
    }

    /// The functions that may be called, and which of them have to be; and those of them that are in namespaces.
    fn checked_tools(&self) -> Result<(Tools, Namespaces), ApiError> {
        let given = self.tools.as_deref().unwrap_or_default();
        let functions = namespaces::functions(given)?;
        let (asked, allowed) = tool_choice(self.tool_choice.as_ref(), &functions)?;
        let mut written = Vec::with_capacity(functions.len());
        for function in &functions {
            if allowed.as_ref().is_none_or(|allowed| allowed.contains(&&*function.name)) {
                let path = FunctionPath {
                    parameters: format!("{}.parameters", function.path),
                    function: function.path.clone(),
                };
                let callable = CallableFunction::new(path, &function.fields, function.fields.get("parameters"))?;
                written.push((shown_tool(function_fields(&function.fields)), callable));
            }
        }
        let mut tools = Tools::new(written, self.parallel_tool_calls.unwrap_or(true))?;
        tools.choose(asked)?;
        Ok((tools, Namespaces::of(&functions)))
    }

    /// The form of the answer's text.
    fn format(&self) -> Result<Option<GrammarRequest>, ApiError> {
        const PATH: &str = "text.format";
        let given = self.text.as_ref().and_then(|text| text.format.as_ref());
        let Some(given) = given.filter(|format| !format.is_null()) else { return Ok(None) };
        string(PATH, object(PATH, given)?, "type")?;
        text_format(PATH, given, "one of text, json_object, json_schema", || json_schema(PATH, given))
    }

    /// Most likely tokens reported with each token of the text.
    fn logprobs(&self) -> Result<Option<u32>, ApiError> {
        let include = self.include.as_deref().unwrap_or_default();
        if let Some(i) = include.iter().position(|name| !INCLUDABLE.contains(&name.as_str())) {
            let param = format!("include[{i}]");
            let message =
                format!("{param} must be one of {}, got {}", INCLUDABLE.join(", "), shown(&include[i].as_str().into()));
            return Err(ApiError::invalid(param, message));
        }
        let top = self.top_logprobs.map(|top| in_range("top_logprobs", top, 0..=20)).transpose()?;
        Ok(include.iter().any(|name| name == LOGPROBS).then(|| top.unwrap_or(0) as u32))
    }

    /// Whether the beginning of an input that is too long is cut off.
    fn cuts_input(&self) -> Result<bool, ApiError> {
        match self.truncation.as_deref() {
            None | Some("disabled") => Ok(false),
            Some("auto") => Ok(true),
            Some(other) => {
                let message = format!("truncation must be \"auto\" or \"disabled\", got {other:?}");
                Err(ApiError::invalid("truncation", message))
            }
        }
    }
}

/// 0.7 for the float32 nearest to it.
fn shortest(value: f32) -> Option<f64> {
    value.to_string().parse().ok()
}

/// What of a tool the chat template is given as its function.
fn function_fields(tool: &Map<String, Value>) -> Map<String, Value> {
    let fields = ["name", "description", "parameters", "strict"];
    let given = |field: &str| Some((field.to_owned(), tool.get(field).filter(|value| !value.is_null())?.clone()));
    fields.into_iter().filter_map(given).collect()
}

/// The choice among the tools, and the names that it is confined to.
fn tool_choice<'a>(
    choice: Option<&Value>,
    tools: &'a [ResponseFunction],
) -> Result<(AskedTool<'a>, Option<Vec<&'a str>>), ApiError> {
    let choice = match choice {
        None => return Ok((AskedTool::Default, None)),
        Some(Value::String(mode)) => {
            let asked = match mode.as_str() {
                "none" => AskedTool::None,
                // Refused, whatever it is.
                _ if tools.is_empty() => AskedTool::Auto,
                "auto" => AskedTool::Auto,
                "required" => AskedTool::Required,
                _ => {
                    const CHOICES: &str = "\"none\", \"auto\", \"required\" or {\"type\": \"function\", \"name\": …}";
                    let message = format!("tool_choice must be {CHOICES}, got {}", shown(&mode.as_str().into()));
                    return Err(ApiError::invalid("tool_choice", message));
                }
            };
            return Ok((asked, None));
        }
        Some(choice) => object("tool_choice", choice)?,
    };
    match string("tool_choice", choice, "type")? {
        "function" => {
            const PARAM: &str = "tool_choice.name";
            let name = namespaces::find("tool_choice", choice, tools)?;
            let name =
                name.ok_or_else(|| no_such_tool(PARAM, string("tool_choice", choice, "name").unwrap_or_default()))?;
            Ok((AskedTool::Function { name, param: PARAM }, None))
        }
        "allowed_tools" => {
            let asked = match string("tool_choice", choice, "mode")? {
                "auto" => AskedTool::Auto,
                "required" => AskedTool::Required,
                mode => {
                    let message = format!("tool_choice.mode must be \"auto\" or \"required\", got {mode:?}");
                    return Err(ApiError::invalid("tool_choice.mode", message));
                }
            };
            let allowed = choice.get("tools");
            let allowed = allowed.and_then(Value::as_array);
            let allowed = allowed.ok_or_else(|| wrong_type("tool_choice.tools", "an array", choice.get("tools")))?;
            let name = |(i, tool): (usize, &Value)| {
                let path = format!("tool_choice.tools[{i}]");
                let tool = function_tool(&path, tool)?;
                namespaces::find(&path, tool, tools)?.ok_or_else(|| {
                    let name = string(&path, tool, "name").unwrap_or_default();
                    ApiError::invalid(format!("{path}.name"), format!("{path}.name: tools has no function {name:?}"))
                })
            };
            Ok((asked, Some(allowed.iter().enumerate().map(name).collect::<Result<_, _>>()?)))
        }
        kind => {
            let message = format!("tool_choice of type {kind:?} is not supported: only functions can be called");
            Err(ApiError::invalid("tool_choice.type", message))
        }
    }
}
