//! `POST /v1/chat/completions`.

use super::accepted::{AcceptedChatFields, AcceptedFields, ReasoningEffort, one_of};
use super::memory::MemoryFields;
use super::sampling::{SamplingFields, check_min_tokens, max_tokens, num_logprobs};
use super::structured::StructuredFields;
use super::tools::{ToolFields, Tools};
use super::{Endpoint, ModelField, Request, null_as_default, parse_fields, shown, structured};
use crate::actors::messages::{ChatPrompt, Prompt};
use crate::actors::runtime::ModelInfo;
use crate::error::ApiError;
use crate::http::body::json::{Bounds, Inner};
use crate::http::openapi::answers::{ChatCompletion, ChatCompletionChunk};
use crate::http::openapi::{Operation, Tag};
use crate::text::chat_output::{ChatFormat, ChatReading, ReasoningStart};
use crate::text::grammar::GrammarRequest;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

/// JSON values in the arguments of all calls of a conversation.
const MAX_ARGUMENT_VALUES: usize = 100_000;
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

#[derive(Default, Deserialize, ToSchema)]
#[serde(default)]
struct ChatFields {
    /// Tokens to generate at most. Default: as many as fit the model.
    #[schema(minimum = 1, maximum = 4294967295_i64)]
    max_tokens: Option<i64>,
    /// The same; goes before max_tokens.
    #[schema(minimum = 1, maximum = 4294967295_i64)]
    max_completion_tokens: Option<i64>,
    /// Log-probabilities of the answer's tokens.
    #[serde(deserialize_with = "null_as_default")]
    #[schema(default = false)]
    logprobs: bool,
    /// With logprobs: each with this many most likely tokens.
    #[schema(minimum = 0, maximum = 20, default = 0)]
    top_logprobs: Option<i64>,
    /// The answer begins with the text of the last message, where it continues that message.
    #[serde(deserialize_with = "null_as_default")]
    #[schema(default = false)]
    echo: bool,
    /// Whether the answer says its reasoning.
    #[schema(default = true)]
    include_reasoning: Option<bool>,
}

/// What the chat template is given; `/tokenize` reads it too.
#[derive(Default, Deserialize, ToSchema)]
#[serde(default)]
pub(in crate::http) struct TemplateFields {
    /// The conversation so far.
    #[schema(value_type = Option<Vec<Message>>, min_items = 1)]
    messages: Option<Vec<Value>>,
    /// Whether the prompt ends with the beginning of an assistant's message. Default: unless continue_final_message.
    add_generation_prompt: Option<bool>,
    /// The answer continues the last message.
    #[serde(deserialize_with = "null_as_default")]
    #[schema(default = false)]
    continue_final_message: bool,
    /// A template instead of the model's own, where the server trusts requests to bring one.
    chat_template: Option<String>,
    /// Whether the tokenizer adds its special tokens to the rendered chat, besides those that the template writes.
    #[serde(deserialize_with = "null_as_default")]
    #[schema(default = false)]
    add_special_tokens: bool,
    /// Texts for templates that know them, each an object with title and text.
    #[schema(value_type = Option<Vec<Object>>)]
    documents: Option<Vec<Map<String, Value>>>,
    /// How much the model is to think, for templates that know reasoning_effort; those that know enable_thinking are
    /// told whether it is to think at all.
    #[schema(value_type = Option<ReasoningEffort>)]
    reasoning_effort: Option<String>,
    /// More variables for the chat template.
    #[serde(deserialize_with = "null_as_default")]
    #[schema(value_type = Object)]
    chat_template_kwargs: Map<String, Value>,
}

/// A message of a conversation. Fields that are not named here reach the chat template as they are.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only described: messages are checked one by one, for errors that say where")]
struct Message {
    role: Role,
    /// A string or text parts. May be left out of an assistant's message that has tool_calls.
    content: Option<Content>,
    /// An assistant's calls, as answers have them.
    #[schema(value_type = Option<Vec<Object>>)]
    tool_calls: Option<Vec<Value>>,
    /// The call that a tool's message answers.
    tool_call_id: Option<String>,
}

/// developer is read as system.
#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "only described, see ROLES")]
enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum Content {
    Text(String),
    Parts(Vec<TextPart>),
}

#[derive(ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(dead_code, reason = "only described")]
enum TextPart {
    Text { text: String },
    Refusal { refusal: String },
}

