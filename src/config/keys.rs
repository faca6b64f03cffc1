//! Entries of `server.api_keys`: each is a string, or a table with the key, its name and its limits.

use std::fmt;
use toml_edit::{InlineTable, Value as Toml};

/// An entry of `server.api_keys`. `None` means that the entry does not say.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct ApiKeyConfig {
    pub key: String,
    /// The name of its owner in logs and traces.
    pub name: Option<String>,
    /// 0 means no limit, as in the other limits.
    pub requests_per_minute: Option<u64>,
    /// Prompt and output tokens together.
    pub tokens_per_minute: Option<u64>,
    /// Requests at once.
    pub max_requests: Option<u64>,
    pub max_connections: Option<u64>,
}

/// The names of the limits in a table.
const LIMITS: [&str; 4] = ["requests_per_minute", "tokens_per_minute", "max_requests", "max_connections"];
const MAX_LIMIT: i64 = 1_000_000_000_000;
/// Names appear in logs and in headers of traces.
const MAX_NAME_BYTES: usize = 64;

impl From<&str> for ApiKeyConfig {
    fn from(key: &str) -> Self {
        Self { key: key.into(), ..Self::default() }
    }
}

impl PartialEq<&str> for ApiKeyConfig {
    fn eq(&self, key: &&str) -> bool {
        let Self { key: own, name, requests_per_minute, tokens_per_minute, max_requests, max_connections } = self;
        let limits = [requests_per_minute, tokens_per_minute, max_requests, max_connections];
        own == key && name.is_none() && limits.into_iter().all(Option::is_none)
    }
}

/// Without the key, because the output may end up in a log.
impl fmt::Debug for ApiKeyConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.clone().hidden("(secret)").as_toml().fmt(f)
    }
}

impl ApiKeyConfig {
    /// Reads an entry of the list. The error describes what was found instead.
    pub(super) fn read(value: &Toml) -> Result<Self, String> {
        match value {
            Toml::String(key) => Ok(key.value().as_str().into()),
            Toml::InlineTable(table) => Self::read_table(table),
            _ => Err("a list with an entry of another type".into()),
        }
    }

    fn read_table(table: &InlineTable) -> Result<Self, String> {
        let mut read = Self::default();
        for (field, value) in table.iter() {
            match (field, value) {
                ("key", Toml::String(key)) => read.key = key.value().clone(),
                ("name", Toml::String(name)) => read.name = Some(checked_name(name.value())?),
                ("key" | "name", _) => return Err(format!("a table whose {field} is not a string")),
                (field, value) => *read.limit(field)? = Some(checked_limit(field, value)?),
            }
        }
        if read.key.is_empty() { Err("a table without a key".into()) } else { Ok(read) }
    }

    fn limit(&mut self, field: &str) -> Result<&mut Option<u64>, String> {
        match field {
            "requests_per_minute" => Ok(&mut self.requests_per_minute),
            "tokens_per_minute" => Ok(&mut self.tokens_per_minute),
            "max_requests" => Ok(&mut self.max_requests),
            "max_connections" => Ok(&mut self.max_connections),
            _ => Err(format!("a table with the unknown field '{field}' (known: key, name, {})", LIMITS.join(", "))),
        }
    }

    pub(super) fn hidden(self, secret: &str) -> Self {
        Self { key: secret.into(), ..self }
    }

    fn limits(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let values = [self.requests_per_minute, self.tokens_per_minute, self.max_requests, self.max_connections];
        LIMITS.into_iter().zip(values).filter_map(|(name, value)| Some((name, value?)))
    }

    /// A string if the entry has only a key, else a table.
    pub(super) fn as_toml(&self) -> Toml {
        if self.name.is_none() && self.limits().next().is_none() {
            return self.key.as_str().into();
        }
        let mut table = InlineTable::new();
        table.insert("key", self.key.as_str().into());
        if let Some(name) = &self.name {
            table.insert("name", name.as_str().into());
        }
        for (name, value) in self.limits() {
            table.insert(name, (value as i64).into());
        }
        table.into()
    }

    pub(super) fn as_json(&self) -> serde_json::Value {
        if self.name.is_none() && self.limits().next().is_none() {
            return self.key.as_str().into();
        }
        let mut object = serde_json::Map::new();
        object.insert("key".into(), self.key.as_str().into());
        if let Some(name) = &self.name {
            object.insert("name".into(), name.as_str().into());
        }
        object.extend(self.limits().map(|(name, value)| (name.into(), value.into())));
        object.into()
    }
}

fn checked_name(name: &str) -> Result<String, String> {
    let is_plain = |c: char| c.is_ascii_graphic();
    match (1..=MAX_NAME_BYTES).contains(&name.len()) && name.chars().all(is_plain) {
        true => Ok(name.into()),
        false => {
            Err(format!("a table whose name is not 1 to {MAX_NAME_BYTES} printable ASCII characters without spaces"))
        }
    }
}

fn checked_limit(field: &str, value: &Toml) -> Result<u64, String> {
    let limit = value.as_integer().filter(|limit| (0..=MAX_LIMIT).contains(limit));
    limit.map(|limit| limit as u64).ok_or(format!("a table whose {field} is not a whole number from 0 to {MAX_LIMIT}"))
}
