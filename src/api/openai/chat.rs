//! `POST /v1/chat/completions`.

use super::accepted::{AcceptedChatFields, AcceptedFields};
use super::tools::ToolFields;
use crate::body::refused::Refused;
use crate::body::{ParsedBody, body, body_fields};
use crate::chat::messages::CallArguments;
use crate::chat::{Chat, TemplateFields};
use crate::checks::{in_range, shortened, shown, wrong_type};
use crate::fields::llama_cpp::{LlamaCppFields, NativeShapeFields, TelemetryFields};
use crate::fields::memory::MemoryFields;
use crate::fields::model::ModelField;
use crate::fields::request_id::RequestIdFields;
use crate::fields::sampling::{SamplingFields, max_tokens, num_logprobs};
use crate::fields::structured::StructuredFields;
use crate::fields::unsupported::UnsupportedFields;
use crate::model_info::ModelInfo;
use crate::openapi::answers::{ChatCompletion, ChatCompletionChunk};
use crate::openapi::{Operation, Tag};
use crate::request::{ApiRequest, FieldNames};
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_text::chat_output::ReasoningPlace;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

const MAX_ROLE_CHARS: usize = 64;

body_fields! {
    struct ChatFields {
        /// Tokens to generate at most. Default: as many as fit the model.
        #[schema(minimum = 1, maximum = 4294967295_i64)]
        max_tokens: Option<i64>,
        /// The same; goes before max_tokens.
        #[schema(minimum = 1, maximum = 4294967295_i64)]
        max_completion_tokens: Option<i64>,
        /// Log-probabilities of the answer's tokens.
        #[schema(default = false)]
        logprobs: bool,
        /// With logprobs: each with this many most likely tokens. More than 20, and -1 for all tokens, where
        /// server.max_logprobs lets it.
        #[schema(minimum = 0, maximum = 20, default = 0)]
        top_logprobs: Option<i64>,
        /// The answer begins with the text of the last message, where it continues that message.
        #[schema(default = false)]
        echo: bool,
        /// Tokens of reasoning at most: then the mark of its end follows. For models whose reasoning is told apart.
        #[schema(minimum = 0, maximum = 4294967295_i64)]
        thinking_token_budget: Option<i64>,
        /// prompt_token_ids: the tokens that another server has made of the messages, for a prompt of just these. Other
        /// parameters of a transfer are refused.
        #[schema(value_type = Option<Object>)]
        kv_transfer_params: Option<Map<String, Value>>,
        /// Whether the answer says its reasoning.
        #[schema(default = true)]
        include_reasoning: Option<bool>,
        /// SGLang's: whether the reasoning is a field of its own. false: it is in the content, with its tags.
        #[schema(default = true)]
        separate_reasoning: Option<bool>,
        /// SGLang's: whether a stream says the reasoning as it comes. false: in one piece, when it is complete.
        #[schema(default = true)]
        stream_reasoning: Option<bool>,
    }
}

body_fields! {
    pub struct MessagesField {
        /// The conversation so far.
        #[schema(value_type = Option<Vec<Message>>, min_items = 1)]
        pub messages: Option<Vec<Value>>,
    }
}

body! {
    /// The body of a chat completion.
    pub struct ChatBody {
        messages: MessagesField,
        model: ModelField,
        own: ChatFields,
        sampling: SamplingFields,
        template: TemplateFields,
        tools: ToolFields,
        memory: MemoryFields,
        structured: StructuredFields,
        request_id: RequestIdFields,
        llama_cpp: LlamaCppFields,
        telemetry: TelemetryFields,
        native_shape: NativeShapeFields,
        accepted: AcceptedFields,
        accepted_in_chats: AcceptedChatFields,
        refused: Refused<UnsupportedFields>,
    }
}

