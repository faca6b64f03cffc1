//! `/admin/config`: clients with the admin key read and change settings while the server runs.

use crate::auth::Keys;
use crate::error::HttpError;
use actix_web::dev::Payload;
use actix_web::{FromRequest, HttpRequest};
use pagetide_actors::live_settings::LiveSettings;
use pagetide_actors::recordings::WrittenRecording;
use pagetide_api::openapi::answers::Status;
use pagetide_api::openapi::{Operation, Tag};
use pagetide_base::error::ApiError;
use pagetide_config::layers::unknown_key;
use pagetide_config::live::{LIVE, needs_restart};
use pagetide_config::settings::{SETTINGS, Setting, find};
use pagetide_config::value::SettingKind;
use pagetide_engine::block_pool::PoolStats;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::future::{Ready, ready};
use utoipa::ToSchema;

/// The client has the admin key. Handlers ask for this value, so that no spelling of a path leads around the check.
pub struct Admin;

impl FromRequest for Admin {
    type Error = HttpError;
    type Future = Ready<Result<Self, HttpError>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let keys: &Keys = request.app_data().expect("every app is made with keys");
        ready(keys.get().operators.check_admin(request.headers()).map(|()| Self).map_err(HttpError::from))
    }
}

/// The settings, and the swap pool.
#[derive(Serialize, ToSchema)]
pub struct AdminConfig {
    /// Settings that may be changed here, by their keys.
    live: BTreeMap<&'static str, LiveSetting>,
    /// The others.
    restart: BTreeMap<&'static str, FixedSetting>,
    swap_pool: SwapPoolState,
}

#[derive(Serialize, ToSchema)]
struct LiveSetting {
    /// As it is now; "(secret)" stands for a secret.
    value: Value,
    /// Where it came from: a line of a file, a variable, a flag, this path, or nowhere.
    origin: String,
    /// What it may be.
    values: String,
    /// Of a number; else empty.
    unit: &'static str,
}

#[derive(Serialize, ToSchema)]
struct FixedSetting {
    /// As it is.
    value: Value,
    /// Where it came from.
    origin: String,
    /// Why it changes with a restart only.
    reason: &'static str,
}

/// In blocks.
#[derive(Serialize, ToSchema)]
struct SwapPoolState {
    /// Its size: used, cached and free together, less those that drain.
    blocks: usize,
    /// Held for a sequence.
    used: usize,
    /// Held by no request, and still found.
    cached: usize,
    free: usize,
    /// Used ones beyond its size: they leave it when they are given back.
    draining: usize,
}

impl From<PoolStats> for SwapPoolState {
    fn from(stats: PoolStats) -> Self {
        let PoolStats { used, cached, free, draining, .. } = stats;
        Self { blocks: used + cached + free - draining, used, cached, free, draining }
    }
}

/// What a change has changed.
#[derive(Serialize, ToSchema)]
pub struct AdminConfigChanged {
    /// Settings that have another value than before.
    changed: BTreeMap<&'static str, ChangedSetting>,
    swap_pool: SwapPoolState,
}

#[derive(Serialize, ToSchema)]
struct ChangedSetting {
    from: Value,
    to: Value,
}

pub fn describe_config() -> Operation {
    Operation::new(Tag::Server, "config", "The settings as they are now, and which may change")
        .fails(&[403])
        .answers::<AdminConfig>("The settings.")
}

pub fn describe_change() -> Operation {
    Operation::new(Tag::Server, "change_config", "Change settings while the server runs")
        .about(
            "All of them or none: where one may not change or has a wrong value, nothing changes, and param names it. \
             Changes last until the next restart or SIGHUP.",
        )
        .body("AdminConfigRequest")
        .described_fields(live_fields())
        .fails(&[403])
        .answers::<AdminConfigChanged>("They have changed, for every step and request from now on.")
}

/// A recording of the engine's last minutes, in a file of the server's.
#[derive(Serialize, ToSchema)]
pub struct RecordingWritten {
    /// Its path, on the machine of the server.
    file: String,
    bytes: u64,
    /// From its beginning to its end.
    seconds: f64,
    /// Steps that were planned.
    steps: u64,
    /// Requests that arrived.
    requests: u64,
    /// Where it could not be made to the end: why.
    ends_early: Option<String>,
}

impl From<WrittenRecording> for RecordingWritten {
    fn from(written: WrittenRecording) -> Self {
        let WrittenRecording { file, bytes, seconds, steps, requests, ends_early } = written;
        Self { file: file.display().to_string(), bytes, seconds, steps, requests, ends_early }
    }
}

pub fn describe_recording() -> Operation {
    Operation::new(Tag::Server, "record", "Write the last minutes of scheduling to a file")
        .about(
            "The file is in recorder.dir, for 'pagetide replay'. The engine goes on meanwhile. No body is asked for.",
        )
        .fails(&[403, 409, 500])
        .answers::<RecordingWritten>("It is written.")
}

