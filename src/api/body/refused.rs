//! Fields that are known and not supported. Ignoring them would give a wrong answer with status 200, so they are
//! refused where they ask for something.

use super::fields::{BodyFields, FieldSource};
use pagetide_base::error::ApiError;
use serde_json::Value;
use std::fmt::Debug;
use std::marker::PhantomData;

/// A known field, the values of it that ask for nothing, and what its error says.
#[derive(Clone, Copy, Debug)]
pub struct RefusedField {
    pub name: &'static str,
    pub off: Off,
    pub note: &'static str,
}

/// Which values ask for nothing. Null, false, an empty string, an empty array and an empty object never do.
#[derive(Clone, Copy, Debug)]
pub enum Off {
    /// Only those.
    Empty,
    /// Also this number, which turns the field off.
    Number(f64),
    /// Also true, the field's default. False asks for something.
    True,
    /// Also these words.
    Words(&'static [&'static str]),
    /// All. The field has no effect here and does not change what an answer says.
    Any,
}

impl Off {
    fn asks(self, value: &Value) -> bool {
        match (self, value) {
            (Off::Any, _) | (Off::True, Value::Bool(true)) => false,
            (Off::True, Value::Bool(false)) => true,
            (Off::Number(off), Value::Number(number)) => number.as_f64() != Some(off),
            (Off::Words(words), Value::String(word)) => !word.is_empty() && !words.contains(&word.as_str()),
            (_, Value::Null | Value::Bool(false)) => false,
            (_, Value::String(text)) => !text.is_empty(),
            (_, Value::Array(items)) => !items.is_empty(),
            (_, Value::Object(fields)) => !fields.is_empty(),
            (_, Value::Bool(true) | Value::Number(_)) => true,
        }
    }
}

/// A field that is refused unless it is empty.
pub const fn refuse(name: &'static str, note: &'static str) -> RefusedField {
    RefusedField { name, off: Off::Empty, note }
}

impl RefusedField {
    /// The same, which asks for nothing with these values too.
    pub const fn unless(self, off: Off) -> Self {
        Self { off, ..self }
    }
}

/// The fields that one API refuses.
pub trait RefusedTable: Debug + Default {
    /// In the order in which they are looked at.
    const FIELDS: &'static [RefusedField];

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
            Some(RefusedField { name, note, .. }) => Err(ApiError::invalid(name, T::message(name, note))),
            None => Ok(()),
        }
    }
}

impl<T: RefusedTable> BodyFields for Refused<T> {
    fn read<S: FieldSource>(&mut self, name: &str, source: &mut S) -> Result<bool, S::Error> {
        let Some(place) = T::FIELDS.iter().position(|field| field.name == name) else { return Ok(false) };
        if T::FIELDS[place].off.asks(&source.value()?) && self.asked.is_none_or(|first| place < first) {
            self.asked = Some(place);
        }
        Ok(true)
    }

    fn add_names(names: &mut Vec<&'static str>) {
        names.extend(T::FIELDS.iter().map(|field| field.name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_that_ask_for_nothing() {
        let given = [json!(null), json!(false), json!(true), json!(""), json!("x"), json!(0), json!(1), json!([])];
        let asks = |off: Off| given.each_ref().map(|value| off.asks(value));
        assert_eq!(asks(Off::Empty), [false, false, true, false, true, true, true, false]);
        assert_eq!(asks(Off::Number(1.0)), [false, false, true, false, true, true, false, false]);
        assert_eq!(asks(Off::True), [false, true, false, false, true, true, true, false]);
        assert_eq!(asks(Off::Words(&["x"])), [false, false, true, false, false, true, true, false]);
        assert_eq!(asks(Off::Any), [false; 8]);
    }
}
