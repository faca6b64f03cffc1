//! Fields of a body: which there are, and how each is read.

use super::ids::Ids;
use super::parsed::{Objects, ParsedBody};
use crate::checks::serde_error;
use pagetide_base::error::ApiError;
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Map, Value};

/// A body, or a group of its fields.
pub trait BodyFields: Default {
    /// Reads the field `name` from `source` and returns true; false where there is no such field.
    ///
    /// # Errors
    /// The source's.
    fn read<S: FieldSource>(&mut self, name: &str, source: &mut S) -> Result<bool, S::Error>;

    /// Adds the names of all its fields.
    fn add_names(names: &mut Vec<&'static str>);
}

/// Gives the value of one field, once.
pub trait FieldSource {
    type Error;

    fn value(&mut self) -> Result<Value, Self::Error>;

    /// An array as token ids or prompts, and anything else as it is.
    fn ids(&mut self) -> Result<Result<Ids, Value>, Self::Error>;

    /// An object as the fields of `B`, and anything else as it is.
    fn object<B: BodyFields>(&mut self) -> Result<Result<ParsedBody<B>, Value>, Self::Error>;

    /// An array of objects, of which the first `most` are kept, and anything else as it is. `None`: as many as a batch
    /// may have prompts.
    fn objects<B: BodyFields>(&mut self, most: Option<usize>) -> Result<Result<Objects<B>, Value>, Self::Error>;

