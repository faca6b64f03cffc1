//! Calls that a client demands, as a grammar: in the words of the model's own format, so that it writes what it was
//! trained to write, and [`super::ChatParser`] reads it.

use super::format::ToolFormat;
use crate::error::ApiError;
use crate::text::grammar::{Whitespace, json_in_lark};
use crate::text::tokenizer::Tokenizer;
use serde_json::Value;
use std::fmt::Write as _;

/// A function that may be called.
#[derive(Clone, Debug)]
pub struct Function<'a> {
    pub name: &'a str,
    /// JSON schema of its arguments, an object.
    pub parameters: &'a Value,
    /// The field of that schema, for errors.
    pub param: String,
}

/// llguidance's Lark for one call or more of these functions, and nothing else. `several`: more than one is allowed.
pub fn calls(
    format: ToolFormat,
    functions: &[Function<'_>],
    several: bool,
    tokenizer: &Tokenizer,
) -> Result<String, ApiError> {
    let mark = |text: &str| terminal(text, tokenizer);
    let has_args_mark = tokenizer.token_id("[ARGS]").is_some();
    let mut out = String::from("start: ");
    out += &match format {
        ToolFormat::Hermes if several => format!(
            "call (\"\\n\" call)*\ncall: {} \"\\n\" function \"\\n\" {}",
            mark("<tool_call>"),
            mark("</tool_call>")
        ),
        ToolFormat::Hermes => format!("{} \"\\n\" function \"\\n\" {}", mark("<tool_call>"), mark("</tool_call>")),
        ToolFormat::Llama3Json if several => "function (\"; \" function)*".into(),
        ToolFormat::Llama3Json => "function".into(),
        ToolFormat::Mistral if has_args_mark && several => "function+".into(),
        ToolFormat::Mistral if has_args_mark => "function".into(),
        ToolFormat::Mistral if several => format!("{} \"[\" function (\", \" function)* \"]\"", mark("[TOOL_CALLS]")),
        ToolFormat::Mistral => format!("{} \"[\" function \"]\"", mark("[TOOL_CALLS]")),
    };
    let names: Vec<String> = (0..functions.len()).map(|i| format!("function_{i}")).collect();
    // Writing to a string does not fail.
    let _ = writeln!(out, "\nfunction: {}", names.join(" | "));
    for (i, function) in functions.iter().enumerate() {
        let (before, after) = match format {
            ToolFormat::Mistral if has_args_mark => {
                (format!("{} {} {}", mark("[TOOL_CALLS]"), quoted(function.name), mark("[ARGS]")), String::new())
            }
            _ => {
                let key = if format == ToolFormat::Llama3Json { "parameters" } else { "arguments" };
                let name = Value::from(function.name);
                (quoted(&format!("{{\"name\": {name}, \"{key}\": ")), " \"}\"".into())
            }
        };
        let _ = writeln!(out, "function_{i}: {before} arguments_{i}{after}");
        let schema = json_in_lark(function.parameters, &Whitespace::default(), &function.param)?;
        let _ = writeln!(out, "arguments_{i}: {schema}");
    }
    Ok(out)
}

/// A mark as the tokenizer has it: a special token is no text to the grammar.
fn terminal(mark: &str, tokenizer: &Tokenizer) -> String {
    match tokenizer.token_id(mark).filter(|id| tokenizer.is_special(*id)) {
        Some(id) => format!("<[{id}]>"),
        None => quoted(mark),
    }
}

/// A Lark string, which is written as JSON's.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}
