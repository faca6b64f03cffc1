//! Prompts as they are in a body: token ids straight from the bytes, four bytes each.

use super::value::{Count, ValueSeed};
use crate::checks::{serde_error, shown, token_id};
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
    /// Texts, and then a number: one prompt where texts and ids may be mixed.
    Mixed(IdList),
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
    /// The text; empty for anything else.
    fn into_text(self) -> String {
        match self {
            Self::Text(text) => text,
            Self::Ids(_) | Self::Other(_) => String::new(),
        }
    }

    /// As JSON; of an array only that it is one.
    pub fn into_value(self) -> Value {
        match self {
            Self::Text(text) => text.into(),
            Self::Ids(_) => Value::Array(Vec::new()),
            Self::Other(other) => other,
        }
    }
}

/// Numbers that can be token ids, with texts between them, up to the first thing that is neither.
#[derive(Debug, Default, PartialEq)]
pub struct IdList {
    ids: Vec<TokenId>,
    /// Each with the number of ids before it.
    texts: Vec<(usize, String)>,
    /// What stands behind them; what follows it has not been kept.
    wrong: Option<Value>,
}

/// Token ids that follow each other, or a text between them.
#[derive(Clone, Debug, PartialEq)]
pub enum MixedPart {
    Text(String),
    Ids(Vec<TokenId>),
}

impl MixedPart {
    /// Bytes of text.
    pub fn num_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Ids(_) => 0,
        }
    }
}

impl IdList {
    /// Whether more is wanted.
    fn push(&mut self, value: Value) -> bool {
        match (value.as_u64().and_then(|id| TokenId::try_from(id).ok()), value) {
            (Some(id), _) => self.ids.push(id),
            (None, Value::String(text)) => self.texts.push((self.ids.len(), text)),
            (None, value) => self.wrong = Some(value),
        }
        self.wrong.is_none()
    }

    /// Of those that have been kept.
    pub fn len(&self) -> usize {
        self.ids.len() + self.texts.len() + usize::from(self.wrong.is_some())
    }

    /// The parts of the prompt `param`, at least one; all ids are below `vocab_size`.
    pub fn mixed(self, param: &str, vocab_size: u32) -> Result<Vec<MixedPart>, ApiError> {
        if self.texts.is_empty() {
            return self.prompt(param, vocab_size).map(|ids| vec![MixedPart::Ids(ids)]);
        }
        let Self { mut ids, texts, wrong } = self;
        // A place in the array: the texts before an id count too.
        let place = |at: usize| at + texts.iter().filter(|(before, _)| *before <= at).count();
        for (at, id) in ids.iter().enumerate() {
            token_id(format_args!("{param}[{}]", place(at)), i64::from(*id), vocab_size)?;
        }
        if let Some(wrong) = wrong {
            let param = format!("{param}[{}]", place(ids.len()));
            return Err(ApiError::invalid(
                &param,
                format!("{param} must be a token id or a text, got {}", shown(&wrong)),
            ));
        }
        let mut parts = Vec::new();
        for (before, text) in texts.into_iter().rev() {
            let behind = ids.split_off(before);
            parts.extend((!behind.is_empty()).then_some(MixedPart::Ids(behind)));
            parts.push(MixedPart::Text(text));
        }
        parts.extend((!ids.is_empty()).then_some(MixedPart::Ids(ids)));
        parts.reverse();
        Ok(parts)
    }

    /// The first text counts as wrong, for a list of ids alone.
    fn refuse_texts(&mut self) {
        if let Some((before, text)) = std::mem::take(&mut self.texts).into_iter().next() {
            self.ids.truncate(before);
            self.wrong = Some(text.into());
        }
    }

    /// What stands behind the texts that the array begins with, and its place.
    pub fn behind_texts(&self) -> (usize, Value) {
        let texts_before = self.texts.iter().take_while(|(before, _)| *before == 0).count();
        let id = self.ids.first().map(|id| Value::from(*id));
        (texts_before, id.or_else(|| self.wrong.clone()).unwrap_or_default())
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The ids of the prompt `param`: at least one, and all below `vocab_size`.
    pub fn prompt(mut self, param: &str, vocab_size: u32) -> Result<Vec<TokenId>, ApiError> {
        if self.is_empty() {
            return Err(ApiError::invalid(param, format!("{param} must have at least one token id")));
        }
        self.refuse_texts();
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
    pub fn tokens(mut self, param: &str, vocab_size: u32) -> Result<Vec<TokenId>, ApiError> {
        self.refuse_texts();
        if let Some(Err(error)) = self.wrong.as_ref().map(i64::deserialize) {
            let param = format!("{param}[{}]", self.ids.len());
            return Err(serde_error(param, &error.to_string()));
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

impl IdsVisitor<'_> {
    /// The whole of a list that begins with `list` and `next`.
    fn list<'de, A: SeqAccess<'de>>(
        self,
        mut list: IdList,
        mut next: Option<IdsItem>,
        mut seq: A,
    ) -> Result<IdList, A::Error> {
        let seed = IdsVisitor { depth: self.depth + 1, ..self };
        while let Some(item) = next {
            let value = match item {
                IdsItem::Value(value) => value,
                // Only to be shown: the first few are enough.
                IdsItem::Array(Ids::One(list)) => list.ids.into_iter().take(NUM_SHOWN).collect(),
                IdsItem::Array(_) => Value::Array(Vec::new()),
            };
            if value.is_string() {
                self.count.add()?;
            }
            if !list.push(value) {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                break;
            }
            next = seq.next_element_seed(seed)?;
        }
        Ok(list)
    }
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
            Ids::One(self.list(IdList::default(), next, seq)?)
        } else {
            let (mut prompts, mut num) = (Vec::new(), 0);
            while let Some(item) = next {
                if matches!(&item, IdsItem::Value(Value::Number(_)))
                    && prompts.iter().all(|prompt| matches!(prompt, OneOf::Text(_)))
                {
                    let texts = prompts.into_iter().map(|prompt| (0, prompt.into_text()));
                    let list = IdList { texts: texts.collect(), ..IdList::default() };
                    return self.list(list, Some(item), seq).map(|list| IdsItem::Array(Ids::Mixed(list)));
                }
                num += 1;
                let prompt = match item {
                    IdsItem::Array(Ids::One(list)) => OneOf::Ids(list),
                    IdsItem::Value(Value::String(text)) => OneOf::Text(text),
                    IdsItem::Array(_) => unreachable!("at a depth of 1 there is only one list"),
                    IdsItem::Value(other) => OneOf::Other(other),
                };
                // Objects are prompts of some APIs.
                let is_wrong = match &prompt {
                    OneOf::Other(other) => !other.is_object(),
                    OneOf::Ids(list) => list.wrong.is_some(),
                    OneOf::Text(_) => false,
                };
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
