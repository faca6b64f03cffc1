//! Closes the objects of a schema: they have no properties but those that the schema names.

use super::references::decoded;
use super::{LISTS, MAPS, SINGLES};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

/// Closes the objects that name properties and do not mention additional ones. Parts of one object that the schema
/// describes in several places (`allOf`, or `properties` beside `anyOf`, `oneOf`, `allOf` or `$ref`) stay open: closed,
/// each would forbid the properties of the others.
pub fn close_objects(schema: &mut Value) {
    let mut references = References::default();
    Visit { parts: &BTreeSet::new(), references: &mut references, close: false }.schema(
        schema,
        "#",
        ObjectContext::ROOT,
    );
    let parts = references.parts();
    Visit { parts: &parts, references: &mut References::default(), close: true }.schema(
        schema,
        "#",
        ObjectContext::ROOT,
    );
}

/// The references of a schema that stand for an object or a part of one.
#[derive(Default)]
struct References {
    /// Those that describe a part.
    to_parts: BTreeSet<String>,
    /// For each definition, those that describe the same object as it does.
    same: BTreeMap<String, Vec<String>>,
}

impl References {
    /// The definitions that describe a part of an object, directly or through others.
    fn parts(mut self) -> BTreeSet<String> {
        let mut found: Vec<String> = self.to_parts.iter().cloned().collect();
        while let Some(definition) = found.pop() {
            for reference in self.same.remove(&definition).unwrap_or_default() {
                if self.to_parts.insert(reference.clone()) {
                    found.push(reference);
                }
            }
        }
        self.to_parts
    }
}

/// Where a schema stands.
#[derive(Clone, Copy)]
struct ObjectContext<'a> {
    /// It describes a part of an object.
    is_part: bool,
    /// The definition that describes the same object.
    definition: Option<&'a str>,
}

impl ObjectContext<'_> {
    const ROOT: Self = Self { is_part: false, definition: None };
}

/// One pass over a schema.
struct Visit<'a> {
    /// Definitions that describe a part of an object.
    parts: &'a BTreeSet<String>,
    references: &'a mut References,
    /// Whether this pass closes objects. The pass before finds the references.
    close: bool,
}

impl Visit<'_> {
    /// `place`: the reference to this schema.
    fn schema(&mut self, schema: &mut Value, place: &str, context: ObjectContext<'_>) {
        let Value::Object(fields) = schema else { return };
        let names_properties = fields.contains_key("properties") || fields.contains_key("patternProperties");
        let context = ObjectContext { is_part: context.is_part || num_descriptions(fields) > 1, ..context };
        if let Some(reference) = fields.get("$ref").and_then(Value::as_str).map(decoded) {
            if let Some(definition) = context.definition {
                self.references.same.entry(definition.to_owned()).or_default().push(reference.clone());
            }
            if context.is_part {
                self.references.to_parts.insert(reference);
            }
        }
        for (key, value) in fields.iter_mut() {
            let place = format!("{place}/{key}");
            let describes_same = matches!(key.as_str(), "allOf" | "anyOf" | "oneOf");
            let inner = if describes_same { context } else { ObjectContext::ROOT };
            match value {
                Value::Object(schemas) if MAPS.contains(&key.as_str()) => {
                    let is_definition = key == "$defs" || key == "definitions";
                    for (name, schema) in schemas {
                        let place = format!("{place}/{name}");
                        let is_part = is_definition && self.parts.contains(&place);
                        let definition = is_definition.then_some(place.as_str());
                        self.schema(schema, &place, ObjectContext { is_part, definition });
                    }
                }
                Value::Array(schemas) if LISTS.contains(&key.as_str()) || key == "items" => {
                    for (i, schema) in schemas.iter_mut().enumerate() {
                        self.schema(schema, &format!("{place}/{i}"), inner);
                    }
                }
                Value::Object(_) if SINGLES.contains(&key.as_str()) => self.schema(value, &place, ObjectContext::ROOT),
                _ => {}
            }
        }
        if self.close && names_properties && !context.is_part {
            fields.entry("additionalProperties").or_insert(Value::Bool(false));
        }
    }
}

/// In how many places these fields describe an object.
fn num_descriptions(fields: &Map<String, Value>) -> usize {
    let names_properties = fields.contains_key("properties") || fields.contains_key("patternProperties");
    let num_all = fields.get("allOf").and_then(Value::as_array).map_or(0, Vec::len);
    let others = ["anyOf", "oneOf", "$ref"].into_iter().filter(|key| fields.contains_key(*key)).count();
    usize::from(names_properties) + num_all + others
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn closed(mut schema: Value) -> Value {
        close_objects(&mut schema);
        schema
    }

    #[test]
    fn objects_that_name_properties_are_closed_at_every_depth() {
        let inner = json!({"type": "object", "properties": {"b": {}}});
        let closed_inner = json!({"type": "object", "properties": {"b": {}}, "additionalProperties": false});
        assert_eq!(
            closed(json!({"properties": {"a": inner, "c": {"type": "array", "items": inner}}})),
            json!({"properties": {"a": closed_inner, "c": {"type": "array", "items": closed_inner}},
                   "additionalProperties": false})
        );
        assert_eq!(
            closed(json!({"anyOf": [inner, {"type": "null"}]})),
            json!({"anyOf": [closed_inner, {"type": "null"}]})
        );
        let with_definition =
            |inner: &Value| json!({"$defs": {"x": inner}, "type": "array", "items": {"$ref": "#/$defs/x"}});
        assert_eq!(closed(with_definition(&inner)), with_definition(&closed_inner));
    }

    #[test]
    fn what_says_so_stays_open() {
        for open in [
            json!({"type": "object"}),
            json!({"properties": {"a": {}}, "additionalProperties": true}),
            json!({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}),
        ] {
            assert_eq!(closed(open.clone()), open);
        }
    }

    #[test]
    fn parts_of_one_object_stay_open() {
        let part = |name: &str| json!({"type": "object", "properties": {name: {}}, "required": [name]});
        for open in [
            json!({"allOf": [part("a"), part("b")]}),
            json!({"properties": {"a": {}}, "anyOf": [part("b"), part("c")]}),
            json!({"$defs": {"base": part("a")}, "allOf": [{"$ref": "#/$defs/base"}, part("b")]}),
            json!({"$defs": {"base": part("a"), "other": {"$ref": "#/$defs/base"}},
                   "$ref": "#/$defs/other", "properties": {"b": {}}}),
        ] {
            assert_eq!(closed(open.clone()), open);
        }
        let single = json!({"allOf": [{"properties": {"a": {}}}]});
        assert_eq!(closed(single), json!({"allOf": [{"properties": {"a": {}}, "additionalProperties": false}]}));
    }
}