    /// The field is wrong.
    fn problem(&mut self, name: &str, error: ApiError);
}

/// A type that a field can have. `null` is "not given" for all of them.
pub trait ReadField: Sized {
    fn read<S: FieldSource>(name: &str, source: &mut S) -> Result<Self, S::Error>;
}

impl<T: FromJson> ReadField for Option<T> {
    fn read<S: FieldSource>(name: &str, source: &mut S) -> Result<Self, S::Error> {
        let mut value = source.value()?;
        if value.is_null() {
            return Ok(None);
        }
        whole_numbers(&mut value, 0);
        Ok(T::from_json(value).map_err(|wrong| source.problem(name, wrong.in_field(name))).ok())
    }
}

impl ReadField for bool {
    fn read<S: FieldSource>(name: &str, source: &mut S) -> Result<Self, S::Error> {
        Ok(Option::read(name, source)?.unwrap_or_default())
    }
}

impl ReadField for Map<String, Value> {
    fn read<S: FieldSource>(name: &str, source: &mut S) -> Result<Self, S::Error> {
        Ok(Option::read(name, source)?.unwrap_or_default())
    }
}

/// A field that may be an array of token ids, or of prompts.
#[derive(Debug, Default)]
pub struct IdsField {
    pub ids: Option<Ids>,
    /// What stands there instead of an array; `None` also for null.
    pub other: Option<Value>,
}

impl ReadField for IdsField {
    fn read<S: FieldSource>(_: &str, source: &mut S) -> Result<Self, S::Error> {
        Ok(match source.ids()? {
            Ok(ids) => Self { ids: Some(ids), other: None },
            Err(other) => Self { ids: None, other: Some(other).filter(|other| !other.is_null()) },
        })
    }
}

/// A type that can be made of a JSON value, which is moved and not copied.
pub trait FromJson: Sized {
    fn from_json(value: Value) -> Result<Self, WrongType>;
}

impl FromJson for Value {
    fn from_json(value: Value) -> Result<Self, WrongType> {
        Ok(value)
    }
}

impl FromJson for Vec<Value> {
    fn from_json(value: Value) -> Result<Self, WrongType> {
        match value {
            Value::Array(items) => Ok(items),
            other => typed::<Vec<IgnoredAny>>(other).map(|_| Vec::new()),
        }
    }
}

impl FromJson for Map<String, Value> {
    fn from_json(value: Value) -> Result<Self, WrongType> {
        match value {
            Value::Object(fields) => Ok(fields),
            other => typed(other),
        }
    }
}

/// Types that are read as serde reads them.
macro_rules! typed_fields {
    ($($type:ty),+) => {
        $(impl $crate::body::fields::FromJson for $type {
            fn from_json(
                value: serde_json::Value,
            ) -> Result<Self, $crate::body::fields::WrongType> {
                $crate::body::fields::typed(value)
            }
        })+
    };
}
pub(crate) use typed_fields;

typed_fields!(String, Vec<i64>, Vec<String>, Vec<Map<String, Value>>);

// Numbers and booleans may come as strings, and booleans as 0 and 1, as pydantic reads them for vLLM and SGLang.
impl FromJson for i64 {
    fn from_json(value: Value) -> Result<Self, WrongType> {
        let written = value.as_str().and_then(|text| text.trim().parse().ok());
        written.map_or_else(|| typed(value), Ok)
    }
}

impl FromJson for f64 {
    fn from_json(value: Value) -> Result<Self, WrongType> {
        let written = value.as_str().and_then(|text| text.trim().parse().ok());
        written.filter(|number: &f64| number.is_finite()).map_or_else(|| typed(value), Ok)
    }
}

impl FromJson for bool {
    fn from_json(value: Value) -> Result<Self, WrongType> {
        let written = match &value {
            Value::Number(number) => number.as_u64().filter(|number| *number < 2).map(|number| number == 1),
            Value::String(text) => match text.to_ascii_lowercase().as_str() {
                "true" | "t" | "yes" | "y" | "on" | "1" => Some(true),
                "false" | "f" | "no" | "n" | "off" | "0" => Some(false),
                _ => None,
            },
            _ => None,
        };
        written.map_or_else(|| typed(value), Ok)
    }
}

/// A value that has another type than its field.
#[derive(Debug)]
pub struct WrongType {
    /// The place within the field: `.` is the field itself.
    path: String,
    /// serde's.
    message: String,
}

impl WrongType {
    /// The error about the field `name`.
    pub fn in_field(self, name: &str) -> ApiError {
        let path = match self.path.as_str() {
            "." => name.to_owned(),
            below if below.starts_with('[') => format!("{name}{below}"),
            below => format!("{name}.{below}"),
        };
        serde_error(path, &self.message)
    }
}

pub fn typed<T: DeserializeOwned>(value: Value) -> Result<T, WrongType> {
    serde_path_to_error::deserialize(value)
        .map_err(|error| WrongType { path: error.path().to_string(), message: error.into_inner().to_string() })
}

/// Some clients write 16 as 16.0, which to JSON is the same. This makes integers of such numbers in a field and in its
/// arrays. Values that lie deeper (a tool's schema) are text to the model and stay as they are.
fn whole_numbers(value: &mut Value, depth: u32) {
    match value {
        Value::Number(number) if number.is_f64() => {
            let float = number.as_f64().unwrap_or_default();
            if float.fract() == 0.0 && float.abs() < 2f64.powi(53) {
                *value = (float as i64).into();
            }
        }
        // A batch of prompts is two deep.
        Value::Array(items) if depth < 2 => items.iter_mut().for_each(|item| whole_numbers(item, depth + 1)),
        _ => {}
    }
}

/// `null` is "not given" for fields of nested objects that are not an `Option` too.
pub(crate) fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// A group of fields. The struct derives `ToSchema`, so that the API's description has exactly what is read.
macro_rules! body_fields {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident {
            $($(#[$field_meta:meta])* $field_vis:vis $field:ident: $type:ty,)*
        }
    ) => {
        #[derive(Debug, Default, utoipa::ToSchema)]
        $(#[$meta])*
        $vis struct $name {
            $($(#[$field_meta])* $field_vis $field: $type,)*
        }

        impl $crate::body::fields::BodyFields for $name {
            fn read<S: $crate::body::fields::FieldSource>(
                &mut self,
                name: &str,
                source: &mut S,
            ) -> Result<bool, S::Error> {
                match name {
                    $(stringify!($field) => {
                        self.$field = $crate::body::fields::ReadField::read(name, source)?;
                    })*
                    _ => return Ok(false),
                }
                Ok(true)
            }

            fn add_names(names: &mut Vec<&'static str>) {
                names.extend([$(stringify!($field)),*]);
            }
        }
    };
}
pub(crate) use body_fields;

/// A body of several groups. A field that two groups have goes to the first.
macro_rules! body {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident {
            $($(#[$part_meta:meta])* $part_vis:vis $part:ident: $type:ty,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Default)]
        $vis struct $name {
            $($(#[$part_meta])* $part_vis $part: $type,)*
        }

        impl $crate::body::fields::BodyFields for $name {
            fn read<S: $crate::body::fields::FieldSource>(
                &mut self,
                name: &str,
                source: &mut S,
            ) -> Result<bool, S::Error> {
                Ok($($crate::body::fields::BodyFields::read(&mut self.$part, name, source)? ||)* false)
            }

            fn add_names(names: &mut Vec<&'static str>) {
                $(<$type as $crate::body::fields::BodyFields>::add_names(names);)*
            }
        }
    };
}
pub(crate) use body;

/// Any object, field by field.
#[derive(Debug, Default)]
pub struct AnyFields(pub Map<String, Value>);

impl BodyFields for AnyFields {
    fn read<S: FieldSource>(&mut self, name: &str, source: &mut S) -> Result<bool, S::Error> {
        let mut value = source.value()?;
        whole_numbers(&mut value, 0);
        self.0.insert(name.to_owned(), value);
        Ok(true)
    }

    fn add_names(_: &mut Vec<&'static str>) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers_and_booleans_may_be_strings() {
        assert_eq!(i64::from_json(json!(" -12 ")).unwrap(), -12);
        assert_eq!(f64::from_json(json!("0.5")).unwrap(), 0.5);
        for (given, read) in [(json!("True"), true), (json!("off"), false), (json!(1), true), (json!("0"), false)] {
            assert_eq!(bool::from_json(given).unwrap(), read);
        }
        for wrong in [json!("two"), json!("1.5"), json!(""), json!([1])] {
            assert!(i64::from_json(wrong).is_err());
        }
        assert!(f64::from_json(json!("nan")).is_err() && f64::from_json(json!("inf")).is_err());
        assert!(bool::from_json(json!(2)).is_err() && bool::from_json(json!("maybe")).is_err());
    }

    #[test]
    fn a_whole_number_may_be_written_as_a_float() {
        let mut body =
            json!({"n": 2.0, "top_p": 0.5, "prompt": [[1.0, 2], [3.5]], "tools": [{"a": 1.0}], "seed": 1e300});
        body.as_object_mut().unwrap().values_mut().for_each(|value| whole_numbers(value, 0));
        let expected = json!({"n": 2, "top_p": 0.5, "prompt": [[1, 2], [3.5]], "tools": [{"a": 1.0}], "seed": 1e300});
        assert_eq!(body, expected);
    }
}
