//! `tools`, `tool_choice` and `parallel_tool_calls`: which functions the model may call, and which it has to.

use super::{parse_fields, shown};
use crate::actors::runtime::ModelInfo;
use crate::error::ApiError;
use crate::text::chat_output::{ToolFormat, grammar};
use crate::text::grammar::{GrammarRequest, GrammarSpec};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

/// Characters of a function's name: Anthropic's limit, OpenAI's is 64.
const MAX_NAME_CHARS: usize = 128;
const CHOICES: &str = "\"none\", \"auto\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": …}}";

/// As they stand in the body.
#[derive(Default, Deserialize, ToSchema)]
#[serde(default)]
pub(super) struct ToolFields {
    /// Functions that the model may call.
    #[schema(value_type = Option<Vec<Tool>>)]
    tools: Option<Vec<Value>>,
    /// none, auto (the default where there are tools), required, one function, or allowed_tools with some of them.
    #[schema(value_type = Option<ToolChoice>)]
    tool_choice: Option<Value>,
    /// Whether there may be more than one call in an answer.
    #[schema(default = true)]
    parallel_tool_calls: Option<bool>,
}

#[derive(ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(dead_code, reason = "only described: tools are checked one by one, for errors that say where")]
#[schema(as = ChatTool)]
enum Tool {
    Function { function: ToolFunction },
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
struct ToolFunction {
    /// Letters, digits, dashes, dots and underscores.
    #[schema(min_length = 1, max_length = 128, pattern = "^[a-zA-Z0-9_.-]+$")]
    name: String,
    /// What it does, for the model.
    description: Option<String>,
    /// JSON schema of its arguments, an object.
    parameters: Option<Map<String, Value>>,
    /// Arguments of demanded calls keep to the schema either way, others do not.
    strict: Option<bool>,
}

#[derive(ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only described")]
enum ToolChoice {
    Word(ToolChoiceWord),
    Object(Map<String, Value>),
}

#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(dead_code, reason = "only described")]
enum ToolChoiceWord {
    None,
    Auto,
    Required,
}

/// A request's tools, checked.
#[derive(Debug, Default)]
pub struct Tools {
    /// Those that may be called, as the template is given them.
    shown: Vec<Value>,
    functions: Vec<Function>,
    choice: Choice,
    /// More than one call is allowed.
    several: bool,
}

#[derive(Debug)]
struct Function {
    /// `tools[0]`
    param: String,
    name: String,
    parameters: Value,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Choice {
    #[default]
    None,
    Auto,
    Required,
    /// One function has to be called: the only one left.
    Named,
}

impl Tools {
    pub fn read(body: &Value) -> Result<Self, ApiError> {
        let fields: ToolFields = parse_fields(body)?;
        let shown = fields.tools.unwrap_or_default();
        let functions = shown.iter().enumerate().map(|(i, tool)| function(format!("tools[{i}]"), tool));
        let functions = functions.collect::<Result<Vec<_>, _>>()?;
        for (i, function) in functions.iter().enumerate() {
            if functions[..i].iter().any(|earlier| earlier.name == function.name) {
                let param = format!("{}.function.name", function.param);
                let message = format!("{param}: an earlier tool is called {:?} too", function.name);
                return Err(ApiError::invalid(param, message));
            }
        }
        let mut tools =
            Self { shown, functions, choice: Choice::None, several: fields.parallel_tool_calls.unwrap_or(true) };
        tools.choose(fields.tool_choice.unwrap_or(Value::Null))?;
        Ok(tools)
    }

    /// For the chat template; `None` where there are none.
    pub fn for_template(&self) -> Option<Value> {
        (!self.shown.is_empty()).then(|| self.shown.clone().into())
    }

    /// The format in which calls are to be read; `None` where there are to be none.
    pub fn format(&self, model: &ModelInfo) -> Result<Option<ToolFormat>, ApiError> {
        match (self.choice, model.chat_format.tools) {
            (Choice::None, _) => Ok(None),
            (_, Some(format)) => Ok(Some(format)),
            (Choice::Auto, None) => Err(ApiError::invalid(
                "tools",
                "this model's chat template shows no format of tool calls that is known: start the server with \
                 --tool-call-parser, or set tool_choice to \"required\", to one function, or to \"none\"",
            )),
            // The grammar brings about calls all the same, in the plainest of the formats.
            (Choice::Required | Choice::Named, None) => Ok(Some(ToolFormat::Llama3Json)),
        }
    }

