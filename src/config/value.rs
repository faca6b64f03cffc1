//! Values of settings, their types and ranges, and how they are read from text, TOML and JSON.

use super::keys::ApiKeyConfig;
use std::fmt;

/// The type and range of a setting.
#[derive(Clone, Copy, Debug)]
pub enum SettingKind {
    /// A string that `check` accepts. With `auto`, the word "auto" is [`Value::Auto`].
    Text {
        auto: bool,
        check: fn(&str) -> Result<(), String>,
    },
    /// A list of strings: a repeated flag on the command line, separated by commas in the environment. With `auto`, the
    /// word "auto" is [`Value::Auto`], and a string is a list of one.
    List {
        /// The only strings that may be in it. Empty: any.
        words: &'static [&'static str],
        auto: bool,
    },
    /// A list of API keys, each a string or a table. Flags and environment variables are those of a list.
    Keys,
    Bool,
    Int {
        min: u64,
        max: u64,
        auto: bool,
    },
    /// `min` itself is allowed only with `or_equal`.
    Float {
        min: f64,
        or_equal: bool,
        max: f64,
        auto: bool,
    },
    /// One of these words.
    Choice(&'static [&'static str]),
}

/// A list of any strings.
pub(super) const LIST: SettingKind = SettingKind::List { words: &[], auto: false };

/// An integer.
pub(super) const fn int(min: u64, max: u64) -> SettingKind {
    SettingKind::Int { min, max, auto: false }
}

pub(super) const fn int_or_auto(min: u64, max: u64) -> SettingKind {
    SettingKind::Int { min, max, auto: true }
}

/// A number from `min` to `max`.
pub(super) const fn number(min: f64, max: f64) -> SettingKind {
    SettingKind::Float { min, or_equal: true, max, auto: false }
}

pub(super) const fn number_or_auto(min: f64, max: f64) -> SettingKind {
    SettingKind::Float { min, or_equal: true, max, auto: true }
}

/// A fraction above 0, up to 1.
pub(super) const SHARE: SettingKind = SettingKind::Float { min: 0.0, or_equal: false, max: 1.0, auto: false };
pub(super) const SHARE_OR_AUTO: SettingKind = SettingKind::Float { min: 0.0, or_equal: false, max: 1.0, auto: true };

pub(super) const fn text(check: fn(&str) -> Result<(), String>) -> SettingKind {
    SettingKind::Text { auto: false, check }
}

pub(super) const fn text_or_auto(check: fn(&str) -> Result<(), String>) -> SettingKind {
    SettingKind::Text { auto: true, check }
}

/// The value of a setting, of its kind's type and in its range.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Auto,
    Text(String),
    List(Vec<String>),
    Keys(Vec<ApiKeyConfig>),
    Bool(bool),
    Int(u64),
    Float(f64),
}

impl Value {
    /// The value in a JSON body.
    pub fn json(&self) -> serde_json::Value {
        match self {
            Value::Auto => "auto".into(),
            Value::Text(text) => text.as_str().into(),
            Value::List(texts) => texts.as_slice().into(),
            Value::Keys(keys) => keys.iter().map(ApiKeyConfig::as_json).collect(),
            Value::Bool(value) => (*value).into(),
            Value::Int(value) => (*value).into(),
            Value::Float(value) => (*value).into(),
        }
    }

    /// Appends the elements of `more`, a list of the same kind.
    pub(super) fn and(self, more: Value) -> Self {
        match (self, more) {
            (Value::List(texts), Value::List(more)) => Value::List([texts, more].concat()),
            (Value::Keys(keys), Value::Keys(more)) => Value::Keys([keys, more].concat()),
            (one, other) => unreachable!("{one:?} and {other:?} are not lists of one kind"),
        }
    }

    /// A copy with the secrets replaced.
    pub fn hidden(self) -> Self {
        const SECRET: &str = "(secret)";
        match self {
            Value::Text(text) if !text.is_empty() => Value::Text(SECRET.into()),
            Value::List(texts) => Value::List(vec![SECRET.into(); texts.len()]),
            Value::Keys(keys) => Value::Keys(keys.into_iter().map(|key| key.hidden(SECRET)).collect()),
            value => value,
        }
    }
}

