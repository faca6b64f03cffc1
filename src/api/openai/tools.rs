//! `tools`, `tool_choice` and `parallel_tool_calls` of a chat.

use crate::body::body_fields;
use crate::chat::tools::{AskedTool, CallableFunction, Tools, function_name, no_such_tool};
use crate::checks::shown;
use pagetide_base::error::ApiError;
use serde_json::{Map, Value};
use utoipa::ToSchema;

const CHOICES: &str = "\"none\", \"auto\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": …}}";

body_fields! {
    /// As they stand in the body.
    pub struct ToolFields {
        /// Functions that the model may call.
        #[schema(value_type = Option<Vec<Tool>>)]
        tools: Option<Vec<Value>>,
        /// none, auto (the default where there are tools), required, one function, or allowed_tools with some of them.
        #[schema(value_type = Option<ToolChoiceForms>)]
        tool_choice: Option<Value>,
        /// Whether there may be more than one call in an answer.
        #[schema(default = true)]
        parallel_tool_calls: Option<bool>,
    }
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
    /// The arguments' objects have no properties but those that the schema names, even where server.schema_objects =
    /// "open". Arguments of demanded calls keep to the schema either way, others do not.
    strict: Option<bool>,
}

#[derive(ToSchema)]
#[serde(untagged)]
#[schema(as = ToolChoice)]
#[allow(dead_code, reason = "only described")]
enum ToolChoiceForms {
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

impl ToolFields {
    /// The tools that a chat has.
    pub fn check(self) -> Result<Tools, ApiError> {
        let with_function = |(i, tool): (usize, Value)| {
            let function = CallableFunction::of_tool(&format!("tools[{i}]"), &tool)?;
            Ok((tool, function))
        };
        let tools = self.tools.unwrap_or_default().into_iter().enumerate().map(with_function);
        let several = self.parallel_tool_calls.unwrap_or(true);
        let mut tools = Tools::new(tools.collect::<Result<_, ApiError>>()?, several)?;
        choose(&mut tools, self.tool_choice.as_ref())?;
        Ok(tools)
    }
}

fn choose(tools: &mut Tools, choice: Option<&Value>) -> Result<(), ApiError> {
    let asked = match choice {
        None => AskedTool::Default,
        Some(Value::String(word)) if word == "none" => AskedTool::None,
        // Refused, whatever it is.
        Some(_) if tools.is_empty() => AskedTool::Auto,
        Some(Value::String(word)) => mode("tool_choice", word)?,
        Some(Value::Object(fields)) => choose_among(tools, fields)?,
        Some(other) => {
            let message = format!("tool_choice must be {CHOICES}, got {}", shown(other));
            return Err(ApiError::invalid("tool_choice", message));
        }
    };
    tools.choose(asked)
}

fn mode(param: &str, word: &str) -> Result<AskedTool<'static>, ApiError> {
    match word {
        "auto" => Ok(AskedTool::Auto),
        "required" => Ok(AskedTool::Required),
        _ => Err(ApiError::invalid(param, format!("{param} must be {CHOICES}, got {}", shown(&word.into())))),
    }
}

