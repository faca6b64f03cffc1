//! Resolves the configuration from its sources: flags take precedence over environment variables, these over the file,
//! and the file over the defaults. Every value keeps its origin, and every mistake is reported, not only the first.

use super::settings::{ENV_PREFIX, SECTIONS, SETTINGS, Setting, find};
use super::value::{SettingKind, Value};
use super::{Config, LOCALHOST, LoadFormat, PreemptionMode, Quantization, SwapConfig};
use pagetide_base::error::StartError;
use std::fmt;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use toml_edit::{Document, Item, Key, TableLike};

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Default,
    File {
        path: PathBuf,
        line: usize,
    },
    Env(String),
    /// The flag as it was given: `--port`, `--set server.port`.
    Flag(String),
    /// Changed over HTTP while the server ran.
    Admin,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::File { path, line } => write!(f, "{}:{line}", path.display()),
            Origin::Env(name) => f.write_str(name),
            Origin::Flag(flag) => f.write_str(flag),
            Origin::Admin => f.write_str("POST /admin/config"),
        }
    }
}

/// One mistake: where it was made, in which key (empty if in none), and what is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub origin: Origin,
    pub key: String,
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.origin)?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.message)
    }
}

/// All mistakes of a configuration, one a line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Problems(pub Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<String> = self.0.iter().map(Problem::to_string).collect();
        f.write_str(&lines.join("\n"))
    }
}

impl From<Problems> for StartError {
    fn from(problems: Problems) -> Self {
        StartError::new(problems.to_string())
    }
}

/// The sources that the user controls.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// Name and text of the configuration file.
    pub file: Option<(PathBuf, String)>,
    /// The environment. Variables without the prefix `PAGETIDE_` are ignored.
    pub env: Vec<(String, String)>,
    /// Flag as given, key, value. A later one wins over an earlier one of the same key.
    pub flags: Vec<(String, String, String)>,
}

/// A valid configuration and the origin of each of its values.
#[derive(Clone, Debug)]
pub struct Resolved {
    pub config: Config,
    /// In the order of [`SETTINGS`].
    origins: Vec<Origin>,
}

/// Marks all values as defaults.
impl From<Config> for Resolved {
    fn from(config: Config) -> Self {
        Self { config, origins: vec![Origin::Default; SETTINGS.len()] }
    }
}

impl Resolved {
    pub fn origin(&self, key: &str) -> &Origin {
        let index = SETTINGS.iter().position(|setting| setting.key == key);
        &self.origins[index.unwrap_or_else(|| panic!("no such setting: {key}"))]
    }

    /// The value of a setting, with secrets replaced.
    pub fn shown(&self, setting: &Setting) -> Value {
        let value = (setting.load)(&self.config);
        if setting.is_secret() { value.hidden() } else { value }
    }

    /// A copy with some settings changed. The values are already checked one by one, so a problem is a conflict between
    /// settings.
    pub fn with(&self, changes: Vec<(&'static Setting, Value, Origin)>) -> Result<Self, Problems> {
        let mut layers = Layers { resolved: self.clone(), problems: Vec::new() };
        for (setting, value, origin) in changes {
            layers.set(setting, Ok(value), origin);
        }
        layers.finish()
    }

    /// The configuration as a TOML file that gives the origin of each value. Secrets are replaced.
    pub fn show(&self) -> String {
        let lines = SETTINGS.iter().zip(&self.origins).map(|(setting, origin)| {
            (setting.section(), format!("{} = {}", setting.name(), self.shown(setting)), origin)
        });
        let mut out = String::new();
        let mut current = "";
        for (section, line, origin) in lines {
            if section != current {
                out += &format!("{}[{section}]\n", if current.is_empty() { "" } else { "\n" });
                current = section;
            }
            out += &format!("{line:<46} # {origin}\n");
        }
        out
    }
}

/// Reads the file at `path` as a source.
pub fn read_file(path: &Path) -> Result<(PathBuf, String), StartError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok((path.to_owned(), text)),
        Err(error) => Err(StartError::new(format!("cannot read the configuration file {}: {error}", path.display()))),
    }
}

