//! Structured output: requirements of a client on the text, as a constraint on tokens.
//!
//! A [`GrammarRequest`] describes the required text. [`GrammarCompiler`] makes a
//! [`ConstraintSource`](pagetide_base::rules::ConstraintSource) of it for the model's vocabulary. llguidance
//! parses the text as it grows. The modules here prepare its input: schemas are checked, with the place of errors
//! (`schema`), llama.cpp's grammars and structural tags are translated (`gbnf`, `structural_tag`), the tokenizer is
//! described (`vocabulary`), compiled grammars are cached and shared (`compiler`), and untrusted grammars are first
//! compiled in another process (`sandbox`).

pub mod compiler;
mod constraint;
mod engine;
pub mod gbnf;
mod lark;
mod lexers;
mod request;
pub mod sandbox;
mod schema;
mod structural_tag;
mod vocabulary;

#[cfg(test)]
mod tests;

pub use compiler::GrammarCompiler;
pub use request::{GrammarLimits, GrammarRequest, GrammarSpec, Whitespace};
pub use schema::{check_regex, close_objects};

use pagetide_base::error::ApiError;
use serde_json::Value;

/// The stack that a thread needs for compiling grammars, which recurses: twice what the largest accepted grammar has
/// needed. Memory is used only as the stack grows.
pub const STACK_BYTES: usize = 64 << 20;

/// A schema as a part of a [`GrammarSpec::Lark`]: `%json {…}`. `param` is the field of the request that the schema is
/// in. An error names the place in the schema.
pub fn json_in_lark(schema: &Value, whitespace: &Whitespace, param: &str) -> Result<String, ApiError> {
    let schema = schema::prepare(schema, whitespace).map_err(|error| error.in_param(param))?;
    // Strings of Lark must not contain control characters, and JSON does not escape this one.
    Ok(format!("%json {}", schema.to_string().replace('\u{7f}', "\\u007f")))
}
