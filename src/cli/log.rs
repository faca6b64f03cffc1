//! Logs go to standard error, so that standard output stays free for results.

use crate::config::{LogConfig, LogFormat};
use crate::error::StartError;
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// Starts logging as configured.
pub fn init(config: &LogConfig) -> Result<(), StartError> {
    // actix-web logs its workers' starts, hyper each connection, hf-hub each token file: noise at "info".
    let quiet = ["actix_server=warn", "actix_http=warn", "hyper=warn", "reqwest=warn", "hf_hub=warn"];
    let directives = format!("{},{}", quiet.join(","), config.level);
    let filter = EnvFilter::builder()
        .parse(directives)
        .map_err(|error| StartError::new(format!("log.level: '{}' is not a log filter: {error}", config.level)))?;
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match config.format {
        LogFormat::Human => {
            let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            logs.with_ansi(colours).with_target(false).try_init()
        }
        LogFormat::Json => logs.json().flatten_event(true).try_init(),
    };
    started.map_err(|error| StartError::new(format!("cannot start logging: {error}")))
}
