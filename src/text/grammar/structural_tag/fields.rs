//! Fields of the objects of a structural tag, with the places of errors.

use pagetide_base::error::ApiError;
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// Maximum number of characters of a value in a message.
const MAX_SHOWN_CHARS: usize = 60;

/// An object, and its place in the request: `response_format.format.tags[0]`.
pub struct TagFields<'a> {
    pub place: String,
    fields: &'a Map<String, Value>,
}

/// The error for a value that is not as `expected`.
pub fn wrong(place: &str, expected: &str, got: Option<&Value>) -> ApiError {
    let got = got.map_or("nothing".into(), |value| shown(&value.to_string()));
    ApiError::invalid(place, format!("{place} must be {expected}, got {got}"))
}

fn shown(text: &str) -> String {
    match text.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

impl<'a> TagFields<'a> {
    /// `known`: the fields that it may have beside `type`.
    pub fn new(value: &'a Value, place: &str, known: &[&str]) -> Result<Self, ApiError> {
        let fields = value.as_object().ok_or_else(|| wrong(place, "an object", Some(value)))?;
        let is_known = |name: &str| name == "type" || known.contains(&name);
        // Clients write null where a field is not given.
        if let Some((unknown, _)) = fields.iter().find(|(name, value)| !value.is_null() && !is_known(name)) {
            let unknown = shown(&Value::from(unknown.as_str()).to_string());
            let message = format!("{place} has {unknown}, which is not supported here; {} are", known.join(", "));
            return Err(ApiError::invalid(place, message));
        }
        Ok(Self { place: place.to_owned(), fields })
    }

    /// The place of a field.
    pub fn below(&self, name: &str) -> String {
        format!("{}.{name}", self.place)
    }

    /// A field that is not null.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.fields.get(name).filter(|value| !value.is_null())
    }

    pub fn required(&self, name: &str, expected: &str) -> Result<&'a Value, ApiError> {
        self.get(name).ok_or_else(|| wrong(&self.below(name), expected, None))
    }

    pub fn text(&self, name: &str) -> Result<&'a str, ApiError> {
        let value = self.get(name);
        value.and_then(Value::as_str).ok_or_else(|| wrong(&self.below(name), "a string", value))
    }

    pub fn flag(&self, name: &str, default: bool) -> Result<bool, ApiError> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(wrong(&self.below(name), "a boolean", Some(other))),
        }
    }

    pub fn number(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = value.as_i64().filter(|number| range.contains(number));
        let expected = || format!("an integer from {} to {}", range.start(), range.end());
        number.map(Some).ok_or_else(|| wrong(&self.below(name), &expected(), Some(value)))
    }

    /// An array with at least one element, and the places of its elements.
    pub fn list(&self, name: &str) -> Result<Vec<(String, &'a Value)>, ApiError> {
        match self.get(name) {
            Some(Value::Array(items)) if !items.is_empty() => Ok(self.elements(name, items)),
            other => Err(wrong(&self.below(name), "an array with at least one element", other)),
        }
    }

    /// The same for an array that may be left out or empty.
    pub fn optional_list(&self, name: &str) -> Result<Vec<(String, &'a Value)>, ApiError> {
        match self.get(name) {
            None => Ok(Vec::new()),
            Some(Value::Array(items)) => Ok(self.elements(name, items)),
            other => Err(wrong(&self.below(name), "an array", other)),
        }
    }

    fn elements(&self, name: &str, items: &'a [Value]) -> Vec<(String, &'a Value)> {
        items.iter().enumerate().map(|(i, item)| (format!("{}[{i}]", self.below(name)), item)).collect()
    }
}

/// The texts in an array; none is empty.
pub fn texts(items: Vec<(String, &Value)>) -> Result<Vec<&str>, ApiError> {
    let text = |(place, item): (String, &'_ Value)| match item {
        Value::String(_) if item != "" => Ok(()),
        other => Err(wrong(&place, "a string that is not empty", Some(other))),
    };
    items.iter().try_for_each(|item| text(item.clone()))?;
    Ok(items.into_iter().filter_map(|(_, item)| item.as_str()).collect())
}
