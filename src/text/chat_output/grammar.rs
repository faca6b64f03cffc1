//! Calls that a client demands, as a grammar: in the words of the model's own format, so that it writes what it was
//! trained to write, and [`super::ChatParser`] reads it.

use super::format::ToolFormat;
use crate::text::tokenizer::Tokenizer;
use serde_json::{Value, json};
use std::fmt::Write as _;

/// A function that may be called.
#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    pub name: String,
    /// JSON schema of its arguments, an object.
    pub parameters: Value,
}

/// llguidance's Lark for one call or more of these functions, and nothing else. `several`: more than one is allowed.
pub fn calls(format: ToolFormat, functions: &[Function], several: bool, tokenizer: &Tokenizer) -> String {
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
                (format!("{} {} {}", mark("[TOOL_CALLS]"), quoted(&function.name), mark("[ARGS]")), String::new())
            }
            _ => {
                let key = if format == ToolFormat::Llama3Json { "parameters" } else { "arguments" };
                let name = Value::from(function.name.as_str());
                (quoted(&format!("{{\"name\": {name}, \"{key}\": ")), " \"}\"".into())
            }
        };
        let _ = writeln!(out, "function_{i}: {before} arguments_{i}{after}");
        let _ = writeln!(out, "arguments_{i}: %json {}", written_closely(&function.parameters));
    }
    out
}

/// The schema, to be written on one line as Python's `json.dumps` has it: so templates show calls, and a model that
/// means white space could go on with it for ever.
fn written_closely(schema: &Value) -> Value {
    let mut schema = schema.clone();
    if let Value::Object(schema) = &mut schema {
        let style = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
        schema.insert("x-guidance".into(), style);
    }
    schema
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
