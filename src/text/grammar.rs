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
mod engine;
pub(crate) mod gbnf;
mod lark;
mod lexers;
mod request;
pub mod sandbox;
mod schema;
mod vocabulary;

#[cfg(test)]
mod tests;

pub use compiler::GrammarCompiler;
pub use request::{GrammarLimits, GrammarRequest, GrammarSpec, Whitespace};
pub use schema::{check_regex, close_objects};

use crate::error::ApiError;
use serde_json::Value;

/// The stack that a thread needs for compiling grammars, which recurses: twice what the largest accepted grammar has
/// needed. Memory is used only as the stack grows.
pub const STACK_BYTES: usize = 64 << 20;

/// A schema as a part of a [`GrammarSpec::Lark`]: `%json {…}`. `param` is the field that the schema came in; where the
/// schema is wrong, the error names the place in it.
pub fn json_in_lark(schema: &Value, whitespace: &Whitespace, param: &str) -> Result<String, ApiError> {
    let schema = schema::prepare(schema, whitespace).map_err(|error| error.in_param(param))?;
    // Lark's strings hold no control character, and JSON leaves this one as it is.
    Ok(format!("%json {}", schema.to_string().replace('\u{7f}', "\\u007f")))
}
