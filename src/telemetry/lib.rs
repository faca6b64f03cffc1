//! Reports on single requests: log lines, slow requests, and traces for a collector.

pub mod report;
pub mod timeline;
pub mod trace;