/// A message of a conversation. Fields that are not named here reach the chat template as they are.
#[derive(ToSchema)]
#[allow(dead_code, reason = "only described: messages are checked one by one, for errors that say where")]
struct Message {
    /// system, developer (read as system), user, assistant or tool. The chat template may know others.
    #[schema(min_length = 1, max_length = 64)]
    role: String,
    /// A string or text parts. May be left out of an assistant's message that has tool_calls.
    content: Option<Content>,
    /// An assistant's calls, as answers have them.
    #[schema(value_type = Option<Vec<Object>>)]
    tool_calls: Option<Vec<Value>>,
    /// The call that a tool's message answers.
    tool_call_id: Option<String>,
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
    let operation =
        Operation::new(Tag::Generation, "chat_completions", "Answers a conversation").body("ChatCompletionRequest");
    describe_fields(operation)
        .answers::<ChatCompletion>("The whole answer, or with stream its parts.")
        .streams::<ChatCompletionChunk>()
        .generates()
}

/// The operation with all fields of a chat.
pub fn describe_fields(operation: Operation) -> Operation {
    operation
        .fields::<MessagesField>()
        .fields::<TemplateFields>()
        .fields::<ToolFields>()
        .fields::<ModelField>()
        .fields::<ChatFields>()
        .fields::<SamplingFields>()
        .fields::<MemoryFields>()
        .fields::<StructuredFields>()
        .fields::<RequestIdFields>()
        .fields::<LlamaCppFields>()
        .fields::<TelemetryFields>()
        .fields::<NativeShapeFields>()
        .fields::<AcceptedFields>()
        .fields::<AcceptedChatFields>()
        .requires(&["messages"])
}

body_fields! {
    struct ConversationsField {
        /// The conversations, each an array of messages.
        #[schema(value_type = Option<Vec<Vec<Message>>>, min_items = 1)]
        messages: Option<Vec<Value>>,
    }
}

body! {
    /// The body of vLLM's batch of chats.
    pub struct BatchBody {
        conversations: ConversationsField,
        chat: ChatBody,
    }
}

pub fn describe_batch() -> Operation {
    let operation = Operation::new(Tag::Generation, "chat_completions_batch", "Answers several conversations at once")
        .about("The answer has a choice for each conversation, in their order. There is no stream.")
        .body("ChatCompletionBatchRequest")
        .fields::<ConversationsField>();
    describe_fields(operation).answers::<ChatCompletion>("The answers.").generates()
}

pub fn parse(body: ParsedBody<ChatBody>, model: &ModelInfo) -> Result<ApiRequest, ApiError> {
    parse_for(body, true, model)
}

/// [`parse`] for the prompt alone. There is no answer, so it does not matter whether calls in it could be read.
pub fn parse_prompt(body: ParsedBody<ChatBody>, model: &ModelInfo) -> Result<ApiRequest, ApiError> {
    parse_for(body, false, model)
}

fn parse_for(
    ParsedBody { body, problems }: ParsedBody<ChatBody>,
    reads_answer: bool,
    model: &ModelInfo,
) -> Result<ApiRequest, ApiError> {
    problems.check_object()?;
    body.model.check(&problems, model)?;
    body.refused.check()?;
    problems.check()?;
    let mut body = body;
    let messages = checked_messages(std::mem::take(&mut body.messages).given()?)?;
    if model.speaks_llama_cpp() {
        continue_assistant(&messages, &mut body.template)?;
    }
    request(body, messages, Vec::new(), reads_answer, model)
}

/// As in llama.cpp: the answer goes on from a last message of the assistant, whether or not the client says so.
fn continue_assistant(messages: &[Value], template: &mut TemplateFields) -> Result<(), ApiError> {
    let is_assistants = |message: &&Value| message["role"] == "assistant";
    let num_last = messages.iter().rev().take_while(is_assistants).count();
    if template.continue_final_message || num_last == 0 {
        return Ok(());
    }
    let param = format!("messages[{}]", messages.len() - 1);
    if num_last > 1 {
        let message = format!("{param}: a conversation must not end with 2 or more messages of the assistant");
        return Err(ApiError::invalid(param, message));
    }
    if messages.last().is_some_and(|last| last.get("tool_calls").is_some()) {
        let message = format!("{param}: a message with tool_calls cannot be continued; add the results of the tools");
        return Err(ApiError::invalid(param, message));
    }
    template.continue_final_message = true;
    template.add_generation_prompt = None;
    Ok(())
}

