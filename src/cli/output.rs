//! What commands print. A standard output that is full or closed ends no program by a panic, as `println!` would.

use super::log;
use crate::error::StartError;
use std::io::{ErrorKind, Write};
use std::process::ExitCode;

/// Prints to standard output. A reader that has seen enough (`| head`) is no failure.
pub fn print(text: impl AsRef<[u8]>) -> Result<ExitCode, StartError> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_ref()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(StartError::new(format!("cannot write to standard output: {error}")))
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Prints lines that are not essential. A server also starts if standard output has no reader or its disk is full.
pub fn print_aside(mut text: String) {
    text.push('\n');
    let print = move || {
        if let Err(StartError(why)) = print(text) {
            tracing::warn!("{why}");
        }
    };
    if let Err(error) = std::thread::Builder::new().name("pagetide-print".into()).spawn(print) {
        tracing::warn!("standard output is not written, for there is no thread for it: {error}");
    }
}

/// Prints a line to standard error, where there is room for it: behind what has been logged.
pub fn complain(text: &str) {
    let line = format!("{text}\n").into_bytes();
    if let Err(line) = log::write_line(line) {
        // What cannot be said there cannot be said.
        let _ = std::io::stderr().write_all(&line);
    }
}
