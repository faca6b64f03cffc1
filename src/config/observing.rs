//! Settings of logs, metrics, traces, the console and the flight recorder.

use super::LogFormat;

#[derive(Clone, Debug, PartialEq)]
pub struct LogConfig {
    /// A level, or filters by module such as `info,pagetide=debug`.
    pub level: String,
    pub format: LogFormat,
    /// 0: no request counts as slow.
    pub slow_request_s: f64,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { level: "info".into(), format: LogFormat::Human, slow_request_s: 0.0 }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct MetricsConfig {
    pub enabled: bool,
    /// Also export the metrics under vLLM's names.
    pub vllm_names: bool,
    /// The same for llama.cpp's.
    pub llama_cpp_names: bool,
}

impl Default for MetricsConfig {
    fn default() -> Self {
        Self { enabled: true, vllm_names: false, llama_cpp_names: false }
    }
}

/// Traces for a collector that speaks OTLP.
#[derive(Clone, Debug, PartialEq)]
pub struct TracingConfig {
    /// Base URL. Empty: no traces.
    pub otlp_endpoint: String,
    /// Fraction of traced requests, among those that do not already belong to a trace.
    pub sample_ratio: f64,
    pub service_name: String,
}

impl Default for TracingConfig {
    fn default() -> Self {
        Self { otlp_endpoint: String::new(), sample_ratio: 1.0, service_name: "pagetide".into() }
    }
}

/// The web page at `/`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConsoleConfig {
    pub enabled: bool,
    /// Maximum number of engine snapshots per second while anyone watches.
    pub max_rate_hz: f64,
    /// Maximum number of clients that watch at once.
    pub max_watchers: usize,
}

impl Default for ConsoleConfig {
    fn default() -> Self {
        Self { enabled: true, max_rate_hz: 10.0, max_watchers: 8 }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct RecorderConfig {
    /// 0: the recorder is disabled.
    pub minutes: u64,
    pub max_mib: usize,
    /// Directory for recordings.
    pub dir: String,
    /// Recordings contain the tokens of prompts and outputs.
    pub tokens: bool,
}

impl Default for RecorderConfig {
    fn default() -> Self {
        Self { minutes: 5, max_mib: 128, dir: ".".into(), tokens: false }
    }
}
