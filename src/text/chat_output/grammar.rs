//! Grammars for required tool calls. They follow the model's own format, so that the model writes what it was trained
//! on and [`super::ChatParser`] can parse it.

use super::format::ToolFormat;
use crate::grammar::{Whitespace, json_in_lark};
use crate::tokenizer::Tokenizer;
use pagetide_base::error::ApiError;
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

/// A Lark grammar for one call of these functions and nothing else. `several` allows more than one call.
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

/// A marker as the tokenizer has it: for the grammar, a special token is not text.
fn terminal(mark: &str, tokenizer: &Tokenizer) -> String {
    match tokenizer.token_id(mark).filter(|id| tokenizer.is_special(*id)) {
        Some(id) => format!("<[{id}]>"),
        None => quoted(mark),
    }
}

/// A Lark string, which is written like JSON's.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat_output::tests::demo_tokenizer;
    use crate::chat_output::{ChatFormat, ChatParser, ChatPiece, ChatReading};
    use crate::grammar::sandbox::GrammarLimits;
    use crate::grammar::{GrammarCompiler, GrammarRequest, GrammarSpec};
    use pagetide_base::budget::Budget;
    use pagetide_base::rules::ConstraintSource;
    use serde_json::json;
    use std::time::Duration;

    const END: u32 = 2;

    /// An output of random allowed tokens. It ends where an end is allowed.
    fn walk(source: &dyn ConstraintSource, tokenizer: &Tokenizer, random: &mut u64) -> Option<String> {
        let (mut state, mut text) = (source.start(), Vec::new());
        for _ in 0..300 {
            let mask = state.allowed().unwrap().expect("a grammar restricts");
            let allowed: Vec<u32> = mask.iter().collect();
            *random ^= *random << 13;
            *random ^= *random >> 7;
            *random ^= *random << 17;
            let token = allowed[(*random % allowed.len() as u64) as usize];
            if token == END {
                return Some(String::from_utf8(text).unwrap());
            }
            text.extend(tokenizer.token_bytes(token));
            state.advance(token).unwrap();
        }
        None
    }

    #[test]
    fn any_output_of_the_model_is_parsed() {
        let weather = json!({"type": "object", "properties": {
            "city": {"enum": ["Paris", "São \"Paulo\"", "</tool_call>"]}, "days": {"type": "integer", "minimum": 0, "maximum": 99},
        }, "required": ["city"], "additionalProperties": false});
        let nothing = json!({"type": "object", "properties": {}, "additionalProperties": false});
        let functions = [("get_weather", &weather), ("now", &nothing)];
        let function = |(name, parameters)| Function { name, parameters, param: "tools[0].function.parameters".into() };
        let functions = functions.map(function);
        let mut random = 0x9E37_79B9_7F4A_7C15;
        for (format, special) in [
            (ToolFormat::Hermes, &[][..]),
            (ToolFormat::Hermes, &["<tool_call>", "</tool_call>"]),
            (ToolFormat::Llama3Json, &["<|python_tag|>"]),
            (ToolFormat::Mistral, &[]),
            (ToolFormat::Mistral, &["[TOOL_CALLS]"]),
            (ToolFormat::Mistral, &["[TOOL_CALLS]", "[ARGS]"]),
        ] {
            let tokenizer = demo_tokenizer(special);
            let limits = GrammarLimits { cpu: Duration::from_secs(1), memory_bytes: 1 << 28, work_per_token: None };
            let compiler = GrammarCompiler::new(tokenizer.clone(), tokenizer.vocab_size(), &[END], limits);
            for several in [false, true] {
                let lark = calls(format, &functions, several, &tokenizer).unwrap();
                let request = GrammarRequest::new(GrammarSpec::Lark(lark.clone()), "tools");
                let source =
                    compiler.compile(&request, &Budget::steps(1)).unwrap_or_else(|error| panic!("{error}\n{lark}"));
                let texts: Vec<String> = (0..60).filter_map(|_| walk(&*source, &tokenizer, &mut random)).collect();
                assert!(texts.len() > 30, "{format:?} {special:?}: only {} of 60 have ended", texts.len());
                let counts: Vec<u32> = texts.iter().map(|text| check(format, text, &weather, &tokenizer)).collect();
                assert_eq!(counts.iter().any(|count| *count > 1), several, "{format:?} {special:?}: {counts:?}");
            }
        }
    }

    /// Parses the text as calls only, and returns their number.
    fn check(format: ToolFormat, text: &str, weather: &Value, tokenizer: &Tokenizer) -> u32 {
        let reading =
            ChatReading { format: ChatFormat { tools: Some(format), reasoning: None }, ..ChatReading::default() };
        let (mut parser, mut pieces) = (ChatParser::new(&reading, tokenizer, &[]), Vec::new());
        parser.push(text, &mut pieces);
        parser.finish(&mut pieces);
        for call in pieces.chunks(2) {
            let [ChatPiece::ToolCall { name, .. }, ChatPiece::ToolArguments { json, .. }] = call else {
                panic!("{text:?} is read as {pieces:?}");
            };
            let arguments: Value = serde_json::from_str(json).unwrap();
            let cities = weather["properties"]["city"]["enum"].as_array().unwrap();
            match name.as_str() {
                "get_weather" => assert!(cities.contains(&arguments["city"]), "{json}"),
                "now" => assert_eq!(arguments, json!({})),
                other => panic!("{other} is no function"),
            }
        }
        parser.num_calls()
    }

    #[test]
    fn a_wrong_schema_is_an_error_of_its_field() {
        let wrong = json!({"type": "object", "properties": {"a": {"type": "sometimes"}}});
        let function = Function { name: "f", parameters: &wrong, param: "tools[3].function.parameters".into() };
        let error = calls(ToolFormat::Hermes, &[function], true, &demo_tokenizer(&[])).unwrap_err();
        let param = error.param.as_deref().unwrap();
        assert!(param.starts_with("tools[3].function.parameters.properties.a"), "{error}: {param}");
    }
}
