//! Ollama's messages as the messages that chat templates know.

use crate::chat::messages::CallArguments;
use crate::checks::{object, optional_string, shown, string, wrong_type};
use pagetide_base::error::ApiError;
use serde_json::{Map, Value, json};

const ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];

/// The messages as the template is given them. True where the last one is the beginning of the answer.
pub fn messages(given: Vec<Value>) -> Result<(Vec<Value>, bool), ApiError> {
    let arguments = CallArguments::default();
    let mut continues = false;
    let mut written = Vec::with_capacity(given.len());
    for (i, given) in given.into_iter().enumerate() {
        let path = format!("messages[{i}]");
        let message = message(&path, object(&path, &given)?, &arguments)?;
        continues = message["role"] == "assistant" && message.get("tool_calls").is_none();
        written.push(message);
    }
    Ok((written, continues))
}

fn message(path: &str, given: &Map<String, Value>, arguments: &CallArguments) -> Result<Value, ApiError> {
    let role = string(path, given, "role")?.to_lowercase();
    if !ROLES.contains(&role.as_str()) {
        let message = format!("{path}.role must be one of {}, got {}", ROLES.join(", "), shown(&role.into()));
        return Err(ApiError::invalid(format!("{path}.role"), message));
    }
    check_no_images(&format!("{path}.images"), given.get("images"))?;
    let content = optional_string(path, given, "content")?.unwrap_or_default();
    let mut message = json!({"role": role, "content": content});
    if let Some(thinking) = optional_string(path, given, "thinking")?.filter(|text| !text.is_empty()) {
        message["reasoning_content"] = thinking.into();
    }
    for (field, written) in [("tool_name", "name"), ("tool_call_id", "tool_call_id")] {
        if let Some(text) = optional_string(path, given, field)? {
            message[written] = text.into();
        }
    }
    match given.get("tool_calls") {
        None | Some(Value::Null) => {}
        Some(Value::Array(calls)) => {
            let calls = calls.iter().enumerate().map(|(i, call)| {
                let path = format!("{path}.tool_calls[{i}]");
                tool_call(&path, object(&path, call)?, arguments)
            });
            let calls = calls.collect::<Result<Vec<_>, ApiError>>()?;
            if !calls.is_empty() {
                message["tool_calls"] = calls.into();
            }
        }
        other => return Err(wrong_type(&format!("{path}.tool_calls"), "an array", other)),
    }
    Ok(message)
}

fn tool_call(path: &str, call: &Map<String, Value>, arguments: &CallArguments) -> Result<Value, ApiError> {
    let path_of_function = format!("{path}.function");
    let function = call.get("function").ok_or_else(|| wrong_type(&path_of_function, "an object", None))?;
    let function = object(&path_of_function, function)?;
    let name = string(&path_of_function, function, "name")?;
    let param = format!("{path_of_function}.arguments");
    let given = match function.get("arguments") {
        None | Some(Value::Null) => Map::new(),
        Some(given) => object(&param, given)?.clone(),
    };
    arguments.count(&param, &given)?;
    let mut written = json!({"type": "function", "function": {"name": name, "arguments": given}});
    if let Some(id) = optional_string(path, call, "id")? {
        written["id"] = id.into();
    }
    Ok(written)
}

/// Refuses images; null and an empty array ask for nothing.
fn check_no_images(path: &str, images: Option<&Value>) -> Result<(), ApiError> {
    match images {
        None | Some(Value::Null) => Ok(()),
        Some(Value::Array(images)) if images.is_empty() => Ok(()),
        Some(_) => Err(ApiError::invalid(path, format!("{path} is not supported, this model reads text only"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(given: Value) -> Result<(Value, bool), ApiError> {
        let Value::Array(given) = given else { unreachable!("the tests give arrays") };
        messages(given).map(|(written, continues)| (written.into(), continues))
    }

    #[test]
    fn messages_are_written_for_templates() {
        let given = json!([
            {"role": "User", "content": "How warm is it?", "images": []},
            {"role": "assistant", "content": "", "thinking": "hm",
             "tool_calls": [{"id": "c", "function": {"index": 0, "name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "tool_name": "f", "tool_call_id": "c", "content": "20"},
            {"role": "assistant", "content": null, "tool_calls": []},
        ]);
        let expected = json!([
            {"role": "user", "content": "How warm is it?"},
            {"role": "assistant", "content": "", "reasoning_content": "hm",
             "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}, "id": "c"}]},
            {"role": "tool", "content": "20", "name": "f", "tool_call_id": "c"},
            {"role": "assistant", "content": ""},
        ]);
        assert_eq!(read(given.clone()).unwrap(), (expected, true));
        let before_the_last = Value::from(given.as_array().unwrap()[..2].to_vec());
        assert!(!read(before_the_last).unwrap().1, "an answer does not go on from calls");
    }

    #[test]
    fn a_wrong_message_is_refused_where_it_is_wrong() {
        let user = |more: Value| {
            let mut message = json!({"role": "user", "content": "a"});
            message.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!([message])
        };
        for (given, param) in [
            (json!(["a"]), "messages[0]"),
            (json!([{"content": "a"}]), "messages[0].role"),
            (user(json!({"role": "developer"})), "messages[0].role"),
            (user(json!({"content": [{"type": "text"}]})), "messages[0].content"),
            (user(json!({"images": ["aGk="]})), "messages[0].images"),
            (user(json!({"tool_calls": {}})), "messages[0].tool_calls"),
            (user(json!({"tool_calls": [{}]})), "messages[0].tool_calls[0].function"),
            (
                user(json!({"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]})),
                "messages[0].tool_calls[0].function.arguments",
            ),
        ] {
            let error = read(given.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{given}: {error}");
        }
    }
}
