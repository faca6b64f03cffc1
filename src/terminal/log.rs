//! Logs go to standard error, so that standard output stays free for results. They go through a queue, so that no
//! thread is blocked when standard error accepts nothing.

mod lines;

use lines::{Lines, Patient};
use pagetide_base::error::StartError;
use pagetide_config::{LogConfig, LogFormat};
use std::backtrace::{Backtrace, BacktraceStatus};
use std::fs::File;
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::panic::PanicHookInfo;
use std::sync::OnceLock;
use std::time::Duration;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::reload::Handle;

/// Changes `log.level` after the log has been started.
pub struct LogLevel(Box<SetLevel>);

type SetLevel = dyn Fn(&str) -> Result<(), String> + Send + Sync;

impl LogLevel {
    pub fn set(&self, level: &str) {
        if let Err(error) = (self.0)(level) {
            tracing::warn!("log.level is unchanged: {error}");
        }
    }
}

/// The log lines of this program, once the log has been started.
static LINES: OnceLock<Lines> = OnceLock::new();
/// Time to write the remaining lines when the program ends.
const LAST_LINES: Duration = Duration::from_secs(1);

/// Writes a line unchanged after the earlier log lines. Returns the line if no log has been started.
pub fn write_line(line: Vec<u8>) -> Result<(), Vec<u8>> {
    let Some(lines) = LINES.get() else { return Err(line) };
    lines.push(line);
    Ok(())
}

/// Gives the last lines some time to be written. Call it before the program ends.
pub fn finish() {
    if let Some(lines) = LINES.get() {
        lines.flush(LAST_LINES);
    }
}

/// Starts the thread that writes.
fn start() -> Result<Lines, StartError> {
    let failed = |error: std::io::Error| StartError::new(format!("cannot start logging: {error}"));
    // Not the standard library's handle: other writers would wait for its lock.
    let stderr = File::from(std::io::stderr().as_fd().try_clone_to_owned().map_err(failed)?);
    let lines = LINES.get_or_init(Lines::default).clone();
    let writer = lines.clone();
    let write = move || writer.write_all_to(Patient(stderr));
    std::thread::Builder::new().name("pagetide-log".into()).spawn(write).map_err(failed)?;
    std::panic::set_hook(Box::new(log_panic));
    Ok(lines)
}

/// Logs a panic. The default handler would write to standard error and wait.
fn log_panic(panic: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("without a name");
    let place = panic.location().map(ToString::to_string).unwrap_or_default();
    let payload = panic.payload();
    let owned = payload.downcast_ref::<String>().map(String::as_str);
    let message = owned.or(payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
    let backtrace = Backtrace::capture();
    let backtrace = (backtrace.status() == BacktraceStatus::Captured).then(|| backtrace.to_string());
    tracing::error!(backtrace, "thread '{name}' panicked at {place}: {message}");
    if name == "main" {
        // Nothing else will call it.
        finish();
    }
}

/// Starts logging as configured.
pub fn init(config: &LogConfig) -> Result<LogLevel, StartError> {
    let filter = filter(&config.level)
        .map_err(|error| StartError::new(format!("log.level: '{}' is not a log filter: {error}", config.level)))?;
    // Errors of writing the log are ignored, because logging them could end the program.
    let lines = start()?;
    let logs =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(move || lines.clone()).log_internal_errors(false);
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
    // At "info", actix-web logs the start of its workers, hyper each connection, and hf-hub each token file.
    let quiet = ["actix_server=warn", "actix_http=warn", "hyper=warn", "reqwest=warn", "hf_hub=warn"];
    let directives = quiet.into_iter().map(str::to_owned).chain(level.split(',').map(by_crate));
    EnvFilter::builder().parse(directives.collect::<Vec<_>>().join(","))
}

/// The directive with the names of modules as events have them: `pagetide::actors` is the crate `pagetide_actors`.
fn by_crate(directive: &str) -> String {
    match directive.trim_start().strip_prefix("pagetide::") {
        // The lines of requests have a target of their own.
        Some(module) if !module.starts_with("access") => format!("pagetide_{module}"),
        _ => directive.to_owned(),
    }
}

fn level_of<S: 'static>(handle: Handle<EnvFilter, S>) -> LogLevel {
    LogLevel(Box::new(move |level| {
        let filter = filter(level).map_err(|error| error.to_string())?;
        handle.reload(filter).map_err(|error| error.to_string())
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_named_as_in_the_program() {
        assert_eq!(by_crate(" pagetide::actors::scheduler=debug"), "pagetide_actors::scheduler=debug");
        for unchanged in ["info", "pagetide=debug", "pagetide::access=warn", "pagetide_http=trace", "hyper=info"] {
            assert_eq!(by_crate(unchanged), unchanged);
        }
    }
}