/// One function, or OpenAI's `allowed_tools`.
fn choose_among<'a>(tools: &mut Tools, fields: &'a Map<String, Value>) -> Result<AskedTool<'a>, ApiError> {
    match fields.get("type").and_then(Value::as_str) {
        Some("function") => {
            let function = fields.get("function").and_then(Value::as_object);
            let name = function_name("tool_choice.function", function)?;
            Ok(AskedTool::Function { name, param: "tool_choice.function.name" })
        }
        Some("allowed_tools") => {
            // OpenAI has them in an object of their own, the Responses API beside the type.
            let (param, allowed) = match fields.get("allowed_tools") {
                Some(Value::Object(allowed)) => ("tool_choice.allowed_tools", allowed),
                _ => ("tool_choice", fields),
            };
            allow(tools, param, allowed)
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

fn allow(tools: &mut Tools, param: &str, allowed: &Map<String, Value>) -> Result<AskedTool<'static>, ApiError> {
    let word = allowed.get("mode").and_then(Value::as_str).unwrap_or("auto");
    let asked = mode(&format!("{param}.mode"), word)?;
    let list = format!("{param}.tools");
    let given = allowed.get("tools").and_then(Value::as_array).filter(|tools| !tools.is_empty());
    let given =
        given.ok_or_else(|| ApiError::invalid(&list, format!("{list} must be an array of one or more functions")))?;
    let mut names = Vec::with_capacity(given.len());
    for (i, tool) in given.iter().enumerate() {
        let path = format!("{list}[{i}].function");
        let name = function_name(&path, tool.get("function").and_then(Value::as_object))?;
        if !tools.has(name) {
            return Err(no_such_tool(&format!("{path}.name"), name));
        }
        names.push(name);
    }
    tools.confine_to(&names);
    Ok(asked)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::read_value;
    use crate::chat::tools::ToolChoice;
    use serde_json::json;

    fn tools_of(body: &Value) -> Result<Tools, ApiError> {
        let parsed = read_value::<ToolFields>(body)?;
        parsed.problems.check()?;
        parsed.body.check()
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}})
    }

    fn read(tools: Value, choice: Value) -> Result<Tools, ApiError> {
        tools_of(&json!({"tools": tools, "tool_choice": choice}))
    }

    #[test]
    fn every_choice_is_read() {
        let both = json!([tool("f"), tool("g")]);
        for (choice, expected, left, shown) in [
            (json!(null), ToolChoice::Auto, &["f", "g"][..], 2),
            (json!("auto"), ToolChoice::Auto, &["f", "g"], 2),
            // The prompt is the same whatever is chosen, as in vLLM; but for what is not allowed.
            (json!("none"), ToolChoice::None, &["f", "g"], 2),
            (json!("required"), ToolChoice::Required, &["f", "g"], 2),
            (json!({"type": "function", "function": {"name": "g"}}), ToolChoice::Named, &["g"], 2),
            (
                json!({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("g")]}}),
                ToolChoice::Required,
                &["g"],
                1,
            ),
            (json!({"type": "allowed_tools", "mode": "auto", "tools": [tool("f")]}), ToolChoice::Auto, &["f"], 1),
        ] {
            let tools = read(both.clone(), choice.clone()).unwrap();
            assert_eq!(tools.choice(), (expected, left.to_vec(), shown), "{choice}");
        }
        let mut none = read(json!(null), json!(null)).unwrap();
        assert_eq!((none.choice().0, none.take_shown()), (ToolChoice::None, None));
        assert_eq!(read(json!([]), json!("none")).unwrap().take_shown(), None);
    }

    #[test]
    fn a_single_call_is_kept_to() {
        let most = |body: Value| tools_of(&body).unwrap().max_calls();
        let tools = json!([tool("f")]);
        assert_eq!(most(json!({ "tools": tools })), u32::MAX);
        assert_eq!(most(json!({"tools": tools, "parallel_tool_calls": null})), u32::MAX);
        assert_eq!(most(json!({"tools": tools, "parallel_tool_calls": false})), 1);
        let named = json!({"type": "function", "function": {"name": "f"}});
        assert_eq!(most(json!({"tools": tools, "tool_choice": named})), 1);
    }

    #[test]
    fn an_error_names_the_place() {
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
            CallableFunction::of_tool("tools[0]", &tool).unwrap().parameters().clone()
        };
        let none = json!({"type": "object", "properties": {}, "additionalProperties": false});
        assert_eq!(parameters(json!(null)), none);
        assert_eq!(parameters(json!({})), json!({"type": "object"}));
        assert_eq!(parameters(json!({"properties": {"x": {}}})), json!({"properties": {"x": {}}, "type": "object"}));
    }
}
