//! JSON into the fields of a body, in bounded memory: a `serde_json::Value` costs 72 bytes and more where its text may
//! have two. Fields that the body does not have are skipped, arrays of token ids are read as numbers ([`super::ids`]),
//! and of what remains there may be [`Bounds::max_values`].

use super::fields::{BodyFields, FieldSource};
use super::ids::{Ids, IdsSeed};
use super::parsed::{FieldProblems, Objects, ParsedBody};
use super::value::{Bounds, Count, ValueSeed};
use pagetide_base::error::ApiError;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use std::fmt;
use std::marker::PhantomData;

/// Reads the fields of `B`, and skips the others.
pub fn read<B: BodyFields>(bytes: &[u8], bounds: Bounds) -> Result<ParsedBody<B>, ApiError> {
    let count = Count::new(bounds);
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let read = BodySeed::new(&count).deserialize(&mut deserializer);
    let read = read.and_then(|read| deserializer.end().map(|()| read));
    read.map_err(|error| count.error(&error))
}

/// The same of a body that is a JSON value already, of any size.
pub fn read_value<B: BodyFields>(value: &Value) -> Result<ParsedBody<B>, ApiError> {
    let count = Count::new(Bounds { max_values: 0, max_prompts: usize::MAX });
    BodySeed::new(&count).deserialize(value).map_err(|error| count.error(&error))
}

struct BodySeed<'a, B>(ObjectSeed<'a, B>);

impl<'a, B> BodySeed<'a, B> {
    fn new(count: &'a Count) -> Self {
        Self(ObjectSeed::new(count))
    }
}

impl<'de, B: BodyFields> DeserializeSeed<'de> for BodySeed<'_, B> {
    type Value = ParsedBody<B>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<ParsedBody<B>, D::Error> {
        let read = self.0.deserialize(deserializer)?;
        Ok(read.unwrap_or_else(|_| {
            let mut problems = FieldProblems::default();
            problems.add("", ApiError::bad_request("the request body must be a JSON object"));
            ParsedBody { body: B::default(), problems }
        }))
    }
}

/// Reads an object as its fields, and anything else as it is.
struct ObjectSeed<'a, B> {
    count: &'a Count,
    body: PhantomData<B>,
}

impl<'a, B> ObjectSeed<'a, B> {
    fn new(count: &'a Count) -> Self {
        Self { count, body: PhantomData }
    }
}

