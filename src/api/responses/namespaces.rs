//! Function tools, which may be in namespaces. A chat template knows no namespaces: the model reads
//! `NAMESPACE__FUNCTION`.

use crate::checks::{object, optional_string, string, wrong_type};
use pagetide_base::error::ApiError;
use serde_json::{Map, Value};
use std::collections::HashMap;

/// A function that the model may call.
#[derive(Debug)]
pub struct ResponseFunction {
    /// Where it stands in the body.
    pub path: String,
    /// The name that the model reads.
    pub name: String,
    /// Its namespace and its name there.
    namespaced: Option<(String, String)>,
    /// As the client sent them, but with the name that the model reads.
    pub fields: Map<String, Value>,
}

/// The functions of namespaces by the names that the model reads: each with its namespace and its name there.
#[derive(Debug, Default)]
pub struct Namespaces(HashMap<String, (String, String)>);

impl Namespaces {
    pub fn of(functions: &[ResponseFunction]) -> Self {
        let namespaced = |function: &ResponseFunction| Some((function.name.clone(), function.namespaced.clone()?));
        Self(functions.iter().filter_map(namespaced).collect())
    }

    /// The namespace and the name of the function that the model calls by `name`.
    pub fn split<'a>(&'a self, name: &'a str) -> (Option<&'a str>, &'a str) {
        match self.0.get(name) {
            Some((namespace, local)) => (Some(namespace), local),
            None => (None, name),
        }
    }
}

/// The name that the model reads.
pub fn flat_name(namespace: Option<&str>, name: &str) -> String {
    namespace.map_or_else(|| name.to_owned(), |namespace| format!("{namespace}__{name}"))
}

/// The functions of a request's tools, those of namespaces included.
pub fn functions(tools: &[Value]) -> Result<Vec<ResponseFunction>, ApiError> {
    let mut functions = Vec::with_capacity(tools.len());
    for (i, tool) in tools.iter().enumerate() {
        let path = format!("tools[{i}]");
        let fields = object(&path, tool)?;
        if string(&path, fields, "type")? != "namespace" {
            functions.push(function(path.clone(), None, function_tool(&path, tool)?)?);
            continue;
        }
        let namespace = string(&path, fields, "name")?;
        let path = format!("{path}.tools");
        let inner = fields.get("tools");
        let inner = inner.and_then(Value::as_array).ok_or_else(|| wrong_type(&path, "an array", inner))?;
        for (i, tool) in inner.iter().enumerate() {
            let path = format!("{path}[{i}]");
            functions.push(function(path.clone(), Some(namespace), function_tool(&path, tool)?)?);
        }
    }
    Ok(functions)
}

fn function(path: String, namespace: Option<&str>, fields: &Map<String, Value>) -> Result<ResponseFunction, ApiError> {
    let local = string(&path, fields, "name")?;
    let name = flat_name(namespace, local);
    let namespaced = namespace.map(|namespace| (namespace.to_owned(), local.to_owned()));
    let mut fields = fields.clone();
    fields.insert("name".into(), name.as_str().into());
    Ok(ResponseFunction { path, name, namespaced, fields })
}

/// The fields of a function tool; every other kind of tool would have to run on the server.
pub fn function_tool<'a>(path: &str, tool: &'a Value) -> Result<&'a Map<String, Value>, ApiError> {
    let tool = object(path, tool)?;
    match string(path, tool, "type")? {
        "function" => Ok(tool),
        kind => {
            let message = format!("{path}: tools of type {kind:?} are not supported, only \"function\" is");
            Err(ApiError::invalid(format!("{path}.type"), message))
        }
    }
}

/// The name that the model reads of the function that `choice` names, with a namespace or without: then it must be in
/// no namespace, or in only one. `None`: there is no such function.
pub fn find<'a>(
    path: &str,
    choice: &Map<String, Value>,
    functions: &'a [ResponseFunction],
) -> Result<Option<&'a str>, ApiError> {
    let name = string(path, choice, "name")?;
    let flat = flat_name(optional_string(path, choice, "namespace")?, name);
    if let Some(function) = functions.iter().find(|function| function.name == flat) {
        return Ok(Some(&function.name));
    }
    let is_local = |function: &&ResponseFunction| function.namespaced.as_ref().is_some_and(|(_, local)| *local == flat);
    let mut local = functions.iter().filter(is_local);
    match (local.next(), local.next()) {
        (Some(_), Some(_)) => {
            let message = format!("{path}.name: {name:?} is in several namespaces; name its namespace");
            Err(ApiError::invalid(format!("{path}.name"), message))
        }
        (only, _) => Ok(only.map(|function| function.name.as_str())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn functions_of_namespaces_are_found_and_named_again() {
        let tool = |name: &str| json!({"type": "function", "name": name, "parameters": {}});
        let tools = [
            tool("plain"),
            json!({"type": "namespace", "name": "a", "tools": [tool("f"), tool("g")]}),
            json!({"type": "namespace", "name": "b", "description": "B.", "tools": [tool("g")]}),
        ];
        let functions = functions(&tools).unwrap();
        let names: Vec<&str> = functions.iter().map(|function| function.name.as_str()).collect();
        assert_eq!(names, ["plain", "a__f", "a__g", "b__g"]);
        assert_eq!((&*functions[3].path, &functions[3].fields["name"]), ("tools[2].tools[0]", &json!("b__g")));
        let namespaces = Namespaces::of(&functions);
        assert_eq!(namespaces.split("b__g"), (Some("b"), "g"));
        assert_eq!(namespaces.split("plain"), (None, "plain"));
        let found = |choice: Value| find("tool_choice", choice.as_object().unwrap(), &functions).map_err(|e| e.param);
        assert_eq!(found(json!({"name": "plain"})), Ok(Some("plain")));
        assert_eq!(found(json!({"name": "f"})), Ok(Some("a__f")));
        assert_eq!(found(json!({"name": "a__g"})), Ok(Some("a__g")));
        assert_eq!(found(json!({"name": "g", "namespace": "b"})), Ok(Some("b__g")));
        assert_eq!(found(json!({"name": "h"})), Ok(None));
        assert_eq!(found(json!({"name": "g"})), Err(Some("tool_choice.name".into())));
    }

    #[test]
    fn a_wrong_tool_is_refused_where_it_is_wrong() {
        for (tool, param) in [
            (json!({"type": "mcp"}), "tools[0].type"),
            (json!({"type": "namespace", "tools": []}), "tools[0].name"),
            (json!({"type": "namespace", "name": "a"}), "tools[0].tools"),
            (json!({"type": "namespace", "name": "a", "tools": [{"type": "mcp"}]}), "tools[0].tools[0].type"),
            (json!({"type": "namespace", "name": "a", "tools": [{"type": "function"}]}), "tools[0].tools[0].name"),
        ] {
            assert_eq!(functions(std::slice::from_ref(&tool)).unwrap_err().param.as_deref(), Some(param), "{tool}");
        }
    }
}
