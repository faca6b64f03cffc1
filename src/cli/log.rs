//! Logs go to standard error, so that standard output stays free for results.

use crate::config::{LogConfig, LogFormat};
use crate::error::StartError;
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::reload::Handle;

/// Changes `log.level` of a log that has been started.
pub struct LogLevel(Box<SetLevel>);

type SetLevel = dyn Fn(&str) -> Result<(), String> + Send + Sync;

impl LogLevel {
    pub fn set(&self, level: &str) {
        if let Err(error) = (self.0)(level) {
            tracing::warn!("log.level stays as it was: {error}");
        }
    }
}

/// Starts logging as configured.
pub fn init(config: &LogConfig) -> Result<LogLevel, StartError> {
    let filter = filter(&config.level)
        .map_err(|error| StartError::new(format!("log.level: '{}' is not a log filter: {error}", config.level)))?;
    // What cannot be written is not complained of in the same place: that would end the program, for want of a log.
    let logs =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).log_internal_errors(false);
    let started = match config.format {
        LogFormat::Human => {
            let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            let logs = logs.with_ansi(colours).with_target(false).with_filter_reloading();
            let level = level_of(logs.reload_handle());
            logs.try_init().map(|()| level)
        }
        LogFormat::Json => {
            let logs = logs.json().flatten_event(true).with_filter_reloading();
            let level = level_of(logs.reload_handle());
            logs.try_init().map(|()| level)
        }
    };
    started.map_err(|error| StartError::new(format!("cannot start logging: {error}")))
}

fn filter(level: &str) -> Result<EnvFilter, ParseError> {
    // actix-web logs its workers' starts, hyper each connection, hf-hub each token file: noise at "info".
    let quiet = ["actix_server=warn", "actix_http=warn", "hyper=warn", "reqwest=warn", "hf_hub=warn"];
    EnvFilter::builder().parse(format!("{},{level}", quiet.join(",")))
}

fn level_of<S: 'static>(handle: Handle<EnvFilter, S>) -> LogLevel {
    LogLevel(Box::new(move |level| {
        let filter = filter(level).map_err(|error| error.to_string())?;
        handle.reload(filter).map_err(|error| error.to_string())
    }))
}
