use super::*;

#[test]
fn every_path_is_described_once() {
    let document = document();
    let items = document["paths"].as_object().unwrap().values().flat_map(|item| item.as_object().unwrap().values());
    let mut ids: Vec<&str> = items.map(|operation| operation["operationId"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), PATHS.len());
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), PATHS.len(), "each has a name of its own");
}

/// Every `$ref` of the document.
fn references<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::Object(fields) => {
            found.extend(fields.get("$ref").and_then(Value::as_str));
            fields.values().for_each(|value| references(value, found));
        }
        Value::Array(items) => items.iter().for_each(|value| references(value, found)),
        _ => {}
    }
}

#[test]
fn what_is_referred_to_is_there_and_what_is_there_is_referred_to() {
    let document = document();
    let mut found = Vec::new();
    references(&document, &mut found);
    let mut named: Vec<&str> = found.iter().map(|name| name.strip_prefix("#/components/schemas/").unwrap()).collect();
    named.sort_unstable();
    named.dedup();
    let schemas: Vec<&String> = document["components"]["schemas"].as_object().unwrap().keys().collect();
    assert_eq!(named, schemas);
}

#[test]
fn every_field_says_what_it_is() {
    for (name, schema) in document()["components"]["schemas"].as_object().unwrap() {
        for (field, described) in schema["properties"].as_object().into_iter().flatten() {
            let is_request = name.ends_with("Request");
            assert!(!is_request || described["description"].is_string(), "{name}.{field} has no description");
        }
    }
}