pub fn describe_failure() -> Operation {
    Operation::new(Tag::Server, "fail_step", "Let the next step fail")
        .about(
            "As if the device had failed: the requests of that step end with an error, the executor restarts, and \
             recordings, metrics and alerts say so. Served where server.debug_endpoints is true. No body is asked for.",
        )
        .fails(&[403])
        .answers::<Status>("The next step fails.")
}

pub async fn config(live_settings: &LiveSettings) -> Result<AdminConfig, ApiError> {
    let (now, swap_pool) = (live_settings.now().await, live_settings.swap_pool().await?.into());
    let (mut live, mut restart) = (BTreeMap::new(), BTreeMap::new());
    for setting in SETTINGS {
        let (value, origin) = (now.shown(setting).json(), now.origin(setting.key).to_string());
        match needs_restart(setting) {
            None => {
                let (values, unit) = (setting.kind.expected(), setting.unit);
                live.insert(setting.key, LiveSetting { value, origin, values, unit });
            }
            Some(reason) => {
                restart.insert(setting.key, FixedSetting { value, origin, reason });
            }
        }
    }
    Ok(AdminConfig { live, restart, swap_pool })
}

/// `body`: `{"section.key": value}`, values as in a configuration file.
pub async fn change(live_settings: &LiveSettings, body: &Value) -> Result<AdminConfigChanged, ApiError> {
    let Value::Object(fields) = body else {
        let message = "expected a JSON object of settings, {\"section.key\": value}";
        return Err(ApiError::bad_request(message));
    };
    let (mut changes, mut problems) = (Vec::new(), Vec::new());
    for (key, value) in fields {
        let read = |setting: &'static Setting| match value {
            Value::Null => Ok(None), // not given
            value => Ok(Some((setting, setting.kind.read_json(value)?))),
        };
        match find(key).ok_or_else(|| unknown_key(key)).and_then(read) {
            Ok(change) => changes.extend(change),
            Err(message) => problems.push((key.clone(), message)),
        }
    }
    if !problems.is_empty() {
        return Err(ApiError::invalid_settings(problems));
    }
    let (changes, swap_pool) = live_settings.change(changes).await?;
    let changed = changes.into_iter().map(|change| {
        let (from, to) = (change.from.json(), change.to.json());
        (change.setting, ChangedSetting { from, to })
    });
    Ok(AdminConfigChanged { changed: changed.collect(), swap_pool: swap_pool.into() })
}

/// The fields of a change, as JSON schemas.
fn live_fields() -> impl Iterator<Item = (String, Value)> {
    LIVE.iter().filter_map(|key| find(key)).map(|setting| {
        let mut schema = schema_of(&setting.kind);
        schema["description"] = match setting.unit {
            "" => setting.doc.into(),
            unit => format!("[{unit}] {}", setting.doc).into(),
        };
        (setting.key.into(), schema)
    })
}

fn schema_of(kind: &SettingKind) -> Value {
    let (schema, has_auto) = match *kind {
        SettingKind::Text { auto, .. } => (json!({"type": "string"}), auto),
        SettingKind::List { words: [], auto } => (json!({"type": "array", "items": {"type": "string"}}), auto),
        SettingKind::List { words, auto } => (json!({"type": "array", "items": {"enum": words}}), auto),
        SettingKind::Keys => (keys_schema(), false),
        SettingKind::Bool => (json!({"type": "boolean"}), false),
        SettingKind::Int { min, max, auto } => (json!({"type": "integer", "minimum": min, "maximum": max}), auto),
        SettingKind::Float { min, or_equal: true, max, auto } => {
            (json!({"type": "number", "minimum": min, "maximum": max}), auto)
        }
        SettingKind::Float { min, or_equal: false, max, auto } => {
            (json!({"type": "number", "exclusiveMinimum": min, "maximum": max}), auto)
        }
        SettingKind::Choice(words) => (json!({"type": "string", "enum": words}), false),
    };
    match has_auto {
        true => json!({"oneOf": [schema, {"type": "string", "enum": ["auto"]}, {"type": "null"}]}),
        false => schema,
    }
}

fn keys_schema() -> Value {
    let limit = json!({"type": "integer", "minimum": 0});
    let properties = json!({
        "key": {"type": "string"}, "name": {"type": "string"}, "requests_per_minute": limit,
        "tokens_per_minute": limit, "max_requests": limit,
    });
    let table = json!({
        "type": "object", "properties": properties, "required": ["key"], "additionalProperties": false,
    });
    json!({"type": "array", "items": {"anyOf": [{"type": "string"}, table]}})
}
