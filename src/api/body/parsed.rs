//! What reading a body gives.

use pagetide_base::error::ApiError;
use serde_json::Value;

/// A body that has been read.
#[derive(Debug)]
pub struct ParsedBody<B> {
    pub body: B,
    pub problems: FieldProblems,
}

/// The first objects of an array, and how many there are in all.
#[derive(Debug)]
pub struct Objects<B> {
    /// Each, or what stands in its place.
    pub(super) kept: Vec<Result<ParsedBody<B>, Value>>,
    pub(super) num: usize,
}

/// What is wrong with the types of a body's fields, in the order of the body.
#[derive(Debug, Default)]
pub struct FieldProblems(Vec<(String, ApiError)>);

impl FieldProblems {
    pub(super) fn add(&mut self, name: &str, error: ApiError) {
        self.0.push((name.to_owned(), error));
    }

    /// The field `name` comes again: what was wrong with it before does not count.
    pub(super) fn forget(&mut self, name: &str) {
        self.0.retain(|(field, _)| field != name);
    }

    /// Refuses a body that is no object.
    pub fn check_object(&self) -> Result<(), ApiError> {
        self.check_field("")
    }

    /// Refuses a body in which the field `name` is wrong.
    pub fn check_field(&self, name: &str) -> Result<(), ApiError> {
        let wrong = self.0.iter().find(|(field, _)| field == name);
        wrong.map_or(Ok(()), |(_, error)| Err(error.clone()))
    }

    /// Refuses a body in which any field is wrong.
    pub fn check(&self) -> Result<(), ApiError> {
        self.0.first().map_or(Ok(()), |(_, error)| Err(error.clone()))
    }
}
