//! The functions that the model may call, and those that it has to call.

use crate::checks::{shown, wrong_type};
use crate::model_info::ModelInfo;
use pagetide_base::error::ApiError;
use pagetide_text::chat_output::{ToolFormat, grammar};
use pagetide_text::grammar::{GrammarRequest, GrammarSpec, close_objects};
use serde_json::{Map, Value, json};
use std::borrow::Cow;

/// Characters of a function's name: Anthropic's limit, OpenAI's is 64.
const MAX_NAME_CHARS: usize = 128;

/// A request's tools, checked.
#[derive(Debug, Default)]
pub struct Tools {
    /// The tools that may be called, as the template is given them.
    shown: Vec<Value>,
    functions: Vec<CallableFunction>,
    choice: ToolChoice,
    /// More than one call is allowed.
    several: bool,
}

/// A function that the model may call.
#[derive(Debug)]
pub struct CallableFunction {
    path: FunctionPath,
    name: String,
    /// JSON schema of its arguments, an object.
    parameters: Value,
    /// Its objects have no properties but those that the schema names, whatever the server's setting is.
    is_strict: bool,
}

/// Where a function stands in the client's body.
#[derive(Clone, Debug)]
pub struct FunctionPath {
    /// The object with its name: `tools[0]`.
    pub function: String,
    /// The schema of its arguments: `tools[0].parameters`.
    pub parameters: String,
}

/// Which functions are to be called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    #[default]
    None,
    Auto,
    Required,
    /// One function has to be called: the only one left.
    Named,
}

/// A client's choice among its tools.
#[derive(Clone, Copy, Debug)]
pub enum AskedTool<'a> {
    /// Nothing is said.
    Default,
    None,
    Auto,
    Required,
    Function {
        name: &'a str,
        /// The field of the name.
        param: &'a str,
    },
}

impl Tools {
    /// Each tool as the template is given it, with its function. `several`: more than one call is allowed.
    pub fn new(tools: Vec<(Value, CallableFunction)>, several: bool) -> Result<Self, ApiError> {
        let (shown, functions): (Vec<Value>, Vec<CallableFunction>) = tools.into_iter().unzip();
        for (i, function) in functions.iter().enumerate() {
            if functions[..i].iter().any(|earlier| earlier.name == function.name) {
                let param = format!("{}.name", function.path.function);
                let message = format!("{param}: an earlier tool is called {:?} too", function.name);
                return Err(ApiError::invalid(param, message));
            }
        }
        Ok(Self { shown, functions, choice: ToolChoice::None, several })
    }

    pub fn choose(&mut self, asked: AskedTool<'_>) -> Result<(), ApiError> {
        self.choice = match asked {
            AskedTool::Default if self.functions.is_empty() => ToolChoice::None,
            AskedTool::Default => ToolChoice::Auto,
            AskedTool::None => ToolChoice::None,
            _ if self.functions.is_empty() => {
                return Err(ApiError::invalid("tool_choice", "tool_choice is only allowed with tools"));
            }
            AskedTool::Auto => ToolChoice::Auto,
            AskedTool::Required => ToolChoice::Required,
            AskedTool::Function { name, param } => {
                self.functions.retain(|function| function.name == name);
                if self.functions.is_empty() {
                    return Err(no_such_tool(param, name));
                }
                ToolChoice::Named
            }
        };
        Ok(())
    }

    /// Only the functions of these names may be called: the others might as well not be there.
    pub fn confine_to(&mut self, names: &[&str]) {
        self.functions.retain(|function| names.contains(&function.name.as_str()));
        self.shown.retain(|tool| tool["function"]["name"].as_str().is_some_and(|name| names.contains(&name)));
    }

    /// The template is shown the tools, and no calls are read.
    pub fn read_no_calls(&mut self) {
        self.choice = ToolChoice::None;
    }

    pub fn is_empty(&self) -> bool {
        self.functions.is_empty()
    }

    pub fn has(&self, name: &str) -> bool {
        self.functions.iter().any(|function| function.name == name)
    }

    /// Takes what the chat template is given; `None` where there are no tools.
    pub fn take_shown(&mut self) -> Option<Value> {
        (!self.shown.is_empty()).then(|| std::mem::take(&mut self.shown).into())
    }

    /// The format in which calls are to be read; `None` where there are to be none.
    pub fn format(&self, model: &ModelInfo) -> Result<Option<ToolFormat>, ApiError> {
        match (self.choice, model.chat_format.tools) {
            (ToolChoice::None, _) => Ok(None),
            (_, Some(format)) => Ok(Some(format)),
            (ToolChoice::Auto, None) => Err(ApiError::invalid(
                "tools",
                "this model's chat template shows no format of tool calls that is known: start the server with \
                 --tool-call-parser, or set tool_choice to \"required\", to one function, or to \"none\"",
            )),
            // The grammar brings about calls all the same, in the plainest of the formats.
            (ToolChoice::Required | ToolChoice::Named, None) => Ok(Some(ToolFormat::Llama3Json)),
        }
    }

    pub fn is_named(&self) -> bool {
        self.choice == ToolChoice::Named
    }

    /// Calls of one answer at most.
    pub fn max_calls(&self) -> u32 {
        if self.several && !self.is_named() { u32::MAX } else { 1 }
    }

