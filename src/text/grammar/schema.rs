//! Checks JSON schemas keyword by keyword, so that an error names the place, and brings them into the form that
//! llguidance accepts.
//!
//! Annotations and unknown keywords do not restrict values and are ignored, as the specification says. A keyword that
//! restricts values but is not supported is an error: an output is valid or there is none.

mod closing;
mod formats;
mod references;
mod values;

use super::request::Whitespace;
pub use closing::close_objects;
use formats::{FORMATS, UNSUPPORTED_FORMATS, and, replace_format};
use llguidance::derivre::{RegexAst, RegexBuilder};
use llguidance::regex_to_lark;
use pagetide_base::budget::{Budget, Exhausted};
use pagetide_base::error::ApiError;
use references::{collect_references, decoded, encoded};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::panic::catch_unwind;
use values::{TYPES, equal, kind, shown, types, values};

/// Maximum nesting of schemas.
const MAX_DEPTH: usize = 100;
/// Maximum number of properties of an object, of definitions, and of options of an anyOf. Compiling an object takes
/// quadratic time, and references are followed by recursion.
const MAX_MEMBERS: usize = 2000;
const MAX_PATTERN_BYTES: usize = 4096;
/// Maximum number of options of a oneOf. Each pair is compared.
const MAX_ONE_OF: usize = 300;
/// Maximum number of comparisons of two schemas to find what distinguishes the options of a oneOf: 1 to 10 µs each.
const MAX_COMPARISONS: u64 = 100_000;
/// The largest supported number. llguidance computes with 64 bits, and -2⁶³ would end the process.
const MAX_NUMBER: f64 = 9.2e18;
/// Maximum number of parts of a rejected schema that are tried alone to find the wrong one.
const MAX_TRIED_PARTS: usize = 200;

/// Keywords that restrict values but are not supported by llguidance.
const UNSUPPORTED: &[&str] = &[
    "$dynamicRef",
    "$recursiveRef",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
];
/// Keywords whose value is an object of schemas, a list of schemas, or a schema.
const MAPS: [&str; 4] = ["$defs", "definitions", "properties", "patternProperties"];
const LISTS: [&str; 4] = ["allOf", "anyOf", "oneOf", "prefixItems"];
const SINGLES: [&str; 3] = ["additionalProperties", "additionalItems", "items"];

/// An error in a schema, and its place.
#[derive(Debug, PartialEq, Eq)]
pub struct SchemaError {
    /// The path from the root of the schema, `.properties.x.pattern`; empty for the schema itself.
    place: String,
    message: String,
}

impl SchemaError {
    pub fn new(place: impl Into<String>, message: impl Into<String>) -> Self {
        Self { place: place.into(), message: message.into() }
    }

    /// The error for the client. The schema is in the field `param`.
    pub fn in_param(self, param: &str) -> ApiError {
        let place = format!("{param}{}", self.place);
        let message = format!("{place}: {}", self.message);
        ApiError::invalid(place, message)
    }
}

type Checked<T> = Result<T, SchemaError>;

/// The place of a member or an element of the value at `place`.
fn below(place: &str, key: &str) -> String {
    let is_plain = !key.is_empty() && key.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '$'));
    if is_plain { format!("{place}.{key}") } else { format!("{place}[{}]", Value::from(key)) }
}

/// Checks a schema of a client and converts it for llguidance, with the options for `whitespace`.
pub fn prepare(schema: &Value, whitespace: &Whitespace) -> Checked<Value> {
    let mut root = match schema {
        Value::Bool(true) => json!({}),
        Value::Bool(false) => return Err(SchemaError::new("", "no value is allowed")),
        Value::Object(_) => schema.clone(),
        other => return Err(SchemaError::new("", format!("a schema must be an object, got {}", kind(other)))),
    };
    // These are options of llguidance, and some of them weaken the schema.
    root.as_object_mut().expect("it is an object").shift_remove("x-guidance");
    let mut references = Vec::new();
    collect_references(&root, &mut references);
    let num_references = references.iter().collect::<BTreeSet<_>>().len();
    if num_references > MAX_MEMBERS {
        let message = format!("must have references to at most {MAX_MEMBERS} schemas, got {num_references}");
        return Err(SchemaError::new("", message));
    }
    let given = root.clone();
    let has_one_of_targets = references.iter().any(|reference| reference.contains("/oneOf/"));
    let checker = Checker { root: &given, has_one_of_targets, budget: Budget::steps(MAX_COMPARISONS) };
    checker.schema(&mut root, "", 0)?;
    checker.targets(&mut root, references)?;
    root.as_object_mut().expect("it is an object").insert("x-guidance".into(), whitespace.options());
    Ok(root)
}

