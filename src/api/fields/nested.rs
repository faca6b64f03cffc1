//! Fields of a chat or a completion that have another name in another API, and may be in an object of their own
//! (Ollama's `options`, SGLang's `sampling_params`).

use super::sampling::SamplingFields;
use crate::body::{BodyFields, FieldSource, ParsedBody, read_value};
use crate::checks::renamed;
use pagetide_base::error::ApiError;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Debug;
use std::marker::PhantomData;
use utoipa::openapi::{ObjectBuilder, RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// An API's names of sampling fields.
pub trait NestedNames: Debug + Default {
    /// The object that they are in; empty: the body itself.
    const BASE: &'static str;
    /// Each with the name that [`SamplingFields`] has.
    const NAMES: &'static [(&'static str, &'static str)];
    /// Those that the API's description says something else of than of the shared ones.
    const DIFFERENT: &'static [DifferentField] = &[];
}

/// What the description says of a field in place of what it says of the shared one.
#[derive(Debug)]
pub struct DifferentField {
    pub name: &'static str,
    pub about: &'static str,
    /// `None`: it is in the text, where there is one.
    pub default: Option<i64>,
}

impl DifferentField {
    fn apply(&self, schema: &mut RefOr<Schema>) {
        match schema {
            RefOr::T(Schema::Object(object)) => {
                object.description = Some(self.about.into());
                object.default = self.default.map(Value::from);
            }
            RefOr::T(Schema::OneOf(forms)) => forms.description = Some(self.about.into()),
            RefOr::T(Schema::Array(array)) => array.description = Some(self.about.into()),
            _ => {}
        }
    }
}

/// The fields of [`SamplingFields`] that `N` names.
#[derive(Debug, Default)]
pub struct NestedSampling<N> {
    pub sampling: SamplingFields,
    names: PhantomData<N>,
}

impl<N: NestedNames> BodyFields for NestedSampling<N> {
    fn read<S: FieldSource>(&mut self, name: &str, source: &mut S) -> Result<bool, S::Error> {
        match N::NAMES.iter().find(|(own, _)| *own == name) {
            Some((_, shared)) => self.sampling.read(shared, source),
            None => Ok(false),
        }
    }

    fn add_names(names: &mut Vec<&'static str>) {
        names.extend(N::NAMES.iter().map(|(own, _)| *own));
    }
}

/// The description of the shared fields, by the API's names.
impl<N: NestedNames> PartialSchema for NestedSampling<N> {
    fn schema() -> RefOr<Schema> {
        let shared: HashMap<_, _> = fields_of(SamplingFields::schema()).into_iter().collect();
        let own = |(name, shared_name): &(&str, &str)| {
            let mut schema = shared.get(*shared_name)?.clone();
            if let Some(different) = N::DIFFERENT.iter().find(|different| different.name == *name) {
                different.apply(&mut schema);
            }
            Some(((*name).to_owned(), schema))
        };
        // A name that is not a sampling field's is described where it is read.
        described(N::NAMES.iter().filter_map(own))
    }
}

impl<N: NestedNames> ToSchema for NestedSampling<N> {
    fn name() -> Cow<'static, str> {
        SamplingFields::name()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        SamplingFields::schemas(schemas);
    }
}

/// The fields of an object that is described, in their order.
pub fn fields_of(schema: RefOr<Schema>) -> Vec<(String, RefOr<Schema>)> {
    match schema {
        RefOr::T(Schema::Object(object)) => object.properties.into_iter().collect(),
        _ => Vec::new(),
    }
}

/// An object that has these fields.
pub fn described(fields: impl Iterator<Item = (String, RefOr<Schema>)>) -> RefOr<Schema> {
    fields.fold(ObjectBuilder::new(), |object, (name, field)| object.property(name, field)).into()
}

/// Describes an object whose fields are read in several groups, each of which describes its own.
macro_rules! describe_object {
    ($(#[$doc:meta])* $name:ident as $title:literal: $($group:ty),+) => {
        $(#[$doc])*
        pub struct $name;

        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                let fields = [$($crate::fields::nested::fields_of(<$group as utoipa::PartialSchema>::schema())),+];
                $crate::fields::nested::described(fields.into_iter().flatten())
            }
        }

        impl utoipa::ToSchema for $name {
            fn name() -> std::borrow::Cow<'static, str> {
                $title.into()
            }

            fn schemas(schemas: &mut Vec<(String, utoipa::openapi::RefOr<utoipa::openapi::Schema>)>) {
                $(<$group as utoipa::ToSchema>::schemas(schemas);)+
            }
        }
    };
}
pub(crate) use describe_object;

/// The fields of the object that `N` names.
pub fn read_nested<N: NestedNames, B: BodyFields>(object: Map<String, Value>) -> Result<B, ApiError> {
    let ParsedBody { body, problems } = read_value(&Value::Object(object))?;
    problems.check().map_err(below::<N>)?;
    Ok(body)
}

/// An error about a field of the object, whose name has no path yet.
pub fn below<N: NestedNames>(error: ApiError) -> ApiError {
    let Some(param) = error.param.clone() else { return error };
    let (name, rest) = param.split_at(param.find(['.', '[']).unwrap_or(param.len()));
    let own = N::NAMES.iter().find(|(_, shared)| *shared == name).map_or(name, |(own, _)| *own);
    let base = if N::BASE.is_empty() { String::new() } else { format!("{}.", N::BASE) };
    renamed(error, &param, format!("{base}{own}{rest}"))
}

/// An error that may be about a sampling field, with the client's path of the field.
pub fn as_nested<N: NestedNames>(error: ApiError) -> ApiError {
    let name = error.param.as_deref().and_then(|param| param.split(['.', '[']).next());
    let is_one = N::NAMES.iter().any(|(_, shared)| Some(*shared) == name);
    if is_one { below::<N>(error) } else { error }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[derive(Debug, Default)]
    struct OwnNames;

    impl NestedNames for OwnNames {
        const BASE: &'static str = "own";
        const NAMES: &'static [(&'static str, &'static str)] = &[("warmth", "temperature"), ("ends", "stop_token_ids")];
    }

    fn read(object: Value) -> Result<SamplingFields, ApiError> {
        let Value::Object(object) = object else { unreachable!("the tests give objects") };
        read_nested::<OwnNames, NestedSampling<OwnNames>>(object).map(|read| read.sampling)
    }

    #[test]
    fn only_the_named_fields_are_read() {
        let sampling = read(json!({"warmth": 0.5, "temperature": 2, "top_p": 0.1})).unwrap();
        assert_eq!((sampling.temperature, sampling.top_p), (Some(0.5), None));
    }

    #[test]
    fn errors_have_the_clients_names() {
        let error = read(json!({"ends": [1, "a"]})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("own.ends[1]"));
        assert_eq!(error.message, "own.ends[1] must be an integer, got string \"a\"");
        let later = as_nested::<OwnNames>(ApiError::invalid("temperature", "temperature must be in [0, 100], got 200"));
        assert_eq!(later.param.as_deref(), Some("own.warmth"));
        assert_eq!(later.message, "own.warmth must be in [0, 100], got 200");
        let other = ApiError::invalid("messages", "messages is required");
        assert_eq!(as_nested::<OwnNames>(other.clone()), other);
    }
}
