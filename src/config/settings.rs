//! The one table of settings. Command-line flags, environment variables, configuration files, error messages,
//! `pagetide config`, `config/pagetide.toml` and `docs/configuration.md` all come from it.

use super::checks::{any_text, http_url, log_filter, not_empty, revision, root_path, socket_address};
use super::field::ConfigField;
use super::value::{
    LIST, SHARE, SHARE_OR_AUTO, SettingKind, Value, int, int_or_auto, number, number_or_auto, text, text_or_auto,
};
use super::{
    AdmissionPolicy, CacheDtype, CacheIsolation, Config, CopyBatches, DeviceKind, Dialect, DtypeChoice, Eviction,
    IsaChoice, LoadFormat, LogFormat, OnFailure, Overlap, PreemptionMode, Quantization, ReasoningParser,
    SchedulingPolicy, SchemaObjects, Surface, ThinkingDefault, ToolCallParser,
};

/// One row of the table: a key of the configuration.
pub struct Setting {
    /// `section.name`
    pub key: &'static str,
    /// Whether the setting is one of the few that most users need. Only these are in `config/pagetide.toml`.
    pub is_common: bool,
    pub kind: SettingKind,
    /// The unit of a number; empty if it has none.
    pub unit: &'static str,
    /// The setting's own flag and the placeholder of its value in `--help`. `--set` takes every key as well.
    pub flag: Option<(&'static str, &'static str)>,
    /// What the setting does. The first sentence can stand alone.
    pub doc: &'static str,
    pub when_to_change: &'static str,
    pub store: fn(&mut Config, Value),
    pub load: fn(&Config) -> Value,
}

impl Setting {
    pub fn section(&self) -> &'static str {
        self.split().0
    }

    pub fn name(&self) -> &'static str {
        self.split().1
    }

    /// The title of the setting's section.
    pub fn section_about(&self) -> &'static str {
        let section = SECTIONS.iter().find(|(name, _)| *name == self.section());
        section.expect("every section is in SECTIONS").1
    }

    fn split(&self) -> (&'static str, &'static str) {
        self.key.split_once('.').expect("the table's macro writes section.name")
    }

    /// `PAGETIDE_SECTION__NAME`
    pub fn env(&self) -> String {
        format!("{ENV_PREFIX}{}__{}", self.section().to_uppercase(), self.name().to_uppercase())
    }

    /// The first sentence of the description.
    pub fn summary(&self) -> &'static str {
        self.doc.find(". ").map_or(self.doc, |end| &self.doc[..=end])
    }

    /// Whether the value is a key, which is never shown.
    pub fn is_secret(&self) -> bool {
        matches!(self.key, "server.api_keys" | "server.admin_key" | "server.metrics_key")
    }

    pub fn default(&self) -> Value {
        (self.load)(&Config::default())
    }
}

pub const ENV_PREFIX: &str = "PAGETIDE_";

/// The setting with this key.
pub fn find(key: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.key == key)
}

/// The sections in the order of the table, each with its title.
pub const SECTIONS: &[(&str, &str)] = &[
    ("server", "HTTP server"),
    ("limits", "Limits on incoming load, beside server.max_requests (0 means no limit)"),
    ("model", "Model"),
    ("device", "Device"),
    ("cache", "KV cache on the device"),
    ("swap", "Swap tier: KV blocks of preempted sequences and cached prefixes in CPU memory"),
    ("scheduler", "Scheduler: batching, admission and preemption"),
    ("intake", "Request intake: chat templates, tokenisation and grammars"),
    ("batches", "Files and batches of requests, on disk"),
    ("log", "Logs, written to standard error"),
    ("metrics", "Prometheus metrics"),
    ("tracing", "Request traces, sent to an OpenTelemetry collector"),
    ("console", "Web console: the page at /, with a chat and a live view of the KV cache"),
    ("recorder", "Flight recorder: the scheduler's recent decisions, for 'pagetide replay'"),
];

/// Values of the table's first column, [`Setting::is_common`].
const COMMON: bool = true;
const RARE: bool = false;

macro_rules! settings {
    ($($section:ident.$field:ident:
        $common:expr, $kind:expr, $unit:literal, $flag:expr, $doc:literal, $when:literal;)+) => {
        pub static SETTINGS: &[Setting] = &[$(Setting {
            key: concat!(stringify!($section), ".", stringify!($field)),
            is_common: $common,
            kind: $kind,
            unit: $unit,
            flag: $flag,
            doc: $doc,
            when_to_change: $when,
            store: |config, value| config.$section.$field.store(value),
            load: |config| config.$section.$field.load(),
        }),+];
    };
}

