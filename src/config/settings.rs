//! The one table of settings. Flags, environment variables, files, their errors, `pagetide config`,
//! `config/pagetide.toml` and `docs/configuration.md` all come from it.

use super::live;
use super::value::{Field, Kind, Value};
use super::{
    AdmissionPolicy, CacheIsolation, Config, DeviceKind, DtypeChoice, Eviction, Isa, LoadFormat, LogFormat, OnFailure,
    Overlap, PreemptionMode, ReasoningParser, SchedulingPolicy, ToolCallParser,
};
use std::fmt::Write;

/// One key of the configuration.
pub struct Setting {
    /// `section.name`
    pub key: &'static str,
    pub kind: Kind,
    pub unit: &'static str,
    /// The flag of its own, and what its value is called in the help. Every key can be given with `--set` as well.
    pub flag: Option<(&'static str, &'static str)>,
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

    /// What its section is about.
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

    /// Its value is never shown.
    pub fn is_secret(&self) -> bool {
        matches!(self.key, "server.api_keys" | "server.admin_key" | "server.metrics_key")
    }

    pub fn default(&self) -> Value {
        (self.load)(&Config::default())
    }
}

pub const ENV_PREFIX: &str = "PAGETIDE_";

/// The setting of this key.
pub fn find(key: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.key == key)
}

/// The sections in the order of the table, each with what it is about.
pub const SECTIONS: &[(&str, &str)] = &[
    ("server", "The HTTP server"),
    ("limits", "How much is taken in, beside server.max_requests; 0 is any number"),
    ("model", "What is served"),
    ("device", "What it runs on"),
    ("cache", "KV blocks on the device"),
    ("swap", "KV blocks in CPU memory: of preempted sequences, and of cached prefixes"),
    ("scheduler", "What shares a step, and who yields when blocks run out"),
    ("intake", "Between HTTP and the scheduler"),
    ("log", "Logs, on standard error"),
    ("metrics", "Prometheus metrics"),
    ("tracing", "Traces of requests, sent to a collector"),
    ("console", "The page at /: chat, and the memory as it moves"),
    ("recorder", "The flight recorder: the engine's last decisions, for 'pagetide replay'"),
];

