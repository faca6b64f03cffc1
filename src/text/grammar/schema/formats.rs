//! Formats of strings.

use serde_json::{Map, Value, json};

/// Supported formats.
pub const FORMATS: [&str; 10] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"];
/// Further formats of JSON Schema.
pub const UNSUPPORTED_FORMATS: [&str; 9] = [
    "idn-email",
    "idn-hostname",
    "iri",
    "iri-reference",
    "json-pointer",
    "regex",
    "relative-json-pointer",
    "uri-reference",
    "uri-template",
];

/// Calendar days from year 1 on, as in Python.
const DATE: &str = concat!(
    "(?:(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-",
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))",
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
);
/// Times of RFC 3339 without leap seconds, which most programs do not accept.
const TIME: &str = concat!(
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?",
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
);

/// Patterns of formats that llguidance checks less strictly: it accepts 29 February in every year and a leap second in
/// every minute.
fn pattern_of_format(format: &str) -> Option<String> {
    match format {
        "date" => Some(format!("^{DATE}$")),
        "time" => Some(format!("^{TIME}$")),
        "date-time" => Some(format!("^{DATE}T{TIME}$")),
        _ => None,
    }
}

/// Adds another schema that values must satisfy.
pub fn and(fields: &mut Map<String, Value>, schema: Value) {
    match fields.get_mut("allOf") {
        Some(Value::Array(all)) => all.push(schema),
        _ => {
            fields.insert("allOf".into(), Value::Array(vec![schema]));
        }
    }
}

pub fn replace_format(fields: &mut Map<String, Value>) {
    let Some(pattern) = fields.get("format").and_then(Value::as_str).and_then(pattern_of_format) else { return };
    fields.shift_remove("format");
    if fields.contains_key("pattern") {
        and(fields, json!({ "pattern": pattern }));
    } else {
        fields.insert("pattern".into(), pattern.into());
    }
}
