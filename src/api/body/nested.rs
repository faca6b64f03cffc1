//! Fields that are objects, or arrays of them, with fields of their own: read as a body is, and not as JSON values.

use super::fields::{BodyFields, FieldSource, ReadField};
use super::parsed::{Objects, ParsedBody};
use crate::checks::{within, wrong_type};
use pagetide_base::error::ApiError;
use serde_json::Value;

/// An object with the fields of `B`; `None` also for null.
#[derive(Debug)]
pub struct Nested<B>(pub Option<ParsedBody<B>>);

/// An array of objects with the fields of `B`, of which the first `MOST` are kept. A `MOST` of 0 stands for as many as
/// a batch may have prompts.
#[derive(Debug)]
pub struct NestedList<B, const MOST: usize>(Option<Objects<B>>);

impl<B> Default for Nested<B> {
    fn default() -> Self {
        Self(None)
    }
}

impl<B, const MOST: usize> Default for NestedList<B, MOST> {
    fn default() -> Self {
        Self(None)
    }
}

impl<B> Nested<B> {
    pub fn is_given(&self) -> bool {
        self.0.is_some()
    }

    /// What `read` makes of the object, which errors call `param`; `None` where there is none.
    pub fn checked<T>(
        self,
        param: &str,
        read: impl FnOnce(ParsedBody<B>) -> Result<T, ApiError>,
    ) -> Result<Option<T>, ApiError> {
        self.0.map(|object| read(object).map_err(|error| within(param, error))).transpose()
    }
}

impl<B, const MOST: usize> NestedList<B, MOST> {
    /// How many objects there are, kept or not; `None` where there is no array.
    pub fn num(&self) -> Option<usize> {
        self.0.as_ref().map(|objects| objects.num)
    }

    /// Whether there are more objects than have been kept.
    pub fn is_too_long(&self) -> bool {
        self.0.as_ref().is_some_and(|objects| objects.num > objects.kept.len())
    }

    /// What `read` makes of each object that was kept, with its path. Errors call the array `param`.
    pub fn checked<T>(
        self,
        param: &str,
        mut read: impl FnMut(&str, B) -> Result<T, ApiError>,
    ) -> Result<Vec<T>, ApiError> {
        let kept = self.0.map(|objects| objects.kept).unwrap_or_default();
        let object = |(i, object): (usize, Result<ParsedBody<B>, Value>)| {
            let param = format!("{param}[{i}]");
            let ParsedBody { body, problems } = object.map_err(|got| wrong_type(&param, "an object", Some(&got)))?;
            problems.check().map_err(|error| within(&param, error))?;
            read(&param, body)
        };
        kept.into_iter().enumerate().map(object).collect()
    }
}

impl<B: BodyFields> ReadField for Nested<B> {
    fn read<S: FieldSource>(name: &str, source: &mut S) -> Result<Self, S::Error> {
        Ok(Self(match source.object()? {
            Ok(object) => Some(object),
            Err(Value::Null) => None,
            Err(other) => {
                source.problem(name, wrong_type(name, "an object", Some(&other)));
                None
            }
        }))
    }
}

impl<B: BodyFields, const MOST: usize> ReadField for NestedList<B, MOST> {
    fn read<S: FieldSource>(name: &str, source: &mut S) -> Result<Self, S::Error> {
        Ok(Self(match source.objects(Some(MOST).filter(|most| *most > 0))? {
            Ok(objects) => Some(objects),
            Err(Value::Null) => None,
            Err(other) => {
                source.problem(name, wrong_type(name, "an array of objects", Some(&other)));
                None
            }
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::{Bounds, body_fields, read};

    body_fields! {
        struct Inner {
            number: Option<i64>,
        }
    }

    body_fields! {
        struct Outer {
            #[schema(value_type = Option<Object>)]
            one: Nested<Inner>,
            #[schema(value_type = Option<Object>)]
            two: NestedList<Inner, 2>,
            #[schema(value_type = Option<Object>)]
            batch: NestedList<Inner, 0>,
        }
    }

    fn outer(text: &str) -> Result<Outer, ApiError> {
        let ParsedBody { body, problems } = read(text.as_bytes(), Bounds { max_values: 20, max_prompts: 3 })?;
        problems.check()?;
        Ok(body)
    }

    fn number(ParsedBody { body, problems }: ParsedBody<Inner>) -> Result<Option<i64>, ApiError> {
        problems.check()?;
        Ok(body.number)
    }

    #[test]
    fn objects_are_read_as_bodies_are() {
        let body = outer(r#"{"one": {"number": 1, "x": [2]}, "two": [{"number": 3}, {}], "batch": []}"#).unwrap();
        assert_eq!(body.one.checked("one", number).unwrap(), Some(Some(1)));
        assert_eq!((body.two.num(), body.two.is_too_long()), (Some(2), false));
        assert_eq!(body.two.checked("two", |_, inner| Ok(inner.number)).unwrap(), [Some(3), None]);
        assert_eq!(body.batch.num(), Some(0));
        let none = outer(r#"{"one": null}"#).unwrap();
        assert!(!none.one.is_given() && none.two.num().is_none());
    }

    #[test]
    fn no_more_objects_are_kept_than_there_may_be() {
        let body = outer(r#"{"two": [{}, {}, {}], "batch": [{}, {}, {}, 5, {}]}"#).unwrap();
        assert_eq!((body.two.num(), body.two.is_too_long()), (Some(3), true));
        assert_eq!((body.batch.num(), body.batch.is_too_long()), (Some(5), true));
        assert_eq!(body.batch.checked("batch", |_, inner| Ok(inner.number)).unwrap().len(), 3);
        let many = format!("{{\"two\": [{{\"number\": 1, \"number\": [{}1]}}]}}", "1,".repeat(30));
        assert!(outer(&many).unwrap_err().message.contains("limits.max_body_values"), "they are counted");
    }

    #[test]
    fn errors_name_the_place() {
        let error = outer(r#"{"one": [1]}"#).unwrap_err();
        assert_eq!(error.message, "one must be an object, got [1]");
        assert_eq!(outer(r#"{"two": {}}"#).unwrap_err().param.as_deref(), Some("two"));
        let body = outer(r#"{"one": {"number": "x"}, "two": [{}, {"number": []}], "batch": [{}, 5]}"#).unwrap();
        let error = body.one.checked("one", number).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("one.number"));
        assert!(error.message.starts_with("one.number must be an integer"), "{error}");
        let error = body.two.checked("two", |_, inner| Ok(inner.number)).unwrap_err();
        assert!(error.message.starts_with("two[1].number must be"), "{error}");
        let error = body.batch.checked("batch", |_, inner| Ok(inner.number)).unwrap_err();
        assert_eq!(error.message, "batch[1] must be an object, got 5");
    }
}
