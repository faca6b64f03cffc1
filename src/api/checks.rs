//! Checks of single values, and what their errors say.

use pagetide_base::error::{ApiError, Violation};
use serde_json::{Map, Value};
use std::fmt::Display;
use std::ops::RangeInclusive;

/// Characters of a wrong value that a message repeats.
const MAX_SHOWN_CHARS: usize = 60;

/// A value the client sent, for a message: its JSON, cut where it is long.
pub fn shown(value: &Value) -> String {
    shortened(&value.to_string())
}

pub fn shortened(text: &str) -> String {
    match text.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Checks a number against its range and says both when it is outside.
pub fn in_range<T>(param: &str, value: T, range: RangeInclusive<T>) -> Result<T, ApiError>
where
    T: PartialOrd + Copy + Display,
{
    if range.contains(&value) {
        return Ok(value);
    }
    let (low, high) = (range.start(), range.end());
    let violation = if value < *low { Violation::BelowMinimum } else { Violation::AboveMaximum };
    Err(ApiError::invalid(param, format!("{param} must be in [{low}, {high}], got {value}")).with_violation(violation))
}

/// A token id that the model has.
pub fn token_id(param: impl Display, id: i64, vocab_size: u32) -> Result<u32, ApiError> {
    u32::try_from(id).ok().filter(|id| *id < vocab_size).ok_or_else(|| {
        let last = vocab_size.saturating_sub(1);
        let message = format!(
            "{param} must be a token id in [0, {last}], got {id}: out of vocabulary, which has {vocab_size} tokens"
        );
        ApiError::invalid(param.to_string(), message)
    })
}

/// A field that is one of a few words.
pub fn one_of(param: &str, given: Option<&str>, words: &[&str]) -> Result<(), ApiError> {
    match given {
        Some(word) if !words.contains(&word) => {
            let message = format!("{param} must be one of {}, got {}", words.join(", "), shown(&word.into()));
            Err(ApiError::invalid(param, message).with_violation(Violation::UnknownWord))
        }
        _ => Ok(()),
    }
}

/// Notes of the client's own have to be texts.
pub fn check_metadata(metadata: Option<&Map<String, Value>>) -> Result<(), ApiError> {
    match metadata.into_iter().flatten().find(|(_, value)| !value.is_string()) {
        None => Ok(()),
        Some((name, value)) => {
            let param = format!("metadata.{name}");
            Err(ApiError::invalid(&param, format!("{param} must be a string, got {}", shown(value))))
        }
    }
}

pub fn object<'a>(path: &str, value: &'a Value) -> Result<&'a Map<String, Value>, ApiError> {
    value.as_object().ok_or_else(|| wrong_type(path, "an object", Some(value)))
}

pub fn string<'a>(path: &str, object: &'a Map<String, Value>, field: &str) -> Result<&'a str, ApiError> {
    let value = object.get(field);
    value.and_then(Value::as_str).ok_or_else(|| wrong_type(&format!("{path}.{field}"), "a string", value))
}

/// `None` also for null.
pub fn optional_string<'a>(
    path: &str,
    object: &'a Map<String, Value>,
    field: &str,
) -> Result<Option<&'a str>, ApiError> {
    match object.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(_) => string(path, object, field).map(Some),
    }
}

pub fn wrong_type(path: &str, wanted: &str, got: Option<&Value>) -> ApiError {
    match got {
        None => ApiError::invalid(path, format!("{path} is required")),
        Some(value) => ApiError::invalid(path, format!("{path} must be {wanted}, got {}", shown(value))),
    }
}

/// An error about a field of the object `path`, as one about a field of the body.
pub fn within(path: &str, error: ApiError) -> ApiError {
    match error.param.clone() {
        Some(param) => renamed(error, &param, format!("{path}.{param}")),
        None => ApiError { param: Some(path.to_owned()), ..error },
    }
}

/// An error about the field `from`, which is called `to`.
pub fn renamed(error: ApiError, from: &str, to: String) -> ApiError {
    let message = match error.message.strip_prefix(from) {
        Some(rest) => format!("{to}{rest}"),
        None => error.message,
    };
    ApiError { param: Some(to), message, ..error }
}

/// The error about the value at `path` of which serde says "invalid type: string "x", expected i64".
pub fn serde_error(path: String, message: &str) -> ApiError {
    let parts = message.split_once(": ").and_then(|(_, rest)| rest.split_once(", expected "));
    let Some((got, expected)) = parts else {
        let message = format!("{path} is wrong: {message}");
        return ApiError::invalid(path, message);
    };
    let number = got.strip_prefix("integer ").or(got.strip_prefix("floating point ").filter(|float| is_huge(float)));
    if let (Some(number), "i64") = (number, expected) {
        let number = number.trim_matches('`');
        let violation = if number.starts_with('-') { Violation::BelowMinimum } else { Violation::AboveMaximum };
        let message = format!("{path} must be in [{}, {}], got {}", i64::MIN, i64::MAX, shortened(number));
        return ApiError::invalid(path, message).with_violation(violation);
    }
    let message = format!("{path} must be {}, got {}", json_type(expected), shortened(json_type(got)));
    ApiError::invalid(path, message)
}

/// Whether a number is an integer of more than 64 bits, which serde reads as a float.
fn is_huge(float: &str) -> bool {
    float.trim_matches('`').parse::<f64>().is_ok_and(|float| float.is_finite() && float.abs() >= 2f64.powi(63))
}

fn json_type(serde_name: &str) -> &str {
    match serde_name {
        "i64" => "an integer",
        "f64" => "a number",
        "sequence" | "a sequence" => "an array",
        "map" | "a map" => "an object",
        name if name.starts_with("struct ") => "an object",
        name => name,
    }
}