/// Applies the sources in order of precedence.
pub fn resolve(sources: &Sources) -> Result<Resolved, Problems> {
    let mut layers = Layers { resolved: Config::default().into(), problems: Vec::new() };
    if let Some((path, text)) = &sources.file {
        layers.add_file(path, text);
    }
    for (name, value) in &sources.env {
        layers.add_env(name, value);
    }
    layers.add_flags(&sources.flags);
    layers.finish()
}

struct Layers {
    resolved: Resolved,
    problems: Vec<Problem>,
}

impl Layers {
    fn finish(mut self) -> Result<Resolved, Problems> {
        self.check_relations();
        if self.problems.is_empty() { Ok(self.resolved) } else { Err(Problems(self.problems)) }
    }

    fn problem(&mut self, origin: Origin, key: impl Into<String>, message: impl Into<String>) {
        self.problems.push(Problem { origin, key: key.into(), message: message.into() });
    }

    fn set(&mut self, setting: &'static Setting, value: Result<Value, String>, origin: Origin) {
        match value {
            Ok(value) => {
                (setting.store)(&mut self.resolved.config, value);
                let index = SETTINGS.iter().position(|other| std::ptr::eq(setting, other));
                self.resolved.origins[index.expect("settings live in the table")] = origin;
            }
            // The message goes to logs, so it must not quote the secret. Messages about keys never do.
            Err(_) if setting.is_secret() && !matches!(setting.kind, SettingKind::Keys) => {
                self.problem(origin, setting.key, format!("the value is not {}", setting.kind.expected()));
            }
            Err(message) => self.problem(origin, setting.key, message),
        }
    }

    fn add_file(&mut self, path: &Path, text: &str) {
        let at = |offset: usize| {
            let before = &text.as_bytes()[..offset.min(text.len())];
            Origin::File { path: path.to_owned(), line: 1 + before.iter().filter(|byte| **byte == b'\n').count() }
        };
        // toml_edit panics at some duplicate keys that follow another mistake.
        let document = match catch_unwind(|| Document::parse(text)) {
            Ok(Ok(document)) => document,
            Err(_) => {
                return self.problem(at(0), "", "not TOML: there are several mistakes, one of them a duplicate key");
            }
            Ok(Err(error)) => {
                let offset = error.span().map_or(0, |span| span.start);
                let column = 1 + text[..offset].rsplit('\n').next().map_or(0, |line| line.chars().count());
                self.problem(
                    at(offset),
                    "",
                    format!("not TOML: {} (column {column})", error.message().trim().replace('\n', ", ")),
                );
                return;
            }
        };
        let span_of = |key: &Key, item: &Item| key.span().or(item.span()).map_or(0, |span| span.start);
        for (section, item) in keys(document.as_table()) {
            let origin = at(span_of(section, item));
            let section = section.get();
            if !SECTIONS.iter().any(|(name, _)| *name == section) {
                self.problem(origin, section, unknown_section(section));
                continue;
            }
            let Some(table) = item.as_table_like() else {
                self.problem(origin, section, format!("this is a section: write [{section}] and its keys below"));
                continue;
            };
            for (name, item) in keys(table) {
                let origin = at(span_of(name, item));
                let key = format!("{section}.{}", name.get());
                // [[section.key]] tables are a list of tables.
                let tables = item.as_array_of_tables().map(|tables| tables.clone().into_array().into());
                match (find(&key), item.as_value().or(tables.as_ref())) {
                    (Some(setting), Some(value)) => self.set(setting, setting.kind.read(value), origin),
                    (Some(setting), None) => {
                        let message = format!("a table is not {}", setting.kind.expected());
                        self.problem(origin, key, message);
                    }
                    (None, _) => {
                        let message = unknown_key(&key);
                        self.problem(origin, key, message);
                    }
                }
            }
        }
    }

    fn add_env(&mut self, name: &str, text: &str) {
        // Names without "__" are not settings. Kubernetes sets PAGETIDE_PORT for a service named "pagetide".
        let Some((section, key)) = name.strip_prefix(ENV_PREFIX).and_then(|rest| rest.split_once("__")) else {
            return;
        };
        let key = format!("{}.{}", section.to_lowercase(), key.to_lowercase());
        let origin = Origin::Env(name.to_owned());
        match find(&key) {
            Some(setting) => self.set(setting, setting.kind.parse(text), origin),
            None => {
                let message = match nearest(&key) {
                    Some(setting) => format!("unknown setting; did you mean {}?", setting.env()),
                    None => "unknown setting".into(),
                };
                self.problem(origin, "", message);
            }
        }
    }