/// Finds the smallest part of `schema` that is also rejected alone, with only the definitions, and returns its place
/// and message. `error_of` returns the message with which a schema is rejected. The `message` of the whole schema ends
/// with that of the part.
pub fn culprit(schema: &Value, message: String, error_of: impl Fn(Value) -> Option<String>) -> SchemaError {
    let mut parts = Vec::new();
    collect_parts(schema, String::new(), &mut parts);
    // Parts come before the schema that contains them.
    for (place, part) in parts.into_iter().take(MAX_TRIED_PARTS) {
        let Value::Object(fields) = part else { continue };
        let mut alone = fields.clone();
        for definitions in ["$defs", "definitions"] {
            if let Some(given) = schema.get(definitions) {
                alone.insert(definitions.into(), given.clone());
            }
        }
        if let Some(own) = error_of(Value::Object(alone)).filter(|own| message.ends_with(own.as_str())) {
            return SchemaError { place, message: own };
        }
    }
    SchemaError { place: String::new(), message }
}

fn collect_parts<'a>(schema: &'a Value, place: String, parts: &mut Vec<(String, &'a Value)>) {
    for (place, part) in children(schema, &place) {
        collect_parts(part, place, parts);
    }
    parts.push((place, schema));
}

/// The schemas directly inside a schema, with their places.
fn children<'a>(schema: &'a Value, place: &str) -> Vec<(String, &'a Value)> {
    let Value::Object(fields) = schema else { return Vec::new() };
    let mut found = Vec::new();
    for (key, value) in fields {
        let place = below(place, key);
        match value {
            Value::Object(schemas) if MAPS.contains(&key.as_str()) => {
                found.extend(schemas.iter().map(|(name, schema)| (below(&place, name), schema)));
            }
            Value::Array(schemas) if LISTS.contains(&key.as_str()) || key == "items" => {
                found.extend(schemas.iter().enumerate().map(|(i, schema)| (format!("{place}[{i}]"), schema)));
            }
            Value::Object(_) if SINGLES.contains(&key.as_str()) => found.push((place, value)),
            _ => {}
        }
    }
    found
}

struct Checker<'a> {
    /// The original schema, for references.
    root: &'a Value,
    /// A reference points into a oneOf.
    has_one_of_targets: bool,
    /// The budget for comparing schemas.
    budget: Budget,
}