/// A request with a prompt for each conversation.
pub fn parse_batch(
    ParsedBody { body, problems }: ParsedBody<BatchBody>,
    model: &ModelInfo,
) -> Result<ApiRequest, ApiError> {
    problems.check_object()?;
    let BatchBody { conversations, chat } = body;
    chat.model.check(&problems, model)?;
    chat.refused.check()?;
    problems.check()?;
    if chat.sampling.stream {
        return Err(ApiError::invalid("stream", "stream is not supported for a batch"));
    }
    let conversations = conversations.messages.filter(|conversations| !conversations.is_empty());
    let conversations = conversations
        .ok_or_else(|| ApiError::invalid("messages", "messages must be an array of at least one conversation"))?;
    let checked = conversations.into_iter().enumerate().map(|(i, conversation)| {
        let param = format!("messages[{i}]");
        match conversation {
            Value::Array(messages) if !messages.is_empty() => checked_messages(messages).map_err(|error| {
                let inner = error.param.as_deref().and_then(|inner| inner.strip_prefix("messages"));
                let inner = inner.map(|inner| format!("{param}{inner}"));
                ApiError { param: inner.or(error.param.clone()), ..error }
            }),
            other => {
                let message = format!("{param} must be an array of at least one message, got {}", shown(&other));
                Err(ApiError::invalid(param, message))
            }
        }
    });
    let mut checked = checked.collect::<Result<Vec<_>, _>>()?;
    let first = checked.remove(0);
    request(chat, first, checked, true, model)
}

/// `messages` and `others`: checked.
fn request(
    body: ChatBody,
    messages: Vec<Value>,
    others: Vec<Vec<Value>>,
    reads_answer: bool,
    model: &ModelInfo,
) -> Result<ApiRequest, ApiError> {
    let ChatBody { own, mut sampling, template, tools, memory, structured, llama_cpp, telemetry, request_id, .. } =
        body;
    llama_cpp.check()?;
    sampling.n = llama_cpp.n_cmpl.or(sampling.n);
    body.accepted.check()?;
    body.accepted_in_chats.check()?;
    let mut tools = tools.check()?;
    if !reads_answer {
        tools.read_no_calls();
    }
    let (name, given) = match (own.max_completion_tokens, own.max_tokens) {
        (Some(given), _) => ("max_completion_tokens", Some(given)),
        (None, Some(given)) => ("max_tokens", Some(given)),
        // -1 is as many as fit.
        (None, None) => ("n_predict", llama_cpp.max_tokens()?.flatten().map(i64::from)),
    };
    let max_tokens = given.map(|given| max_tokens(name, given, 1)).transpose()?;
    let num_probs = llama_cpp.num_probs(model)?;
    let top_logprobs = num_logprobs("top_logprobs", own.top_logprobs, model)?;
    if top_logprobs.is_some_and(|k| k > 0) && !own.logprobs {
        return Err(ApiError::invalid("top_logprobs", "top_logprobs is only allowed with logprobs: true"));
    }
    let thinking_budget = own.thinking_token_budget.map(|given| thinking_budget(given, model)).transpose()?;
    let chat = Chat {
        prompt_tokens: prompt_tokens(own.kv_transfer_params.as_ref(), !others.is_empty(), model)?,
        thinking_budget,
        template: template.check("reasoning_effort", model)?,
        messages,
        tools,
        max_tokens,
        logprobs: own.logprobs.then(|| top_logprobs.unwrap_or(0)).or(num_probs),
        grammar: structured.check(&sampling)?,
        echo: own.echo,
        reasoning_place: own.reasoning_place(),
        sampling,
        memory,
        names: FieldNames::CHAT,
    };
    let mut request = request_id.name(chat.into_batch(others, model)?)?;
    llama_cpp.apply(&mut request, model)?;
    telemetry.apply(&mut request, model);
    Ok(request)
}

