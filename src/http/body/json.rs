//! JSON into what handlers read, in bounded memory: a `serde_json::Value` costs 72 bytes and more where its text may have
//! two. Fields that no endpoint knows are skipped, arrays of token ids are read as numbers ([`super::ids`]), and of what
//! remains there may be [`Bounds::max_values`].

use super::ids::{Ids, IdsSeed};
use crate::error::ApiError;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
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

/// A body that has been read.
#[derive(Debug)]
pub struct Json {
    /// All of it but `ids`.
    pub value: Value,
    /// The field that is asked for, where it is an array.
    pub ids: Option<Ids>,
}

impl Json {
    /// Reads `bytes`. Of the body's own fields those are skipped that `is_known` does not know; `ids` is one that may have
    /// token ids.
    pub fn read(
        bytes: &[u8],
        is_known: &dyn Fn(&str) -> bool,
        ids: Option<&'static str>,
        bounds: Bounds,
    ) -> Result<Self, ApiError> {
        let count = Count { bounds, num_values: Cell::new(0), refused: RefCell::new(None) };
        let mut deserializer = serde_json::Deserializer::from_slice(bytes);
        let seed = BodySeed { count: &count, is_known, ids };
        let read = seed.deserialize(&mut deserializer).and_then(|read| deserializer.end().map(|()| read));
        read.map_err(|error| {
            let refused = count.refused.take();
            refused.unwrap_or_else(|| ApiError::bad_request(format!("the request body is not JSON: {error}")))
        })
    }
}

/// JSON in the strings of a body: of all of it together there may be [`Bounds::max_values`].
pub struct Inner(Count);

impl Inner {
    pub fn new(bounds: Bounds) -> Self {
        Self(Count { bounds, num_values: Cell::new(0), refused: RefCell::new(None) })
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
}

/// What has been read so far.
pub(super) struct Count {
    pub(super) bounds: Bounds,
    num_values: Cell<usize>,
    /// Why reading ended, where it is not the JSON.
    refused: RefCell<Option<ApiError>>,
}

impl Count {
    fn add<E: Error>(&self) -> Result<(), E> {
        let num = self.num_values.get() + 1;
        self.num_values.set(num);
        let most = self.bounds.max_values;
        if most == 0 || num <= most {
            return Ok(());
        }
        *self.refused.borrow_mut() = Some(ApiError::too_many_values(most));
        Err(E::custom("too many values"))
    }
}

struct BodySeed<'a> {
    count: &'a Count,
    is_known: &'a dyn Fn(&str) -> bool,
    ids: Option<&'static str>,
}

impl<'de> DeserializeSeed<'de> for BodySeed<'_> {
    type Value = Json;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Json, D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// An object field by field; anything else is for the handler to refuse.
impl<'de> Visitor<'de> for BodySeed<'_> {
    type Value = Json;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let (mut fields, mut ids) = (Map::new(), None);
        while let Some(name) = map.next_key::<String>()? {
            if self.ids == Some(name.as_str()) {
                // The last of several counts, as everywhere in JSON.
                fields.remove(&name);
                ids = None;
                match map.next_value_seed(IdsSeed(self.count))? {
                    Ok(read) => ids = Some(read),
                    Err(other) => drop(fields.insert(name, other)),
                }
            } else if (self.is_known)(&name) {
                fields.insert(name, map.next_value_seed(ValueSeed(self.count))?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(Json { value: Value::Object(fields), ids })
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Json, E> {
        ValueSeed(self.count).visit_bool(value).map(plain)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Json, E> {
        ValueSeed(self.count).visit_i64(value).map(plain)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Json, E> {
        ValueSeed(self.count).visit_u64(value).map(plain)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Json, E> {
        ValueSeed(self.count).visit_f64(value).map(plain)
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Json, E> {
        ValueSeed(self.count).visit_str(value).map(plain)
    }

    fn visit_unit<E: Error>(self) -> Result<Json, E> {
        ValueSeed(self.count).visit_unit().map(plain)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Json, A::Error> {
        ValueSeed(self.count).visit_seq(seq).map(plain)
    }
}

fn plain(value: Value) -> Json {
    Json { value, ids: None }
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

    fn read(text: &str) -> Result<Json, ApiError> {
        Json::read(text.as_bytes(), &|name| name.starts_with("known"), Some("prompt"), BOUNDS)
    }

    #[test]
    fn a_body_is_what_it_says() {
        let text = r#"{"known": {"a": [1, -2, 2.5, 1e300, "x", null, true]}, "known_2": "\u00e9", "prompt": "p"}"#;
        let body = read(text).unwrap();
        assert_eq!(body.value, serde_json::from_str::<Value>(text).unwrap());
        assert!(body.ids.is_none());
        for text in ["7", "\"a\"", "[1, {\"a\": null}]", "null", "true", "-1", "1.5"] {
            assert_eq!(read(text).unwrap().value, serde_json::from_str::<Value>(text).unwrap());
        }
        for text in ["{", "{\"a\": [}", "{} {}", "", "{\"known\": 01}", "[1,]", "nul"] {
            let error = read(text).unwrap_err();
            let theirs = serde_json::from_str::<Value>(text).unwrap_err();
            assert_eq!(error.message, format!("the request body is not JSON: {theirs}"), "{text}");
        }
    }

    #[test]
    fn what_nobody_knows_is_skipped_and_has_to_be_json_all_the_same() {
        let many = "[1],".repeat(1000);
        let body = read(&format!("{{\"other\": [{many}2], \"known\": 3, \"others\": {{\"known\": 4}}}}")).unwrap();
        assert_eq!(body.value, json!({"known": 3}));
        assert!(read("{\"other\": [1, 2, \"known\": 3}").unwrap_err().message.contains("not JSON"));
    }

    #[test]
    fn json_in_strings_is_counted_together() {
        let inner = Inner::new(BOUNDS);
        assert_eq!(inner.read("{\"a\": [1, 2]}").unwrap(), Some(json!({"a": [1, 2]})));
        assert_eq!(inner.read("{x").unwrap(), None);
        assert_eq!(inner.read("[1] 2").unwrap(), None);
        assert!(inner.read("[1, 2, 3, 4, 5]").is_err());
    }

    #[test]
    fn values_are_counted_wherever_they_are() {
        for (text, is_let_in) in [
            ("{\"known\": [1,2,3,4,5,6,7,8,9]}", true),
            ("{\"known\": [1,2,3,4,5,6,7,8,9,10]}", false),
            ("{\"known\": [[[[[[[[[1]]]]]]]]]}", true),
            ("{\"known\": [[[[[[[[[[1]]]]]]]]]]}", false),
            (
                "{\"known\": {\"a\":1,\"b\":1,\"c\":1,\"d\":1,\"e\":1,\"f\":1,\"g\":1,\"h\":1,\"i\":1}, \"known_2\": 1}",
                false,
            ),
            ("[1,2,3,4,5,6,7,8,9,10]", false),
        ] {
            let read = read(text);
            assert_eq!(read.is_ok(), is_let_in, "{text}");
            if let Err(error) = read {
                assert!(error.status == 400 && error.message.contains("limits.max_body_values = 10"), "{error}");
            }
        }
    }
}
