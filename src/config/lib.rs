//! The configuration of the program: every value resolved and in range.
//!
//! [`layers`] makes a [`Config`] from command-line flags, environment variables, a file and the defaults, in this order
//! of precedence. The table in [`settings`] describes each key. `None` in a field means "auto": methods of the sections
//! resolve it once the model or the device is known.

mod checks;
mod choices;
mod engine;
mod field;
pub mod keys;
pub mod layers;
pub mod live;
mod loading;
mod observing;
pub mod reference;
mod serving;
pub mod settings;
pub mod value;

pub use choices::{
    AdmissionPolicy, CacheDtype, CacheIsolation, CopyBatches, DeviceKind, Dialect, DtypeChoice, Eviction, IsaChoice,
    LoadFormat, LogFormat, OnFailure, Overlap, PreemptionMode, Quantization, ReasoningParser, SchedulingPolicy,
    SchemaObjects, Surface, ThinkingDefault, ToolCallParser,
};
pub use engine::{CacheConfig, DeviceConfig, ModelConfig, SchedulerSettings, SwapConfig};
pub use keys::ApiKeyConfig;
pub use observing::{ConsoleConfig, LogConfig, MetricsConfig, RecorderConfig, TracingConfig};
pub use pagetide_model::files::DEMO_MODEL;
pub use serving::{BatchesConfig, IntakeConfig, LOCALHOST, LimitsConfig, ServerConfig};

#[derive(Clone, Debug, PartialEq, Default)]
pub struct Config {
    pub server: ServerConfig,
    pub limits: LimitsConfig,
    pub model: ModelConfig,
    pub device: DeviceConfig,
    pub cache: CacheConfig,
    pub swap: SwapConfig,
    pub scheduler: SchedulerSettings,
    pub intake: IntakeConfig,
    pub batches: BatchesConfig,
    pub log: LogConfig,
    pub metrics: MetricsConfig,
    pub tracing: TracingConfig,
    pub console: ConsoleConfig,
    pub recorder: RecorderConfig,
}

impl Config {
    /// Open connections of each API key that does not set its own maximum; 0 means no limit.
    pub fn key_max_connections(&self) -> u64 {
        let most = self.limits.max_connections as f64;
        self.limits.key_max_connections.unwrap_or(match self.server.api_keys.len() {
            0 | 1 => 0,
            _ => (SHARE_OF_SEVERAL * most).ceil() as u64,
        })
    }
}

/// Default share that one of several API keys may take of a common resource. The rest is left for the others.
const SHARE_OF_SEVERAL: f64 = 0.75;

/// Cores this process may run on.
pub fn num_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests;