    fn add_flags(&mut self, flags: &[(String, String, String)]) {
        let mut lists: Vec<(&str, Value)> = Vec::new();
        for (flag, key, text) in flags {
            let origin = Origin::Flag(flag.clone());
            let Some(setting) = find(key) else {
                self.problem(origin, "", unknown_key(key));
                continue;
            };
            let value = match setting.kind.parse(text) {
                // A repeated flag appends to its list.
                Ok(value @ (Value::List(_) | Value::Keys(_))) => {
                    let before = lists.iter().position(|(known, _)| known == key).map(|place| lists.remove(place));
                    let all = before.map_or(value.clone(), |(_, before)| before.and(value));
                    lists.push((key, all.clone()));
                    Ok(all)
                }
                value => value,
            };
            self.set(setting, value, origin);
        }
    }

    /// Checks conditions between settings. A condition is skipped if one of its settings is already reported.
    fn check_relations(&mut self) {
        let Config { server, scheduler, swap, .. } = &self.resolved.config;
        let origin = |key| self.resolved.origin(key);
        let mut broken: Vec<(&[&str], String)> = Vec::new();
        if let Some(tokens) = scheduler.max_num_batched_tokens
            && tokens < scheduler.max_num_seqs
        {
            let keys = &["scheduler.max_num_batched_tokens", "scheduler.max_num_seqs"];
            let message = format!(
                "{tokens} is less than scheduler.max_num_seqs = {} ({}): each running sequence needs one token per step",
                scheduler.max_num_seqs,
                origin(keys[1])
            );
            broken.push((keys, message));
        }
        if scheduler.preemption_mode == PreemptionMode::Swap && swap.space_gib == Some(0.0) {
            let keys = &["scheduler.preemption_mode", "swap.space_gib"];
            broken.push((keys, format!("'swap' needs swap space, but swap.space_gib = 0 ({})", origin(keys[1]))));
        }
        if let SwapConfig { space_gib: Some(space_gib), max_space_gib: Some(most), .. } = swap
            && space_gib > most
        {
            let keys = &["swap.space_gib", "swap.max_space_gib"];
            broken.push((keys, format!("{space_gib} is more than swap.max_space_gib = {most} ({})", origin(keys[1]))));
        }
        let device = &self.resolved.config.device;
        if device.fp8_activations && device.batch_invariant {
            let keys = &["device.fp8_activations", "device.batch_invariant"];
            let why = format!(
                "is true, and device.batch_invariant too ({}): results of FP8 products depend on the rows of the step",
                origin(keys[1])
            );
            broken.push((keys, why));
        }
        let model = &self.resolved.config.model;
        if model.quantization != Quantization::None && model.load_format != LoadFormat::Auto {
            let keys = &["model.quantization", "model.load_format"];
            let message = format!(
                "'{}' needs a checkpoint's weights, but model.load_format = {} ({})",
                model.quantization,
                model.load_format,
                origin(keys[1])
            );
            broken.push((keys, message));
        }
        let limits = &self.resolved.config.limits;
        if limits.max_parsing_bytes != 0 && limits.max_parsing_bytes < server.max_body_bytes {
            let keys = &["limits.max_parsing_bytes", "server.max_body_bytes"];
            let (most, largest) = (limits.max_parsing_bytes, server.max_body_bytes);
            let why = format!(
                "{most} is less than server.max_body_bytes = {largest} ({}): a body of that size would never be accepted",
                origin(keys[1])
            );
            broken.push((keys, why));
        }
        let is_clients = |own: &str| !own.is_empty() && server.api_keys.iter().any(|key| key.key == own);
        if is_clients(&server.admin_key) {
            let keys = &["server.admin_key", "server.api_keys"];
            broken.push((keys, "is also in server.api_keys: clients could change settings".into()));
        }
        if is_clients(&server.metrics_key) {
            let keys = &["server.metrics_key", "server.api_keys"];
            broken.push((keys, "is also in server.api_keys: clients could see the requests of others".into()));
        }
        if !server.metrics_key.is_empty() && server.metrics_key == server.admin_key {
            let keys = &["server.metrics_key", "server.admin_key"];
            broken.push((keys, "equals server.admin_key: the reader of metrics could change settings".into()));
        }
        if let Some(wrong) = server.cors_allowed_origins.iter().find(|origin| !is_origin(origin)) {
            let why = format!(
                "'{wrong}' is not an origin: write https://HOST, https://HOST:PORT, localhost for pages of the client's own machine, \
                 or * for any"
            );
            broken.push((&["server.cors_allowed_origins"], why));
        }
        if server.api_keys.iter().any(|key| key.key.is_empty()) {
            broken.push((&["server.api_keys"], "a key must not be empty".into()));
        }
        let keys = &server.api_keys;
        if let Some(place) = (1..keys.len()).find(|place| keys[..*place].iter().any(|key| key.key == keys[*place].key))
        {
            // It would be unclear whose name and limits apply.
            let why = format!("entry {} repeats the key of an earlier entry: keys must be unique", place + 1);
            broken.push((&["server.api_keys"], why));
        }
        for (keys, one, other) in [
            (&["server.tls_cert", "server.tls_key"], &server.tls_cert, &server.tls_key),
            (&["server.tls_key", "server.tls_cert"], &server.tls_key, &server.tls_cert),
        ] {
            if !one.is_empty() && other.is_empty() {
                broken.push((keys, format!("TLS also needs {}", keys[1])));
            }
        }
        if !server.unix_socket.is_empty() && !server.tls_cert.is_empty() {
            let message = "a Unix socket has no TLS; leave server.tls_cert and server.tls_key out";
            broken.push((&["server.unix_socket", "server.tls_cert"], message.into()));
        }
        let wrong: Vec<String> = self.problems.iter().map(|problem| problem.key.clone()).collect();
        for (keys, message) in broken {
            if !keys.iter().any(|key| wrong.iter().any(|wrong| wrong == key)) {
                self.problem(self.resolved.origin(keys[0]).clone(), keys[0], message);
            }
        }
    }
}

