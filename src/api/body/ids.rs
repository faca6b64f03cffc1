//! Prompts as they are in a body: token ids straight from the bytes, four bytes each.

use super::value::{Count, ValueSeed};
use crate::checks::{shown, token_id, type_error};
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Number, Value};
use std::fmt;

/// Of an array in the wrong place.
const NUM_SHOWN: usize = 60;
/// Whole numbers below this are the same as a float.
const WHOLE_BELOW: f64 = 9_007_199_254_740_992.0;

/// An array of token ids, or of prompts.
#[derive(Debug, PartialEq)]
pub enum Ids {
    /// Empty, or what begins with a number: one prompt.
    One(IdList),
    /// The first prompts of several, and how many there are in all.
    Several { prompts: Vec<OneOf>, num: usize },
}

/// One of several prompts.
#[derive(Debug, PartialEq)]
pub enum OneOf {
    Text(String),
    Ids(IdList),
    /// Neither of them.
    Other(Value),
}

impl OneOf {
    /// As JSON; of an array only that it is one.
    pub fn into_value(self) -> Value {
        match self {
            Self::Text(text) => text.into(),
            Self::Ids(_) => Value::Array(Vec::new()),
            Self::Other(other) => other,
        }
    }
}

/// Numbers that can be token ids, up to the first thing that cannot.
#[derive(Debug, Default, PartialEq)]
pub struct IdList {
    ids: Vec<TokenId>,
    /// What stands behind them; what follows it has not been kept.
    wrong: Option<Value>,
}

impl IdList {
    /// Whether more is wanted.
    fn push(&mut self, value: Value) -> bool {
        match value.as_u64().and_then(|id| TokenId::try_from(id).ok()) {
            Some(id) => self.ids.push(id),
            None => self.wrong = Some(value),
        }
        self.wrong.is_none()
    }

    /// Of those that have been kept.
    pub fn len(&self) -> usize {
        self.ids.len() + usize::from(self.wrong.is_some())
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The ids of the prompt `param`: at least one, and all below `vocab_size`.
    pub fn prompt(self, param: &str, vocab_size: u32) -> Result<Vec<TokenId>, ApiError> {
        if self.is_empty() {
            return Err(ApiError::invalid(param, format!("{param} must have at least one token id")));
        }
        self.check_range(param, vocab_size)?;
        match &self.wrong {
            None => Ok(self.ids),
            Some(wrong) => {
                let param = format!("{param}[{}]", self.ids.len());
                Err(ApiError::invalid(&param, format!("{param} must be a token id, got {}", shown(wrong))))
            }
        }
    }

    /// The ids of `param` where none is right too, and where a wrong type is told before a wrong number.
    pub fn tokens(self, param: &str, vocab_size: u32) -> Result<Vec<TokenId>, ApiError> {
        if let Some(Err(error)) = self.wrong.as_ref().map(i64::deserialize) {
            let param = format!("{param}[{}]", self.ids.len());
            return Err(ApiError::invalid(&param, format!("{param} {}", type_error(&error.to_string()))));
        }
        self.check_range(param, vocab_size)?;
        Ok(self.ids)
    }

    fn check_range(&self, param: &str, vocab_size: u32) -> Result<(), ApiError> {
        let place = self.ids.iter().position(|id| *id >= vocab_size);
        let known = place.map(|place| (place, i64::from(self.ids[place])));
        let wrong = self.wrong.as_ref().and_then(Value::as_i64).map(|id| (self.ids.len(), id));
        match known.or(wrong) {
            Some((place, id)) => token_id(format_args!("{param}[{place}]"), id, vocab_size).map(drop),
            None => Ok(()),
        }
    }
}

/// Reads an array as [`Ids`], and anything else as it is.
pub(super) struct IdsSeed<'a>(pub(super) &'a Count);

