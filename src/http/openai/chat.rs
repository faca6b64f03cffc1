//! `POST /v1/chat/completions`.

use super::sampling::{SamplingFields, check_min_tokens, max_tokens, num_logprobs};
use super::{Endpoint, Request, null_as_default, parse_fields, shown, structured};
use crate::actors::messages::{ChatPrompt, Prompt};
use crate::actors::runtime::ModelInfo;
use crate::error::ApiError;
use serde::Deserialize;
use serde_json::{Map, Value};

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

#[derive(Default, Deserialize)]
#[serde(default)]
struct ChatFields {
    max_completion_tokens: Option<i64>,
    #[serde(deserialize_with = "null_as_default")]
    logprobs: bool,
    top_logprobs: Option<i64>,
}

/// What the chat template is given; `/tokenize` reads it too.
#[derive(Default, Deserialize)]
#[serde(default)]
struct TemplateFields {
    messages: Option<Vec<Value>>,
    tools: Option<Vec<Value>>,
    add_generation_prompt: Option<bool>,
    #[serde(deserialize_with = "null_as_default")]
    continue_final_message: bool,
    #[serde(deserialize_with = "null_as_default")]
    chat_template_kwargs: Map<String, Value>,
}

pub fn parse(body: &Value, model: &ModelInfo) -> Result<Request, ApiError> {
    let shared: SamplingFields = parse_fields(body)?;
    let own: ChatFields = parse_fields(body)?;
    let prompt = chat_prompt(body)?;
    let mut params = shared.params(model)?;
    let mut answer = shared.answer(&params)?;
    params.max_tokens = match (own.max_completion_tokens, shared.max_tokens) {
        (Some(given), _) => max_tokens("max_completion_tokens", given, 1)?,
        (None, Some(given)) => max_tokens("max_tokens", given, 1)?,
        (None, None) => 0,
    };
    check_min_tokens(&params)?;
    let top_logprobs = num_logprobs("top_logprobs", own.top_logprobs)?;
    if top_logprobs.is_some_and(|k| k > 0) && !own.logprobs {
        return Err(ApiError::invalid("top_logprobs", "top_logprobs is only allowed with logprobs: true"));
    }
    answer.chat = true;
    answer.logprobs = own.logprobs.then(|| top_logprobs.unwrap_or(0));
    params.logprobs = answer.logprobs;
    let (n, best_of) = (shared.n()?, shared.best_of()?);
    let stream = shared.stream()?;
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
        grammar: structured::grammar(body)?,
        answer,
        stream,
    })
}

/// The conversation of a body that has `messages`.
pub fn chat_prompt(body: &Value) -> Result<ChatPrompt, ApiError> {
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
    Ok(ChatPrompt {
        messages: messages.into_iter().enumerate().map(|(i, m)| message(i, m)).collect::<Result<_, _>>()?,
        tools: fields.tools.filter(|tools| !tools.is_empty()).map(Value::Array),
        add_generation_prompt: fields.add_generation_prompt.unwrap_or(!fields.continue_final_message),
        continue_final_message: fields.continue_final_message,
        kwargs: fields.chat_template_kwargs,
    })
}

/// A message as the template wants it: a known role and content of one string. Other fields go through as they are.
fn message(index: usize, message: Value) -> Result<Value, ApiError> {
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
    if let Some(Value::Array(calls)) = message.get_mut("tool_calls") {
        calls.iter_mut().for_each(parse_arguments);
    }
    let has_tool_calls = message.get("tool_calls").is_some_and(Value::is_array);
    match message.get("content") {
        None | Some(Value::Null) if role == "assistant" && has_tool_calls => {}
        content => {
            let text = content_text(&format!("{param}.content"), content.unwrap_or(&Value::Null))?;
            message.insert("content".into(), text.into());
        }
    }
    Ok(message.into())
}

/// The text of `content`: a string, or text parts, one a line.
fn content_text(param: &str, content: &Value) -> Result<String, ApiError> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => {
            let texts = parts.iter().enumerate().map(|(i, part)| part_text(&format!("{param}[{i}]"), part));
            Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
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

/// Clients send a call's arguments as JSON in a string; templates write them out as JSON, so they want the object.
fn parse_arguments(call: &mut Value) {
    if let Some(arguments) = call.pointer_mut("/function/arguments")
        && let Some(Ok(object)) = arguments.as_str().map(serde_json::from_str::<Map<String, Value>>)
    {
        *arguments = object.into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn prompt_of(messages: Value) -> Result<ChatPrompt, ApiError> {
        chat_prompt(&json!({ "messages": messages }))
    }

    #[test]
    fn content_becomes_one_string() {
        let prompt = prompt_of(json!([
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
        ]))
        .unwrap();
        assert_eq!(prompt.messages[0], json!({"role": "system", "content": "Be brief."}));
        assert_eq!(prompt.messages[1], json!({"role": "user", "content": "a\nb", "name": "x"}));
        assert!(prompt.add_generation_prompt);
    }

    #[test]
    fn tool_calls_in_the_history_have_their_arguments_as_objects() {
        let call = |arguments: Value| json!([{"type": "function", "function": {"name": "f", "arguments": arguments}}]);
        let prompt = prompt_of(json!([
            {"role": "assistant", "tool_calls": call(json!("{\"x\": 1}"))},
            {"role": "tool", "content": "2", "tool_call_id": "c"},
        ]))
        .unwrap();
        assert_eq!(prompt.messages[0]["tool_calls"], call(json!({"x": 1})));
    }

    #[test]
    fn a_wrong_message_is_refused_where_it_is_wrong() {
        for (messages, param) in [
            (json!(null), "messages"),
            (json!([]), "messages"),
            (json!("hello"), "messages"),
            (json!([7]), "messages[0]"),
            (json!([{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}]), "messages[1].role"),
            (json!([{"content": "a"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "assistant", "content": null}]), "messages[0].content"),
            (json!([{"role": "user", "content": 5}]), "messages[0].content"),
            (json!([{"role": "user", "content": [{"text": "a"}]}]), "messages[0].content[0]"),
            (json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
            (
                json!([{"role": "user", "content": [{"type": "text", "text": "what is it?"}, {"type": "image_url"}]}]),
                "messages[0].content[1].type",
            ),
        ] {
            let error = prompt_of(messages.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{messages}: {error}");
        }
    }

    #[test]
    fn continuing_a_message_excludes_the_generation_prompt() {
        let messages = json!([{"role": "assistant", "content": "Once"}]);
        let body = json!({"messages": messages, "continue_final_message": true});
        let prompt = chat_prompt(&body).unwrap();
        assert!(prompt.continue_final_message && !prompt.add_generation_prompt);
        let body = json!({"messages": messages, "continue_final_message": true, "add_generation_prompt": true});
        assert_eq!(chat_prompt(&body).unwrap_err().param.as_deref(), Some("continue_final_message"));
    }
}
