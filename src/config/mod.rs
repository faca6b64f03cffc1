//! The configuration: what the program uses, every value resolved and in range.
//!
//! A [`Config`] is made by laying flags over environment variables over a file over the defaults
//! ([`layers`]); the one table of settings ([`settings`]) says what each key is. [`Option`] stands for "auto": resolved by whoever
//! knows the model or the device, through the methods here.

mod choices;
pub mod keys;
pub mod layers;
pub mod live;
pub mod settings;
pub mod value;

pub use choices::{
    AdmissionPolicy, CacheIsolation, DeviceKind, DtypeChoice, Eviction, Isa, LoadFormat, LogFormat, OnFailure, Overlap,
    PreemptionMode, ReasoningParser, SchedulingPolicy, ToolCallParser,
};
pub use keys::ApiKeyConfig;

#[derive(Clone, Debug, PartialEq, Default)]
pub struct Config {
    pub server: ServerConfig,
    pub limits: LimitsConfig,
    pub model: ModelConfig,
    pub device: DeviceConfig,
    pub cache: CacheConfig,
    pub swap: SwapConfig,
    pub scheduler: SchedulerConfig,
    pub intake: IntakeConfig,
    pub log: LogConfig,
    pub metrics: MetricsConfig,
    pub tracing: TracingConfig,
    pub console: ConsoleConfig,
    pub recorder: RecorderConfig,
}

/// What one of several API keys may take of what all share, where the configuration does not say: the rest is there for the
/// others, however greedy one is.
const SHARE_OF_SEVERAL: f64 = 0.75;