/// Writes the value as TOML.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Auto => f.write_str("\"auto\""),
            Value::Text(text) => toml_edit::Value::from(text.as_str()).fmt(f),
            Value::List(texts) => texts.iter().collect::<toml_edit::Array>().fmt(f),
            Value::Keys(keys) => keys.iter().map(ApiKeyConfig::as_toml).collect::<toml_edit::Array>().fmt(f),
            Value::Bool(value) => value.fmt(f),
            Value::Int(value) => value.fmt(f),
            Value::Float(value) => write!(f, "{value:?}"),
        }
    }
}

impl SettingKind {
    /// The type and range in words, for "expected a whole number from 1 to 256".
    pub fn expected(&self) -> String {
        let or_auto = |auto: bool| if auto { ", or \"auto\"" } else { "" };
        match *self {
            SettingKind::Text { auto, .. } => format!("a string{}", or_auto(auto)),
            SettingKind::List { words: [], auto: false } => "a list of strings".into(),
            SettingKind::List { words: [], auto: true } => "a string, a list of strings, or \"auto\"".into(),
            SettingKind::List { words, auto } => format!("a list of {}{}", words.join(", "), or_auto(auto)),
            SettingKind::Keys => {
                "a list of strings, or of tables {key, name, requests_per_minute, tokens_per_minute, max_requests, max_connections}".into()
            }
            SettingKind::Bool => "true or false".into(),
            SettingKind::Int { min, max, auto } if max == u64::MAX => {
                format!("a whole number, at least {min}{}", or_auto(auto))
            }
            SettingKind::Int { min, max, auto } => format!("a whole number from {min} to {max}{}", or_auto(auto)),
            SettingKind::Float { min, or_equal: true, max, auto } => {
                format!("a number from {min} to {max}{}", or_auto(auto))
            }
            SettingKind::Float { min, or_equal: false, max, auto } => {
                format!("a number above {min}, up to {max}{}", or_auto(auto))
            }
            SettingKind::Choice(words) => format!("one of {}", words.join(", ")),
        }
    }

    /// Reads a flag or an environment variable. A list may be written as in TOML: `["a", "b"]`.
    pub fn parse(&self, text: &str) -> Result<Value, String> {
        let found = || format!("'{text}'");
        match self {
            SettingKind::List { .. } | SettingKind::Keys if text.trim_start().starts_with('[') => {
                match text.trim().parse::<toml_edit::Value>() {
                    Ok(value) => self.read(&value),
                    Err(error) => {
                        let why = error.message().lines().next().unwrap_or_default().to_owned();
                        Err(format!("it is not a list as in TOML: {why}"))
                    }
                }
            }
            SettingKind::Text { .. } | SettingKind::Choice(_) => self.check_text(text),
            _ if text == "auto" && self.has_auto() => Ok(Value::Auto),
            SettingKind::List { .. } => self.check_list(parts(text).map(str::to_owned).collect()),
            SettingKind::Keys => Ok(Value::Keys(parts(text).map(ApiKeyConfig::from).collect())),
            SettingKind::Bool => match text {
                "true" => Ok(Value::Bool(true)),
                "false" => Ok(Value::Bool(false)),
                _ => Err(self.mismatch(&found())),
            },
            SettingKind::Int { .. } => match text.parse::<i128>() {
                Ok(number) => self.check_int(number),
                Err(_) => Err(self.mismatch(&found())),
            },
            SettingKind::Float { .. } => match text.parse::<f64>() {
                Ok(number) => self.check_float(number),
                Err(_) => Err(self.mismatch(&found())),
            },
        }
    }

    /// Reads a value of a TOML file.
    pub fn read(&self, value: &toml_edit::Value) -> Result<Value, String> {
        use toml_edit::Value as Toml;
        match (self, value) {
            (SettingKind::Text { .. } | SettingKind::Choice(_), Toml::String(text)) => self.check_text(text.value()),
            (SettingKind::List { .. }, Toml::Array(array)) => {
                let texts: Option<Vec<String>> = array.iter().map(|item| item.as_str().map(str::to_owned)).collect();
                self.check_list(texts.ok_or_else(|| self.mismatch("a list with an entry of another type"))?)
            }
            (SettingKind::Keys, Toml::Array(array)) => {
                let keys: Result<Vec<_>, _> = array.iter().map(ApiKeyConfig::read).collect();
                keys.map(Value::Keys).map_err(|found| self.mismatch(&found))
            }
            (SettingKind::Keys, _) => Err(self.mismatch("the value")),
            (SettingKind::Bool, Toml::Boolean(value)) => Ok(Value::Bool(*value.value())),
            (SettingKind::Int { .. }, Toml::Integer(number)) => self.check_int(i128::from(*number.value())),
            (SettingKind::Float { .. }, Toml::Float(number)) => self.check_float(*number.value()),
            (SettingKind::Float { .. }, Toml::Integer(number)) => self.check_float(*number.value() as f64),
            (_, Toml::String(text)) if text.value() == "auto" && self.has_auto() => Ok(Value::Auto),
            (SettingKind::List { auto: true, .. }, Toml::String(text)) => self.check_list(vec![text.value().clone()]),
            _ => Err(self.mismatch(&format!("{} ({})", value.to_string().trim(), toml_type(value)))),
        }
    }

