//! JSON values, counted as they are read: a body may make the server hold only so many of them.

use pagetide_base::error::ApiError;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use std::cell::{Cell, RefCell};
use std::fmt;

/// What a body may make the server hold.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Values, those within others counted too, and keys of objects not. 0 is any number.
    pub max_values: usize,
    /// Prompts of a batch.
    pub max_prompts: usize,
}

/// JSON in the strings of a body: of all of it together there may be [`Bounds::max_values`].
pub struct EmbeddedJson(Count);

impl EmbeddedJson {
    pub fn new(bounds: Bounds) -> Self {
        Self(Count::new(bounds))
    }

    /// The value that `text` is; `None` where it is no JSON.
    ///
    /// # Errors
    /// There are too many values.
    pub fn read(&self, text: &str) -> Result<Option<Value>, ApiError> {
        let mut deserializer = serde_json::Deserializer::from_str(text);
        let read = ValueSeed(&self.0).deserialize(&mut deserializer);
        let read = read.and_then(|value| deserializer.end().map(|()| value)).ok();
        self.0.refused.take().map_or(Ok(read), Err)
    }

    /// Counts values that have been read already.
    ///
    /// # Errors
    /// There are too many values.
    pub fn count(&self, num_values: usize) -> Result<(), ApiError> {
        self.0.num_values.set(self.0.num_values.get() + num_values);
        let most = self.0.bounds.max_values;
        if most > 0 && self.0.num_values.get() > most { Err(ApiError::too_many_values(most)) } else { Ok(()) }
    }
}

/// What has been read so far.
pub(super) struct Count {
    pub(super) bounds: Bounds,
    num_values: Cell<usize>,
    /// Why reading ended, where it is not the JSON.
    refused: RefCell<Option<ApiError>>,
}

impl Count {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self { bounds, num_values: Cell::new(0), refused: RefCell::new(None) }
    }

    pub(super) fn add<E: Error>(&self) -> Result<(), E> {
        let num = self.num_values.get() + 1;
        self.num_values.set(num);
        let most = self.bounds.max_values;
        if most == 0 || num <= most {
            return Ok(());
        }
        *self.refused.borrow_mut() = Some(ApiError::too_many_values(most));
        Err(E::custom("too many values"))
    }

    /// Why reading failed.
    pub(super) fn error(&self, error: &serde_json::Error) -> ApiError {
        let refused = self.refused.take();
        refused.unwrap_or_else(|| ApiError::bad_request(format!("the request body is not JSON: {error}")))
    }
}

/// Any value, counted.
#[derive(Clone, Copy)]
pub(super) struct ValueSeed<'a>(pub(super) &'a Count);

impl<'de> DeserializeSeed<'de> for ValueSeed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ValueSeed<'_> {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        self.0.add()?;
        Ok(Value::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        self.0.add()?;
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        self.0.add()?;
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        self.0.add()?;
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        self.visit_string(value.to_owned())
    }

    fn visit_string<E: Error>(self, value: String) -> Result<Value, E> {
        self.0.add()?;
        Ok(Value::String(value))
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        self.0.add()?;
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        self.0.add()?;
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(self)? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        self.0.add()?;
        let mut fields = Map::new();
        while let Some(name) = map.next_key::<String>()? {
            fields.insert(name, map.next_value_seed(self)?);
        }
        Ok(Value::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const BOUNDS: Bounds = Bounds { max_values: 10, max_prompts: 3 };

    #[test]
    fn json_in_strings_is_counted_together() {
        let inner = EmbeddedJson::new(BOUNDS);
        assert_eq!(inner.read("{\"a\": [1, 2]}").unwrap(), Some(json!({"a": [1, 2]})));
        assert_eq!(inner.read("{x").unwrap(), None);
        assert_eq!(inner.read("[1] 2").unwrap(), None);
        assert!(inner.read("[1, 2, 3, 4, 5]").is_err());
    }
}
