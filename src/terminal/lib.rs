//! What the commands share: settings as flags, logs, output, progress, the limit of open files.

pub mod log;
pub mod open_files;
pub mod options;
pub mod output;
pub mod progress;