    pub fn is_named(&self) -> bool {
        self.choice == Choice::Named
    }

    /// Calls of one answer at most.
    pub fn max_calls(&self) -> u32 {
        if self.several && !self.is_named() { u32::MAX } else { 1 }
    }

    /// What the output has to be where calls are demanded.
    pub fn grammar(&self, format: ToolFormat, model: &ModelInfo) -> Result<Option<GrammarRequest>, ApiError> {
        if !matches!(self.choice, Choice::Required | Choice::Named) {
            return Ok(None);
        }
        let functions = self.functions.iter().map(|function| grammar::Function {
            name: &function.name,
            parameters: &function.parameters,
            param: format!("{}.function.parameters", function.param),
        });
        let functions: Vec<_> = functions.collect();
        let lark = grammar::calls(format, &functions, self.max_calls() > 1, &model.tokenizer)?;
        Ok(Some(GrammarRequest::new(GrammarSpec::Lark(lark), "tools")))
    }

    fn choose(&mut self, choice: Value) -> Result<(), ApiError> {
        self.choice = match &choice {
            Value::Null if self.functions.is_empty() => Choice::None,
            Value::Null => Choice::Auto,
            Value::String(word) if word == "none" => Choice::None,
            _ if self.functions.is_empty() => {
                return Err(ApiError::invalid("tool_choice", "tool_choice is only allowed with tools"));
            }
            Value::String(word) => self.mode("tool_choice", word)?,
            Value::Object(fields) => self.choose_among(fields)?,
            other => {
                let message = format!("tool_choice must be {CHOICES}, got {}", shown(other));
                return Err(ApiError::invalid("tool_choice", message));
            }
        };
        Ok(())
    }

    fn mode(&self, param: &str, word: &str) -> Result<Choice, ApiError> {
        match word {
            "auto" => Ok(Choice::Auto),
            "required" => Ok(Choice::Required),
            _ => Err(ApiError::invalid(param, format!("{param} must be {CHOICES}, got {}", shown(&word.into())))),
        }
    }

    /// One function, or OpenAI's `allowed_tools`: the others might as well not be there.
    fn choose_among(&mut self, fields: &Map<String, Value>) -> Result<Choice, ApiError> {
        match fields.get("type").and_then(Value::as_str) {
            Some("function") => {
                let name = name_of("tool_choice", fields.get("function"))?;
                self.functions.retain(|function| function.name == name);
                if self.functions.is_empty() {
                    return Err(no_such_tool("tool_choice.function.name", name));
                }
                Ok(Choice::Named)
            }
            Some("allowed_tools") => {
                // OpenAI has them in an object of their own, the Responses API beside the type.
                let (param, allowed) = match fields.get("allowed_tools") {
                    Some(Value::Object(allowed)) => ("tool_choice.allowed_tools", allowed),
                    _ => ("tool_choice", fields),
                };
                self.allow(param, allowed)
            }
            _ => {
                let message = format!(
                    "tool_choice.type must be \"function\" or \"allowed_tools\", got {}",
                    fields.get("type").map_or("nothing".into(), shown)
                );
                Err(ApiError::invalid("tool_choice.type", message))
            }
        }
    }

    fn allow(&mut self, param: &str, allowed: &Map<String, Value>) -> Result<Choice, ApiError> {
        let mode = allowed.get("mode").and_then(Value::as_str).unwrap_or("auto");
        let choice = self.mode(&format!("{param}.mode"), mode)?;
        let list = format!("{param}.tools");
        let tools = allowed.get("tools").and_then(Value::as_array).filter(|tools| !tools.is_empty());
        let tools = tools
            .ok_or_else(|| ApiError::invalid(&list, format!("{list} must be an array of one or more functions")))?;
        let mut names = Vec::with_capacity(tools.len());
        for (i, tool) in tools.iter().enumerate() {
            let param = format!("{list}[{i}]");
            let name = name_of(&param, tool.get("function"))?;
            if !self.functions.iter().any(|function| function.name == name) {
                return Err(no_such_tool(&format!("{param}.function.name"), name));
            }
            names.push(name);
        }
        let is_allowed = |name: &str| names.contains(&name);
        self.functions.retain(|function| is_allowed(&function.name));
        self.shown.retain(|tool| tool["function"]["name"].as_str().is_some_and(is_allowed));
        Ok(choice)
    }
}

fn no_such_tool(param: &str, name: &str) -> ApiError {
    ApiError::invalid(param, format!("{param}: there is no tool called {}", shown(&name.into())))
}

/// The name in a `function` object.
fn name_of<'a>(param: &str, function: Option<&'a Value>) -> Result<&'a str, ApiError> {
    let param = format!("{param}.function.name");
    let name = function.and_then(|function| function.get("name"));
    name.and_then(Value::as_str).ok_or_else(|| {
        let message = format!("{param} must be a string, got {}", name.map_or("nothing".into(), shown));
        ApiError::invalid(&param, message)
    })
}

