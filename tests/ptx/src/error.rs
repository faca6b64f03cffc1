//! What is wrong with a module or a launch.

use std::fmt;

/// A module that cannot be read, or a launch that cannot be made. Errors of an executed kernel are
/// [`KernelFinding`](crate::findings::KernelFinding)s.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PtxError {
    /// The line of the PTX text, from 1; 0 if it is about no line.
    pub line: u32,
    pub message: String,
}

impl PtxError {
    pub fn at(line: u32, message: impl Into<String>) -> Self {
        Self { line, message: message.into() }
    }

    pub fn new(message: impl Into<String>) -> Self {
        Self::at(0, message)
    }
}

impl fmt::Display for PtxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line > 0 { write!(f, "PTX line {}: {}", self.line, self.message) } else { f.write_str(&self.message) }
    }
}

impl std::error::Error for PtxError {}

pub type PtxResult<T> = Result<T, PtxError>;
