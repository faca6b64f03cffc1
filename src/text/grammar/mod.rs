//! Structured output: what a client demands of the text, as a constraint on tokens.

use serde_json::Value;

/// What the output has to be.
#[derive(Clone, Debug, PartialEq)]
pub enum GrammarSpec {
    /// Any JSON object.
    JsonObject,
    /// JSON that this schema accepts.
    JsonSchema(Value),
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar as clients write it: llama.cpp's GBNF, EBNF in its style, or llguidance's Lark.
    Grammar(String),
    /// llguidance's Lark, written by ourselves.
    Lark(String),
}

/// A constraint on the text of a request's outputs.
#[derive(Clone, Debug, PartialEq)]
pub struct GrammarRequest {
    pub spec: GrammarSpec,
    /// The field that it came in, for errors: `response_format.json_schema.schema`.
    pub param: String,
    /// The constraint holds from behind the first occurrence of this text on (a reasoning model's `</think>`); before
    /// it, anything may come but the end.
    pub starts_after: Option<String>,
}