impl ChatFields {
    fn reasoning_place(&self) -> ReasoningPlace {
        let is_on = |field: Option<bool>| field.unwrap_or(true);
        match (is_on(self.include_reasoning), is_on(self.separate_reasoning), is_on(self.stream_reasoning)) {
            (false, _, _) => ReasoningPlace::Nowhere,
            (true, false, _) => ReasoningPlace::Content,
            (true, true, false) => ReasoningPlace::ApartAtOnce,
            (true, true, true) => ReasoningPlace::Apart,
        }
    }
}

/// The tokens of vLLM's kv_transfer_params. `is_batch`: there are several conversations.
fn prompt_tokens(
    params: Option<&Map<String, Value>>,
    is_batch: bool,
    model: &ModelInfo,
) -> Result<Option<Vec<TokenId>>, ApiError> {
    const PARAM: &str = "kv_transfer_params.prompt_token_ids";
    let is_given = |(name, value): &(&String, &Value)| name != &"prompt_token_ids" && !is_nothing(value);
    if let Some((name, _)) = params.into_iter().flatten().find(is_given) {
        let param = format!("kv_transfer_params.{}", shortened(name));
        let message = format!("{param} is not supported; this server computes prefill and decode itself");
        return Err(ApiError::invalid(param, message));
    }
    let ids = match params.and_then(|params| params.get("prompt_token_ids")) {
        None | Some(Value::Null) => return Ok(None),
        Some(_) if is_batch => {
            return Err(ApiError::invalid(PARAM, format!("{PARAM} is not available for several conversations")));
        }
        Some(Value::Array(ids)) if !ids.is_empty() => ids,
        other => return Err(wrong_type(PARAM, "an array of at least one token id", other)),
    };
    let most = i64::from(model.vocab_size) - 1;
    let token = |(i, id): (usize, &Value)| {
        let id = id.as_i64().filter(|id| (0..=most).contains(id));
        let param = format!("{PARAM}[{i}]");
        let message = format!("{param} must be a token id in [0, {most}]");
        id.map(|id| id as TokenId).ok_or_else(|| ApiError::invalid(param, message))
    };
    ids.iter().enumerate().map(token).collect::<Result<_, _>>().map(Some)
}

/// A value that asks for nothing.
fn is_nothing(value: &Value) -> bool {
    matches!(value, Value::Null | Value::Bool(false))
}

/// vLLM's thinking_token_budget.
fn thinking_budget(given: i64, model: &ModelInfo) -> Result<(u32, &'static str), ApiError> {
    const PARAM: &str = "thinking_token_budget";
    if model.chat_format.reasoning.is_none() {
        let message = "thinking_token_budget is only available where the reasoning of the model is told apart \
                       (model.reasoning_parser)";
        return Err(ApiError::invalid(PARAM, message));
    }
    Ok((in_range(PARAM, given, 0..=i64::from(u32::MAX))? as u32, PARAM))
}

impl MessagesField {
    /// At least one message.
    pub fn given(self) -> Result<Vec<Value>, ApiError> {
        let messages = self.messages.ok_or_else(|| ApiError::invalid("messages", "messages is required"))?;
        if messages.is_empty() {
            return Err(ApiError::invalid("messages", "messages must have at least one message"));
        }
        Ok(messages)
    }
}

/// The messages as the template wants them.
pub fn checked_messages(messages: Vec<Value>) -> Result<Vec<Value>, ApiError> {
    let arguments = CallArguments::default();
    messages.into_iter().enumerate().map(|(i, m)| message(i, m, &arguments)).collect()
}