macro_rules! settings {
    ($($section:ident.$field:ident: $kind:expr, $unit:literal, $flag:expr, $doc:literal, $when:literal;)+) => {
        pub static SETTINGS: &[Setting] = &[$(Setting {
            key: concat!(stringify!($section), ".", stringify!($field)),
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

const fn int(min: u64, max: u64) -> Kind {
    Kind::Int { min, max, auto: false }
}

const fn int_or_auto(min: u64, max: u64) -> Kind {
    Kind::Int { min, max, auto: true }
}

const NAME: Kind = Kind::Text { auto: false, check: not_empty };

settings! {
    server.host: NAME, "", Some(("host", "H")),
        "Address to listen on.",
        "0.0.0.0 to be reached from other machines; then set api_keys too.";
    server.port: int(0, 65535), "", Some(("port", "P")),
        "Port to listen on; 0 takes a free one and prints it.",
        "Another program has it.";
    server.served_model_name: Kind::Text { auto: true, check: not_empty }, "", Some(("served-model-name", "NAME")),
        "The model's name in the API; auto is its name on the hub, or the last part of its path.",
        "Clients ask for a fixed name whatever is behind it.";
    server.api_keys: Kind::Keys, "", Some(("api-key", "KEY")),
        "Bearer keys that clients may use; with none, no key is asked for. /health, /ready, /docs, /openapi.json and the console's page are always open. As a table a key has a name, for logs and traces, and limits of its own in place of limits.key_*.",
        "The server can be reached by others. Prefer file or environment: a flag shows in the process list.";
    server.admin_key: Kind::Text { auto: false, check: any_text }, "", None,
        "Bearer key of /admin/config, where settings are seen and changed while the server runs; none of api_keys is good there. It reads /metrics and the console's events too, and is good for nothing else. Empty: nobody may.",
        "Settings are to be changed without a restart. In a file or the environment: a flag shows in the process list.";
    server.metrics_key: Kind::Text { auto: false, check: any_text }, "", None,
        "Bearer key of /metrics and of what the console shows, which tell of the requests of all clients; admin_key is good there too, and none of api_keys. Empty: where api_keys are set, admin_key alone; where none are, no key is asked for.",
        "Prometheus reads a server that has api_keys: a key of its own. In a file or the environment: a flag shows in the process list.";
    server.cors_allowed_origins: Kind::List, "", None,
        "Origins (https://chat.example.org) whose web pages may use this server; \"*\" is any, none is none.",
        "A page in a browser talks to this server without one in between.";
    server.cors_allow_credentials: Kind::Bool, "", None,
        "Whether those pages may send cookies and other credentials of the browser. Keys in Authorization need none.",
        "A proxy in front of this server asks for cookies.";
    server.cache_isolation: Kind::Choice(CacheIsolation::NAMES), "", None,
        "Who shares cached prefixes: per_key, requests of one of the api_keys; shared, all requests. A request's cache_salt divides either further.",
        "shared, where those who hold keys trust each other and begin their prompts the same: how fast an answer begins then tells one what another has asked.";
    server.include_kv_usage: Kind::Bool, "", None,
        "Whether usage says what memory pressure has cost a request (usage.kv), where the request does not say (include_kv_usage).",
        "Whoever reads the answers cannot change the requests.";
    server.pause_comments: Kind::Bool, "", None,
        "Whether a stream says in comments when memory pressure pauses it and when it goes on, where the request does not say (pause_comments).",
        "Clients or proxies give up on streams that are silent.";
    server.max_requests: int(1, 1_000_000), "requests", None,
        "Requests held at once, queued and running; one more is answered with 429.",
        "Lower, to turn clients away sooner instead of letting them wait; higher for bursts.";
    server.max_share_per_key: Kind::Float { min: 0.0, or_equal: false, max: 1.0, auto: true }, "fraction", None,
        "Part of max_requests that requests of one of the api_keys may take together, each prompt of a batch for itself; one more is refused (429). auto is 0.75 where there are two keys or more, and 1 for one alone.",
        "1 where all keys are one client's; lower where there are many.";
    server.retry_after_s: int(0, 3600), "s", None,
        "What a 429 tells the client in Retry-After.",
        "Clients come back too soon or too late.";
    server.drain_delay_s: int(0, 3600), "s", None,
        "After SIGINT or SIGTERM, how long requests are still taken while /ready says 503 already.",
        "A load balancer goes by /ready: a little longer than it takes to notice.";
    server.drain_timeout_s: int(0, 86_400), "s", None,
        "After that, time for running requests to finish; what still runs then ends with an error.",
        "Answers take longer than this; stay below the supervisor's own limit.";
    server.max_body_bytes: int(1024, 1 << 30), "bytes", None,
        "Largest request body; a larger one is answered with 413. The default is some two million tokens of text; reading a body takes up to ten times its size.",
        "Prompts are longer (higher), or clients are not trusted (lower).";
    server.header_timeout_s: int(0, 3600), "s", None,
        "Time for a client to send the first request's head, and to finish a TLS handshake; 0 is any. A later head has this time and server.keep_alive_s together.",
        "Clients are far away, or hold connections open on purpose (lower).";
    server.body_timeout_s: int(0, 3600), "s", None,
        "Time for a client to send a request's body; 408 after that. 0 is any.",
        "Large prompts over slow lines (higher).";
    server.request_timeout_s: int(0, 86_400), "s", None,
        "Time for a whole answer from when its request has been read, waiting included; then it ends with an error, 504 where nothing has been sent. 0 is any.",
        "Nobody waits longer than this for an answer anyway.";
    server.write_timeout_s: int(0, 3600), "s", None,
        "A client that takes nothing of what is ready for it for this long is cut off, and its request cancelled; 0 is never.",
        "Clients stop reading for longer on purpose.";
    server.max_unread_mib: int(0, 1 << 20), "MiB", None,
        "A client whose stream comes faster than it reads is cut off, and its request cancelled, when so much of the answer waits for it; 0 is any.",
        "Clients read slowly on purpose, and there is memory for what waits.";
    server.max_answer_logprobs: int(0, 1_000_000_000), "log-probabilities", None,
        "Log-probabilities of the output that an answer may have which is not a stream, those of the most likely tokens counted; an eighth of it for /v1/responses, whose streams repeat them at the end. A request whose answer gets more ends with an error. 0 is any.",
        "Clients ask for whole answers of many thousand tokens with many top_logprobs (each takes 100 bytes).";
    server.keep_alive_s: int(1, 3600), "s", None,
        "How long a connection without requests stays open.",
        "A load balancer keeps its own longer: more than that, so that none is closed just as a request comes.";
    server.tls_cert: Kind::Text { auto: false, check: any_text }, "", None,
        "File with the server's certificate and those between it and its root (PEM); empty is no TLS. Read again at SIGHUP.",
        "Clients come over a network, and nothing in between speaks TLS for this server.";
    server.tls_key: Kind::Text { auto: false, check: any_text }, "", None,
        "File with the certificate's private key (PEM). Read again at SIGHUP.",
        "With tls_cert.";
    server.admin_listen: Kind::Text { auto: false, check: socket_address }, "", None,
        "Address and port (127.0.0.1:9000) that /metrics and /admin are served on, without TLS, and no longer on server.port; /health and /ready are on both. Empty: on server.port.",
        "Everybody can reach server.port.";
    server.trust_request_chat_template: Kind::Bool, "", None,
        "Requests may bring a chat_template of their own.",
        "Clients may say all of the prompt: a template writes it. What it may cost is bounded.";
    server.debug_endpoints: Kind::Bool, "", None,
        "Serve POST /admin/debug/fail_step, with which whoever has admin_key lets a step fail as if the device had.",
        "On a server for trials, to see what a failure does: alerts, recordings, clients' retries.";
    server.workers: int(0, 1024), "threads", None,
        "Threads for HTTP; 0 is one for each core, at most 4.",
        "Thousands of streams at once.";

    limits.max_connections: int(0, 1_000_000), "connections", None,
        "Connections open at once on server.port; more of them wait until one closes. Divided evenly among server.workers, and rounded down to a multiple of them.",
        "Below half of the limit of open files (ulimit -n), of which each takes two.";
    limits.requests_per_minute: int(0, 1_000_000_000), "requests", None,
        "Requests that generate, of all clients together: so many at once, and as many more a minute. Beyond: 429.",
        "What is behind this server, or its price, is to be bounded.";
    limits.tokens_per_minute: int(0, 1_000_000_000_000), "tokens", None,
        "Tokens of prompts and outputs, of all clients together. A request is charged with its prompt and max_tokens when it comes, and gets back what it has not used.",
        "As before, where requests differ in length.";
    limits.key_requests_per_minute: int(0, 1_000_000_000), "requests", None,
        "The same for each of server.api_keys that says nothing else.",
        "One client should not use up what is there for all.";
    limits.key_tokens_per_minute: int(0, 1_000_000_000_000), "tokens", None,
        "The same for each of server.api_keys that says nothing else.",
        "One client should not use up what is there for all.";
    limits.key_max_requests: int(0, 1_000_000), "requests", None,
        "Requests at once of each of server.api_keys that says nothing else.",
        "One client's queue should be short.";
    limits.key_max_connections: int_or_auto(0, 1_000_000), "connections", None,
        "Connections at once of each of server.api_keys that says nothing else: a connection counts for the key that it was last used with. Beyond: 429, and the connection is closed. auto is three quarters of limits.max_connections where there are two keys or more, and no limit for one alone or where max_connections is 0.",
        "0 where all keys are one client's, or come through one gateway.";

    limits.max_body_values: int(0, 1_000_000_000), "values", None,
        "JSON values in a request's body, those in arrays and objects counted too; token ids of prompts and fields that are not known are not. Beyond: 400.",
        "Requests have very large schemas, tools or lists (higher).";
    limits.max_parsing_bytes: int(0, 1 << 40), "bytes", None,
        "Bytes of request bodies above 16 KiB that are read at once, of all clients together. Beyond: 429.",
        "Many clients send long prompts at the same time (higher), or memory is short (lower).";

    model.path: NAME, "", Some(("model", "DIR|OWNER/NAME|demo")),
        "Directory of a Hugging Face checkpoint, name of a model on the hub (Qwen/Qwen2.5-1.5B-Instruct), or demo for the small model inside the program.",
        "Always, except to try Pagetide out.";
    model.revision: Kind::Text { auto: true, check: revision }, "", Some(("revision", "NAME")),
        "Branch, tag or commit of a hub model; auto is main.",
        "A commit, so that every start serves the same weights.";
    model.dtype: Kind::Choice(DtypeChoice::NAMES), "", Some(("dtype", "auto|float32|float16|bfloat16")),
        "Type of weights and KV cache; auto is the checkpoint's own.",
        "float32 to compare outputs exactly; bfloat16 to halve the memory of a float32 checkpoint.";
    model.max_model_len: int_or_auto(1, 1 << 31), "tokens", Some(("max-model-len", "N")),
        "Prompt and output together, per sequence; auto is the model's own limit.",
        "Lower, so that one request cannot take the whole pool.";
    model.load_format: Kind::Choice(LoadFormat::NAMES), "", Some(("load-format", "auto|dummy|null")),
        "auto reads the checkpoint's safetensors; dummy makes random weights from config.json alone, with the demo model's tokenizer where there is none; null computes nothing and answers with random tokens, which do not end before max_tokens.",
        "dummy, to measure a model's shape without its weights; null, to measure everything around a model.";
    model.tool_call_parser: Kind::Choice(ToolCallParser::NAMES), "",
        Some(("tool-call-parser", "auto|none|hermes|llama3_json|mistral")),
        "In which words the model calls tools: hermes (Hermes, Qwen), llama3_json, mistral; auto is what its chat template shows, none reads no calls.",
        "The chat template is of no known format, or of another than the model was trained on; the start says what auto finds.";
    model.reasoning_parser: Kind::Choice(ReasoningParser::NAMES), "",
        Some(("reasoning-parser", "auto|none|deepseek_r1|qwen3|mistral")),
        "How the model marks its reasoning: <think> (qwen3; deepseek_r1 where the first mark may be missing) or [THINK] (mistral); auto is what its chat template shows, none leaves it in the content.",
        "Reasoning comes as content, or content as reasoning.";

    device.kind: Kind::Choice(DeviceKind::NAMES), "", Some(("device", "auto|cpu|cuda")),
        "Where the model runs; auto is the GPU if there is one, else the CPU.",
        "To be sure: cpu or cuda fails instead of falling back.";
    device.threads: int(0, 1024), "threads", None,
        "Threads of the CPU backend; 0 is one for each core.",
        "Other programs need cores, or hyperthreads are counted as cores.";
    device.isa: Kind::Choice(Isa::NAMES), "", None,
        "Instruction set of the CPU kernels; auto is the best this machine has.",
        "To compare, or to get the same bytes on different machines.";
    device.memory_utilization: Kind::Float { min: 0.0, or_equal: false, max: 1.0, auto: true }, "fraction",
        Some(("device-memory-utilization", "F")),
        "Part of the device's memory for weights and KV blocks; auto is 0.9 on a GPU, 0.5 on the CPU.",
        "Other programs share the device, or out-of-memory errors at start.";
    device.cuda_library_path: Kind::List, "", None,
        "Folders searched for libcuda, libnvrtc and libcublasLt before the usual ones.",
        "pagetide doctor does not find them.";
    device.kernel_cache: Kind::Text { auto: true, check: not_empty }, "", None,
        "Folder of compiled CUDA kernels; auto is pagetide/kernels in the user's cache folder.",
        "The home folder is not writable, or several machines share one.";
    device.cuda_graphs: Kind::Bool, "", None,
        "Replay decode steps on a GPU as CUDA graphs.",
        "To look for an error in a step.";
    device.batch_invariant: Kind::Bool, "", Some(("batch-invariant", "true|false")),
        "On a GPU, compute every token the same way whatever else is in the step, so that resumed, cached and recomputed requests return the same bytes; always so on the CPU.",
        "true, where the same answer is worth more than speed.";
    device.on_failure: Kind::Choice(OnFailure::NAMES), "", None,
        "When a step has failed and its requests with it: restart makes the KV pools anew and goes on, exit ends the process with a non-zero status.",
        "exit, where a supervisor restarts the process, perhaps on another device.";
    device.step_timeout_s: int(0, 86_400), "s", None,
        "A step that takes longer is taken for hung: all requests fail and the process exits with a non-zero status. 0 waits for ever.",
        "Higher, if steps of a large model on a slow device can take minutes; lower, to be replaced sooner.";

    cache.block_size: int(1, 256), "tokens", Some(("block-size", "N")),
        "Tokens in a KV block.",
        "Smaller wastes fewer slots and shares shorter prefixes; larger has less overhead per token.";
    cache.num_device_blocks: int_or_auto(1, u32::MAX as u64), "blocks", Some(("num-device-blocks", "N")),
        "KV blocks on the device; auto is what fits in device.memory_utilization, and for the demo model 2048 at most.",
        "To fix the pool's size, in tests and comparisons.";
    cache.enable_prefix_caching: Kind::Bool, "", Some(("enable-prefix-caching", "true|false")),
        "Keep blocks of finished requests and use them for prompts that begin the same.",
        "To measure without it. Outputs are the same either way.";
    cache.eviction: Kind::Choice(Eviction::NAMES), "", None,
        "Which cached blocks go first when room is needed, on either tier: adaptive learns from the requests what blocks that were used so and so often and so long ago are worth, so that prompts which come once do not push out what is shared; lru takes the least recently used.",
        "To compare. Outputs are the same either way.";

    cache.max_share_per_key: Kind::Float { min: 0.0, or_equal: false, max: 1.0, auto: false }, "fraction", None,
        "Part of the device blocks that requests of one of the api_keys may hold when another of its requests starts: that one waits, and those of other keys go before it. A key that holds nothing can always start one; 1 is no quota.",
        "One key's load should leave room for the others.";

    swap.space_gib: Kind::Float { min: 0.0, or_equal: true, max: 65536.0, auto: false }, "GiB",
        Some(("swap-space-gib", "G")),
        "CPU memory for the blocks of preempted sequences, and for prefixes that the device no longer holds; 0 is no swap tier.",
        "More if pagetide_preemptions_total grows by mode=recompute and memory is free.";
    swap.max_space_gib: Kind::Float { min: 0.0, or_equal: true, max: 65536.0, auto: true }, "GiB", None,
        "How far space_gib may be raised while the server runs. On the CPU only address space is kept for it, and auto is half of the memory that is available at the start, or space_gib where that is more; on a GPU all of it is taken and pinned at the start, and auto is space_gib.",
        "space_gib is to be raised without a restart, further than auto allows.";
    swap.high_watermark: Kind::Float { min: 0.0, or_equal: true, max: 1.0, auto: false }, "fraction", None,
        "Part of the device blocks in use above which full blocks of the sequences that would yield first are copied ahead of need (write-behind); 1 is never.",
        "Lower if preemptions come in bursts; higher if pagetide_swap_out_blocks_total grows where nothing is preempted.";
    swap.max_tail_blocks: int(0, 65_536), "blocks", None,
        "Full blocks that such a sequence may have beside those copied ahead. Its preemption copies so many, those that its last step has filled (two steps, with scheduler.overlap) and the partly filled one. It is no bound for a preemption that was not foreseen, or where copies wait or the swap tier is full: pagetide_preemptions_over_tail_total counts these.",
        "Lower for shorter preemptions; higher for fewer copies.";
    swap.max_share_per_key: Kind::Float { min: 0.0, or_equal: false, max: 1.0, auto: false }, "fraction", None,
        "Part of that memory for preempted sequences of one of the api_keys; more of them are computed again instead. 1 is no quota.",
        "One key's load should leave room for the others.";

    scheduler.max_num_seqs: int(1, 65_536), "sequences", Some(("max-num-seqs", "N")),
        "Sequences in a step at most.",
        "Lower for shorter gaps between tokens; higher for throughput.";
    scheduler.max_num_batched_tokens: int_or_auto(1, 1 << 20), "tokens", Some(("max-num-batched-tokens", "N")),
        "Tokens in a step at most, of prompts and decoding together; auto is 512 on the CPU, 2048 on a GPU, and never below max_num_seqs.",
        "Higher to get through long prompts faster; lower for shorter gaps between tokens while that happens.";
    scheduler.inter_token_target_ms: int(0, 3_600_000), "ms", Some(("inter-token-target-ms", "N")),
        "How long a step should take while somebody waits for a next token: prompts get as large a part of it as the steps before say is possible, 32 tokens and three quarters of its time at least. 0 is no target: prompts get what max_num_batched_tokens leaves.",
        "Lower for steadier streams, higher or 0 for a shorter time to first token and throughput.";
    scheduler.preemption_mode: Kind::Choice(PreemptionMode::NAMES), "", Some(("preemption-mode", "auto|swap|recompute")),
        "What a preempted sequence does with its blocks: copy them to CPU memory, or drop them and compute again; auto chooses for each.",
        "To measure one way, or where CPU memory is scarce (recompute).";
    scheduler.admission: Kind::Choice(AdmissionPolicy::NAMES), "", None,
        "What a sequence has to find device blocks for before it runs, beside those that do: expected, what all of them are expected to need, by the lengths of the outputs that have ended, until a preemption would be worth its cost; max_tokens, what all of them may need, so that none is preempted; prompt, the tokens that it has.",
        "max_tokens, where requests say how long their outputs become and steady streams count for more than throughput; prompt to compare.";
    scheduler.policy: Kind::Choice(SchedulingPolicy::NAMES), "", Some(("scheduling-policy", "fcfs|priority")),
        "Who goes first: by arrival, or by the request's priority (lower first), then arrival.",
        "Clients send priority.";
    scheduler.watermark: Kind::Float { min: 0.0, or_equal: true, max: 0.5, auto: false }, "fraction", None,
        "Part of the device blocks that admitting a request must leave free, so that it is not preempted at once.",
        "Higher if pagetide_preemptions_total grows fast under load.";
    scheduler.non_preemptible_share: Kind::Float { min: 0.0, or_equal: true, max: 1.0, auto: false }, "fraction", None,
        "Part of the device blocks that requests with preemptible: false may hold together, with room for all their max_tokens; 0 refuses such requests.",
        "Higher, for more or longer requests that are never paused; what they hold is kept from the others.";
    scheduler.key_turns: Kind::Bool, "", None,
        "Where requests of several server.api_keys wait, the key whose running requests have least of the device blocks and of max_num_seqs goes first, and requests of a key that has more than an equal part yield first; priorities go before that. false: whoever came first.",
        "All keys are one client's, and the order in which requests came counts.";
    scheduler.overlap: Kind::Choice(Overlap::NAMES), "", Some(("overlap", "auto|on|off")),
        "Plan each step while the one before it runs, so that the device never waits for the host; auto is on for a GPU, and off for the CPU, which does both.",
        "To compare, or to look for an error. Outputs are the same either way.";

    intake.tokenizer_threads: int(1, 256), "threads", None,
        "Threads that render chat templates and tokenise prompts.",
        "Long prompts at a high rate: time to first token grows while the device idles.";

    intake.job_timeout_s: int(1, 3600), "s", None,
        "Time for one job on a text thread (parsing a large body, a chat template, tokenising, a grammar), from when it begins; then its request is refused.",
        "Prompts of millions of tokens on a slow machine.";
    intake.max_prompt_bytes: int_or_auto(1024, 1 << 30), "bytes", None,
        "Largest text of a prompt, and of what /tokenize takes; a larger one is refused before it is tokenised. auto is 16 bytes for each of max_model_len tokens, at least 256 KiB. A prompt that may be cut (truncate_prompt_tokens) may have four times as many.",
        "Prompts have more than 16 bytes a token and yet fit the model: long runs of spaces, say.";
    intake.grammar_cpu_s: Kind::Float { min: 0.1, or_equal: true, max: 600.0, auto: false }, "s", None,
        "Processor time that compiling a client's grammar, JSON schema or regular expression may take; more is refused. It is compiled in a process of its own first, and in the server only where that ended well.",
        "Clients are trusted, and their schemas large.";
    intake.grammar_memory_mib: int(16, 65_536), "MiB", None,
        "Memory that compiling one may take.",
        "As before.";
    intake.grammar_work_per_token: int_or_auto(10, 1_000_000), "units", None,
        "Work that each token of a request with a grammar adds to what its masks may take, up to a hundred times as much at once. A unit takes about half a microsecond, and all requests of a step wait for its masks. A request that takes more ends with an error. auto is 500 and one for each 16 tokens of the vocabulary: some ten times what large schemas and patterns take.",
        "Grammars that can be read in many ways are wanted, and the other requests may wait for them.";

    log.level: Kind::Text { auto: false, check: log_filter }, "", None,
        "error, warn, info, debug or trace; or by module: info,pagetide::actors=debug.",
        "To look into something.";
    log.format: Kind::Choice(LogFormat::NAMES), "", None,
        "Lines for people, or one JSON object a line.",
        "json where a log collector reads them.";
    log.slow_request_s: Kind::Float { min: 0.0, or_equal: true, max: 86400.0, auto: false }, "s", None,
        "A request that takes longer is logged as a warning, with where its time went; 0 is none.",
        "Somebody looks after slow requests.";

    metrics.enabled: Kind::Bool, "", None,
        "Record metrics and serve them on /metrics, to whoever has server.metrics_key or server.admin_key; where neither server.api_keys nor server.metrics_key is set, to all.",
        "Hardly ever: they cost next to nothing.";
    metrics.vllm_names: Kind::Bool, "", None,
        "The same facts under vLLM's names too (vllm:num_requests_running, ...), with its labels and its histograms' bounds.",
        "Dashboards, autoscalers or inference gateways that read vLLM are to read this server unchanged.";

    tracing.otlp_endpoint: Kind::Text { auto: false, check: http_url }, "", None,
        "Base URL of a collector that takes OTLP over HTTP (http://localhost:4318; /v1/traces is added); empty traces nothing.",
        "There is a collector: Jaeger, Tempo, OpenTelemetry's own.";
    tracing.sample_ratio: Kind::Float { min: 0.0, or_equal: true, max: 1.0, auto: false }, "fraction", None,
        "Part of the requests that are traced; one that comes as part of a trace (traceparent) is traced where that says so.",
        "Traces cost too much where they are kept.";
    tracing.service_name: NAME, "", None,
        "service.name of the traces.",
        "Several servers send to one collector.";
    console.enabled: Kind::Bool, "", None,
        "Serve the console: the page at /, and what it shows at /console/events. Where api_keys or metrics_key are set, what it shows is for who has metrics_key or admin_key.",
        "Nobody is to see the page, or how many requests there are and how large they are.";
    console.max_rate_hz: Kind::Float { min: 1.0, or_equal: true, max: 60.0, auto: false }, "Hz", None,
        "Snapshots of the engine that are taken a second while somebody watches: one for all who do. Fewer where pools are so large that a snapshot takes more than 1/200 of the time in between.",
        "Lower where every microsecond between two steps counts.";
    console.max_watchers: int(0, 1000), "clients", None,
        "Who may watch at once; one more is answered with 429. 0: nobody, and the page is there to chat.",
        "Many people look at the same server.";
    recorder.minutes: int(0, 1440), "min", None,
        "How many of the last minutes of scheduling are kept in memory, to be written to a file by POST /admin/recording or when the executor fails; 0 records nothing.",
        "Longer, to see what led to something that is noticed late.";
    recorder.max_mib: int(1, 65_536), "MiB", None,
        "Memory for them at most: under load it may hold less than recorder.minutes. Where the state of the engine takes more than a third of it, recording pauses until it takes less, and the log says so.",
        "pagetide_recorder_seconds stays below recorder.minutes, and memory is free.";
    recorder.dir: Kind::Text { auto: false, check: not_empty }, "", None,
        "Folder of the recordings, made when the first is written; a relative one is in the working directory.",
        "The working directory cannot be written, or is not where files should be.";
    recorder.tokens: Kind::Bool, "", None,
        "Recordings hold the tokens of prompts and outputs, and so their text; otherwise only lengths and which prefixes are equal.",
        "To look for an error that depends on the texts, where they may be kept.";
}

fn any_text(_: &str) -> Result<(), String> {
    Ok(())
}

fn not_empty(text: &str) -> Result<(), String> {
    if text.is_empty() { Err("must not be empty".into()) } else { Ok(()) }
}

fn socket_address(text: &str) -> Result<(), String> {
    match text.is_empty() || text.parse::<std::net::SocketAddr>().is_ok() {
        true => Ok(()),
        false => Err(format!("'{text}' is not an address with a port, as in 127.0.0.1:9000 or [::1]:9000")),
    }
}

fn http_url(text: &str) -> Result<(), String> {
    let is_one = reqwest::Url::parse(text).is_ok_and(|url| ["http", "https"].contains(&url.scheme()) && url.has_host());
    match text.is_empty() || is_one {
        true => Ok(()),
        false => Err(format!("'{text}' is not an http:// or https:// URL")),
    }
}

fn revision(text: &str) -> Result<(), String> {
    if crate::model::hub::is_revision(text) {
        Ok(())
    } else {
        Err("must be the name of a branch, tag or commit".into())
    }
}

fn log_filter(text: &str) -> Result<(), String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    for directive in text.split(',').map(str::trim) {
        // To the parser a misspelt level is a module's name, and would silence everything else.
        let is_filter = directive.contains(['=', ':', '[']);
        if !is_filter && !LEVELS.contains(&directive.to_lowercase().as_str()) {
            return Err(format!("'{directive}' is neither one of {} nor a filter MODULE=LEVEL", LEVELS.join(", ")));
        }
    }
    let filter = tracing_subscriber::EnvFilter::builder().parse(text);
    filter.map(drop).map_err(|error| format!("'{text}' is not a log filter: {error}"))
}

/// A configuration file with every setting at its default, unit, range and reason to change it beside each.
pub fn reference_file() -> String {
    let mut out = String::from(
        "# Every setting of Pagetide, at its default. Use what you need of it:\n\
         #   pagetide serve --config pagetide.toml\n\
         # Flags come before environment variables (PAGETIDE_SECTION__NAME), those before this file.\n",
    );
    for (section, about) in SECTIONS {
        write!(out, "\n# {about}.\n[{section}]\n").expect("writing to a String");
        for setting in SETTINGS.iter().filter(|setting| setting.section() == *section) {
            let unit = if setting.unit.is_empty() { String::new() } else { format!(" [{}]", setting.unit) };
            write!(
                out,
                "# {}\n# {}{unit}.{} When to change it: {}\n{} = {}\n",
                setting.doc,
                capitalised(&setting.kind.expected()),
                if live::is_live(setting.key) { " Changes while the server runs." } else { "" },
                setting.when_to_change,
                setting.name(),
                setting.default(),
            )
            .expect("writing to a String");
        }
    }
    out
}

fn capitalised(text: &str) -> String {
    text[..1].to_uppercase() + &text[1..]
}