/// The keys of a table with their items; [`TableLike::iter`] gives no spans.
fn keys(table: &dyn TableLike) -> impl Iterator<Item = (&Key, &Item)> {
    table.iter().filter_map(|(name, _)| table.get_key_value(name))
}

fn unknown_section(name: &str) -> String {
    // Perhaps a key outside of its section.
    if let Some(setting) = SETTINGS.iter().find(|setting| setting.name() == name) {
        return format!("unknown section; did you mean '{}'?", setting.key);
    }
    let names = SECTIONS.iter().map(|(name, _)| *name);
    match closest(name, names.clone()) {
        Some(section) => format!("unknown section; did you mean [{section}]?"),
        None => format!("unknown section; the sections are {}", names.collect::<Vec<_>>().join(", ")),
    }
}

/// The error message for an unknown key.
pub fn unknown_key(key: &str) -> String {
    match nearest(key) {
        Some(setting) => format!("unknown key; did you mean '{}'?", setting.key),
        None => "unknown key; 'pagetide config show' lists all keys".into(),
    }
}

/// The setting that was probably meant.
fn nearest(key: &str) -> Option<&'static Setting> {
    let name = key.rsplit('.').next().unwrap_or(key);
    // A right name in a wrong section, or without one, is likelier than a misspelling.
    SETTINGS
        .iter()
        .find(|setting| setting.name() == name)
        .or_else(|| find(closest(key, SETTINGS.iter().map(|setting| setting.key))?))
}

fn closest<'a>(word: &str, among: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let scored = among.map(|candidate| (strsim::normalized_damerau_levenshtein(word, candidate), candidate));
    let (score, candidate) = scored.max_by(|a, b| a.0.total_cmp(&b.0))?;
    (score >= 0.6).then_some(candidate)
}

/// Whether `text` is `*`, or a scheme, a host and an optional port as browsers write them.
fn is_origin(text: &str) -> bool {
    let rest = text.split_once("://").filter(|(scheme, _)| !scheme.is_empty()).map(|(_, rest)| rest);
    let is_host = |host: &str| !host.is_empty() && !host.contains(['/', '?', '#', '@', '*', ' ']);
    text == "*" || text == LOCALHOST || (rest.is_some_and(is_host) && text == text.to_lowercase())
}