    /// What the output has to be where calls are demanded.
    pub fn grammar(&self, format: ToolFormat, model: &ModelInfo) -> Result<Option<GrammarRequest>, ApiError> {
        if !matches!(self.choice, ToolChoice::Required | ToolChoice::Named) {
            return Ok(None);
        }
        let closes_objects = model.server.get().closes_objects();
        let parameters = self.functions.iter().map(|function| {
            let mut schema = Cow::Borrowed(&function.parameters);
            if closes_objects || function.is_strict {
                close_objects(schema.to_mut());
            }
            schema
        });
        let parameters: Vec<Cow<'_, Value>> = parameters.collect();
        let functions = self.functions.iter().zip(&parameters).map(|(function, parameters)| grammar::Function {
            name: &function.name,
            parameters,
            param: function.path.parameters.clone(),
        });
        let functions: Vec<_> = functions.collect();
        let lark = grammar::calls(format, &functions, self.max_calls() > 1, &model.tokenizer)?;
        Ok(Some(GrammarRequest::new(GrammarSpec::Lark(lark), "tools")))
    }

    /// The choice, the functions that may be called, and the number of tools that are shown.
    #[cfg(test)]
    pub fn choice(&self) -> (ToolChoice, Vec<&str>, usize) {
        (self.choice, self.functions.iter().map(|function| function.name.as_str()).collect(), self.shown.len())
    }
}

pub fn no_such_tool(param: &str, name: &str) -> ApiError {
    ApiError::invalid(param, format!("{param}: there is no tool called {}", shown(&name.into())))
}

impl CallableFunction {
    #[cfg(test)]
    pub fn parameters(&self) -> &Value {
        &self.parameters
    }

    /// Checks the function of a tool of OpenAI's form, which stands at `path`.
    pub fn of_tool(path: &str, tool: &Value) -> Result<Self, ApiError> {
        let kind = tool.get("type");
        if !tool.is_object() {
            return Err(wrong_type(path, "an object", Some(tool)));
        } else if kind.and_then(Value::as_str) != Some("function") {
            return Err(wrong_type(&format!("{path}.type"), "\"function\"", kind));
        }
        let path =
            FunctionPath { function: format!("{path}.function"), parameters: format!("{path}.function.parameters") };
        let Some(Value::Object(fields)) = tool.get("function") else {
            return Err(wrong_type(&path.function, "an object", tool.get("function")));
        };
        Self::new(path, fields, fields.get("parameters"))
    }

    /// Checks a function: `fields` has its name, `parameters` are the schema of its arguments.
    pub fn new(path: FunctionPath, fields: &Map<String, Value>, parameters: Option<&Value>) -> Result<Self, ApiError> {
        let wrong = |param: &str, expected: &str, got: Option<&Value>| {
            let got = got.map_or("nothing".into(), shown);
            Err(ApiError::invalid(param, format!("{param} must be {expected}, got {got}")))
        };
        let FunctionPath { function: base, parameters: schema_path } = &path;
        let name = function_name(base, Some(fields))?;
        let is_name = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        if !(1..=MAX_NAME_CHARS).contains(&name.len()) || !name.chars().all(is_name) {
            let expected = format!("1 to {MAX_NAME_CHARS} letters, digits, dashes, dots and underscores");
            return wrong(&format!("{base}.name"), &expected, fields.get("name"));
        }
        for (field, is_right, expected) in [
            ("description", Value::is_string as fn(&Value) -> bool, "a string"),
            ("strict", Value::is_boolean as fn(&Value) -> bool, "a boolean"),
        ] {
            let given = fields.get(field).filter(|value| !value.is_null());
            if given.is_some_and(|value| !is_right(value)) {
                return wrong(&format!("{base}.{field}"), expected, given);
            }
        }
        let parameters = match parameters {
            None | Some(Value::Null) => json!({"type": "object", "properties": {}, "additionalProperties": false}),
            Some(Value::Object(schema)) if schema.is_empty() => json!({"type": "object"}),
            Some(Value::Object(schema)) => match schema.get("type") {
                None => {
                    let mut schema = schema.clone();
                    schema.insert("type".into(), "object".into());
                    schema.into()
                }
                Some(Value::String(kind)) if kind == "object" => schema.clone().into(),
                Some(other) => return wrong(&format!("{schema_path}.type"), "\"object\"", Some(other)),
            },
            Some(other) => return wrong(schema_path, "a JSON schema of an object", Some(other)),
        };
        let name = name.to_owned();
        let is_strict = fields.get("strict") == Some(&Value::Bool(true));
        Ok(Self { path, name, parameters, is_strict })
    }
}

/// The name in the object `function` at `path`.
pub fn function_name<'a>(path: &str, function: Option<&'a Map<String, Value>>) -> Result<&'a str, ApiError> {
    let name = function.and_then(|function| function.get("name"));
    name.and_then(Value::as_str).ok_or_else(|| {
        let param = format!("{path}.name");
        let message = format!("{param} must be a string, got {}", name.map_or("nothing".into(), shown));
        ApiError::invalid(&param, message)
    })
}

/// A function's fields as the tool that the chat template is given.
pub fn shown_tool(function: Map<String, Value>) -> Value {
    json!({"type": "function", "function": function})
}