    /// Reads a value of a JSON body. It has the same form as in TOML.
    pub fn read_json(&self, value: &serde_json::Value) -> Result<Value, String> {
        match as_toml(value).filter(|toml| !toml.is_inline_table()) {
            Some(toml) => self.read(&toml),
            None => Err(self.mismatch(&value.to_string())),
        }
    }

    fn has_auto(&self) -> bool {
        matches!(
            self,
            SettingKind::Text { auto: true, .. }
                | SettingKind::List { auto: true, .. }
                | SettingKind::Int { auto: true, .. }
                | SettingKind::Float { auto: true, .. }
        )
    }

    fn mismatch(&self, found: &str) -> String {
        format!("{found} is not {}", self.expected())
    }

    fn check_text(&self, text: &str) -> Result<Value, String> {
        match self {
            SettingKind::Choice(words) if !words.contains(&text) => Err(self.mismatch(&format!("'{text}'"))),
            SettingKind::Text { auto: true, .. } if text == "auto" => Ok(Value::Auto),
            SettingKind::Text { check, .. } => check(text).map(|()| Value::Text(text.to_owned())),
            _ => Ok(Value::Text(text.to_owned())),
        }
    }

    fn check_list(&self, texts: Vec<String>) -> Result<Value, String> {
        match self {
            SettingKind::List { words, .. } if !words.is_empty() => {
                match texts.iter().find(|text| !words.contains(&text.as_str())) {
                    Some(unknown) => Err(self.mismatch(&format!("a list with '{unknown}'"))),
                    None => Ok(Value::List(texts)),
                }
            }
            SettingKind::List { auto: true, .. } if texts.is_empty() || texts.contains(&String::new()) => {
                Err("it must not be empty".into())
            }
            _ => Ok(Value::List(texts)),
        }
    }

    fn check_int(&self, number: i128) -> Result<Value, String> {
        match (self, u64::try_from(number)) {
            (SettingKind::Int { min, max, .. }, Ok(number)) if (*min..=*max).contains(&number) => {
                Ok(Value::Int(number))
            }
            _ => Err(format!("{number} is out of range: {}", self.expected())),
        }
    }

    fn check_float(&self, number: f64) -> Result<Value, String> {
        match *self {
            SettingKind::Float { min, or_equal, max, .. }
                if number <= max && (number > min || (or_equal && number == min)) =>
            {
                Ok(Value::Float(number))
            }
            _ => Err(format!("{number} is out of range: {}", self.expected())),
        }
    }
}

/// The parts between commas; none if `text` is empty.
fn parts(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(move |_| !text.is_empty())
}

/// `None` if TOML has no such value.
fn as_toml(value: &serde_json::Value) -> Option<toml_edit::Value> {
    use serde_json::Value as Json;
    match value {
        Json::String(text) => Some(text.as_str().into()),
        Json::Bool(value) => Some((*value).into()),
        Json::Number(number) => number.as_i64().map(Into::into).or(number.as_f64().map(Into::into)),
        Json::Array(items) => items.iter().map(as_toml).collect::<Option<toml_edit::Array>>().map(Into::into),
        Json::Object(fields) => {
            let fields = fields.iter().map(|(name, value)| Some((name.as_str(), as_toml(value)?)));
            fields.collect::<Option<toml_edit::InlineTable>>().map(Into::into)
        }
        Json::Null => None,
    }
}

fn toml_type(value: &toml_edit::Value) -> &'static str {
    match value {
        toml_edit::Value::String(_) => "a string",
        toml_edit::Value::Integer(_) => "a whole number",
        toml_edit::Value::Float(_) => "a number",
        toml_edit::Value::Boolean(_) => "a boolean",
        toml_edit::Value::Datetime(_) => "a date",
        toml_edit::Value::Array(_) => "a list",
        toml_edit::Value::InlineTable(_) => "a table",
    }
}
