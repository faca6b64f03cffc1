//! What the APIs beside OpenAI's chat have in common: their bodies become a chat request's body, which is then checked
//! and answered as every chat is. Errors of that body are told in the client's own names.

use crate::actors::runtime::{ModelInfo, RuntimeHandle};
use crate::error::ApiError;
use crate::http::openai::{Endpoint, Request, shown};
use crate::metrics;
use serde_json::{Map, Value};

/// Fields with the same name and meaning in a chat request: what OpenAI's APIs share, and vLLM's additions.
pub const SAME_IN_CHAT: &[&str] = &[
    "allowed_token_ids",
    "bad_words",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "frequency_penalty",
    "ignore_eos",
    "include_kv_usage",
    "include_stop_str_in_output",
    "logit_bias",
    "max_pause_ms",
    "min_p",
    "min_tokens",
    "model",
    "pause_comments",
    "preemptible",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop_token_ids",
    "stream",
    "structured_outputs",
    "temperature",
    "top_k",
    "top_p",
    "truncate_prompt_tokens",
    "truncation_side",
];

/// A chat request's body in the making, and how the client calls its fields.
#[derive(Debug, Default)]
pub struct ChatBody {
    fields: Map<String, Value>,
    pub names: FieldNames,
}

impl ChatBody {
    /// Takes over what has the same name in both.
    pub fn new(client: &Value) -> Self {
        let mut chat = Self::default();
        SAME_IN_CHAT.iter().for_each(|name| chat.copy(client, name));
        chat
    }

    pub fn copy(&mut self, client: &Value, name: &str) {
        if let Some(value) = client.get(name).filter(|value| !value.is_null()) {
            self.fields.insert(name.to_owned(), value.clone());
        }
    }

    pub fn set(&mut self, name: &str, value: impl Into<Value>) {
        self.fields.insert(name.to_owned(), value.into());
    }

    /// Sets a field that the client calls by the path `own`.
    pub fn set_named(&mut self, name: &str, own: &str, value: impl Into<Value>) {
        self.set(name, value);
        self.names.name(name, own);
    }

    /// A variable of the chat template, where the client has not set it itself.
    pub fn set_template_kwarg(&mut self, name: &str, value: impl Into<Value>) {
        let kwargs = self.fields.entry("chat_template_kwargs").or_insert_with(|| Map::new().into());
        // Something other than an object is refused when the body is parsed.
        if let Value::Object(kwargs) = kwargs {
            kwargs.entry(name).or_insert_with(|| value.into());
        }
    }

    /// The checked request.
    pub fn parse(self, model: &ModelInfo) -> Result<(Request, FieldNames), ApiError> {
        match Request::parse(Endpoint::Chat, &Value::Object(self.fields), model) {
            Ok(request) => Ok((request, self.names)),
            Err(error) => Err(self.names.in_clients_words(error)),
        }
    }
}

/// Counts a request that is refused before it is submitted.
pub fn count_refused<T>(parsed: Result<T, ApiError>, handle: &RuntimeHandle) -> Result<T, ApiError> {
    parsed.inspect_err(|_| metrics::request_rejected(metrics::Rejection::Invalid, handle.tenant()))
}

/// For paths of a chat request's body, those of the client's.
#[derive(Debug, Default)]
pub struct FieldNames {
    /// A path of the chat request, and what stands in the client's body in its place. What lies below goes with it.
    pairs: Vec<(String, String)>,
}

impl FieldNames {
    pub fn name(&mut self, chat: impl Into<String>, own: impl Into<String>) {
        self.pairs.push((chat.into(), own.into()));
    }

    /// An error of the chat request as one of the client's.
    pub fn in_clients_words(&self, mut error: ApiError) -> ApiError {
        if let Some(param) = error.param.take() {
            error.message = self.rewrite(&error.message, &param);
            error.param = Some(self.rewrite(&param, &param));
        }
        error
    }

    /// `text` with the client's paths. One-word names ("stop", "tools") are taken for paths only where `param` lies
    /// below them: elsewhere they may be words of a sentence.
    fn rewrite(&self, text: &str, param: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        while !rest.is_empty() {
            let begins = out.chars().next_back().is_none_or(|c| !is_name(c) && c != '.' && c != ']');
            let matching = self.pairs.iter().filter(|(chat, _)| {
                begins
                    && starts_with_path(rest, chat)
                    && (chat.contains(['_', '.', '[']) || starts_with_path(param, chat))
            });
            if let Some((chat, own)) = matching.max_by_key(|(chat, _)| chat.len()) {
                out.push_str(own);
                rest = &rest[chat.len()..];
            } else {
                let mut chars = rest.chars();
                out.extend(chars.next());
                rest = chars.as_str();
            }
        }
        out
    }
}

/// Whether `text` begins with `path` and not just with another name's first letters.
fn starts_with_path(text: &str, path: &str) -> bool {
    let rest = text.strip_prefix(path);
    rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_'))
}

pub fn object<'a>(path: &str, value: &'a Value) -> Result<&'a Map<String, Value>, ApiError> {
    value.as_object().ok_or_else(|| wrong_type(path, "an object", Some(value)))
}

pub fn string<'a>(path: &str, object: &'a Map<String, Value>, field: &str) -> Result<&'a str, ApiError> {
    let value = object.get(field);
    value.and_then(Value::as_str).ok_or_else(|| wrong_type(&format!("{path}.{field}"), "a string", value))
}

/// `None` also for null.
pub fn optional_string<'a>(
    path: &str,
    object: &'a Map<String, Value>,
    field: &str,
) -> Result<Option<&'a str>, ApiError> {
    match object.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(_) => string(path, object, field).map(Some),
    }
}

pub fn wrong_type(path: &str, wanted: &str, got: Option<&Value>) -> ApiError {
    match got {
        None => ApiError::invalid(path, format!("{path} is required")),
        Some(value) => ApiError::invalid(path, format!("{path} must be {wanted}, got {}", shown(value))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_told_in_the_clients_names() {
        let mut names = FieldNames::default();
        for (chat, own) in [
            ("messages", "input"),
            ("messages[1]", "input[0]"),
            ("messages[1].tool_calls[0].function", "input[3]"),
            ("max_tokens", "max_output_tokens"),
            ("stop", "stop_sequences"),
        ] {
            names.name(chat, own);
        }
        for (param, message, own_param, own_message) in [
            ("messages[1].content", "messages[1].content must be", "input[0].content", "input[0].content must be"),
            ("messages[1].tool_calls[0].function.name", "no name", "input[3].name", "no name"),
            ("messages", "messages is required", "input", "input is required"),
            ("max_tokens", "max_tokens must be 1", "max_output_tokens", "max_output_tokens must be 1"),
            // A name within another, and one that is also a word.
            ("min_tokens", "at most max_tokens (3), stop", "min_tokens", "at most max_output_tokens (3), stop"),
            ("max_tokens_x", "max_tokens_x stop", "max_tokens_x", "max_tokens_x stop"),
            ("stop[0]", "stop[0] must be", "stop_sequences[0]", "stop_sequences[0] must be"),
            ("top_p", "top_p must not stop é", "top_p", "top_p must not stop é"),
        ] {
            let error = names.in_clients_words(ApiError::invalid(param, message));
            assert_eq!((error.param.as_deref(), error.message.as_str()), (Some(own_param), own_message));
        }
    }
}
