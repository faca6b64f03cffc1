//! A request for structured output.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::time::Duration;

/// What the output has to be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum GrammarSpec {
    /// Any JSON object.
    JsonObject,
    /// JSON that this schema accepts.
    JsonSchema(Value),
    /// A text that this regular expression matches from its beginning to its end.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar as clients write it: llama.cpp's GBNF, EBNF in its style, or llguidance's Lark.
    Grammar(String),
    /// llguidance's Lark, written by ourselves.
    Lark(String),
}

/// A constraint on the text of a request's outputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GrammarRequest {
    pub spec: GrammarSpec,
    /// The field that it came in, for errors: `response_format.json_schema.schema`.
    pub param: String,
    /// The constraint holds from behind the first occurrence of this text on (a reasoning model's `</think>`); before
    /// it, anything may come but the end. The token that completes this text ends with it.
    pub starts_after: Option<String>,
    /// Of JSON; other grammars say it themselves.
    pub whitespace: Whitespace,
}

impl GrammarRequest {
    /// `spec` from the output's first token on, with the usual white space.
    pub fn new(spec: GrammarSpec, param: impl Into<String>) -> Self {
        Self { spec, param: param.into(), starts_after: None, whitespace: Whitespace::default() }
    }
}

/// White space between the parts of JSON. Never without a bound: a model can like white space so much that it writes
/// nothing else.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Whitespace {
    /// Where JSON allows it, nothing, a space, or a line break and an indentation, whichever the model writes.
    #[default]
    Limited,
    /// None.
    Compact,
    /// What this regular expression matches, or nothing.
    Pattern(String),
}

/// [`Whitespace::Limited`] as a regular expression.
const LIMITED_WHITESPACE: &str = r" |\r?\n[ \t]{0,20}";

impl Whitespace {
    /// llguidance's options of a schema.
    pub(super) fn options(&self) -> Value {
        match self {
            Whitespace::Limited => json!({ "whitespace_pattern": LIMITED_WHITESPACE }),
            Whitespace::Compact => json!({ "whitespace_flexible": false }),
            Whitespace::Pattern(pattern) => json!({ "whitespace_pattern": pattern }),
        }
    }
}

impl GrammarSpec {
    /// Bytes of its text, about.
    pub(super) fn len(&self) -> usize {
        match self {
            GrammarSpec::JsonObject => 0,
            GrammarSpec::JsonSchema(schema) => schema.to_string().len(),
            GrammarSpec::Choice(choices) => choices.iter().map(String::len).sum(),
            GrammarSpec::Regex(text) | GrammarSpec::Grammar(text) | GrammarSpec::Lark(text) => text.len(),
        }
    }
}

/// What a grammar may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GrammarLimits {
    /// Processor time.
    pub cpu: Duration,
    pub memory_bytes: usize,
    /// Of its outputs' masks, in units of about half a microsecond. `None`: by the vocabulary.
    pub work_per_token: Option<u32>,
}
