//! A request for structured output.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::time::Duration;

/// The required output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum GrammarSpec {
    /// Any JSON object.
    JsonObject,
    /// JSON that this schema accepts.
    JsonSchema(Value),
    /// A text that this regular expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar as clients write it: llama.cpp's GBNF, EBNF in its style, or llguidance's Lark.
    Grammar(String),
    /// Text with tags, as xgrammar describes it: `format`, or the older `structures` and `triggers`.
    StructuralTag(Value),
    /// A Lark grammar that the server has written.
    Lark(String),
}

/// A constraint on the text of a request's outputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GrammarRequest {
    pub spec: GrammarSpec,
    /// The field of the request, for errors: `response_format.json_schema.schema`.
    pub param: String,
    /// The constraint applies after the first occurrence of this text (such as the `</think>` of a reasoning model).
    /// Before it, everything except the end is allowed. The token that completes this text must end with it.
    pub starts_after: Option<String>,
    /// White space of JSON. Other grammars define it themselves.
    pub whitespace: Whitespace,
}

impl GrammarRequest {
    /// A request for `spec` from the first token on, with the default white space.
    pub fn new(spec: GrammarSpec, param: impl Into<String>) -> Self {
        Self { spec, param: param.into(), starts_after: None, whitespace: Whitespace::default() }
    }
}

/// White space between the parts of JSON. It is always bounded, because a model may otherwise write nothing else.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Whitespace {
    /// Where JSON allows white space: nothing, a space, or a line break with an indentation.
    #[default]
    Limited,
    /// None.
    Compact,
    /// Text that this regular expression matches, or nothing.
    Pattern(String),
}

/// [`Whitespace::Limited`] as a regular expression.
const LIMITED_WHITESPACE: &str = r" |\r?\n[ \t]{0,20}";

impl Whitespace {
    /// The options of a schema for llguidance.
    pub(super) fn options(&self) -> Value {
        match self {
            Whitespace::Limited => json!({ "whitespace_pattern": LIMITED_WHITESPACE }),
            Whitespace::Compact => json!({ "whitespace_flexible": false }),
            Whitespace::Pattern(pattern) => json!({ "whitespace_pattern": pattern }),
        }
    }
}

impl GrammarSpec {
    /// Approximate size of the text in bytes.
    pub(super) fn len(&self) -> usize {
        match self {
            GrammarSpec::JsonObject => 0,
            GrammarSpec::JsonSchema(value) | GrammarSpec::StructuralTag(value) => value.to_string().len(),
            GrammarSpec::Choice(choices) => choices.iter().map(String::len).sum(),
            GrammarSpec::Regex(text) | GrammarSpec::Grammar(text) | GrammarSpec::Lark(text) => text.len(),
        }
    }
}

/// Limits of a grammar.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GrammarLimits {
    /// Processor time of compiling.
    pub cpu: Duration,
    pub memory_bytes: usize,
    /// Work on token masks per output token, in units of about half a microsecond. `None`: by the size of the
    /// vocabulary.
    pub work_per_token: Option<u32>,
}
