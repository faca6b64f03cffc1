//! Reads members of a JSON object, with errors that name them.

use crate::spec::MAX_LAYERS;
use pagetide_base::error::StartError;
use pagetide_base::ids::TokenId;
use serde_json::{Map, Value};

/// Whether a number is positive, also in float32, in which it is used.
fn is_positive(number: f64) -> bool {
    number > 0.0 && (f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX)).contains(&number)
}

/// A value for an error message, shortened if it is long.
fn excerpt(value: &Value) -> String {
    const LONGEST: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(LONGEST) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text,
    }
}

/// The members of a JSON object, read with errors that name the key. `null` counts as missing.
pub(super) struct Fields<'a> {
    pub members: &'a Map<String, Value>,
    /// The path before a key in messages.
    pub path: &'static str,
}

impl<'a> Fields<'a> {
    pub fn error(&self, key: &str, problem: impl std::fmt::Display) -> StartError {
        StartError::new(format!("{}{key}: {problem}", self.path))
    }

    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.members.get(key).filter(|value| !value.is_null())
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, StartError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.error(key, format!("{} is not {expected}", excerpt(value))))
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, StartError> {
        value.ok_or_else(|| self.error(key, "missing"))
    }

    pub fn string(&self, key: &str) -> Result<Option<&'a str>, StartError> {
        self.typed(key, "a text", Value::as_str)
    }

    pub fn bool_or(&self, key: &str, default: bool) -> Result<bool, StartError> {
        Ok(self.typed(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    pub fn count_or(&self, key: &str, default: usize) -> Result<usize, StartError> {
        let read = |value: &Value| value.as_u64().and_then(|count| usize::try_from(count).ok());
        Ok(self.typed(key, "a whole number from 0", read)?.unwrap_or(default))
    }

    /// A size, at most 2³¹, so that the product of two sizes fits a `usize`.
    pub fn optional_size(&self, key: &str) -> Result<Option<usize>, StartError> {
        self.optional_size_to(key, (1 << 31) - 1)
    }

    /// A size of at most `largest`.
    fn optional_size_to(&self, key: &str, largest: usize) -> Result<Option<usize>, StartError> {
        self.typed(key, &format!("a whole number from 1 to {largest}"), |value| {
            usize::try_from(value.as_u64()?).ok().filter(|size| (1..=largest).contains(size))
        })
    }

    /// A number of layers. Lists of this length are allocated before the rest of the model is checked.
    pub fn layers(&self, key: &str) -> Result<usize, StartError> {
        self.optional_layers(key).and_then(|layers| self.required(key, layers))
    }

    pub fn optional_layers(&self, key: &str) -> Result<Option<usize>, StartError> {
        self.optional_size_to(key, MAX_LAYERS)
    }

    pub fn size(&self, key: &str) -> Result<usize, StartError> {
        self.optional_size(key).and_then(|size| self.required(key, size))
    }

    pub fn size_or(&self, key: &str, default: usize) -> Result<usize, StartError> {
        Ok(self.optional_size(key)?.unwrap_or(default))
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>, StartError> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// `default` replaces a missing key; `null` means none.
    pub fn nullable_size(&self, key: &str, default: Option<usize>) -> Result<Option<usize>, StartError> {
        if self.members.contains_key(key) { self.optional_size(key) } else { Ok(default) }
    }

    /// `default` replaces a missing key; `null` means none.
    pub fn nullable_positive(&self, key: &str, default: Option<f64>) -> Result<Option<f64>, StartError> {
        if self.members.contains_key(key) { self.optional_positive(key) } else { Ok(default) }
    }

    /// An object with members. An empty object counts as missing.
    pub fn object(&self, key: &str) -> Option<&'a Map<String, Value>> {
        self.get(key).and_then(Value::as_object).filter(|members| !members.is_empty())
    }

    /// A list of numbers above 0.
    pub fn factors(&self, key: &str, len: usize) -> Result<Vec<f64>, StartError> {
        let number = |value: &Value| value.as_f64().filter(|number| is_positive(*number));
        let read = |value: &Value| value.as_array().and_then(|list| list.iter().map(number).collect());
        let factors: Vec<f64> = self.required(key, self.typed(key, "a list of numbers above 0 (in float32)", read)?)?;
        if factors.len() != len {
            return Err(self.error(key, format!("{} numbers where {len} are needed", factors.len())));
        }
        Ok(factors)
    }

    /// Indices below `end`.
    pub fn indices(&self, key: &str, end: usize) -> Result<Vec<usize>, StartError> {
        let index = |value: &Value| value.as_u64().and_then(|index| usize::try_from(index).ok()).filter(|i| *i < end);
        let expected = format!("a list of whole numbers below {end}");
        let read = |value: &Value| value.as_array().and_then(|list| list.iter().map(index).collect());
        Ok(self.typed(key, &expected, read)?.unwrap_or_default())
    }

    pub fn number_or(&self, key: &str, default: f64) -> Result<f64, StartError> {
        Ok(self.number(key)?.unwrap_or(default))
    }

    /// The epsilon of a norm.
    pub fn epsilon_or(&self, key: &str, default: f64) -> Result<f32, StartError> {
        let read = |value: &Value| value.as_f64().filter(|epsilon| (0.0..=1.0).contains(epsilon));
        Ok(self.typed(key, "a number from 0 to 1", read)?.unwrap_or(default) as f32)
    }

    pub fn optional_positive(&self, key: &str) -> Result<Option<f64>, StartError> {
        self.typed(key, "a number above 0 (in float32)", |value| value.as_f64().filter(|number| is_positive(*number)))
    }

    pub fn positive(&self, key: &str) -> Result<f64, StartError> {
        self.optional_positive(key).and_then(|number| self.required(key, number))
    }

    pub fn positive_or(&self, key: &str, default: f64) -> Result<f64, StartError> {
        Ok(self.optional_positive(key)?.unwrap_or(default))
    }

    /// One token id, or a list of them.
    pub fn token_ids(&self, key: &str) -> Result<Option<Vec<TokenId>>, StartError> {
        let id = |value: &Value| value.as_u64().and_then(|id| TokenId::try_from(id).ok());
        self.typed(key, "a token id or a list of token ids", |value| match value {
            Value::Array(list) => list.iter().map(id).collect(),
            value => Some(vec![id(value)?]),
        })
    }

    /// `default` replaces a missing key; `null` means no such token.
    pub fn token_ids_or(&self, key: &str, default: Option<TokenId>) -> Result<Vec<TokenId>, StartError> {
        match self.members.contains_key(key) {
            true => Ok(self.token_ids(key)?.unwrap_or_default()),
            false => Ok(default.into_iter().collect()),
        }
    }
}