impl Checker<'_> {
    fn schema(&self, schema: &mut Value, place: &str, depth: usize) -> Checked<()> {
        if depth > MAX_DEPTH {
            return Err(SchemaError::new(place, format!("schemas are nested more than {MAX_DEPTH} deep")));
        }
        let fields = match schema {
            Value::Bool(_) => return Ok(()),
            Value::Object(fields) => fields,
            other => {
                let message = format!("a schema must be an object or a boolean, got {}", kind(other));
                return Err(SchemaError::new(place, message));
            }
        };
        drop_what_says_nothing(fields);
        for (key, value) in fields.iter_mut() {
            self.keyword(key, value, &below(place, key), depth)?;
        }
        replace_format(fields);
        replace_exclusive_bounds(fields);
        self.one_of(fields, place)
    }

    fn keyword(&self, key: &str, value: &mut Value, place: &str, depth: usize) -> Checked<()> {
        let wrong = |expected: &str| Err(SchemaError::new(place, format!("must be {expected}, got {}", shown(value))));
        if UNSUPPORTED.contains(&key) {
            return Err(SchemaError::new(place, format!("the keyword {key} is not supported")));
        }
        match key {
            _ if MAPS.contains(&key) => {
                let Value::Object(schemas) = value else { return wrong("an object of schemas") };
                check_count(schemas.len(), MAX_MEMBERS, place)?;
                for (name, schema) in schemas {
                    let place = below(place, name);
                    if key == "patternProperties" {
                        check_pattern(name, &place)?;
                    }
                    self.schema(schema, &place, depth + 1)?;
                }
            }
            _ if LISTS.contains(&key) || (key == "items" && value.is_array()) => {
                let Value::Array(schemas) = value else { return wrong("an array of schemas") };
                check_count(schemas.len(), if key == "oneOf" { MAX_ONE_OF } else { MAX_MEMBERS }, place)?;
                if schemas.is_empty() && key.ends_with("Of") {
                    return Err(SchemaError::new(place, "must have at least one schema"));
                }
                for (i, schema) in schemas.iter_mut().enumerate() {
                    self.schema(schema, &format!("{place}[{i}]"), depth + 1)?;
                }
            }
            _ if SINGLES.contains(&key) => self.schema(value, place, depth + 1)?,
            "type" => {
                let names: Vec<&Value> = match &*value {
                    Value::Array(names) if !names.is_empty() => names.iter().collect(),
                    name => vec![name],
                };
                if !names.iter().all(|name| name.as_str().is_some_and(|name| TYPES.contains(&name))) {
                    return wrong(&format!("one of {}, or an array of them", TYPES.join(", ")));
                }
            }
            "enum" if value.as_array().is_none_or(Vec::is_empty) => return wrong("an array with at least one value"),
            "required" if !value.as_array().is_some_and(|names| names.iter().all(Value::is_string)) => {
                return wrong("an array of strings");
            }
            "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties" | "maxProperties" => {
                // 3.0 is an integer in JSON Schema.
                let whole = value.as_f64().filter(|number| number.fract() == 0.0 && (0.0..1e9).contains(number));
                let Some(whole) = whole else { return wrong("an integer from 0 to 999999999") };
                *value = (whole as u64).into();
            }
            "minimum" | "maximum" if !is_moderate(value) => return wrong("a number from -9.2e18 to 9.2e18"),
            "exclusiveMinimum" | "exclusiveMaximum" if !is_moderate(value) && !value.is_boolean() => {
                return wrong("a number from -9.2e18 to 9.2e18");
            }
            "const" | "enum" if !has_moderate_numbers(value) => {
                return Err(SchemaError::new(place, "numbers must be from -9.2e18 to 9.2e18"));
            }
            "multipleOf" if value.as_f64().is_none_or(|number| number <= 0.0) => return wrong("a number above 0"),
            "pattern" => match value.as_str() {
                Some(pattern) => check_pattern(pattern, place)?,
                None => return wrong("a string"),
            },
            "format" => match value.as_str() {
                Some(format) if UNSUPPORTED_FORMATS.contains(&format) => {
                    let message = format!("the format {format} is not supported; {} are", FORMATS.join(", "));
                    return Err(SchemaError::new(place, message));
                }
                Some(_) => {}
                None => return wrong("a string"),
            },
            "$ref" => match value.as_str() {
                Some(reference) => {
                    self.check_reference(reference, place)?;
                    *value = encoded(reference).into();
                }
                None => return wrong("a string"),
            },
            _ => {}
        }
        Ok(())
    }

    fn check_reference(&self, reference: &str, place: &str) -> Checked<()> {
        match reference.strip_prefix('#') {
            Some(pointer) if pointer.is_empty() || pointer.starts_with('/') => match self.lookup(reference) {
                Some(_) => Ok(()),
                None => Err(SchemaError::new(place, format!("{reference:?} points to nothing in the schema"))),
            },
            // An anchor. llguidance reports it if it is missing.
            Some(_) => Ok(()),
            None => {
                let message = format!(
                    "{reference:?} is outside of the schema, and remote schemas are not \
                                       supported; use #/$defs/…"
                );
                Err(SchemaError::new(place, message))
            }
        }
    }

    /// The target of a reference into the schema.
    fn lookup(&self, reference: &str) -> Option<&Value> {
        self.root.pointer(&decoded(reference.strip_prefix('#')?))
    }

    /// Checks schemas that are not below a keyword and are only found through references.
    fn targets(&self, root: &mut Value, mut references: Vec<String>) -> Checked<()> {
        let mut seen = BTreeSet::new();
        while let Some(reference) = references.pop() {
            let is_usual = reference == "#" || MAPS.iter().any(|key| reference.starts_with(&format!("#/{key}/")));
            if is_usual || !seen.insert(reference.clone()) {
                continue;
            }
            let Some(pointer) = reference.strip_prefix('#').map(decoded) else { continue };
            let Some(target) = root.pointer_mut(&pointer) else { continue };
            let place = pointer.split('/').skip(1).fold(String::new(), |place, key| below(&place, key));
            self.schema(target, &place, 0)?;
            collect_references(target, &mut references);
        }
        Ok(())
    }

    /// "Exactly one of" equals "any of" if no value is valid for two options. Otherwise it is not supported.
    fn one_of(&self, fields: &mut Map<String, Value>, place: &str) -> Checked<()> {
        let Some(Value::Array(options)) = fields.get("oneOf") else { return Ok(()) };
        for (i, a) in options.iter().enumerate() {
            for (j, b) in options.iter().enumerate().skip(i + 1) {
                if !self
                    .are_disjoint(a, b, 0)
                    .map_err(|why| SchemaError::new(below(place, "oneOf"), why.to_string()))?
                {
                    let message = format!(
                        "oneOf is supported only if its options obviously exclude each other (by their types, or \
                         by a required property with different values), but [{i}] and [{j}] do not; use anyOf"
                    );
                    return Err(SchemaError::new(below(place, "oneOf"), message));
                }
            }
        }
        let options = Value::Array(options.clone());
        // References into the list must find it at its place.
        if self.has_one_of_targets {
            return Ok(());
        }
        if fields.contains_key("anyOf") {
            fields.shift_remove("oneOf");
            and(fields, json!({ "anyOf": options }));
        } else {
            // At the same place, because the order of keywords is that of the properties.
            let renamed = std::mem::take(fields).into_iter().map(|(key, value)| match key.as_str() {
                "oneOf" => ("anyOf".to_owned(), value),
                _ => (key, value),
            });
            *fields = renamed.collect();
        }
        Ok(())
    }

    /// Whether it is obvious that no value is valid for both.
    fn are_disjoint(&self, a: &Value, b: &Value, depth: usize) -> Result<bool, Exhausted> {
        self.budget.spend(1)?;
        if depth > 8 {
            return Ok(false);
        }
        let (a, b) = (self.resolved(a), self.resolved(b));
        let (Value::Object(left), Value::Object(right)) = (a, b) else {
            return Ok(*a == Value::Bool(false) || *b == Value::Bool(false));
        };
        for (schema, other) in [(left, b), (right, a)] {
            for key in ["anyOf", "oneOf"] {
                let Some(Value::Array(options)) = schema.get(key) else { continue };
                if self.all(options, |option| self.are_disjoint(option, other, depth + 1))? {
                    return Ok(true);
                }
            }
            if let Some(Value::Array(parts)) = schema.get("allOf")
                && !self.all(parts, |part| Ok(!self.are_disjoint(part, other, depth + 1)?))?
            {
                return Ok(true);
            }
        }
        let (left_types, right_types) = (types(left), types(right));
        let common: Vec<&str> = left_types.intersection(&right_types).copied().collect();
        if let (Some(left), Some(right)) = (values(left), values(right)) {
            self.budget.spend(left.len() as u64 * right.len() as u64 / 64)?;
            if !left.iter().any(|value| right.iter().any(|other| equal(value, other))) {
                return Ok(true);
            }
        }
        match common[..] {
            [] => Ok(true),
            ["object"] => self.are_objects_disjoint(left, right, depth),
            _ => Ok(false),
        }
    }

    /// Whether `is_so` holds for all values. Stops at the first for which it does not.
    fn all(&self, values: &[Value], is_so: impl Fn(&Value) -> Result<bool, Exhausted>) -> Result<bool, Exhausted> {
        for value in values {
            if !is_so(value)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether one of them requires a property that cannot be valid for both.
    fn are_objects_disjoint(
        &self,
        left: &Map<String, Value>,
        right: &Map<String, Value>,
        depth: usize,
    ) -> Result<bool, Exhausted> {
        fn property<'v>(schema: &'v Map<String, Value>, name: &str) -> Option<&'v Value> {
            schema.get("properties")?.get(name)
        }
        let is_closed = |schema: &Map<String, Value>, name: &str| {
            schema.get("additionalProperties") == Some(&Value::Bool(false))
                && !schema.contains_key("patternProperties")
                && property(schema, name).is_none()
        };
        let required = [left, right].into_iter().filter_map(|schema| schema.get("required")?.as_array()).flatten();
        for name in required.filter_map(Value::as_str) {
            self.budget.spend(1)?;
            if is_closed(left, name) || is_closed(right, name) {
                return Ok(true);
            }
            if let (Some(a), Some(b)) = (property(left, name), property(right, name))
                && self.are_disjoint(a, b, depth + 1)?
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Follows a reference that is alone, or beside annotations only.
    fn resolved<'v>(&'v self, mut schema: &'v Value) -> &'v Value {
        for _ in 0..8 {
            let Some(reference) = schema.get("$ref").and_then(Value::as_str) else { break };
            match self.lookup(reference) {
                Some(target) => schema = target,
                None => break,
            }
        }
        schema
    }
}

/// Removes keywords that allow every value, and unknown formats, which are annotations.
fn drop_what_says_nothing(fields: &mut Map<String, Value>) {
    let is_open = |value: &Value| *value == Value::Bool(true) || value.as_object().is_some_and(Map::is_empty);
    let has_contains = fields.contains_key("contains");
    let has_if = fields.contains_key("if");
    let has_branch = fields.contains_key("then") || fields.contains_key("else");
    fields.retain(|key, value| match key.as_str() {
        "uniqueItems" => *value != Value::Bool(false),
        "unevaluatedProperties" | "unevaluatedItems" | "propertyNames" => !is_open(value),
        "dependencies" | "dependentRequired" | "dependentSchemas" => !is_open(value),
        "minContains" | "maxContains" => has_contains,
        "if" => has_branch,
        "then" | "else" => has_if,
        "$dynamicAnchor" | "$recursiveAnchor" => false,
        "format" => value.as_str().is_none_or(|name| FORMATS.contains(&name) || UNSUPPORTED_FORMATS.contains(&name)),
        _ => true,
    });
}

/// llguidance treats an integer exclusive bound as inclusive if the other bound has the same integer part: "above 1000,
/// at most 1000.5" allows 1000. So integer bounds are moved slightly inwards.
fn replace_exclusive_bounds(fields: &mut Map<String, Value>) {
    for (key, inclusive, sign) in [("exclusiveMinimum", "minimum", 1.0), ("exclusiveMaximum", "maximum", -1.0)] {
        let bound = match fields.get(key) {
            // As in draft 4.
            Some(Value::Bool(true)) => fields.get(inclusive).cloned(),
            bound => bound.cloned(),
        };
        if let Some(bound) = bound.as_ref().and_then(Value::as_f64).filter(|bound| bound.fract() == 0.0) {
            let inside = (bound.abs().max(1.0) * 1e-9).min(0.5);
            fields.insert(key.into(), (bound + sign * inside).into());
        }
    }
}

/// Whether llguidance can compute with a number.
fn is_moderate(value: &Value) -> bool {
    value.as_f64().is_some_and(|number| number.abs() <= MAX_NUMBER)
}

/// Whether this holds for all numbers in a value.
fn has_moderate_numbers(value: &Value) -> bool {
    match value {
        Value::Number(_) => is_moderate(value),
        Value::Array(items) => items.iter().all(has_moderate_numbers),
        Value::Object(fields) => fields.values().all(has_moderate_numbers),
        _ => true,
    }
}

fn check_count(got: usize, most: usize, place: &str) -> Checked<()> {
    if got > most {
        return Err(SchemaError::new(place, format!("must have at most {most} schemas, got {got}")));
    }
    Ok(())
}

fn check_pattern(pattern: &str, place: &str) -> Checked<()> {
    if pattern.len() > MAX_PATTERN_BYTES {
        let message = format!("a pattern must have at most {MAX_PATTERN_BYTES} bytes, got {}", pattern.len());
        return Err(SchemaError::new(place, message));
    }
    check_regex(pattern).map_err(|message| SchemaError::new(place, message))
}

/// Checks that llguidance can match this expression; the error says why not.
pub fn check_regex(regex: &str) -> Result<(), String> {
    let unsupported = |why: &str| format!("the regular expression {} is not supported: {why}", shown(&regex.into()));
    let ast = RegexAst::SearchRegex(regex_to_lark(regex, "dw"));
    // derivre panics at some expressions with equal and empty options.
    let made = catch_unwind(|| RegexBuilder::new().mk(&ast).map(|_| ()));
    made.map_err(|_| unsupported("it cannot be read"))?.map_err(|error| {
        let error = error.to_string();
        unsupported(error.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default().trim())
    })
}