impl Config {
    /// Connections at once of each API key that says nothing else. 0: any number.
    pub fn key_max_connections(&self) -> u64 {
        let most = self.limits.max_connections as f64;
        self.limits.key_max_connections.unwrap_or(match self.server.api_keys.len() {
            0 | 1 => 0,
            _ => (SHARE_OF_SEVERAL * most).ceil() as u64,
        })
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct ServerConfig {
    pub host: String,
    /// 0 lets the system choose a free port.
    pub port: u16,
    /// `None`: the model's own name.
    pub served_model_name: Option<String>,
    /// Empty: no key is asked for.
    pub api_keys: Vec<ApiKeyConfig>,
    /// Of `/admin/config`. Empty: it is closed.
    pub admin_key: String,
    /// Of `/metrics` and the console's events, beside `admin_key`. Empty: of `admin_key` alone, where clients have keys.
    pub metrics_key: String,
    /// Origins whose pages may ask, `*` for any; empty: none may.
    pub cors_allowed_origins: Vec<String>,
    pub cors_allow_credentials: bool,
    pub cache_isolation: CacheIsolation,
    /// Usage has `kv` where a request does not say.
    pub include_kv_usage: bool,
    /// Streams say when they pause, where a request does not say.
    pub pause_comments: bool,
    /// Requests held at once, queued and running; one more gets a 429.
    pub max_requests: usize,
    /// `None`: see [`ServerConfig::max_requests_of_key`].
    pub max_share_per_key: Option<f64>,
    pub retry_after_s: u64,
    /// How long `/ready` says no before requests are refused.
    pub drain_delay_s: u64,
    pub drain_timeout_s: u64,
    pub max_body_bytes: usize,
    /// 0: none; so for the other time-outs.
    pub header_timeout_s: u64,
    pub body_timeout_s: u64,
    pub request_timeout_s: u64,
    pub write_timeout_s: u64,
    /// 0: any.
    pub max_unread_mib: usize,
    /// 0: any.
    pub max_answer_logprobs: usize,
    pub keep_alive_s: u64,
    /// Empty: plain HTTP.
    pub tls_cert: String,
    pub tls_key: String,
    /// Empty: `/metrics` and `/admin` are served beside everything else.
    pub admin_listen: String,
    pub trust_request_chat_template: bool,
    /// The admin may let a step fail.
    pub debug_endpoints: bool,
    /// 0: see [`ServerConfig::num_workers`].
    pub workers: usize,
}

/// How much is taken in. 0 is any number.
#[derive(Clone, Debug, PartialEq)]
pub struct LimitsConfig {
    pub max_connections: usize,
    /// Of all requests together.
    pub requests_per_minute: u64,
    pub tokens_per_minute: u64,
    /// Of each API key that says nothing else.
    pub key_requests_per_minute: u64,
    pub key_tokens_per_minute: u64,
    pub key_max_requests: u64,
    /// `None`: see [`Config::key_max_connections`].
    pub key_max_connections: Option<u64>,
    pub max_body_values: usize,
    pub max_parsing_bytes: usize,
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self {
            max_connections: 0,
            requests_per_minute: 0,
            tokens_per_minute: 0,
            key_requests_per_minute: 0,
            key_tokens_per_minute: 0,
            key_max_requests: 0,
            key_max_connections: None,
            // A value takes up to a kilobyte until its request has been made.
            max_body_values: 100_000,
            max_parsing_bytes: 64 << 20,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// A directory, a name of the Hugging Face hub, or [`DEMO_MODEL`].
    pub path: String,
    /// Of a hub model. `None`: its main branch.
    pub revision: Option<String>,
    pub dtype: DtypeChoice,
    /// `None`: the model's own.
    pub max_model_len: Option<u32>,
    pub load_format: LoadFormat,
    pub tool_call_parser: ToolCallParser,
    pub reasoning_parser: ReasoningParser,
}

/// The value of `model.path` that stands for the model inside the program.
pub const DEMO_MODEL: &str = "demo";

#[derive(Clone, Debug, PartialEq)]
pub struct DeviceConfig {
    pub kind: DeviceKind,
    /// Threads of the CPU backend; 0: one for each core.
    pub threads: usize,
    pub isa: Isa,
    /// `None`: see [`DeviceConfig::memory_fraction`].
    pub memory_utilization: Option<f64>,
    /// Folders searched for CUDA's libraries before all others.
    pub cuda_library_path: Vec<String>,
    /// `None`: `pagetide/kernels` in the user's cache folder.
    pub kernel_cache: Option<String>,
    pub cuda_graphs: bool,
    /// Results on a GPU do not depend on what else is in a step.
    pub batch_invariant: bool,
    pub on_failure: OnFailure,
    /// 0: none.
    pub step_timeout_s: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct CacheConfig {
    /// Tokens in a KV block, 1 to 256.
    pub block_size: u32,
    /// `None`: as many as `device.memory_utilization` allows.
    pub num_device_blocks: Option<u32>,
    pub enable_prefix_caching: bool,
    pub eviction: Eviction,
    /// Fraction of the device blocks that requests of one API key may hold.
    pub max_share_per_key: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct SwapConfig {
    /// 0: no swap tier.
    pub space_gib: f64,
    /// What `space_gib` may become while the server runs. `None`: see [`SwapConfig::max_space_bytes`].
    pub max_space_gib: Option<f64>,
    /// Fraction of the device blocks.
    pub high_watermark: f64,
    pub max_tail_blocks: usize,
    /// Fraction of the swap pool that requests of one API key may hold.
    pub max_share_per_key: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerConfig {
    pub max_num_seqs: u32,
    /// `None`: see [`SchedulerConfig::batched_tokens`].
    pub max_num_batched_tokens: Option<u32>,
    /// 0: none.
    pub inter_token_target_ms: u64,
    pub preemption_mode: PreemptionMode,
    pub admission: AdmissionPolicy,
    pub policy: SchedulingPolicy,
    /// Fraction of the device blocks kept free when a request is admitted.
    pub watermark: f64,
    /// Fraction of the device blocks that requests which are not preemptible may hold.
    pub non_preemptible_share: f64,
    /// Several API keys that wait take turns.
    pub key_turns: bool,
    pub overlap: Overlap,
}

#[derive(Clone, Debug, PartialEq)]
pub struct IntakeConfig {
    pub tokenizer_threads: usize,
    pub job_timeout_s: u64,
    pub max_prompt_bytes: Option<usize>,
    /// Of compiling a client's grammar.
    pub grammar_cpu_s: f64,
    pub grammar_memory_mib: usize,
    /// Of its outputs' masks. `None`: by the vocabulary.
    pub grammar_work_per_token: Option<u32>,
}

impl IntakeConfig {
    /// Bytes of a prompt's text at most, for a model of so many tokens.
    pub fn max_prompt_bytes(&self, max_model_len: usize) -> usize {
        self.max_prompt_bytes.unwrap_or((16 * max_model_len).max(256 << 10))
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct LogConfig {
    /// A level, or filters by module as in `info,pagetide=debug`.
    pub level: String,
    pub format: LogFormat,
    /// 0: none is called slow.
    pub slow_request_s: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct MetricsConfig {
    pub enabled: bool,
    /// Under vLLM's names too.
    pub vllm_names: bool,
}

/// Traces to a collector that speaks OTLP.
#[derive(Clone, Debug, PartialEq)]
pub struct TracingConfig {
    /// Base URL. Empty: nothing is traced.
    pub otlp_endpoint: String,
    /// Of requests that come without a trace of their own.
    pub sample_ratio: f64,
    pub service_name: String,
}

/// The page at `/`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConsoleConfig {
    pub enabled: bool,
    /// Snapshots of the engine a second, while somebody watches.
    pub max_rate_hz: f64,
    /// Who may watch at once.
    pub max_watchers: usize,
}

#[derive(Clone, Debug, PartialEq)]
pub struct RecorderConfig {
    /// 0: nothing is recorded.
    pub minutes: u64,
    pub max_mib: usize,
    /// Where recordings are written.
    pub dir: String,
    /// They hold the tokens of prompts and outputs.
    pub tokens: bool,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".into(),
            port: 8000,
            served_model_name: None,
            api_keys: Vec::new(),
            admin_key: String::new(),
            metrics_key: String::new(),
            cors_allowed_origins: Vec::new(),
            cors_allow_credentials: false,
            cache_isolation: CacheIsolation::PerKey,
            include_kv_usage: false,
            pause_comments: false,
            max_requests: 1024,
            max_share_per_key: None,
            retry_after_s: 1,
            drain_delay_s: 0,
            drain_timeout_s: 30,
            // Some two million tokens of text, or one million token ids.
            max_body_bytes: 8 << 20,
            header_timeout_s: 10,
            body_timeout_s: 60,
            request_timeout_s: 0,
            write_timeout_s: 60,
            max_unread_mib: 64,
            max_answer_logprobs: 400_000,
            // Longer than a load balancer's usual minute, so that it is not us who closes one just as a request comes.
            keep_alive_s: 75,
            tls_cert: String::new(),
            tls_key: String::new(),
            admin_listen: String::new(),
            trust_request_chat_template: false,
            debug_endpoints: false,
            workers: 0,
        }
    }
}

impl ServerConfig {
    /// Of `max_requests`, how many the requests of one API key may take.
    pub fn max_requests_of_key(&self) -> usize {
        let share = self.max_share_per_key.unwrap_or(if self.api_keys.len() > 1 { SHARE_OF_SEVERAL } else { 1.0 });
        ((share * self.max_requests as f64) as usize).clamp(1, self.max_requests)
    }

    /// Threads that parse and write HTTP. A few are plenty: the work is in the engine.
    pub fn num_workers(&self) -> usize {
        if self.workers > 0 { self.workers } else { num_cores().min(4) }
    }
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            path: DEMO_MODEL.into(),
            revision: None,
            dtype: DtypeChoice::Auto,
            max_model_len: None,
            load_format: LoadFormat::Auto,
            tool_call_parser: ToolCallParser::Auto,
            reasoning_parser: ReasoningParser::Auto,
        }
    }
}

impl Default for DeviceConfig {
    fn default() -> Self {
        Self {
            kind: DeviceKind::Auto,
            threads: 0,
            isa: Isa::Auto,
            memory_utilization: None,
            cuda_library_path: Vec::new(),
            kernel_cache: None,
            cuda_graphs: true,
            batch_invariant: false,
            on_failure: OnFailure::Restart,
            step_timeout_s: 300,
        }
    }
}

impl DeviceConfig {
    pub fn num_threads(&self) -> usize {
        if self.threads > 0 { self.threads } else { num_cores() }
    }

    /// Fraction of the device's memory for weights and KV blocks. On the CPU other programs want memory too.
    pub fn memory_fraction(&self, on_cuda: bool) -> f64 {
        self.memory_utilization.unwrap_or(if on_cuda { 0.9 } else { 0.5 })
    }
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            block_size: 16,
            num_device_blocks: None,
            enable_prefix_caching: true,
            eviction: Eviction::Adaptive,
            max_share_per_key: 1.0,
        }
    }
}

impl Default for SwapConfig {
    fn default() -> Self {
        Self { space_gib: 1.0, max_space_gib: None, high_watermark: 0.8, max_tail_blocks: 4, max_share_per_key: 1.0 }
    }
}

impl SwapConfig {
    pub fn space_bytes(&self) -> usize {
        gib(self.space_gib)
    }

    /// What the swap pool may become while the server runs. Where that is not said, it is `unless_given` bytes, or what
    /// it is at the start.
    pub fn max_space_bytes(&self, unless_given: usize) -> usize {
        self.max_space_gib.map_or(unless_given.max(self.space_bytes()), gib)
    }
}

/// In bytes.
fn gib(gib: f64) -> usize {
    (gib * (1u64 << 30) as f64) as usize
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            max_num_seqs: 256,
            max_num_batched_tokens: None,
            inter_token_target_ms: 100,
            preemption_mode: PreemptionMode::Auto,
            admission: AdmissionPolicy::Expected,
            policy: SchedulingPolicy::Fcfs,
            watermark: 0.01,
            non_preemptible_share: 0.25,
            key_turns: true,
            overlap: Overlap::Auto,
        }
    }
}

