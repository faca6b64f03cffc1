//! The forms of a prompt.

use crate::body::fields::IdsField;
use crate::body::ids::{IdList, Ids, MixedPart, OneOf};
use crate::checks::{shown, wrong_type};
use crate::prompt::Prompt;
use pagetide_base::error::ApiError;
use serde_json::Value;
use utoipa::ToSchema;

/// What a prompt may be. No two forms are alike, so that a value has one of them at most.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described: see prompts()")]
pub enum NativePromptForms {
    Text(String),
    Object(PromptObject),
    /// Texts and token ids, which are one prompt if an id is among them, or several prompts.
    Several(Vec<NativePromptPart>),
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
pub enum NativePromptPart {
    Text(String),
    Token(u32),
    /// Texts and token ids.
    Mixed(Vec<TextOrToken>),
    Object(PromptObject),
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
pub enum TextOrToken {
    Text(String),
    Token(u32),
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
pub struct PromptObject {
    prompt_string: Option<String>,
    /// Instead of prompt_string: parts of text, which are put together.
    #[schema(value_type = Option<Vec<crate::Object>>)]
    content: Option<Vec<Value>>,
}

/// A text, an array of texts and token ids of which at least one is an id, an object with `prompt_string` or `content`,
/// or an array of these. `add_special_tokens`: whether the tokenizer adds its special tokens to what begins with a
/// text.
pub fn prompts(
    param: &str,
    field: IdsField,
    add_special_tokens: bool,
    vocab_size: u32,
) -> Result<Vec<Prompt>, ApiError> {
    let text = |text: String| Prompt::Text { text, add_special_tokens };
    let one = |param: &str, list: IdList| {
        let mut parts = list.mixed(param, vocab_size)?;
        if !add_special_tokens && matches!(parts[..], [MixedPart::Text(_), ..]) {
            // They are added to a text in the first place alone.
            parts.insert(0, MixedPart::Ids(Vec::new()));
        }
        Ok(match parts.pop() {
            Some(MixedPart::Ids(ids)) if parts.is_empty() => Prompt::Tokens(ids),
            last => {
                parts.extend(last);
                Prompt::Mixed(parts)
            }
        })
    };
    let (prompts, num) = match field {
        IdsField { ids: Some(Ids::One(list) | Ids::Mixed(list)), .. } => {
            if list.is_empty() {
                return Err(ApiError::invalid(param, format!("{param} must not be an empty array")));
            }
            return Ok(vec![one(param, list)?]);
        }
        IdsField { ids: Some(Ids::Several { prompts, num }), .. } => (prompts, num),
        IdsField { other: Some(Value::String(given)), .. } => return Ok(vec![text(given)]),
        IdsField { other: Some(other), .. } => return Ok(vec![text(object(param, other)?)]),
        IdsField { other: None, .. } => return Err(ApiError::invalid(param, format!("{param} is required"))),
    };
    let most = prompts.len();
    let read = prompts.into_iter().enumerate().map(|(i, prompt)| {
        let param = format!("{param}[{i}]");
        match prompt {
            OneOf::Text(given) => Ok(text(given)),
            OneOf::Ids(list) => one(&param, list),
            OneOf::Other(other) => object(&param, other).map(text),
        }
    });
    let read = read.collect::<Result<Vec<_>, _>>()?;
    if num > most {
        // The others have not been kept.
        return Err(ApiError::too_many_prompts(param, most, num));
    }
    Ok(read)
}

/// The text of llama.cpp's form of a prompt with images, without images.
fn object(param: &str, given: Value) -> Result<String, ApiError> {
    let Value::Object(mut fields) = given else {
        let message = format!(
            "{param} must be a string, an array of texts and token ids, an object with prompt_string, or an array of \
             these, got {}",
            shown(&given)
        );
        return Err(ApiError::invalid(param, message));
    };
    if let Some(data) =
        fields.get("multimodal_data").filter(|data| !data.is_null() && **data != Value::Array(Vec::new()))
    {
        let param = format!("{param}.multimodal_data");
        let message = format!("{param} must be empty, because this model reads text only, got {}", shown(data));
        return Err(ApiError::invalid(param, message));
    }
    match (fields.remove("prompt_string"), fields.remove("content")) {
        (Some(Value::String(text)), None) => Ok(text),
        (None, Some(content)) => content_text(&format!("{param}.content"), &content),
        (Some(_), Some(_)) => {
            let param = format!("{param}.content");
            Err(ApiError::invalid(&param, format!("{param} and prompt_string cannot be combined")))
        }
        (other, None) => Err(wrong_type(&format!("{param}.prompt_string"), "a string", other.as_ref())),
    }
}

/// Parts of text as one text.
fn content_text(param: &str, content: &Value) -> Result<String, ApiError> {
    let parts = content.as_array().ok_or_else(|| wrong_type(param, "an array of parts", Some(content)))?;
    let text = |(i, part): (usize, &Value)| {
        let param = format!("{param}[{i}]");
        match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
            (Some("text"), Some(text)) => Ok(text.to_owned()),
            (Some("text"), None) => Err(wrong_type(&format!("{param}.text"), "a string", part.get("text"))),
            _ => {
                let message = format!(
                    "{param} must be a part of type text, because this model reads text only, got {}",
                    shown(part)
                );
                Err(ApiError::invalid(param, message))
            }
        }
    };
    parts.iter().enumerate().map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::{body_fields, read_value};
    use serde_json::json;