impl<'de> DeserializeSeed<'de> for IdsSeed<'_> {
    type Value = Result<Ids, Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(IdsVisitor { count: self.0, depth: 0 }).map(|field| match field {
            IdsItem::Array(ids) => Ok(ids),
            IdsItem::Value(value) => Err(value),
        })
    }
}

/// What stands in the field, or in its array.
enum IdsItem {
    Array(Ids),
    /// Anything else.
    Value(Value),
}

/// Reads a value at a depth of 0, the field itself, 1 or 2. Numbers are not counted, since nothing is kept of them but
/// four bytes.
#[derive(Clone, Copy)]
struct IdsVisitor<'a> {
    count: &'a Count,
    depth: u32,
}

impl<'de> DeserializeSeed<'de> for IdsVisitor<'_> {
    type Value = IdsItem;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<IdsItem, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for IdsVisitor<'_> {
    type Value = IdsItem;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<IdsItem, E> {
        Ok(IdsItem::Value(value.into()))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<IdsItem, E> {
        Ok(IdsItem::Value(value.into()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<IdsItem, E> {
        Ok(IdsItem::Value(value.into()))
    }

    /// Some clients write 16 as 16.0.
    fn visit_f64<E: Error>(self, value: f64) -> Result<IdsItem, E> {
        let is_whole = value.fract() == 0.0 && value.abs() < WHOLE_BELOW;
        let number = if is_whole { Some((value as i64).into()) } else { Number::from_f64(value) };
        Ok(IdsItem::Value(number.map_or(Value::Null, Value::Number)))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<IdsItem, E> {
        Ok(IdsItem::Value(value.into()))
    }

    fn visit_unit<E: Error>(self) -> Result<IdsItem, E> {
        Ok(IdsItem::Value(Value::Null))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<IdsItem, A::Error> {
        ValueSeed(self.count).visit_map(map).map(IdsItem::Value)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<IdsItem, A::Error> {
        if self.depth == 2 {
            return ValueSeed(self.count).visit_seq(seq).map(IdsItem::Value);
        }
        let seed = IdsVisitor { depth: self.depth + 1, ..self };
        let mut next = match seq.next_element_seed(seed)? {
            None => return Ok(IdsItem::Array(Ids::One(IdList::default()))),
            Some(first) => Some(first),
        };
        let is_one = self.depth == 1 || matches!(&next, Some(IdsItem::Value(Value::Number(_))));
        let ids = if is_one {
            let mut list = IdList::default();
            while let Some(item) = next {
                let value = match item {
                    IdsItem::Value(value) => value,
                    // Only to be shown: the first few are enough.
                    IdsItem::Array(Ids::One(list)) => list.ids.into_iter().take(NUM_SHOWN).collect(),
                    IdsItem::Array(Ids::Several { .. }) => unreachable!("a list has no lists of lists"),
                };
                if !list.push(value) {
                    while seq.next_element::<IgnoredAny>()?.is_some() {}
                    break;
                }
                next = seq.next_element_seed(seed)?;
            }
            Ids::One(list)
        } else {
            let (mut prompts, mut num) = (Vec::new(), 0);
            while let Some(item) = next {
                num += 1;
                let prompt = match item {
                    IdsItem::Array(Ids::One(list)) => OneOf::Ids(list),
                    IdsItem::Value(Value::String(text)) => OneOf::Text(text),
                    IdsItem::Array(Ids::Several { .. }) => unreachable!("at a depth of 1 there is only one list"),
                    IdsItem::Value(other) => OneOf::Other(other),
                };
                let is_wrong = matches!(&prompt, OneOf::Other(_) | OneOf::Ids(IdList { wrong: Some(_), .. }));
                prompts.push(prompt);
                if is_wrong || prompts.len() == self.count.bounds.max_prompts {
                    while seq.next_element::<IgnoredAny>()?.is_some() {
                        num += 1;
                    }
                    break;
                }
                next = seq.next_element_seed(seed)?;
            }
            Ids::Several { prompts, num }
        };
        Ok(IdsItem::Array(ids))
    }
}
