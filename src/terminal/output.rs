//! Prints the output of commands. A full or closed standard output does not cause a panic, as `println!` would.

use super::log;
use pagetide_base::error::StartError;
use std::io::{ErrorKind, Write};
use std::process::ExitCode;

/// Prints to standard output. It is not an error if the reader stops reading (`| head`).
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
        tracing::warn!("cannot write to standard output, because no thread can be started: {error}");
    }
}

/// Prints a line to standard error after the log lines, if there is room.
pub fn complain(text: &str) {
    let line = format!("{text}\n").into_bytes();
    if let Err(line) = log::write_line(line) {
        // There is no other place to report an error.
        let _ = std::io::stderr().write_all(&line);
    }
}