pub fn describe() -> Operation {
    Operation::new(Tag::Generation, "chat_completions", "Answers a conversation")
        .body("ChatCompletionRequest")
        .fields::<TemplateFields>()
        .fields::<ToolFields>()
        .fields::<ModelField>()
        .fields::<ChatFields>()
        .fields::<SamplingFields>()
        .fields::<MemoryFields>()
        .fields::<StructuredFields>()
        .fields::<AcceptedFields>()
        .fields::<AcceptedChatFields>()
        .requires(&["messages"])
        .answers::<ChatCompletion>("The whole answer, or with stream its parts.")
        .streams::<ChatCompletionChunk>()
        .generates()
}

pub fn parse(body: &Value, model: &ModelInfo) -> Result<Request, ApiError> {
    let shared: SamplingFields = parse_fields(body)?;
    let memory: MemoryFields = parse_fields(body)?;
    let own: ChatFields = parse_fields(body)?;
    parse_fields::<AcceptedFields>(body)?.check()?;
    parse_fields::<AcceptedChatFields>(body)?.check()?;
    let tools = Tools::read(body)?;
    let prompt = chat_prompt(body, &tools, model)?;
    let mut params = shared.params(model)?;
    let mut answer = shared.answer(&params)?;
    answer.kv_block_bytes = memory.usage_block_bytes(model);
    answer.pause_comments = shared.pause_comments(model);
    params.max_tokens = match (own.max_completion_tokens, own.max_tokens) {
        (Some(given), _) => max_tokens("max_completion_tokens", given, 1)?,
        (None, Some(given)) => max_tokens("max_tokens", given, 1)?,
        (None, None) => 0,
    };
    check_min_tokens(&params)?;
    let top_logprobs = num_logprobs("top_logprobs", own.top_logprobs)?;
    if top_logprobs.is_some_and(|k| k > 0) && !own.logprobs {
        return Err(ApiError::invalid("top_logprobs", "top_logprobs is only allowed with logprobs: true"));
    }
    let mut reading = reading(&tools, &prompt, own.include_reasoning.unwrap_or(true), model)?;
    let grammar = grammar(body, &tools, &reading, model)?;
    reading.has_reasoning = grammar.as_ref().is_some_and(|grammar| grammar.starts_after.is_some());
    answer.text.kept_tokens = reading.format.marker_tokens(&model.tokenizer).into();
    answer.named_tool = tools.is_named();
    answer.echo = own.echo;
    answer.logprobs = own.logprobs.then(|| top_logprobs.unwrap_or(0));
    if !reading.include_reasoning && reading.format.reasoning.is_some() {
        // Tokens tell what the text does not.
        (answer.logprobs, answer.return_token_ids) = (None, false);
    }
    answer.chat = Some(reading);
    params.logprobs = answer.logprobs;
    let (n, best_of) = (shared.n()?, shared.best_of()?);
    let stream = shared.stream(memory.include_kv_usage == Some(true))?;
    shared.search(&mut params, &answer)?;
    shared.check_streamed_prompt_logprobs()?;
    Ok(Request {
        endpoint: Endpoint::Chat,
        prompts: vec![Prompt::Chat(prompt)],
        n,
        best_of,
        params,
        ignore_eos: shared.ignore_eos,
        seed: shared.seed(),
        priority: shared.priority()?,
        cache_salt: shared.cache_salt()?,
        terms: memory.terms()?,
        truncation: shared.truncation(model)?,
        grammar,
        answer,
        stream,
    })
}

/// How the answer is to be read.
fn reading(
    tools: &Tools,
    prompt: &ChatPrompt,
    include_reasoning: bool,
    model: &ModelInfo,
) -> Result<ChatReading, ApiError> {
    let reasoning = model.chat_format.reasoning;
    let start = reasoning.filter(|_| prompt.continue_final_message);
    Ok(ChatReading {
        format: ChatFormat { tools: tools.format(model)?, reasoning },
        max_calls: tools.max_calls(),
        start: start.map(|format| ReasoningStart::within(&prompt.last_text(), format)),
        has_reasoning: false,
        include_reasoning,
    })
}