    body_fields! {
        struct PromptAlone {
            #[schema(value_type = NativePromptForms)]
            prompt: IdsField,
        }
    }

    fn parsed(prompt: Value) -> Result<String, ApiError> {
        let body = read_value::<PromptAlone>(&json!({ "prompt": prompt }))?.body;
        prompts("prompt", body.prompt, true, 100).map(|prompts| format!("{prompts:?}"))
    }

    fn text(text: &str) -> String {
        format!("Text {{ text: {text:?}, add_special_tokens: true }}")
    }

    #[test]
    fn every_form_is_read() {
        let (a, b) = (text("a"), text("b"));
        for (prompt, expected) in [
            (json!("a"), format!("[{a}]")),
            (json!(["a", "b"]), format!("[{a}, {b}]")),
            (json!([1, 2]), "[Tokens([1, 2])]".to_owned()),
            (json!([[1, 2], "a"]), format!("[Tokens([1, 2]), {a}]")),
            (json!([1, 2, "a", 3, "b"]), r#"[Mixed([Ids([1, 2]), Text("a"), Ids([3]), Text("b")])]"#.to_owned()),
            (json!(["a", "b", 3]), r#"[Mixed([Text("a"), Text("b"), Ids([3])])]"#.to_owned()),
            (json!([["a", 1], "b"]), format!(r#"[Mixed([Text("a"), Ids([1])]), {b}]"#)),
            (json!({"prompt_string": "a"}), format!("[{a}]")),
            (json!({"content": [{"type": "text", "text": ""}, {"type": "text", "text": "a"}]}), format!("[{a}]")),
            (json!([[1], {"prompt_string": "a", "multimodal_data": []}]), format!("[Tokens([1]), {a}]")),
        ] {
            assert_eq!(parsed(prompt.clone()).unwrap(), expected, "{prompt}");
        }
    }

    #[test]
    fn special_tokens_are_left_out_on_request() {
        let of = |prompt: Value| {
            let body = read_value::<PromptAlone>(&json!({ "prompt": prompt })).unwrap().body;
            prompts("prompt", body.prompt, false, 100).map(|prompts| format!("{prompts:?}")).unwrap()
        };
        assert_eq!(of(json!({"prompt_string": "a"})), "[Text { text: \"a\", add_special_tokens: false }]");
        assert_eq!(of(json!(["a", 1])), "[Mixed([Ids([]), Text(\"a\"), Ids([1])])]");
    }

    #[test]
    fn a_wrong_prompt_is_refused_where_it_is_wrong() {
        for (prompt, param) in [
            (json!([]), "prompt"),
            (json!(null), "prompt"),
            (json!(7), "prompt"),
            (json!([1, "a", 100]), "prompt[2]"),
            (json!([1, "a", 2, 2.5]), "prompt[3]"),
            (json!(["a", -1]), "prompt[1]"),
            (json!([["a", 100]]), "prompt[0][1]"),
            (json!(["a", null]), "prompt[1]"),
            (json!([{"prompt": "a"}]), "prompt[0].prompt_string"),
            (json!({"prompt_string": "a", "multimodal_data": ["x"]}), "prompt.multimodal_data"),
            (json!({"prompt_string": "a", "content": []}), "prompt.content"),
            (json!({"content": "a"}), "prompt.content"),
            (json!([{"content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]), "prompt[0].content[1]"),
            (json!({"content": [{"type": "text"}]}), "prompt.content[0].text"),
        ] {
            assert_eq!(parsed(prompt.clone()).unwrap_err().param.as_deref(), Some(param), "{prompt}");
        }
    }
}
