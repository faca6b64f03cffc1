//! Types and values that a schema allows.

use serde_json::{Map, Value};
use std::collections::BTreeSet;

pub const TYPES: [&str; 7] = ["array", "boolean", "integer", "null", "number", "object", "string"];

/// A value for a message, shortened if it is long.
pub fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// The possible types of a schema's values. An integer is a number.
pub fn types(schema: &Map<String, Value>) -> BTreeSet<&'static str> {
    let number = |name: &str| if name == "integer" { "number" } else { name }.to_owned();
    let known = |name: &str| TYPES.into_iter().find(|known| *known == name);
    let all = || TYPES.into_iter().filter(|name| *name != "integer").collect::<BTreeSet<_>>();
    let mut types = match schema.get("type") {
        Some(Value::String(name)) => known(&number(name)).into_iter().collect(),
        Some(Value::Array(names)) => {
            names.iter().filter_map(Value::as_str).filter_map(|name| known(&number(name))).collect()
        }
        _ => all(),
    };
    if let Some(values) = values(schema) {
        let of_values: BTreeSet<_> = values.iter().map(|value| kind(value)).collect();
        types.retain(|name| of_values.contains(name));
    }
    types
}

/// The values that a schema allows, if it lists them.
pub fn values(schema: &Map<String, Value>) -> Option<Vec<&Value>> {
    match (schema.get("const"), schema.get("enum")) {
        (Some(value), _) => Some(vec![value]),
        (None, Some(Value::Array(values))) => Some(values.iter().collect()),
        _ => None,
    }
}

/// Equality as in JSON Schema: 1 equals 1.0.
pub fn equal(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}