/// What the text has to be: the calls that are demanded, else what the client says of its form; behind the reasoning,
/// if there is any.
fn grammar(
    body: &Value,
    tools: &Tools,
    reading: &ChatReading,
    model: &ModelInfo,
) -> Result<Option<GrammarRequest>, ApiError> {
    let asked = structured::grammar(body)?;
    let calls = match reading.format.tools {
        Some(format) => tools.grammar(format, model)?,
        None => None,
    };
    // The form is that of an answer, and there is to be none yet.
    let mut grammar = calls.or(asked);
    if let (Some(grammar), Some(format)) = (&mut grammar, reading.format.reasoning)
        && reading.start != Some(ReasoningStart::Over)
    {
        grammar.starts_after = Some(format.end().to_owned());
    }
    Ok(grammar)
}

/// The conversation of a body that has `messages`.
pub fn chat_prompt(body: &Value, tools: &Tools, model: &ModelInfo) -> Result<ChatPrompt, ApiError> {
    let fields: TemplateFields = parse_fields(body)?;
    let messages = fields.messages.ok_or_else(|| ApiError::invalid("messages", "messages is required"))?;
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "messages must have at least one message"));
    }
    if fields.continue_final_message && fields.add_generation_prompt == Some(true) {
        return Err(ApiError::invalid(
            "continue_final_message",
            "continue_final_message and add_generation_prompt cannot both be true",
        ));
    }
    if fields.chat_template.is_some() && !model.server.get().trust_request_chat_template {
        let message = "chat_template is not allowed: this server renders no templates of requests \
                       (server.trust_request_chat_template is off)";
        return Err(ApiError::invalid("chat_template", message));
    }
    let mut kwargs = fields.chat_template_kwargs;
    if let Some(documents) = fields.documents {
        kwargs.entry("documents").or_insert(documents.into_iter().map(Value::Object).collect());
    }
    if let Some(effort) = fields.reasoning_effort {
        set_effort(&effort, &mut kwargs)?;
    }
    Ok(ChatPrompt {
        messages: checked_messages(messages)?,
        tools: tools.for_template(),
        add_generation_prompt: fields.add_generation_prompt.unwrap_or(!fields.continue_final_message),
        continue_final_message: fields.continue_final_message,
        add_special_tokens: fields.add_special_tokens,
        kwargs,
        template: fields.chat_template,
    })
}

/// What templates know of an effort, as far as the client has not said it itself.
fn set_effort(effort: &str, kwargs: &mut Map<String, Value>) -> Result<(), ApiError> {
    one_of("reasoning_effort", Some(effort), ReasoningEffort::WORDS)?;
    kwargs.entry("enable_thinking").or_insert((effort != "none").into());
    kwargs.entry("reasoning_effort").or_insert(effort.into());
    Ok(())
}

fn checked_messages(messages: Vec<Value>) -> Result<Vec<Value>, ApiError> {
    // What calls have as arguments is JSON in a string.
    let inner = Inner::new(Bounds { max_values: MAX_ARGUMENT_VALUES, max_prompts: 0 });
    messages.into_iter().enumerate().map(|(i, m)| message(i, m, &inner)).collect()
}

/// A message as the template wants it: a known role, and content that is a string or parts of text. Other fields go
/// through as they are.
fn message(index: usize, message: Value, inner: &Inner) -> Result<Value, ApiError> {
    let param = format!("messages[{index}]");
    let Value::Object(mut message) = message else {
        return Err(ApiError::invalid(&param, format!("{param} must be an object, got {}", shown(&message))));
    };
    let role = match message.get("role").and_then(Value::as_str) {
        Some(role) if ROLES.contains(&role) => role.to_owned(),
        _ => {
            let got = message.get("role").map_or("nothing".into(), shown);
            let param = format!("{param}.role");
            return Err(ApiError::invalid(&param, format!("{param} must be one of {}, got {got}", ROLES.join(", "))));
        }
    };
    if role == "developer" {
        // OpenAI's newer word for it; templates of open models know only the old one.
        message.insert("role".into(), "system".into());
    }
    let has_calls = match message.get_mut("tool_calls") {
        Some(Value::Array(calls)) if role == "assistant" && !calls.is_empty() => {
            for (i, call) in calls.iter_mut().enumerate() {
                tool_call(&format!("{param}.tool_calls[{i}]"), call, inner)?;
            }
            true
        }
        Some(Value::Null | Value::Array(_)) => {
            message.remove("tool_calls");
            false
        }
        Some(other) => {
            let param = format!("{param}.tool_calls");
            return Err(ApiError::invalid(&param, format!("{param} must be an array, got {}", shown(other))));
        }
        None => false,
    };
    // Two names for the same: DeepSeek's, which templates know, and vLLM's.
    if let (None, Some(reasoning)) = (message.get("reasoning_content"), message.get("reasoning").cloned()) {
        message.insert("reasoning_content".into(), reasoning);
    }
    let content = match message.get("content") {
        None | Some(Value::Null) if has_calls => "".into(),
        content => checked_content(&format!("{param}.content"), content.unwrap_or(&Value::Null), role == "tool")?,
    };
    message.insert("content".into(), content);
    Ok(message.into())
}

