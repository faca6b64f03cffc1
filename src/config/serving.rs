//! Settings of the server, its limits and the request intake.

use super::{
    ApiKeyConfig, CacheIsolation, Dialect, SHARE_OF_SEVERAL, SchemaObjects, Surface, ThinkingDefault, num_cores,
};

/// In `cors_allowed_origins`: pages of the client's own machine, at any port.
pub const LOCALHOST: &str = "localhost";

#[derive(Clone, Debug, PartialEq)]
pub struct ServerConfig {
    pub host: String,
    /// 0: the system chooses a free port.
    pub port: u16,
    /// Empty: listen at `host` and `port`.
    pub unix_socket: String,
    /// Empty, or `/llm`: a prefix that paths may have.
    pub root_path: String,
    /// Not empty. `None`: the name of the model.
    pub served_model_name: Option<Vec<String>>,
    /// Whether a request may name a model that is not served.
    pub accept_any_model: bool,
    /// The APIs that are served.
    pub surfaces: Vec<Surface>,
    /// Whose answers OpenAI's paths give.
    pub dialect: Dialect,
    /// Whether answers have `X-Request-Id`.
    pub request_id_headers: bool,
    /// Whether `/slots` tells of the sequences that run.
    pub slots: bool,
    /// Empty: slots are not kept.
    pub slot_folder: String,
    /// Words about the model, for clients to read.
    pub model_tags: Vec<String>,
    pub schema_objects: SchemaObjects,
    /// Every chunk of a stream has the usage so far.
    pub force_include_usage: bool,
    /// Default of a request's `return_tokens_as_token_ids`.
    pub return_tokens_as_token_ids: bool,
    /// Empty: no key is required.
    pub api_keys: Vec<ApiKeyConfig>,
    /// Key of `/admin`. Empty: `/admin` is closed.
    pub admin_key: String,
    /// Key of `/metrics` and the console's events; `admin_key` opens them too. If empty, only `admin_key` does when
    /// `api_keys` is set.
    pub metrics_key: String,
    /// Origins whose pages may call the server. `*` allows any, [`LOCALHOST`] those of the client's machine, an empty
    /// list none.
    pub cors_allowed_origins: Vec<String>,
    pub cors_allow_credentials: bool,
    pub cache_isolation: CacheIsolation,
    /// Default of a request's `include_kv_usage`.
    pub include_kv_usage: bool,
    /// Default of a request's `pause_comments`.
    pub pause_comments: bool,
    /// Default of a request's `verbose`.
    pub verbose: bool,
    /// Default of the template's `enable_thinking`.
    pub thinking: ThinkingDefault,
    /// Seed of requests that give none. `None`: each draws its own.
    pub default_seed: Option<u64>,
    /// Maximum number of requests, waiting and running. Further ones are refused with 429.
    pub max_requests: usize,
    /// `None`: see [`ServerConfig::max_requests_of_key`].
    pub max_share_per_key: Option<f64>,
    pub retry_after_s: u64,
    /// How long requests are still accepted while `/ready` already returns 503.
    pub drain_delay_s: u64,
    pub drain_timeout_s: u64,
    pub max_body_bytes: usize,
    /// 0: no limit, as in the other timeouts.
    pub header_timeout_s: u64,
    pub body_timeout_s: u64,
    pub request_timeout_s: u64,
    pub write_timeout_s: u64,
    /// 0: any.
    pub max_unread_mib: usize,
    /// Most likely tokens reported at most, of one position. 0: all of the vocabulary.
    pub max_logprobs: usize,
    /// 0: any.
    pub max_answer_logprobs: usize,
    pub max_sessions: usize,
    pub max_session_tokens: usize,
    pub session_timeout_s: u64,
    pub keep_alive_s: u64,
    /// Empty: plain HTTP.
    pub tls_cert: String,
    pub tls_key: String,
    /// Empty: `/metrics` and `/admin` are on the main port.
    pub admin_listen: String,
    pub trust_request_chat_template: bool,
    /// Serve `/admin/debug`, which can make a step fail.
    pub debug_endpoints: bool,
    /// 0: see [`ServerConfig::num_workers`].
    pub workers: usize,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".into(),
            port: 8000,
            unix_socket: String::new(),
            root_path: String::new(),
            served_model_name: None,
            accept_any_model: false,
            surfaces: Surface::ALL.to_vec(),
            dialect: Dialect::OpenAi,
            request_id_headers: true,
            slots: true,
            slot_folder: String::new(),
            model_tags: Vec::new(),
            schema_objects: SchemaObjects::Closed,
            force_include_usage: false,
            return_tokens_as_token_ids: false,
            api_keys: Vec::new(),
            admin_key: String::new(),
            metrics_key: String::new(),
            cors_allowed_origins: Vec::new(),
            cors_allow_credentials: false,
            cache_isolation: CacheIsolation::PerKey,
            include_kv_usage: false,
            pause_comments: false,
            verbose: false,
            thinking: ThinkingDefault::Auto,
            default_seed: None,
            max_requests: 1024,
            max_share_per_key: None,
            retry_after_s: 1,
            drain_delay_s: 0,
            drain_timeout_s: 30,
            // About two million tokens of text, or one million token ids.
            max_body_bytes: 8 << 20,
            header_timeout_s: 10,
            body_timeout_s: 60,
            request_timeout_s: 0,
            write_timeout_s: 60,
            max_unread_mib: 64,
            max_logprobs: 20,
            max_answer_logprobs: 400_000,
            max_sessions: 1000,
            max_session_tokens: 1 << 24,
            session_timeout_s: 3600,
            // Longer than a load balancer's usual minute, so that the server does not close a connection just as a
            // request arrives.
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
    /// Whether objects of a JSON schema are closed unless the schema opens them.
    pub fn closes_objects(&self) -> bool {
        self.schema_objects == SchemaObjects::Closed
    }

