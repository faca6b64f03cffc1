//! Fields that are known and not supported. Ignoring them would give a wrong answer with status 200, so they are
//! refused where they ask for something.

use super::fields::{BodyFields, FieldSource};
use pagetide_base::error::ApiError;
use serde_json::Value;
use std::fmt::Debug;
use std::marker::PhantomData;

/// The fields that one API refuses.
pub trait RefusedTable: Debug + Default {
    /// Each with what its error says of it, in the order in which they are looked at.
    const FIELDS: &'static [(&'static str, &'static str)];

    /// Whether a field asks for something with this value.
    fn asks(name: &str, value: &Value) -> bool;

    /// The error's message about a field.
    fn message(name: &str, note: &str) -> String;
}

/// Which of the fields that `T` refuses a body asks for.
#[derive(Debug, Default)]
pub struct Refused<T> {
    /// A place in the table: the first that asks for something.
    asked: Option<usize>,
    table: PhantomData<T>,
}

impl<T: RefusedTable> Refused<T> {
    pub fn check(&self) -> Result<(), ApiError> {
        match self.asked.map(|place| T::FIELDS[place]) {
            Some((name, note)) => Err(ApiError::invalid(name, T::message(name, note))),
            None => Ok(()),
        }
    }
}

impl<T: RefusedTable> BodyFields for Refused<T> {
    fn read<S: FieldSource>(&mut self, name: &str, source: &mut S) -> Result<bool, S::Error> {
        let Some(place) = T::FIELDS.iter().position(|(field, _)| *field == name) else { return Ok(false) };
        if T::asks(name, &source.value()?) && self.asked.is_none_or(|first| place < first) {
            self.asked = Some(place);
        }
        Ok(true)
    }

    fn add_names(names: &mut Vec<&'static str>) {
        names.extend(T::FIELDS.iter().map(|(name, _)| *name));
    }
}