settings! {
    server.host: COMMON, text(not_empty), "", Some(("host", "H")),
        "IP address or host name to listen on.",
        "Set 0.0.0.0 to accept connections from other machines; set api_keys too.";
    server.port: COMMON, int(0, 65535), "", Some(("port", "P")),
        "TCP port to listen on; 0 picks a free port, which the log gives.",
        "Another program uses the port.";
    server.unix_socket: RARE, text(any_text), "", Some(("uds", "PATH")),
        "Path of a Unix socket to listen on instead of host and port. The file is made at the start and removed at \
         the end; the umask of the process says who may connect. It has no TLS.",
        "A proxy on the same machine is the only client.";
    server.root_path: RARE, text(root_path), "", Some(("root-path", "PATH")),
        "Path under which a proxy shows this server (/llm). Requests are answered with this prefix and without it, \
         and the API's description names it.",
        "A proxy passes on requests of one of its paths, and does not cut the path off.";
    server.served_model_name: COMMON, SettingKind::List { words: &[], auto: true }, "",
        Some(("served-model-name", "NAME")),
        "Model name in the API; auto uses the model's name on the hub, or the last part of its path. Of a list, each \
         name is accepted and the first is the one in answers.",
        "Clients request a fixed model name, whatever model is behind it.";
    server.accept_any_model: RARE, SettingKind::Bool, "", None,
        "Whether requests may name any model. All are answered by the one that is served.",
        "Clients such as Claude Code send model names of their own.";
    server.surfaces: RARE, SettingKind::List { words: Surface::NAMES, auto: false }, "", None,
        "The APIs that are served. The paths of an API that is left out answer 404.",
        "Clients should reach only the APIs that they use.";
    server.dialect: RARE, SettingKind::Choice(Dialect::NAMES), "", None,
        "Whose answers OpenAI's paths give where servers differ. vllm: errors have vLLM's types (BadRequestError) and \
         the status as their code, and structured output with include_reasoning: false begins at once. llama.cpp: \
         /completions and /embeddings without /v1 have llama.cpp's shapes, errors have its format, a chat goes on from \
         a last message of the assistant, answers have timings, and /v1/models lists one model with its aliases.",
        "Clients were written for vLLM's or llama.cpp's server, and read what OpenAI's API does not have.";
    server.request_id_headers: RARE, SettingKind::Bool, "", None,
        "Whether every answer has the header X-Request-Id: the request's own, or 32 random hexadecimal digits. Logs \
         have the id in any case.",
        "A proxy in front sets this header itself, or nothing may be added to the answers.";
    server.slots: RARE, SettingKind::Bool, "", None,
        "Whether llama.cpp's /slots tells of the sequences that run. If not, it answers 501.",
        "Nobody should see how many requests run, as with llama-server's --no-slots.";
    server.slot_folder: RARE, text(any_text), "", Some(("slot-save-path", "DIR")),
        "Folder for the files of llama.cpp's slots, which POST /slots/{id}?action=save writes and action=restore reads. It \
         is created if it is not there. A relative path starts at the working directory. If empty, these actions and \
         action=erase answer 501.",
        "Clients keep the KV of long prompts beyond a restart. The files are as large as their KV, and nothing limits \
         their number.";
    server.model_tags: RARE, LIST, "", None,
        "Words about the model that /v1/models shows in the dialect llama.cpp. They choose nothing.",
        "Clients pick models by tags, as with llama.cpp's --tags.";
    server.api_keys: COMMON, SettingKind::Keys, "", Some(("api-key", "KEY")),
        "API keys that clients send as bearer tokens; with an empty list no key is required. /health, /ready, \
         /docs, /openapi.json and the console's page never require a key. A key can also be a table with a name, \
         for logs and traces, and with its own limits, which replace limits.key_*.",
        "The server can be reached by others. Prefer the file or the environment: other users of the machine can \
         see flags in the process list.";
    server.admin_key: RARE, text(any_text), "", None,
        "Bearer key of /admin, which reads and changes settings and writes recordings while the server runs. It \
         also reads /metrics and the console's events. It is not a client's key, and no key of api_keys opens \
         /admin. If empty, /admin is closed.",
        "You want to change settings without a restart. Use the file or the environment: flags show in the process \
         list.";
    server.metrics_key: RARE, text(any_text), "", None,
        "Bearer key of /metrics and of the console's events, which show the requests of all clients. admin_key \
         opens them too; no key of api_keys does. If empty, only admin_key opens them when api_keys is set, and no \
         key is required when it is not.",
        "Prometheus scrapes a server that has api_keys. Use the file or the environment: flags show in the process \
         list.";
    server.cors_allowed_origins: RARE, LIST, "", None,
        "Origins (https://chat.example.org) whose web pages may call this server. \"*\" allows any origin, \
         \"localhost\" the pages of localhost, 127.0.0.1 and [::1] at any port, and an empty list none.",
        "A web page calls this server directly from the browser.";
    server.cors_allow_credentials: RARE, SettingKind::Bool, "", None,
        "Whether pages of cors_allowed_origins may send cookies and other browser credentials. A key in the \
         Authorization header does not need this.",
        "A proxy in front of this server requires cookies.";
    server.cache_isolation: RARE, SettingKind::Choice(CacheIsolation::NAMES), "", None,
        "Which requests share cached prefixes. per_key: only requests with the same API key. shared: all requests. \
         A request's cache_salt separates them further in both cases.",
        "Set shared if the owners of the keys trust each other and their prompts begin alike. With shared, a client \
         can find out from the time to first token what another client has asked.";
    server.schema_objects: RARE, SettingKind::Choice(SchemaObjects::NAMES), "", None,
        "Whether objects in structured output and in the arguments of tools may have properties that their JSON schema \
         does not name. closed: only where the schema sets additionalProperties. open: unless it forbids them, as JSON \
         Schema has it.",
        "Clients expect the reading of JSON Schema, and want properties that their schemas do not name.";
    server.force_include_usage: RARE, SettingKind::Bool, "", None,
        "Whether every chunk of a stream of chat completions and completions has the usage so far, as with \
         stream_options.include_usage and continuous_usage_stats.",
        "A proxy counts tokens, and clients do not ask for usage.";
    server.return_tokens_as_token_ids: RARE, SettingKind::Bool, "", None,
        "Whether log-probabilities name tokens by their ids (token_id:5) and not by their text. A request's own \
         return_tokens_as_token_ids takes precedence.",
        "Clients need to tell apart tokens that have the same text, and cannot change their requests.";
    server.include_kv_usage: RARE, SettingKind::Bool, "", None,
        "Whether usage contains usage.kv, the cost of memory pressure to the request. A request's own \
         include_kv_usage takes precedence.",
        "You read usage.kv but cannot change the requests.";
    server.pause_comments: RARE, SettingKind::Bool, "", None,
        "Whether a stream contains SSE comments that say when memory pressure pauses and resumes it. A request's \
         own pause_comments takes precedence.",
        "Clients or proxies give up on streams that are silent.";
    server.verbose: RARE, SettingKind::Bool, "", None,
        "Whether chats and completions show the prompt and the parameters that they were made with, in __verbose. A \
         request's own verbose takes precedence.",
        "You look for the reason of an unexpected answer.";
    server.thinking: RARE, SettingKind::Choice(ThinkingDefault::NAMES), "", None,
        "Whether the model thinks before it answers, where its chat template knows enable_thinking and a request does \
         not say. auto: as the template has it.",
        "A model thinks by default and answers should come at once, or the other way round.";
    server.default_seed: RARE, int_or_auto(0, u32::MAX as u64 - 1), "", None,
        "Seed of requests that give none. auto draws a random one for each request.",
        "Equal requests should have equal answers although clients send no seed.";
    server.max_requests: RARE, int(1, 1_000_000), "requests", None,
        "Maximum number of requests in the server, waiting and running. Further requests are refused with 429.",
        "Lower it to refuse requests early instead of letting them wait; raise it to accept bursts.";
    server.max_share_per_key: RARE, SHARE_OR_AUTO, "fraction", None,
        "Fraction of max_requests that requests of one API key may take together. Each prompt of a batch counts. \
         Further requests of the key are refused with 429. auto is 0.75 with two or more api_keys, else 1.",
        "Set 1 if all keys belong to one client; lower it if there are many keys.";
    server.retry_after_s: RARE, int(0, 3600), "s", None,
        "Value of the Retry-After header of a 429.",
        "Clients retry too soon or too late.";
    server.drain_delay_s: RARE, int(0, 3600), "s", None,
        "How long the server still accepts requests after SIGINT or SIGTERM, while /ready already returns 503.",
        "A load balancer polls /ready: set slightly more than it needs to notice.";
    server.drain_timeout_s: RARE, int(0, 86_400), "s", None,
        "How long running requests may take to finish after drain_delay_s. Those that still run then end with an \
         error.",
        "Answers take longer than this. Keep it below the supervisor's own stop timeout.";
    server.max_body_bytes: RARE, int(1024, 1 << 30), "bytes", None,
        "Maximum size of a request body. A larger body is refused with 413. The default holds about two million \
         tokens of text. Parsing a body takes up to ten times its size in memory.",
        "Raise it for longer prompts; lower it if you do not trust the clients.";
    server.header_timeout_s: RARE, int(0, 3600), "s", None,
        "Time limit for a client to send the head of its first request, and to finish a TLS handshake. The head of \
         a later request on the connection may take this and keep_alive_s together. 0 means no limit.",
        "Raise it for distant clients; lower it if clients hold connections open on purpose.";
    server.body_timeout_s: RARE, int(0, 3600), "s", None,
        "Time limit for a client to send a request's body. After it the request is refused with 408. 0 means no \
         limit.",
        "Raise it for large prompts over slow connections.";
    server.request_timeout_s: RARE, int(0, 86_400), "s", None,
        "Time limit for a whole answer, from the moment the request has been read, waiting included. After it the \
         request ends with an error: 504 if nothing has been sent yet. 0 means no limit.",
        "No client waits longer than this for an answer.";
    server.write_timeout_s: RARE, int(0, 3600), "s", None,
        "How long a client may read nothing while data is ready for it. After that its connection is closed and its \
         request is cancelled. 0 means no limit.",
        "Clients stop reading for longer on purpose.";
    server.max_unread_mib: RARE, int(0, 1 << 20), "MiB", None,
        "Maximum amount of a streamed answer that waits for a client that reads slowly. Beyond it the connection is \
         closed and the request is cancelled. 0 means no limit.",
        "Clients read slowly on purpose, and there is enough memory to hold their answers.";
    server.max_logprobs: RARE, int(0, 1_000_000), "tokens", None,
        "Maximum number of most likely tokens that a request may have reported with each token (logprobs, \
         top_logprobs, prompt_logprobs). 0 means no limit. A request asks with -1 for all tokens of the vocabulary, where \
         that many are allowed.",
        "Clients need more of the distribution than the 20 tokens of OpenAI's API. Answers grow with it.";
    server.max_answer_logprobs: RARE, int(0, 1_000_000_000), "log-probabilities", None,
        "Maximum number of log-probabilities in an answer that is not streamed, top_logprobs included. For \
         /v1/responses the maximum is an eighth of it, because its streams repeat them at the end. A request that \
         would exceed it ends with an error. 0 means no limit.",
        "Clients request complete answers of many thousand tokens with many top_logprobs (each takes 100 bytes).";
    server.max_sessions: RARE, int(0, 1_000_000), "sessions", None,
        "Maximum number of SGLang's sessions that are open at once. Further ones are refused with 429.",
        "Many conversations use /open_session at once.";
    server.max_session_tokens: RARE, int(1, 1_000_000_000_000), "tokens", None,
        "Tokens that all open sessions hold together, at 4 bytes each; each of their requests counts as 64 more. Beyond \
         it, requests of sessions are refused with 429. Requests under way may exceed it a little.",
        "Sessions are long, or never closed.";
    server.session_timeout_s: RARE, int(1, 31_536_000), "s", None,
        "A session without requests for this long is closed. A client may ask for less when it opens one.",
        "Conversations pause for longer.";
    server.keep_alive_s: RARE, int(1, 3600), "s", None,
        "How long a connection without requests stays open.",
        "A load balancer keeps idle connections longer. Set more than its timeout, so that the server does not \
         close a connection just as a request arrives.";
    server.tls_cert: RARE, text(any_text), "", None,
        "PEM file with the server's certificate and its intermediate certificates. If empty, the server speaks \
         plain HTTP. SIGHUP reads the file again.",
        "Clients connect over a network, and no proxy terminates TLS for this server.";
    server.tls_key: RARE, text(any_text), "", None,
        "PEM file with the private key of tls_cert. SIGHUP reads the file again.",
        "Together with tls_cert.";
    server.admin_listen: RARE, text(socket_address), "", None,
        "Separate address and port (127.0.0.1:9000) for /metrics and /admin, without TLS. They are then no longer \
         served on server.port; /health and /ready are served on both. If empty, everything is on server.port.",
        "Everybody can reach server.port.";
    server.trust_request_chat_template: RARE, SettingKind::Bool, "", None,
        "Whether requests may contain their own chat_template.",
        "You allow clients to write the whole prompt, which a template can do. The cost of a template is bounded.";
    server.debug_endpoints: RARE, SettingKind::Bool, "", None,
        "Whether POST /admin/debug/fail_step is served, which makes a step fail as if the device had failed. It \
         requires admin_key.",
        "On a test server, to see what a failure does to alerts, recordings and clients' retries.";
    server.workers: RARE, int(0, 1024), "threads", None,
        "Number of HTTP threads. 0 means one per core, at most 4.",
        "There are thousands of streams at once.";

    limits.max_connections: RARE, int(0, 1_000_000), "connections", None,
        "Maximum number of open connections on server.port. Further connections wait until one closes. The number \
         is divided evenly among server.workers and rounded down to a multiple of them.",
        "Set it below half of the limit of open files (ulimit -n): each connection takes two files.";
    limits.requests_per_minute: RARE, int(0, 1_000_000_000), "requests", None,
        "Rate limit of generation requests of all clients together. It is a token bucket: so many requests at once, \
         refilled with as many per minute. Further requests are refused with 429.",
        "The load, or its price, has to be bounded.";
    limits.tokens_per_minute: RARE, int(0, 1_000_000_000_000), "tokens", None,
        "Rate limit of prompt and output tokens of all clients together. A request is charged with its prompt and \
         max_tokens when it arrives, and is refunded what it has not used.",
        "As requests_per_minute, if requests differ much in length.";
    limits.key_requests_per_minute: RARE, int(0, 1_000_000_000), "requests", None,
        "requests_per_minute of each API key that does not set its own.",
        "One client must not use up the capacity of all.";
    limits.key_tokens_per_minute: RARE, int(0, 1_000_000_000_000), "tokens", None,
        "tokens_per_minute of each API key that does not set its own.",
        "One client must not use up the capacity of all.";
    limits.key_max_requests: RARE, int(0, 1_000_000), "requests", None,
        "Maximum number of requests at once of each API key that does not set its own.",
        "One client's queue must stay short.";
    limits.key_max_connections: RARE, int_or_auto(0, 1_000_000), "connections", None,
        "Maximum number of open connections of each API key that does not set its own. A connection counts for the \
         key that it last used. Beyond the maximum the request is refused with 429 and the connection is closed. \
         auto is three quarters of max_connections with two or more api_keys. It is no limit with one key, or if \
         max_connections is 0.",
        "Set 0 if all keys belong to one client, or if all clients come through one gateway.";
    limits.max_body_values: RARE, int(0, 1_000_000_000), "values", None,
        "Maximum number of JSON values in a request body, nested values included. Token ids of prompts and unknown \
         fields do not count. Beyond it the request is refused with 400.",
        "Raise it for requests with very large schemas, tools or lists.";
    limits.max_parsing_bytes: RARE, int(0, 1 << 40), "bytes", None,
        "Maximum total size of the request bodies over 16 KiB that are parsed at once, of all clients together. \
         Beyond it requests are refused with 429.",
        "Raise it if many clients send long prompts at the same time; lower it if memory is short.";

    model.path: COMMON, text(not_empty), "", Some(("model", "DIR|FILE|OWNER/NAME[:QUANT]|demo")),
        "Model to serve: a directory with a Hugging Face checkpoint, a GGUF file or a directory with one, a name on the \
         hub, or demo for the small built-in model. A name on the hub is OWNER/NAME (Qwen/Qwen2.5-1.5B-Instruct), or \
         OWNER/NAME:QUANT for its GGUF file in this quantisation (Qwen/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M).",
        "Always, except to try Pagetide out.";
    model.revision: RARE, text_or_auto(revision), "", Some(("revision", "NAME")),
        "Branch, tag or commit of a model on the hub. auto is main.",
        "Set a commit, so that every start serves the same weights.";
    model.dtype: RARE, SettingKind::Choice(DtypeChoice::NAMES), "", Some(("dtype", "auto|float32|float16|bfloat16")),
        "Data type of the weights, and of the KV cache if cache.dtype does not say otherwise. auto uses the \
         checkpoint's own.",
        "Set float32 to compare outputs exactly; set bfloat16 to halve the memory of a float32 checkpoint.";
    model.quantization: RARE, SettingKind::Choice(Quantization::NAMES), "",
        Some(("quantization", "none|q8_0|q4_0|q4_1|q5_0|q5_1|q4_k|q6_k")),
        "Format of ggml to which the matrices of a checkpoint in safetensors are quantised when it is loaded. GGUF \
         files and quantised checkpoints are served as they are, with none.",
        "A CPU should hold a larger model and decode faster. q8_0 costs hardly any quality, q4_k some.";
    model.quantization_cache: RARE, text_or_auto(not_empty), "", None,
        "Directory that keeps quantised weights, so that the next start does not quantise them again. auto is \
         pagetide/quantized in the user's cache directory, and off keeps nothing.",
        "The home directory has no room for the files or cannot be written, or several machines share them.";
    model.max_model_len: COMMON, int_or_auto(1, 1 << 31), "tokens", Some(("max-model-len", "N")),
        "Maximum number of tokens of a sequence, prompt and output together; auto uses the model's own limit.",
        "Lower it so that one request cannot take the whole KV cache.";
    model.load_format: RARE, SettingKind::Choice(LoadFormat::NAMES), "", Some(("load-format", "auto|dummy|null")),
        "Where the weights come from. auto reads the checkpoint's safetensors files. dummy makes random weights for \
         the shape in config.json, and uses the demo model's tokenizer if there is none. null computes nothing and \
         answers with random tokens until max_tokens.",
        "Set dummy to measure a model's shape without its weights; set null to measure everything but the model.";
    model.skip_tokenizer_init: RARE, SettingKind::Bool, "", None,
        "Whether the server runs without a tokenizer: prompts are token ids, and answers have token ids and no text. \
         Requests with text, stop strings or structured output are refused.",
        "Another process tokenizes, as with vLLM's --skip-tokenizer-init and --tokens-only, or the model has no \
         tokenizer.";
    model.tool_call_parser: RARE, SettingKind::Choice(ToolCallParser::NAMES), "",
        Some(("tool-call-parser", "auto|none|hermes|llama3_json|mistral")),
        "Format in which the model writes tool calls: hermes (Hermes, Qwen), llama3_json or mistral. auto \
         recognises the format from the chat template. none does not parse tool calls.",
        "The chat template has no known format, or not the one that the model was trained on. The log says at the \
         start what auto has found.";
    model.reasoning_parser: RARE, SettingKind::Choice(ReasoningParser::NAMES), "",
        Some(("reasoning-parser", "auto|none|deepseek_r1|qwen3|mistral")),
        "Format in which the model marks its reasoning: <think> (qwen3, or deepseek_r1 if the opening tag may be \
         missing) or [THINK] (mistral). auto recognises the format from the chat template. none leaves the \
         reasoning in the content.",
        "Reasoning appears as content, or content as reasoning.";

    device.kind: COMMON, SettingKind::Choice(DeviceKind::NAMES), "", Some(("device", "auto|cpu|cuda")),
        "Device that runs the model; auto is the GPU if there is one, else the CPU.",
        "Set cpu or cuda to get an error instead of a fallback.";
    device.threads: RARE, int(0, 1024), "threads", None,
        "Number of threads of the CPU backend. 0 means one per core.",
        "Other programs need cores, or the system counts hyperthreads as cores.";
    device.isa: RARE, SettingKind::Choice(IsaChoice::NAMES), "", None,
        "Instruction set of the CPU kernels. auto is the best one of this machine. avx512-widened is avx512 that widens \
         bfloat16 weights to float32: auto is that where the processor's dot products of bfloat16 are slower.",
        "To compare instruction sets, or to get the same bytes on different machines.";
    device.memory_utilization: COMMON, SHARE_OR_AUTO, "fraction", Some(("device-memory-utilization", "F")),
        "Fraction of the device's memory for weights and KV blocks; auto is 0.9 on a GPU and 0.5 on the CPU.",
        "Other programs share the device, or the start fails because memory runs out.";
    device.cuda_library_path: RARE, LIST, "", None,
        "Directories searched for libcuda, libnvrtc and libcublasLt before the usual ones.",
        "pagetide doctor does not find the libraries.";
    device.kernel_cache: RARE, text_or_auto(not_empty), "", None,
        "Directory for compiled CUDA kernels. auto is pagetide/kernels in the user's cache directory.",
        "The home directory is not writable, or several machines share it.";
    device.cuda_graphs: RARE, SettingKind::Bool, "", None,
        "Whether decode steps on a GPU run as CUDA graphs.",
        "Set false to look for an error in a step.";
    device.batch_invariant: RARE, SettingKind::Bool, "", Some(("batch-invariant", "true|false")),
        "Whether the result of a token on a GPU is independent of the other sequences in its step. Resumed, cached \
         and recomputed requests then return the same bytes. On the CPU this always holds.",
        "Set true if identical answers matter more than speed.";
    device.fp8_activations: RARE, SettingKind::Bool, "", None,
        "Whether a GPU quantises activations to FP8 (E4M3) for products with matrices that a checkpoint stores in FP8. \
         FP8 units multiply twice as fast as those of 16 bits. This needs compute capability 9.0 (Hopper), cuBLASLt \
         12.9 or newer, and device.batch_invariant = false.",
        "Set true if prompts of an FP8 checkpoint should be computed faster, at some cost in quality.";
    device.copy_batches: RARE, SettingKind::Choice(CopyBatches::NAMES), "", None,
        "Whether the copies of a swap that are smaller than 256 KiB are given to the GPU's driver in one call \
         (cuMemcpyBatchAsync). auto measures at the start whether that is faster; always and never do not measure.",
        "Set never if the driver crashes or hangs in this call. pagetide doctor shows what was chosen.";
    device.on_failure: RARE, SettingKind::Choice(OnFailure::NAMES), "", None,
        "What the server does when a step fails. The requests in it fail in any case. restart creates new KV pools \
         and continues; exit ends the process with a non-zero status.",
        "Set exit if a supervisor restarts the process, perhaps on another device.";
    device.step_timeout_s: RARE, int(0, 86_400), "s", None,
        "Time after which a step counts as hung. All requests then fail and the process exits with a non-zero \
         status. 0 means no limit.",
        "Raise it if steps of a large model on a slow device take minutes; lower it to be restarted sooner.";

    cache.dtype: RARE, SettingKind::Choice(CacheDtype::NAMES), "", Some(("kv-cache-dtype", "auto|int8|fp8|int4")),
        "Data type of the KV cache. auto is that of the weights. int8 and fp8 (E4M3) take about half the bytes of \
         bfloat16: one for each element, and two for each token, layer and head of K and of V. int4 takes about a \
         quarter; its vectors are rotated first. On a GPU there is no int4, and with int8 and fp8 cache.block_size has \
         to be a multiple of 8.",
        "Set int8 to hold almost twice as many tokens in the same memory, and to decode faster behind long contexts; \
         set int4 to hold almost four times as many at some cost of quality.";
    cache.block_size: COMMON, int(1, 256), "tokens", Some(("block-size", "N")),
        "Number of tokens in a KV block.",
        "Smaller blocks waste fewer slots and share shorter prefixes; larger blocks have less overhead per token.";
    cache.num_device_blocks: COMMON, int_or_auto(1, u32::MAX as u64), "blocks", Some(("num-device-blocks", "N")),
        "Number of KV blocks on the device; auto is as many as fit in device.memory_utilization. The demo model \
         gets at most 2048.",
        "Set it to fix the size of the KV cache, in tests and comparisons.";
    cache.enable_prefix_caching: RARE, SettingKind::Bool, "", Some(("enable-prefix-caching", "true|false")),
        "Whether blocks of finished requests are kept and reused for prompts with the same prefix. Outputs are the \
         same in both cases.",
        "Set false to measure without the prefix cache.";
    cache.eviction: RARE, SettingKind::Choice(Eviction::NAMES), "", None,
        "Which cached blocks are evicted first, on the device and in the swap tier. adaptive learns how often \
         blocks are used again, by their number of uses and the time since the last one; prompts that are sent once \
         then do not evict shared prefixes. lru evicts the least recently used. Outputs are the same in both cases.",
        "To compare the two.";
    cache.max_share_per_key: RARE, SHARE, "fraction", None,
        "Fraction of the device blocks up to which requests of one API key are admitted. Beyond it the key's \
         requests wait, and requests of other keys go before them. A key that holds no blocks can always start one \
         request. 1 means no quota.",
        "One key's load must leave room for the others.";

    swap.space_gib: COMMON, number_or_auto(0.0, 65536.0), "GiB", Some(("swap-space-gib", "G")),
        "CPU memory for KV blocks of preempted sequences and for cached prefixes that the device has evicted; 0 \
         disables the swap tier. auto is 1 GiB on the CPU. On a GPU, where the pool is pinned at the start, it is the \
         size of the KV pool there, but at most a quarter of the available memory and 16 GiB.",
        "Raise it if pagetide_preemptions_total{mode=\"recompute\"} grows and memory is free.";
    swap.max_space_gib: RARE, number_or_auto(0.0, 65536.0), "GiB", None,
        "Maximum to which space_gib can be raised while the server runs. On the CPU this only reserves address \
         space, and auto is half of the memory available at the start, or space_gib if that is more. On a GPU the \
         whole maximum is allocated and pinned at the start, and auto is space_gib.",
        "You want to raise space_gib without a restart further than auto allows.";
    swap.high_watermark: RARE, number(0.0, 1.0), "fraction", None,
        "Fraction of used device blocks above which full blocks of the likeliest victims are copied to CPU memory \
         ahead of a preemption (write-behind). 1 disables this.",
        "Lower it if preemptions come in bursts; raise it if pagetide_swap_out_blocks_total grows without \
         preemptions.";
    swap.max_tail_blocks: RARE, int(0, 65_536), "blocks", None,
        "Number of full blocks of a likely victim that write-behind leaves uncopied. Its preemption then copies \
         these, the blocks that its last step has filled (its last two steps with scheduler.overlap), and the \
         partly filled block. The bound does not hold for a victim that was not foreseen, or if copies wait or the \
         swap tier is full: pagetide_preemptions_over_tail_total counts these.",
        "Lower it for shorter preemptions; raise it for fewer copies.";
    swap.max_share_per_key: RARE, SHARE, "fraction", None,
        "Fraction of the swap tier that preempted sequences of one API key may take. Beyond it they are recomputed \
         instead. 1 means no quota.",
        "One key's load must leave room for the others.";

    scheduler.max_num_seqs: COMMON, int(1, 65_536), "sequences", Some(("max-num-seqs", "N")),
        "Maximum number of sequences in a step.",
        "Lower it for shorter gaps between tokens; raise it for throughput.";
    scheduler.max_num_batched_tokens: COMMON, int_or_auto(1, 1 << 20), "tokens",
        Some(("max-num-batched-tokens", "N")),
        "Maximum number of tokens in a step, prefill and decode together; auto is 512 on the CPU, 2048 on a GPU, \
         and at least max_num_seqs.",
        "Raise it to process long prompts faster; lower it for shorter gaps between tokens meanwhile.";
    scheduler.inter_token_target_ms: RARE, int(0, 3_600_000), "ms", Some(("inter-token-target-ms", "N")),
        "Target duration of a step while any sequence decodes. Prompt chunks are sized to fit it, by the measured \
         times of earlier steps. They get at least 32 tokens and three quarters of the step's time. While the prompts \
         that wait for another prompt would take longer than three steps, a step may take up to three times as long. \
         0 means no target: prompts get what max_num_batched_tokens leaves.",
        "Lower it for steadier streams; raise it, or set 0, for throughput and a shorter time to first token.";
    scheduler.preemption_mode: COMMON, SettingKind::Choice(PreemptionMode::NAMES), "",
        Some(("preemption-mode", "auto|swap|recompute")),
        "What happens to the blocks of a preempted sequence: swap copies them to CPU memory, recompute drops and \
         recomputes them, auto chooses the cheaper way each time.",
        "Set recompute if CPU memory is scarce, or set either one to measure it.";
    scheduler.admission: RARE, SettingKind::Choice(AdmissionPolicy::NAMES), "", None,
        "How many device blocks must be free before a waiting sequence starts. expected: enough for what all \
         running sequences are likely to need, by the lengths of earlier outputs; a preemption is risked only if it \
         is expected to pay off. max_tokens: enough for all that they may need, so that no sequence is preempted. \
         prompt: enough for the sequence's own tokens.",
        "Set max_tokens if requests give exact limits and steady streams matter more than throughput; set prompt to \
         compare.";
    scheduler.policy: RARE, SettingKind::Choice(SchedulingPolicy::NAMES), "", Some(("scheduling-policy", "fcfs|priority")),
        "Order in which waiting requests start: fcfs by arrival, priority by the request's priority (lower first), \
         then by arrival.",
        "Clients send a priority.";
    scheduler.watermark: RARE, number(0.0, 0.5), "fraction", None,
        "Fraction of the device blocks that must stay free when a request is admitted, so that it is not preempted \
         at once.",
        "Raise it if pagetide_preemptions_total grows fast under load.";
    scheduler.non_preemptible_share: RARE, number(0.0, 1.0), "fraction", None,
        "Fraction of the device blocks that requests with preemptible: false may reserve together, each for its \
         prompt and max_tokens. 0 refuses such requests.",
        "Raise it for more or longer requests that are never paused. Other requests cannot use the blocks that they \
         reserve.";
    scheduler.key_turns: RARE, SettingKind::Bool, "", None,
        "Whether API keys share the device fairly. Among waiting requests of the same priority, the key whose \
         running requests hold the smallest share of blocks and of max_num_seqs goes first; requests of keys with \
         more than an equal share are preempted first. false: by arrival alone.",
        "Set false if all keys belong to one client and the order of arrival matters.";
    scheduler.overlap: RARE, SettingKind::Choice(Overlap::NAMES), "", Some(("overlap", "auto|on|off")),
        "Whether a step is planned while the step before it runs, so that the device does not wait for the host. \
         auto is on for a GPU. It is off for the CPU, which does both on the same cores. Outputs are the same in \
         both cases.",
        "To compare, or to look for an error.";

    intake.tokenizer_threads: RARE, int(1, 256), "threads", None,
        "Number of threads that parse large bodies, render chat templates and tokenise prompts.",
        "Long prompts arrive at a high rate: the time to first token grows while the device is idle.";
    intake.job_timeout_s: RARE, int(1, 3600), "s", None,
        "Time limit of one job on such a thread: parsing a large body, rendering a chat template, tokenising, or \
         compiling a grammar. It counts from the job's begin. After it the request is refused.",
        "Prompts have millions of tokens and the machine is slow.";
    intake.max_prompt_bytes: RARE, int_or_auto(1024, 1 << 30), "bytes", None,
        "Maximum size of a prompt's text, for /tokenize too. A larger text is refused before it is tokenised. auto \
         is 16 bytes per token of max_model_len, at least 256 KiB. A prompt with truncate_prompt_tokens may be four \
         times as large.",
        "Prompts have more than 16 bytes per token and still fit the model, for example long runs of spaces.";
    intake.grammar_cpu_s: RARE, number(0.1, 600.0), "s", None,
        "Processor time limit for compiling a client's grammar, JSON schema or regular expression. Beyond it the \
         request is refused. A separate process compiles it first; the server compiles it only if that succeeds.",
        "You trust the clients, and their schemas are large.";
    intake.grammar_memory_mib: RARE, int(16, 65_536), "MiB", None,
        "Memory limit for compiling a client's grammar.",
        "As grammar_cpu_s.";
    intake.grammar_work_per_token: RARE, int_or_auto(10, 1_000_000), "units", None,
        "Amount of work on token masks that a request with a grammar earns with each output token. It can save up \
         to a hundred times as much. A request that needs more ends with an error, because all requests of a step \
         wait for its masks. A unit takes about half a microsecond. auto is 500, plus one for each 16 tokens of the \
         vocabulary: about ten times what large schemas and patterns need.",
        "Raise it for highly ambiguous grammars, if other requests may wait for them.";

    batches.folder: RARE, text(any_text), "", None,
        "Folder for the files and batches of /v1/files, /v1/batches and /v1/messages/batches. It is created if it is \
         not there, and one server at a time may use it. A relative path starts at the working directory. If empty, \
         these paths answer 403.",
        "Clients send many requests that need no answer soon.";
    batches.max_file_mib: RARE, int(1, 1 << 20), "MiB", None,
        "Maximum size of an uploaded file. server.body_timeout_s limits the time of an upload.",
        "Clients upload larger files. A file is never held in memory.";
    batches.max_folder_gib: RARE, int(1, 1 << 20), "GiB", None,
        "Maximum size of all files together, results included. Further uploads are refused with 429. Results are \
         always written.",
        "The disk has more room, or less.";
    batches.max_files: RARE, int(1, 1_000_000), "files", None,
        "Maximum number of files that an API key has uploaded and not deleted. Further ones are refused with 429.",
        "Clients keep more files.";
    batches.max_batches: RARE, int(1, 1_000_000), "batches", None,
        "Maximum number of batches of an API key. A new one takes the place of the oldest that has ended; where none \
         has, it is refused with 429.",
        "Clients have more batches at once.";
    batches.max_lines: RARE, int(1, 10_000_000), "lines", None,
        "Maximum number of requests in a batch. A batch with more fails. A request of a batch is limited as others \
         are, by server.max_body_bytes and limits.max_body_values.",
        "Clients make larger batches.";
    batches.max_running: RARE, int(1, 100_000), "requests", None,
        "Maximum number of requests of all batches at once. None starts while scheduler.max_num_seqs or more requests \
         are under way, so that clients that wait go first.",
        "Batches take too long although the device has room, or they slow other requests down.";
    batches.priority: RARE, int(0, 2_147_483_647), "", None,
        "The priority of a batch's requests under scheduler.policy = priority. A request may lower it further.",
        "Clients send priorities of their own above it.";
    batches.keep_days: RARE, int(1, 3650), "days", None,
        "How long files and ended batches are kept. Clients may choose a shorter time for a file.",
        "Clients fetch results later, or the disk fills up.";

    log.level: COMMON, text(log_filter), "", None,
        "Log level: error, warn, info, debug or trace. It can differ by module: info,pagetide::actors=debug.",
        "To investigate a problem.";
    log.format: RARE, SettingKind::Choice(LogFormat::NAMES), "", None,
        "Format of the log: human writes lines for people, json writes one JSON object per line.",
        "Set json if a log collector reads the log.";
    log.slow_request_s: RARE, number(0.0, 86400.0), "s", None,
        "A request that takes longer is logged as a warning that says where its time went. 0 disables this.",
        "To find out why requests are slow.";

    metrics.enabled: RARE, SettingKind::Bool, "", None,
        "Whether metrics are recorded and served on /metrics. It requires server.metrics_key or server.admin_key, \
         or no key if neither server.api_keys nor server.metrics_key is set.",
        "Hardly ever: metrics cost next to nothing.";
    metrics.vllm_names: RARE, SettingKind::Bool, "", None,
        "Whether /metrics also contains the metrics under vLLM's names (vllm:num_requests_running, ...), with its \
         labels and histogram buckets.",
        "Set true if dashboards, autoscalers or inference gateways for vLLM read this server unchanged.";
    metrics.llama_cpp_names: RARE, SettingKind::Bool, "", None,
        "Whether /metrics also contains the metrics under llama.cpp's names (llamacpp:requests_processing, ...), and \
         its answer the header Process-Start-Time-Unix.",
        "Set true if dashboards for llama.cpp read this server unchanged.";

    tracing.otlp_endpoint: RARE, text(http_url), "", None,
        "Base URL of a collector that takes OTLP over HTTP (http://localhost:4318). /v1/traces is appended. If \
         empty, no traces are sent.",
        "You run a collector: Jaeger, Tempo or the OpenTelemetry collector.";
    tracing.sample_ratio: RARE, number(0.0, 1.0), "fraction", None,
        "Fraction of the requests that are traced. A request that already belongs to a trace (traceparent) is \
         traced according to that header.",
        "Storing all traces costs too much.";
    tracing.service_name: RARE, text(not_empty), "", None,
        "The service.name attribute of the traces.",
        "Several servers send traces to one collector.";

    console.enabled: RARE, SettingKind::Bool, "", None,
        "Whether the console is served: the page at / and its data at /console/events. If api_keys or metrics_key \
         is set, the data requires metrics_key or admin_key.",
        "Set false if nobody may see the page, or the number and size of the requests.";
    console.max_rate_hz: RARE, number(1.0, 60.0), "Hz", None,
        "Maximum number of engine snapshots per second while anyone watches. All watchers share one snapshot. With \
         very large KV pools there are fewer, so that snapshots take at most 1/200 of the time.",
        "Lower it if every microsecond between two steps counts.";
    console.max_watchers: RARE, int(0, 1000), "clients", None,
        "Maximum number of clients that watch the console at once. Further ones are refused with 429. With 0 the \
         page has only the chat.",
        "Many people watch the same server.";

    recorder.minutes: RARE, int(0, 1440), "min", None,
        "Number of minutes of scheduling that the recorder keeps in memory. POST /admin/recording writes them to a \
         file, and so does a failure of the executor. 0 disables the recorder.",
        "Raise it to see what led to a problem that is noticed late.";
    recorder.max_mib: RARE, int(1, 65_536), "MiB", None,
        "Maximum memory of the recorder. Under load it may therefore hold less than recorder.minutes. If the \
         engine's state alone takes more than a third of it, recording pauses, and the log says so.",
        "pagetide_recorder_seconds stays below recorder.minutes, and memory is free.";
    recorder.dir: RARE, text(not_empty), "", None,
        "Directory for recordings. It is created with the first recording. A relative path starts at the working \
         directory.",
        "The working directory is not writable, or is the wrong place for files.";
    recorder.tokens: RARE, SettingKind::Bool, "", None,
        "Whether recordings contain the tokens of prompts and outputs, and so their text. Otherwise they contain \
         only lengths, and which prefixes are equal.",
        "To look for an error that depends on the texts, if they may be stored.";
}