/// A message as the template wants it: a role, and content that is a string or parts of text. Other fields go
/// through as they are.
fn message(index: usize, message: Value, call_arguments: &CallArguments) -> Result<Value, ApiError> {
    let param = format!("messages[{index}]");
    let Value::Object(mut message) = message else {
        return Err(ApiError::invalid(&param, format!("{param} must be an object, got {}", shown(&message))));
    };
    let role = match message.get("role").and_then(Value::as_str) {
        // Some models have roles of their own, such as ipython or document: the template decides what it makes of them.
        Some(role) if (1..=MAX_ROLE_CHARS).contains(&role.chars().count()) => role.to_owned(),
        _ => {
            let got = message.get("role").map_or("nothing".into(), shown);
            let param = format!("{param}.role");
            let message = format!("{param} must be a string of 1 to {MAX_ROLE_CHARS} characters, got {got}");
            return Err(ApiError::invalid(&param, message));
        }
    };
    if role == "developer" {
        // OpenAI's newer word for it; templates of open models know only the old one.
        message.insert("role".into(), "system".into());
    }
    let has_calls = match message.get_mut("tool_calls") {
        Some(Value::Array(calls)) if role == "assistant" && !calls.is_empty() => {
            for (i, call) in calls.iter_mut().enumerate() {
                tool_call(&format!("{param}.tool_calls[{i}]"), call, call_arguments)?;
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
    let given = message.get_mut("content").map_or(Value::Null, Value::take);
    let content = match given {
        Value::Null if has_calls => "".into(),
        given => checked_content(&format!("{param}.content"), given, role == "tool")?,
    };
    message.insert("content".into(), content);
    Ok(message.into())
}

/// A string, or parts that are all of text. `join`: parts become a string too, for templates show a tool's result as
/// it is.
fn checked_content(param: &str, content: Value, join: bool) -> Result<Value, ApiError> {
    match content {
        Value::String(_) => Ok(content),
        Value::Array(parts) => {
            let texts = parts.iter().enumerate().map(|(i, part)| part_text(&format!("{param}[{i}]"), part));
            let texts = texts.collect::<Result<Vec<_>, _>>()?;
            if join {
                return Ok(texts.join("\n").into());
            }
            Ok(texts.into_iter().map(|text| json!({"type": "text", "text": text})).collect())
        }
        other => {
            let message = format!("{param} must be a string or an array of content parts, got {}", shown(&other));
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

/// A call of the history.
fn tool_call(param: &str, call: &mut Value, call_arguments: &CallArguments) -> Result<(), ApiError> {
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
        Some(Value::String(text)) => call_arguments.read(&format!("{param}.function.arguments"), text)?,
        None | Some(Value::Null) => Map::new(),
        Some(other) => return wrong(format!("{param}.function.arguments"), "JSON in a string", Some(other)),
    };
    function.insert("arguments".into(), arguments.into());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::messages::MAX_ARGUMENT_VALUES;

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
            {"role": "ipython", "content": [{"type": "text", "text": "5"}]},
            {"role": "user", "content": ["a", {"type": "text", "text": "b", "more": 1}], "name": "x"},
            {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ]))
        .unwrap();
        assert_eq!(messages[0], json!({"role": "system", "content": "Be brief."}));
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        assert_eq!(messages[1], json!({"role": "ipython", "content": [{"type": "text", "text": "5"}]}));
        assert_eq!(messages[2], json!({"role": "user", "content": parts, "name": "x"}));
        assert_eq!(messages[3], json!({"role": "tool", "content": "a\nb"}));
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
            (json!([{"role": "user", "content": "a"}, {"role": "", "content": "b"}]), "messages[1].role"),
            (json!([{"role": "r".repeat(65), "content": "a"}]), "messages[0].role"),
            (json!([{"role": 5, "content": "a"}]), "messages[0].role"),
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
