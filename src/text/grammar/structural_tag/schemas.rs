//! The schemas in structural tags.

use crate::grammar::request::GrammarSpec;
use crate::grammar::schema::close_objects;
use serde_json::Value;

impl GrammarSpec {
    /// Closes the objects of JSON schemas ([`close_objects`]).
    pub fn close_objects(&mut self) {
        match self {
            GrammarSpec::JsonSchema(schema) => close_objects(schema),
            GrammarSpec::StructuralTag(tag) => each_schema(tag, "", &mut |_, schema| close_objects(schema)),
            _ => {}
        }
    }
}

/// Calls `visit` with the place of each schema in a structural tag, and the schema.
pub fn each_schema(tag: &mut Value, place: &str, visit: &mut dyn FnMut(&str, &mut Value)) {
    let Some(fields) = tag.as_object_mut() else { return };
    let is_schema = fields.get("type").is_some_and(|kind| kind == "json_schema");
    for (name, value) in fields {
        let place = format!("{place}.{name}");
        match (name.as_str(), value) {
            ("json_schema", schema) if is_schema => visit(&place, schema),
            ("format" | "content", part) => each_schema(part, &place, visit),
            ("elements" | "tags", Value::Array(parts)) => {
                for (i, part) in parts.iter_mut().enumerate() {
                    each_schema(part, &format!("{place}[{i}]"), visit);
                }
            }
            ("rules", Value::Array(rules)) => {
                for (i, rule) in rules.iter_mut().enumerate() {
                    if let Some(part) = rule.get_mut(1) {
                        each_schema(part, &format!("{place}[{i}][1]"), visit);
                    }
                }
            }
            ("structures", Value::Array(structures)) => {
                for (i, structure) in structures.iter_mut().enumerate() {
                    if let Some(schema) = structure.get_mut("schema") {
                        visit(&format!("{place}[{i}].schema"), schema);
                    }
                }
            }
            _ => {}
        }
    }
}