    /// The part of `max_requests` that requests of one API key may take.
    pub fn max_requests_of_key(&self) -> usize {
        let share = self.max_share_per_key.unwrap_or(if self.api_keys.len() > 1 { SHARE_OF_SEVERAL } else { 1.0 });
        ((share * self.max_requests as f64) as usize).clamp(1, self.max_requests)
    }

    /// Threads that parse and write HTTP. A few are enough, because the engine does the work.
    pub fn num_workers(&self) -> usize {
        if self.workers > 0 { self.workers } else { num_cores().min(4) }
    }
}

/// Limits on incoming load. 0: no limit.
#[derive(Clone, Debug, PartialEq)]
pub struct LimitsConfig {
    pub max_connections: usize,
    /// Of all clients together.
    pub requests_per_minute: u64,
    pub tokens_per_minute: u64,
    /// Of each API key that does not set its own.
    pub key_requests_per_minute: u64,
    pub key_tokens_per_minute: u64,
    pub key_max_requests: u64,
    /// `None`: see [`Config::key_max_connections`](crate::Config::key_max_connections).
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
            // A value takes up to a kilobyte until the request has been parsed.
            max_body_values: 100_000,
            max_parsing_bytes: 64 << 20,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct IntakeConfig {
    pub tokenizer_threads: usize,
    pub job_timeout_s: u64,
    pub max_prompt_bytes: Option<usize>,
    /// Limit of compiling a client's grammar.
    pub grammar_cpu_s: f64,
    pub grammar_memory_mib: usize,
    /// Limit of the work on token masks. `None`: by the size of the vocabulary.
    pub grammar_work_per_token: Option<u32>,
}

impl IntakeConfig {
    /// Maximum size of a prompt's text in bytes, for a model of this length.
    pub fn max_prompt_bytes(&self, max_model_len: usize) -> usize {
        self.max_prompt_bytes.unwrap_or((16 * max_model_len).max(256 << 10))
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

/// Files and batches of requests over HTTP.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchesConfig {
    /// Empty: there are no files and batches.
    pub folder: String,
    pub max_file_mib: u64,
    /// Of all files together.
    pub max_folder_gib: u64,
    /// Of each API key, as `max_batches`.
    pub max_files: usize,
    pub max_batches: usize,
    pub max_lines: u64,
    /// Requests of all batches at once.
    pub max_running: usize,
    pub priority: u32,
    pub keep_days: u64,
}

impl Default for BatchesConfig {
    fn default() -> Self {
        Self {
            folder: String::new(),
            max_file_mib: 200,
            max_folder_gib: 10,
            max_files: 1000,
            max_batches: 1000,
            max_lines: 50_000,
            max_running: 16,
            priority: 1000,
            keep_days: 30,
        }
    }
}
