//! What the chat template is given.

use crate::body::body_fields;
use crate::checks::one_of;
use crate::model_info::ModelInfo;
use crate::prompt::ChatPrompt;
use pagetide_base::error::ApiError;
use pagetide_config::ThinkingDefault;
use pagetide_text::chat_template::today;
use serde_json::{Map, Value};
use utoipa::ToSchema;

body_fields! {
    /// What the chat template is given besides the messages and the tools; `/tokenize` reads it too.
    pub struct TemplateFields {
        /// Whether the prompt ends with the beginning of an assistant's message. Default: unless
        /// continue_final_message.
        pub add_generation_prompt: Option<bool>,
        /// The answer continues the last message.
        #[schema(default = false)]
        pub continue_final_message: bool,
        /// A template instead of the model's own, where the server trusts requests to bring one.
        pub chat_template: Option<String>,
        /// Whether the tokenizer adds its special tokens to the rendered chat, besides those that the template writes.
        #[schema(default = false)]
        pub add_special_tokens: bool,
        /// Texts for templates that know them, each an object with title and text.
        #[schema(value_type = Option<Vec<Object>>)]
        pub documents: Option<Vec<Map<String, Value>>>,
        /// How much the model is to think, for templates that know reasoning_effort; those that know enable_thinking
        /// are told whether it is to think at all.
        #[schema(value_type = Option<ReasoningEffort>)]
        pub reasoning_effort: Option<String>,
        /// More variables for the chat template.
        #[schema(value_type = Object)]
        pub chat_template_kwargs: Map<String, Value>,
    }
}

/// Words that a field may be, in the schema and for the check.
macro_rules! words {
    ($($(#[$doc:meta])* $name:ident { $($variant:ident = $word:literal),+ })+) => {
        $($(#[$doc])*
        #[derive(ToSchema)]
        #[allow(dead_code, reason = "only described: WORDS are what is read")]
        pub enum $name {
            $(#[schema(rename = $word)] $variant),+
        }

        impl $name {
            pub const WORDS: &[&str] = &[$($word),+];
        })+
    };
}
pub(crate) use words;

words! {
    ReasoningEffort {
        None = "none", Minimal = "minimal", Low = "low", Medium = "medium", High = "high", Xhigh = "xhigh", Max = "max"
    }
}

/// What a rendering depends on besides the messages and the tools, checked.
#[derive(Debug)]
pub struct TemplateSettings {
    add_generation_prompt: bool,
    continue_final_message: bool,
    add_special_tokens: bool,
    kwargs: Map<String, Value>,
    template: Option<String>,
    /// Templates are given the tools under another name too.
    is_llama_cpp: bool,
}

/// Variables that llama.cpp gives templates beside those of transformers: today's date as Llama 3 and FireFunction
/// write it.
const DATES: [(&str, &str); 2] = [("date_string", "%d %b %Y"), ("datetime", "%b %d %Y")];
/// The same: the tools as a text, for FireFunction's template.
const FUNCTIONS: &str = "functions";

impl TemplateFields {
    /// `effort`: what the API calls `reasoning_effort`.
    pub fn check(self, effort: &str, model: &ModelInfo) -> Result<TemplateSettings, ApiError> {
        if self.continue_final_message && self.add_generation_prompt == Some(true) {
            return Err(ApiError::invalid(
                "continue_final_message",
                "continue_final_message and add_generation_prompt cannot both be true",
            ));
        }
        if self.chat_template.is_some() && !model.server.get().trust_request_chat_template {
            let message = "chat_template is not allowed: this server renders no templates of requests \
                           (server.trust_request_chat_template is off)";
            return Err(ApiError::invalid("chat_template", message));
        }
        let mut kwargs = self.chat_template_kwargs;
        if let Some(documents) = self.documents {
            kwargs.entry("documents").or_insert(documents.into_iter().map(Value::Object).collect());
        }
        if let Some(given) = self.reasoning_effort {
            set_effort(effort, &given, &mut kwargs)?;
        }
        let is_llama_cpp = model.speaks_llama_cpp();
        let thinks = match model.server.get().thinking {
            ThinkingDefault::Auto => is_llama_cpp.then_some(true),
            ThinkingDefault::On => Some(true),
            ThinkingDefault::Off => Some(false),
        };
        if let Some(thinks) = thinks {
            kwargs.entry("enable_thinking").or_insert(thinks.into());
        }
        if is_llama_cpp {
            for (name, format) in DATES {
                kwargs.entry(name).or_insert_with(|| today(format).into());
            }
        }
        Ok(TemplateSettings {
            add_generation_prompt: self.add_generation_prompt.unwrap_or(!self.continue_final_message),
            continue_final_message: self.continue_final_message,
            add_special_tokens: self.add_special_tokens,
            kwargs,
            template: self.chat_template,
            is_llama_cpp,
        })
    }
}

impl TemplateSettings {
    /// The prompt that these messages become.
    pub fn prompt(&self, messages: Vec<Value>, tools: Option<Value>) -> ChatPrompt {
        let mut kwargs = self.kwargs.clone();
        if self.is_llama_cpp {
            let text = tools.as_ref().map(|tools| format!("{tools:#}")).unwrap_or_default();
            kwargs.entry(FUNCTIONS).or_insert(text.into());
        }
        ChatPrompt {
            messages,
            tools,
            add_generation_prompt: self.add_generation_prompt,
            continue_final_message: self.continue_final_message,
            add_special_tokens: self.add_special_tokens,
            kwargs,
            template: self.template.clone(),
        }
    }
}

/// What templates know of an effort, as far as the client has not said it itself. `param`: the field that says it.
fn set_effort(param: &str, effort: &str, kwargs: &mut Map<String, Value>) -> Result<(), ApiError> {
    one_of(param, Some(effort), ReasoningEffort::WORDS)?;
    kwargs.entry("enable_thinking").or_insert((effort != "none").into());
    kwargs.entry("reasoning_effort").or_insert(effort.into());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn effort_reaches_templates_under_the_names_that_they_know() {
        let kwargs = |effort: &str, given: Value| {
            let mut kwargs: Map<String, Value> = serde_json::from_value(given).unwrap();
            set_effort("reasoning_effort", effort, &mut kwargs).map(|()| Value::Object(kwargs))
        };
        let high = json!({"enable_thinking": true, "reasoning_effort": "high"});
        assert_eq!(kwargs("high", json!({})).unwrap(), high);
        assert_eq!(kwargs("none", json!({})).unwrap()["enable_thinking"], false);
        assert_eq!(kwargs("none", json!({"enable_thinking": true})).unwrap()["enable_thinking"], true);
        assert_eq!(kwargs("huge", json!({})).unwrap_err().param.as_deref(), Some("reasoning_effort"));
    }
}
