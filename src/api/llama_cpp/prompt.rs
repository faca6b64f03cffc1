//! The forms of a prompt.

use crate::body::fields::IdsField;
use crate::body::ids::{IdList, Ids, MixedPart, OneOf};
use crate::checks::{shown, wrong_type};
use crate::prompt::Prompt;
use pagetide_base::error::ApiError;
use serde_json::Value;
use utoipa::ToSchema;

/// What a prompt may be.
#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described: see prompts()")]
pub enum NativePromptForms {
    One(NativePrompt),
    Several(Vec<NativePrompt>),
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
pub enum NativePrompt {
    Text(String),
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
    prompt_string: String,
}

/// A text, an array of texts and token ids of which at least one is an id, an object with `prompt_string`, or an array
/// of these.
pub fn prompts(param: &str, field: IdsField, vocab_size: u32) -> Result<Vec<Prompt>, ApiError> {
    let one = |param: &str, list: IdList| {
        let mut parts = list.mixed(param, vocab_size)?;
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
        IdsField { other: Some(Value::String(text)), .. } => return Ok(vec![text.into()]),
        IdsField { other: Some(other), .. } => return Ok(vec![object(param, other)?]),
        IdsField { other: None, .. } => return Err(ApiError::invalid(param, format!("{param} is required"))),
    };
    let most = prompts.len();
    let read = prompts.into_iter().enumerate().map(|(i, prompt)| {
        let param = format!("{param}[{i}]");
        match prompt {
            OneOf::Text(text) => Ok(text.into()),
            OneOf::Ids(list) => one(&param, list),
            OneOf::Other(other) => object(&param, other),
        }
    });
    let read = read.collect::<Result<Vec<_>, _>>()?;
    if num > most {
        // The others have not been kept.
        return Err(ApiError::too_many_prompts(param, most, num));
    }
    Ok(read)
}

/// llama.cpp's form of a prompt with images, without images.
fn object(param: &str, given: Value) -> Result<Prompt, ApiError> {
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
    match fields.remove("prompt_string") {
        Some(Value::String(text)) => Ok(text.into()),
        other => Err(wrong_type(&format!("{param}.prompt_string"), "a string", other.as_ref())),
    }
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
        prompts("prompt", body.prompt, 100).map(|prompts| format!("{prompts:?}"))
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
            (json!([[1], {"prompt_string": "a", "multimodal_data": []}]), format!("[Tokens([1]), {a}]")),
        ] {
            assert_eq!(parsed(prompt.clone()).unwrap(), expected, "{prompt}");
        }
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
        ] {
            assert_eq!(parsed(prompt.clone()).unwrap_err().param.as_deref(), Some(param), "{prompt}");
        }
    }
}