fn function(param: String, tool: &Value) -> Result<Function, ApiError> {
    let wrong = |param: &str, expected: &str, got: Option<&Value>| {
        let got = got.map_or("nothing".into(), shown);
        Err(ApiError::invalid(param, format!("{param} must be {expected}, got {got}")))
    };
    let kind = tool.get("type");
    if !tool.is_object() {
        return wrong(&param, "an object", Some(tool));
    } else if kind.and_then(Value::as_str) != Some("function") {
        return wrong(&format!("{param}.type"), "\"function\"", kind);
    }
    let Some(Value::Object(fields)) = tool.get("function") else {
        return wrong(&format!("{param}.function"), "an object", tool.get("function"));
    };
    let name = name_of(&param, tool.get("function"))?;
    let is_name = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    if !(1..=MAX_NAME_CHARS).contains(&name.len()) || !name.chars().all(is_name) {
        let expected = format!("1 to {MAX_NAME_CHARS} letters, digits, dashes, dots and underscores");
        return wrong(&format!("{param}.function.name"), &expected, fields.get("name"));
    }
    for (field, is_right, expected) in [
        ("description", Value::is_string as fn(&Value) -> bool, "a string"),
        ("strict", Value::is_boolean as fn(&Value) -> bool, "a boolean"),
    ] {
        let given = fields.get(field).filter(|value| !value.is_null());
        if given.is_some_and(|value| !is_right(value)) {
            return wrong(&format!("{param}.function.{field}"), expected, given);
        }
    }
    let path = format!("{param}.function.parameters");
    let parameters = match fields.get("parameters") {
        None | Some(Value::Null) => json!({"type": "object", "properties": {}, "additionalProperties": false}),
        Some(Value::Object(schema)) if schema.is_empty() => json!({"type": "object"}),
        Some(Value::Object(schema)) => match schema.get("type") {
            None => {
                let mut schema = schema.clone();
                schema.insert("type".into(), "object".into());
                schema.into()
            }
            Some(Value::String(kind)) if kind == "object" => schema.clone().into(),
            Some(other) => return wrong(&format!("{path}.type"), "\"object\"", Some(other)),
        },
        Some(other) => return wrong(&path, "a JSON schema of an object", Some(other)),
    };
    Ok(Function { name: name.to_owned(), parameters, param })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}})
    }

    fn read(tools: Value, choice: Value) -> Result<Tools, ApiError> {
        Tools::read(&json!({"tools": tools, "tool_choice": choice}))
    }

    fn names(tools: &Tools) -> Vec<&str> {
        tools.functions.iter().map(|function| function.name.as_str()).collect()
    }

    #[test]
    fn every_choice_is_read() {
        let both = json!([tool("f"), tool("g")]);
        for (choice, expected, left, shown) in [
            (json!(null), Choice::Auto, &["f", "g"][..], 2),
            (json!("auto"), Choice::Auto, &["f", "g"], 2),
            // The prompt is the same whatever is chosen, as in vLLM; but for what is not allowed.
            (json!("none"), Choice::None, &["f", "g"], 2),
            (json!("required"), Choice::Required, &["f", "g"], 2),
            (json!({"type": "function", "function": {"name": "g"}}), Choice::Named, &["g"], 2),
            (
                json!({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("g")]}}),
                Choice::Required,
                &["g"],
                1,
            ),
            (json!({"type": "allowed_tools", "mode": "auto", "tools": [tool("f")]}), Choice::Auto, &["f"], 1),
        ] {
            let tools = read(both.clone(), choice.clone()).unwrap();
            assert_eq!((tools.choice, names(&tools), tools.shown.len()), (expected, left.to_vec(), shown), "{choice}");
        }
        let none = read(json!(null), json!(null)).unwrap();
        assert_eq!((none.choice, none.for_template()), (Choice::None, None));
        assert_eq!(read(json!([]), json!("none")).unwrap().for_template(), None);
    }

    #[test]
    fn a_single_call_is_kept_to() {
        let most = |body: Value| Tools::read(&body).unwrap().max_calls();
        let tools = json!([tool("f")]);
        assert_eq!(most(json!({ "tools": tools })), u32::MAX);
        assert_eq!(most(json!({"tools": tools, "parallel_tool_calls": null})), u32::MAX);
        assert_eq!(most(json!({"tools": tools, "parallel_tool_calls": false})), 1);
        let named = json!({"type": "function", "function": {"name": "f"}});
        assert_eq!(most(json!({"tools": tools, "tool_choice": named})), 1);
    }

    #[test]
    fn what_is_wrong_is_refused_where_it_is_wrong() {
        let with = |field: &str, value: Value| {
            let mut tool = tool("f");
            tool["function"][field] = value;
            json!([tool])
        };
        let f = json!([tool("f")]);
        let named = |name: Value| json!({"type": "function", "function": {"name": name}});
        for (tools, choice, param) in [
            (json!("f"), json!(null), "tools"),
            (json!([5]), json!(null), "tools[0]"),
            (json!([{"function": {"name": "f"}}]), json!(null), "tools[0].type"),
            (json!([{"type": "web_search"}]), json!(null), "tools[0].type"),
            (json!([tool("f"), {"type": "function"}]), json!(null), "tools[1].function"),
            (json!([{"type": "function", "function": {}}]), json!(null), "tools[0].function.name"),
            (with("name", json!("")), json!(null), "tools[0].function.name"),
            (with("name", json!("a b")), json!(null), "tools[0].function.name"),
            (with("name", json!("x".repeat(129))), json!(null), "tools[0].function.name"),
            (json!([tool("f"), tool("f")]), json!("none"), "tools[1].function.name"),
            (with("description", json!(5)), json!(null), "tools[0].function.description"),
            (with("strict", json!("yes")), json!(null), "tools[0].function.strict"),
            (with("parameters", json!([])), json!(null), "tools[0].function.parameters"),
            (with("parameters", json!({"type": "string"})), json!(null), "tools[0].function.parameters.type"),
            (json!(null), json!("auto"), "tool_choice"),
            (json!([]), named(json!("f")), "tool_choice"),
            (f.clone(), json!("any"), "tool_choice"),
            (f.clone(), json!(5), "tool_choice"),
            (f.clone(), json!({"type": "custom"}), "tool_choice.type"),
            (f.clone(), json!({"type": "function"}), "tool_choice.function.name"),
            (f.clone(), named(json!(7)), "tool_choice.function.name"),
            (f.clone(), named(json!("g")), "tool_choice.function.name"),
            (f.clone(), json!({"type": "allowed_tools", "mode": "all", "tools": f}), "tool_choice.mode"),
            (f.clone(), json!({"type": "allowed_tools", "tools": []}), "tool_choice.tools"),
            (
                f.clone(),
                json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("g")]}}),
                "tool_choice.allowed_tools.tools[0].function.name",
            ),
        ] {
            let error = read(tools.clone(), choice.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{tools} {choice}: {error}");
            assert!(error.message.starts_with(param), "{error}");
        }
    }

    #[test]
    fn parameters_are_those_of_an_object() {
        let parameters = |given: Value| {
            let tool = json!({"type": "function", "function": {"name": "f", "parameters": given}});
            function("tools[0]".into(), &tool).unwrap().parameters
        };
        let none = json!({"type": "object", "properties": {}, "additionalProperties": false});
        assert_eq!(parameters(json!(null)), none);
        assert_eq!(parameters(json!({})), json!({"type": "object"}));
        assert_eq!(parameters(json!({"properties": {"x": {}}})), json!({"properties": {"x": {}}, "type": "object"}));
    }
}