/// A string, or parts that are all of text. `join`: parts become a string too, for templates show a tool's result as
/// it is.
fn checked_content(param: &str, content: &Value, join: bool) -> Result<Value, ApiError> {
    match content {
        Value::String(text) => Ok(text.as_str().into()),
        Value::Array(parts) => {
            let texts = parts.iter().enumerate().map(|(i, part)| part_text(&format!("{param}[{i}]"), part));
            let texts = texts.collect::<Result<Vec<_>, _>>()?;
            if join {
                return Ok(texts.join("\n").into());
            }
            Ok(texts.into_iter().map(|text| json!({"type": "text", "text": text})).collect())
        }
        other => {
            let message = format!("{param} must be a string or an array of content parts, got {}", shown(other));
            Err(ApiError::invalid(param, message))
        }
    }
}

fn part_text<'a>(param: &str, part: &'a Value) -> Result<&'a str, ApiError> {
    let kind = part.get("type").and_then(Value::as_str);
    let field = match (kind, part) {
        (_, Value::String(text)) => return Ok(text),
        (Some("text"), _) => "text",
        (Some("refusal"), _) => "refusal",
        (Some(kind), _) => {
            let message = format!("{param}: a part of type {kind:?} is not supported, this model reads text only");
            return Err(ApiError::invalid(format!("{param}.type"), message));
        }
        (None, _) => {
            let message = format!("{param} must be an object with a type, got {}", shown(part));
            return Err(ApiError::invalid(param, message));
        }
    };
    part.get(field).and_then(Value::as_str).ok_or_else(|| {
        let param = format!("{param}.{field}");
        ApiError::invalid(&param, format!("{param} must be a string"))
    })
}

/// A call of the history. Clients send its arguments as JSON in a string; templates write them out as JSON, so they want
/// the object. As in vLLM, what is no object becomes an empty one: a model's slip must not end the conversation.
fn tool_call(param: &str, call: &mut Value, inner: &Inner) -> Result<(), ApiError> {
    let wrong = |param: String, expected: &str, got: Option<&Value>| {
        let got = got.map_or("nothing".into(), shown);
        Err(ApiError::invalid(&param, format!("{param} must be {expected}, got {got}")))
    };
    if let Some(kind) = call.get("type").filter(|kind| *kind != "function") {
        return wrong(format!("{param}.type"), "\"function\"", Some(kind));
    }
    let Some(Value::Object(function)) = call.get_mut("function") else {
        return wrong(format!("{param}.function"), "an object", call.get("function"));
    };
    if !function.get("name").is_some_and(Value::is_string) {
        return wrong(format!("{param}.function.name"), "a string", function.get("name"));
    }
    let arguments = match function.get("arguments") {
        Some(Value::Object(arguments)) => arguments.clone(),
        Some(Value::String(text)) => match inner.read(text).map_err(|_| too_many_values(param))? {
            Some(Value::Object(arguments)) => arguments,
            _ => Map::new(),
        },
        None | Some(Value::Null) => Map::new(),
        Some(other) => return wrong(format!("{param}.function.arguments"), "JSON in a string", Some(other)),
    };
    function.insert("arguments".into(), arguments.into());
    Ok(())
}

