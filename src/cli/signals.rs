//! SIGINT and SIGTERM.

use crate::error::StartError;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that ask the program to stop.
pub struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl StopSignals {
    /// From here on the signals no longer end the process by themselves.
    pub fn listen() -> Result<Self, StartError> {
        let listen =
            |kind| signal(kind).map_err(|error| StartError::new(format!("cannot listen for signals: {error}")));
        Ok(Self { interrupt: listen(SignalKind::interrupt())?, terminate: listen(SignalKind::terminate())? })
    }

    /// Waits for the next one; its number.
    pub async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.interrupt.recv() => SignalKind::interrupt().as_raw_value(),
            _ = self.terminate.recv() => SignalKind::terminate().as_raw_value(),
        }
    }
}
