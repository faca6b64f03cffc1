//! Structured output: what a client demands of the text, as a constraint on tokens.
//!
//! A [`GrammarRequest`] says what the text has to be; [`GrammarCompiler`] makes a
//! [`ConstraintSource`](crate::engine::constraint::ConstraintSource) of it, for the model's vocabulary. llguidance does
//! the parsing of the text as it grows; here is what stands between it and a client: schemas are checked and errors
//! get a place (`schema`), llama.cpp's grammars are translated (`gbnf`), the tokenizer is made known
//! (`vocabulary`), compiled grammars are kept and shared (`compiler`), and what a client sends is compiled in another process
//! first (`sandbox`).

pub mod compiler;
mod constraint;
pub(crate) mod gbnf;
mod lexers;
pub mod sandbox;
mod schema;
mod vocabulary;

#[cfg(test)]
mod tests;

pub use compiler::GrammarCompiler;
pub use schema::{check_regex, close_objects};

use crate::error::ApiError;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

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
    fn options(&self) -> Value {
        match self {
            Whitespace::Limited => json!({ "whitespace_pattern": LIMITED_WHITESPACE }),
            Whitespace::Compact => json!({ "whitespace_flexible": false }),
            Whitespace::Pattern(pattern) => json!({ "whitespace_pattern": pattern }),
        }
    }
}

/// A schema as a part of a [`GrammarSpec::Lark`]: `%json {…}`. `param` is the field that the schema came in; where the
/// schema is wrong, the error names the place in it.
pub fn json_in_lark(schema: &Value, whitespace: &Whitespace, param: &str) -> Result<String, ApiError> {
    let schema = schema::prepare(schema, whitespace).map_err(|error| error.in_param(param))?;
    // Lark's strings hold no control character, and JSON leaves this one as it is.
    Ok(format!("%json {}", schema.to_string().replace('\u{7f}', "\\u007f")))
}
