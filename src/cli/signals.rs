//! SIGINT and SIGTERM stop the program. SIGHUP makes it read its configuration again.

use pagetide_base::error::StartError;
use std::io::{IsTerminal, stderr};
use tokio::signal::unix::{Signal, SignalKind, signal};

fn listen(kind: SignalKind) -> Result<Signal, StartError> {
    signal(kind).map_err(|error| StartError::new(format!("cannot listen for signals: {error}")))
}

/// A file that reaches its size limit (`RLIMIT_FSIZE`, systemd's `LimitFSIZE`) is an error of the write, like a full
/// disk. Without this, the kernel's signal would end the process.
pub fn survive_file_size_limits() {
    // SAFETY: no handler is installed, so no code of this program runs in a signal's context. This is the first call of
    // the program, before there are other threads.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// The signals that ask the program to stop.
pub struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl StopSignals {
    /// From here on the signals do not end the process.
    pub fn listen() -> Result<Self, StartError> {
        Ok(Self { interrupt: listen(SignalKind::interrupt())?, terminate: listen(SignalKind::terminate())? })
    }

    /// Waits for the next signal and returns its number.
    pub async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.interrupt.recv() => SignalKind::interrupt().as_raw_value(),
            _ = self.terminate.recv() => SignalKind::terminate().as_raw_value(),
        }
    }
}

/// SIGHUP. It is also sent when the terminal of the program is closed.
pub struct HangUps {
    signal: Signal,
    had_terminal: bool,
}

/// The meaning of a SIGHUP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HangUp {
    ReadConfig,
    /// The terminal or the parent process is gone.
    TerminalGone,
}

impl HangUps {
    /// From here on the signal does not end the process. A signal that arrives is kept for [`HangUps::next`].
    pub fn listen() -> Result<Self, StartError> {
        Ok(Self { signal: listen(SignalKind::hangup())?, had_terminal: stderr().is_terminal() })
    }

    pub async fn next(&mut self) -> HangUp {
        self.signal.recv().await;
        // A closed terminal is no longer a terminal.
        match self.had_terminal && !stderr().is_terminal() {
            true => HangUp::TerminalGone,
            false => HangUp::ReadConfig,
        }
    }
}