impl<'de, B: BodyFields> DeserializeSeed<'de> for ObjectSeed<'_, B> {
    type Value = Result<ParsedBody<B>, Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, B: BodyFields> Visitor<'de> for ObjectSeed<'_, B> {
    type Value = Result<ParsedBody<B>, Value>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        let mut body = B::default();
        let mut fields = MapFields { map, input: PhantomData, count: self.count, problems: FieldProblems::default() };
        // The last of several fields of one name counts, as everywhere in JSON.
        while let Some(name) = fields.map.next_key::<String>()? {
            fields.problems.forget(&name);
            if !body.read(&name, &mut fields)? {
                fields.map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(Ok(ParsedBody { body, problems: fields.problems }))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Self::Value, E> {
        ValueSeed(self.count).visit_bool(value).map(Err)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Self::Value, E> {
        ValueSeed(self.count).visit_i64(value).map(Err)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Self::Value, E> {
        ValueSeed(self.count).visit_u64(value).map(Err)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Self::Value, E> {
        ValueSeed(self.count).visit_f64(value).map(Err)
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Self::Value, E> {
        ValueSeed(self.count).visit_str(value).map(Err)
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        ValueSeed(self.count).visit_unit().map(Err)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
        ValueSeed(self.count).visit_seq(seq).map(Err)
    }
}

/// Reads an array as [`Objects`], and anything else as it is.
struct ObjectsSeed<'a, B> {
    count: &'a Count,
    most: usize,
    body: PhantomData<B>,
}

impl<'a, B> ObjectsSeed<'a, B> {
    fn new(count: &'a Count, most: usize) -> Self {
        Self { count, most, body: PhantomData }
    }
}

impl<'de, B: BodyFields> DeserializeSeed<'de> for ObjectsSeed<'_, B> {
    type Value = Result<Objects<B>, Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, B: BodyFields> Visitor<'de> for ObjectsSeed<'_, B> {
    type Value = Result<Objects<B>, Value>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut kept = Vec::new();
        while kept.len() < self.most {
            let Some(object) = seq.next_element_seed(ObjectSeed::new(self.count))? else {
                let num = kept.len();
                return Ok(Ok(Objects { kept, num }));
            };
            self.count.add()?;
            kept.push(object);
        }
        let mut num = kept.len();
        while seq.next_element::<IgnoredAny>()?.is_some() {
            num += 1;
        }
        Ok(Ok(Objects { kept, num }))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        ValueSeed(self.count).visit_map(map).map(Err)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Self::Value, E> {
        ValueSeed(self.count).visit_bool(value).map(Err)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Self::Value, E> {
        ValueSeed(self.count).visit_i64(value).map(Err)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Self::Value, E> {
        ValueSeed(self.count).visit_u64(value).map(Err)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Self::Value, E> {
        ValueSeed(self.count).visit_f64(value).map(Err)
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Self::Value, E> {
        ValueSeed(self.count).visit_str(value).map(Err)
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        ValueSeed(self.count).visit_unit().map(Err)
    }
}

/// The fields of an object, one after the other.
struct MapFields<'a, 'de, A> {
    map: A,
    input: PhantomData<&'de ()>,
    count: &'a Count,
    problems: FieldProblems,
}

impl<'de, A: MapAccess<'de>> FieldSource for MapFields<'_, 'de, A> {
    type Error = A::Error;

    fn value(&mut self) -> Result<Value, A::Error> {
        self.map.next_value_seed(ValueSeed(self.count))
    }

    fn ids(&mut self) -> Result<Result<Ids, Value>, A::Error> {
        self.map.next_value_seed(IdsSeed(self.count))
    }

    fn object<B: BodyFields>(&mut self) -> Result<Result<ParsedBody<B>, Value>, A::Error> {
        self.count.add()?;
        self.map.next_value_seed(ObjectSeed::new(self.count))
    }

    fn objects<B: BodyFields>(&mut self, most: Option<usize>) -> Result<Result<Objects<B>, Value>, A::Error> {
        let most = most.unwrap_or(self.count.bounds.max_prompts);
        self.map.next_value_seed(ObjectsSeed::new(self.count, most))
    }

    fn problem(&mut self, name: &str, error: ApiError) {
        self.problems.add(name, error);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::fields::AnyFields;
    use serde_json::json;

    const BOUNDS: Bounds = Bounds { max_values: 10, max_prompts: 3 };

    /// All fields that begin with `known`, and what is wrong with the body.
    #[derive(Debug, Default)]
    struct KnownFields(AnyFields);

    impl BodyFields for KnownFields {
        fn read<S: FieldSource>(&mut self, name: &str, source: &mut S) -> Result<bool, S::Error> {
            Ok(name.starts_with("known") && self.0.read(name, source)?)
        }

        fn add_names(_: &mut Vec<&'static str>) {}
    }

    fn read(text: &str) -> Result<Value, ApiError> {
        let ParsedBody { body: KnownFields(AnyFields(fields)), problems } = super::read(text.as_bytes(), BOUNDS)?;
        problems.check()?;
        Ok(fields.into())
    }

    #[test]
    fn a_body_is_what_it_says() {
        let text = r#"{"known": {"a": [1, -2, 2.5, 1e300, "x", null, true]}, "known_2": "\u00e9"}"#;
        assert_eq!(read(text).unwrap(), serde_json::from_str::<Value>(text).unwrap());
        assert_eq!(read(r#"{"known": 1, "known": [2]}"#).unwrap(), json!({"known": [2]}), "the last of a name counts");
        for text in ["7", "\"a\"", "[1, {\"a\": null}]", "null", "true", "-1", "1.5"] {
            assert_eq!(read(text).unwrap_err().message, "the request body must be a JSON object", "{text}");
        }
        for text in ["{", "{\"a\": [}", "{} {}", "", "{\"known\": 01}", "[1,]", "nul"] {
            let error = read(text).unwrap_err();
            let theirs = serde_json::from_str::<Value>(text).unwrap_err();
            assert_eq!(error.message, format!("the request body is not JSON: {theirs}"), "{text}");
        }
    }

    #[test]
    fn unknown_fields_are_skipped_and_must_be_json() {
        let many = "[1],".repeat(1000);
        let body = read(&format!("{{\"other\": [{many}2], \"known\": 3, \"others\": {{\"known\": 4}}}}")).unwrap();
        assert_eq!(body, json!({"known": 3}));
        assert!(read("{\"other\": [1, 2, \"known\": 3}").unwrap_err().message.contains("not JSON"));
    }

    #[test]
    fn broken_json_is_reported_before_a_wrong_type() {
        type Sampling = crate::fields::sampling::SamplingFields;
        let error = super::read::<Sampling>(b"{\"n\": \"two\", ", BOUNDS).unwrap_err();
        assert!(error.message.contains("not JSON") && error.param.is_none(), "{error}");
        let ParsedBody { body, problems } = super::read::<Sampling>(b"{\"n\": \"two\", \"top_k\": 3}", BOUNDS).unwrap();
        assert_eq!((body.top_k, problems.check().unwrap_err().param.as_deref()), (Some(3), Some("n")));
        let ParsedBody { body, problems } = super::read::<Sampling>(b"{\"n\": \"two\", \"n\": 3}", BOUNDS).unwrap();
        assert_eq!((body.n, problems.check()), (Some(3), Ok(())), "the last of a name counts");
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