impl SchedulerConfig {
    /// Tokens in one step at most. Never below `max_num_seqs`: each running sequence needs one.
    pub fn batched_tokens(&self, on_cuda: bool) -> u32 {
        self.max_num_batched_tokens.unwrap_or_else(|| self.max_num_seqs.max(if on_cuda { 2048 } else { 512 }))
    }

    /// Of `num_device_blocks`: how many requests that are not preemptible may hold together.
    pub fn non_preemptible_blocks(&self, num_device_blocks: usize) -> usize {
        (self.non_preemptible_share * num_device_blocks as f64) as usize
    }

    /// Seconds that a step should take while somebody waits for a next token.
    pub fn inter_token_target(&self) -> Option<f64> {
        (self.inter_token_target_ms > 0).then(|| self.inter_token_target_ms as f64 / 1e3)
    }

    /// Whether steps are planned ahead. The CPU backend has nothing to gain: it plans and computes on the same cores.
    pub fn overlaps(&self, on_cuda: bool) -> bool {
        match self.overlap {
            Overlap::Auto => on_cuda,
            Overlap::On => true,
            Overlap::Off => false,
        }
    }
}

impl Default for IntakeConfig {
    fn default() -> Self {
        Self {
            tokenizer_threads: 2,
            job_timeout_s: 10,
            max_prompt_bytes: None,
            grammar_cpu_s: 2.0,
            grammar_memory_mib: 64,
            grammar_work_per_token: None,
        }
    }
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { level: "info".into(), format: LogFormat::Human, slow_request_s: 0.0 }
    }
}

impl Default for TracingConfig {
    fn default() -> Self {
        Self { otlp_endpoint: String::new(), sample_ratio: 1.0, service_name: "pagetide".into() }
    }
}

impl Default for RecorderConfig {
    fn default() -> Self {
        Self { minutes: 5, max_mib: 128, dir: ".".into(), tokens: false }
    }
}

impl Default for MetricsConfig {
    fn default() -> Self {
        Self { enabled: true, vllm_names: false }
    }
}

impl Default for ConsoleConfig {
    fn default() -> Self {
        Self { enabled: true, max_rate_hz: 10.0, max_watchers: 8 }
    }
}

/// Cores this process may run on.
pub fn num_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests;