fn too_many_values(param: &str) -> ApiError {
    let param = format!("{param}.function.arguments");
    let message =
        format!("{param}: the arguments of all calls may have {MAX_ARGUMENT_VALUES} JSON values, and have more");
    ApiError::too_complex(param, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages_of(messages: Value) -> Result<Vec<Value>, ApiError> {
        checked_messages(serde_json::from_value(messages).unwrap())
    }

    #[test]
    fn arguments_of_calls_are_bounded_together() {
        let text = format!("{{\"a\": [{}1]}}", "[1],".repeat(MAX_ARGUMENT_VALUES / 4));
        let call = json!({"type": "function", "function": {"name": "f", "arguments": text}});
        let calls = |num: usize| json!([{"role": "assistant", "tool_calls": vec![call.clone(); num]}]);
        messages_of(calls(1)).unwrap();
        let error = messages_of(calls(3)).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("messages[0].tool_calls[1].function.arguments"), "{error}");
    }

    #[test]
    fn content_is_a_string_or_parts_of_text() {
        let messages = messages_of(json!([
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": ["a", {"type": "text", "text": "b", "more": 1}], "name": "x"},
            {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ]))
        .unwrap();
        assert_eq!(messages[0], json!({"role": "system", "content": "Be brief."}));
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        assert_eq!(messages[1], json!({"role": "user", "content": parts, "name": "x"}));
        assert_eq!(messages[2], json!({"role": "tool", "content": "a\nb"}));
    }

    #[test]
    fn effort_reaches_templates_under_the_names_that_they_know() {
        let kwargs = |effort: &str, given: Value| {
            let mut kwargs: Map<String, Value> = serde_json::from_value(given).unwrap();
            set_effort(effort, &mut kwargs).map(|()| Value::Object(kwargs))
        };
        let high = json!({"enable_thinking": true, "reasoning_effort": "high"});
        assert_eq!(kwargs("high", json!({})).unwrap(), high);
        assert_eq!(kwargs("none", json!({})).unwrap()["enable_thinking"], false);
        assert_eq!(kwargs("none", json!({"enable_thinking": true})).unwrap()["enable_thinking"], true);
        assert_eq!(kwargs("huge", json!({})).unwrap_err().param.as_deref(), Some("reasoning_effort"));
    }

    #[test]
    fn tool_calls_in_the_history_have_their_arguments_as_objects() {
        let call = |arguments: Value| json!([{"type": "function", "function": {"name": "f", "arguments": arguments}}]);
        let with = |arguments: Value| {
            let messages = json!([{"role": "assistant", "tool_calls": call(arguments), "reasoning": "Hm."}]);
            messages_of(messages).unwrap().remove(0)
        };
        let message = with(json!("{\"x\": 1}"));
        assert_eq!(message["tool_calls"], call(json!({"x": 1})));
        assert_eq!((&message["content"], &message["reasoning_content"]), (&json!(""), &json!("Hm.")));
        for given in [json!(null), json!(""), json!("{x"), json!("[1]"), json!({})] {
            assert_eq!(with(given.clone())["tool_calls"], call(json!({})), "{given}");
        }
        let none = messages_of(json!([{"role": "assistant", "content": "a", "tool_calls": []}])).unwrap();
        assert_eq!(none[0], json!({"role": "assistant", "content": "a"}));
    }

    #[test]
    fn a_wrong_message_is_refused_where_it_is_wrong() {
        let calls = |calls: Value| json!([{"role": "assistant", "content": "a", "tool_calls": calls}]);
        for (messages, param) in [
            (json!([7]), "messages[0]"),
            (json!([{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}]), "messages[1].role"),
            (json!([{"content": "a"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "assistant", "content": null}]), "messages[0].content"),
            (json!([{"role": "assistant", "content": null, "tool_calls": []}]), "messages[0].content"),
            (json!([{"role": "user", "content": 5}]), "messages[0].content"),
            (json!([{"role": "user", "content": [{"text": "a"}]}]), "messages[0].content[0]"),
            (json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
            (
                json!([{"role": "user", "content": [{"type": "text", "text": "what is it?"}, {"type": "image_url"}]}]),
                "messages[0].content[1].type",
            ),
            (calls(json!({})), "messages[0].tool_calls"),
            (calls(json!([5])), "messages[0].tool_calls[0].function"),
            (calls(json!([{"type": "custom"}])), "messages[0].tool_calls[0].type"),
            (calls(json!([{"function": {}}])), "messages[0].tool_calls[0].function.name"),
            (
                calls(json!([{"function": {"name": "f", "arguments": 5}}])),
                "messages[0].tool_calls[0].function.arguments",
            ),
        ] {
            let error = messages_of(messages.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{messages}: {error}");
        }
    }
}
