//! The table of all metrics. They are registered and documented (`docs/metrics.md`) from it.

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MetricKind {
    Counter,
    Gauge,
    Histogram,
}

impl MetricKind {
    pub fn name(self) -> &'static str {
        match self {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        }
    }
}

/// A metric.
#[derive(Debug)]
pub struct Metric {
    pub name: &'static str,
    pub kind: MetricKind,
    /// The unit: `seconds`, `tokens`, …
    pub unit: &'static str,
    /// Each label, with its values or a description of them.
    pub labels: &'static [(&'static str, &'static str)],
    pub help: &'static str,
    /// Upper bounds of a histogram's buckets.
    pub buckets: &'static [f64],
}

/// For times of whole requests: from a cached token of an idle server to a long text of a full one.
const REQUEST_BOUNDS: &[f64] =
    &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0];
/// For gaps between tokens: from a step of a small model on a fast device to a step behind many swaps.
const GAP_BOUNDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0];
/// For a step, its parts, and the gap between two steps. Scheduling takes microseconds.
const STEP_BOUNDS: &[f64] =
    &[1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5];
const SEQUENCE_BOUNDS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0];
const BLOCK_BOUNDS: &[f64] = &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0];
const TOKEN_BOUNDS: &[f64] =
    &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0];

macro_rules! metrics {
    ($($const_name:ident = $name:literal $kind:ident $unit:literal [$($label:literal: $values:literal),*] $buckets:expr, $help:literal;)+) => {
        $(
            pub const $const_name: Metric = Metric {
                name: $name,
                kind: MetricKind::$kind,
                unit: $unit,
                labels: &[$(($label, $values)),*],
                help: $help,
                buckets: $buckets,
            };
        )+

        /// All of them, in the order of the documentation.
        pub const METRICS: &[&Metric] = &[$(&$const_name),+];
    };
}

metrics! {
    REQUESTS = "pagetide_requests" Gauge "requests" ["state": "waiting, running, swapped"] &[],
        "Requests in the engine: waiting for KV blocks (new ones and those to be recomputed), running, or swapped \
         out. A request with several samples counts once until its prompt is computed, then once per sample.";
    REQUESTS_TOTAL = "pagetide_requests_total" Counter "requests" ["outcome": "stop, length, cancelled, failed"] &[],
        "Requests that have ended. stop: at an end token, stop token or stop string. length: at max_tokens or the \
         model's maximum length. cancelled: the client disconnected. failed: the engine failed.";
    REJECTED = "pagetide_rejected_total" Counter "requests" ["reason": "queue_full, too_long, invalid, draining, request_limit, token_limit, concurrency_limit, connection_limit, parsing_full"] &[],
        "Requests refused. queue_full: server.max_requests or the key's share of it is reached (429). too_long: \
         prompt and output can never fit (400). invalid: any other mistake in the request (400). draining: the \
         server is stopping (503). request_limit, token_limit, concurrency_limit, connection_limit: a limit of the \
         API key or of all clients is reached (429). parsing_full: limits.max_parsing_bytes is reached (429); this \
         counts for no API key.";
    SLOW_CLIENTS = "pagetide_slow_clients_total" Counter "requests" [] &[],
        "Streams closed because the client read nothing for server.write_timeout_s, or read so slowly that \
         server.max_unread_mib waited.";
    QUEUE_SECONDS = "pagetide_queue_seconds" Histogram "seconds" [] REQUEST_BOUNDS,
        "Time from the arrival of a request to its first step.";
    TIME_TO_FIRST_TOKEN = "pagetide_time_to_first_token_seconds" Histogram "seconds" [] REQUEST_BOUNDS,
        "Time from the arrival of a request to its first generated token.";
    INTER_TOKEN = "pagetide_inter_token_seconds" Histogram "seconds" [] GAP_BOUNDS,
        "Time between two tokens of a sequence.";
    E2E = "pagetide_e2e_seconds" Histogram "seconds" [] REQUEST_BOUNDS,
        "Time from the arrival of a request to its end.";
    PROMPT_TOKENS = "pagetide_prompt_tokens_total" Counter "tokens" [] &[],
        "Prompt tokens of admitted requests, including tokens found in the prefix cache.";
    GENERATED_TOKENS = "pagetide_generated_tokens_total" Counter "tokens" [] &[],
        "Generated tokens of all samples.";
    CACHED_TOKENS = "pagetide_cached_tokens_total" Counter "tokens" [] &[],
        "Prompt tokens that were found in the prefix cache and not computed.";
    RECOMPUTED_TOKENS = "pagetide_recomputed_tokens_total" Counter "tokens" [] &[],
        "Tokens computed again because a preemption had dropped their blocks.";
    BATCH_SEQUENCES = "pagetide_batch_sequences" Histogram "sequences" [] SEQUENCE_BOUNDS,
        "Sequences in a step.";
    STEP_TOKENS = "pagetide_step_tokens" Histogram "tokens" [] TOKEN_BOUNDS,
        "Tokens computed in a step, prefill and decode together.";
    STEP_SECONDS = "pagetide_step_seconds" Histogram "seconds" ["phase": "schedule, execute, sample"] STEP_BOUNDS,
        "Duration of the parts of a step. schedule: planning, with the block pools. execute: the forward pass and \
         its copies. sample: sampling.";
    STEP_GAP = "pagetide_step_gap_seconds" Histogram "seconds" [] STEP_BOUNDS,
        "Time from the end of a step to the start of the next one, as the host sees it. It is 0 if the next step \
         was already submitted. Idle times are not counted.";
    PROMPT_LIMIT = "pagetide_prompt_limit_tokens" Gauge "tokens" [] &[],
        "Maximum number of prompt tokens in the latest step beside its decodes: what \
         scheduler.max_num_batched_tokens left, or the estimate for scheduler.inter_token_target_ms.";
    EXPECTED_SECONDS = "pagetide_expected_seconds" Gauge "seconds" ["of": "decodes, prompt_token"] &[],
        "The scheduler's estimates from earlier steps. decodes: the time of the latest step's decodes alone. \
         prompt_token: the time that one more prompt token adds to a step.";
    EXPECTED_OUTPUT = "pagetide_expected_output_tokens" Gauge "tokens" [] &[],
        "Expected output length of a request that may end by itself, estimated from earlier outputs.";
    ADMISSION_HORIZON = "pagetide_admission_horizon_tokens" Gauge "tokens" [] &[],
        "Number of steps for which KV blocks had to suffice at the latest admission decision, with one token per \
         sequence and step. After so many steps a preemption would be worth its cost.";
    DEVICE_BLOCKS = "pagetide_device_blocks" Gauge "blocks" ["state": "used, cached, free"] &[],
        "KV blocks on the device. used: held by a sequence. cached: in the prefix cache only. free: empty.";
    SWAP_BLOCKS = "pagetide_swap_blocks" Gauge "blocks" ["state": "used, cached, free, draining"] &[],
        "KV blocks of the swap pool in CPU memory. used: of swapped sequences, and copied ahead for running ones. \
         cached: in the second level of the prefix cache only. free: empty. draining: beyond the pool's new size \
         after swap.space_gib was lowered, until they are released.";
    COPY_SECONDS = "pagetide_copy_seconds" Gauge "seconds" ["direction": "out, in"] &[],
        "Estimated time to copy a block to the swap pool (out) or to the device (in), from about the last hundred \
         copies. The arbiter uses it.";
    COPY_QUEUE = "pagetide_copy_queue_blocks" Gauge "blocks" [] &[],
        "Blocks that wait to be copied between the device and the swap pool.";
    ARBITER = "pagetide_arbiter_decisions_total" Counter "decisions" ["choice": "swap, swap_full, recompute"] &[],
        "Decisions of scheduler.preemption_mode = auto. swap: all blocks of the victim are swapped. swap_full: its \
         full blocks are swapped, and the rest is recomputed. recompute: all is recomputed.";
    KV_WASTE = "pagetide_kv_waste_ratio" Gauge "ratio" [] &[],
        "Fraction of the slots in used device blocks that hold no token, in the latest step.";
    KV_SLOT_STEPS = "pagetide_kv_slot_steps_total" Counter "slots" [] &[],
        "Slots in used device blocks, summed over all steps.";
    KV_EMPTY_SLOT_STEPS = "pagetide_kv_empty_slot_steps_total" Counter "slots" [] &[],
        "Slots in used device blocks that hold no token, summed over all steps. Divided by \
         pagetide_kv_slot_steps_total it is the KV waste of the whole run.";
    SWAP_IN_BLOCKS = "pagetide_swap_in_blocks_total" Counter "blocks" [] &[],
        "Blocks copied from the swap pool to the device.";
    SWAP_OUT_BLOCKS = "pagetide_swap_out_blocks_total" Counter "blocks" [] &[],
        "Blocks copied from the device to the swap pool.";
    SWAP_IN_BYTES = "pagetide_swap_in_bytes_total" Counter "bytes" [] &[],
        "Bytes copied from the swap pool to the device.";
    SWAP_OUT_BYTES = "pagetide_swap_out_bytes_total" Counter "bytes" [] &[],
        "Bytes copied from the device to the swap pool.";
    PREEMPTIONS = "pagetide_preemptions_total" Counter "sequences" ["mode": "swap, recompute"] &[],
        "Preempted sequences. swap: their blocks went to the swap pool. recompute: their blocks were dropped.";
    PREEMPTION_BLOCKS = "pagetide_preemption_blocks" Histogram "blocks" [] BLOCK_BOUNDS,
        "Blocks that a preemption to the swap pool had to copy, without those copied ahead. Multiplied by \
         pagetide_copy_seconds it is the time that the copies took.";
    TAIL_EXCESSES = "pagetide_preemptions_over_tail_total" Counter "sequences" ["reason": "filled, unforeseen, queue_full, no_room, off"] &[],
        "Preemptions to the swap pool that copied more than pagetide_max_tail_blocks and the partly filled block, \
         by reason. filled: its last steps filled blocks. unforeseen: it was not among the likely victims, had just \
         started, or a copy had failed. queue_full: copies of others were in the way. no_room: the swap pool had no \
         room for copies ahead. off: swap.high_watermark is 1, so nothing is copied ahead.";
    MAX_TAIL = "pagetide_max_tail_blocks" Gauge "blocks" [] &[],
        "Maximum number of full blocks of a likely victim that are not copied ahead (swap.max_tail_blocks). With \
         the partly filled block it bounds pagetide_preemption_blocks for preemptions that were foreseen. \
         pagetide_preemptions_over_tail_total counts the others.";
    PREFIX_QUERIES = "pagetide_prefix_cache_queries_total" Counter "tokens" [] &[],
        "Prompt tokens looked up in the prefix cache, both levels.";
    PREFIX_HITS = "pagetide_prefix_cache_hits_total" Counter "tokens" ["tier": "device, cpu"] &[],
        "Prompt tokens found in the prefix cache. device: on the device. cpu: only in the swap pool.";
    TENANT_REQUESTS = "pagetide_tenant_requests" Gauge "requests" ["tenant": "name of an API key, or its fingerprint, or other", "state": "waiting, running, swapped"] &[],
        "pagetide_requests by API key.";
    TENANT_REQUESTS_TOTAL = "pagetide_tenant_requests_total" Counter "requests" ["tenant": "as above", "outcome": "stop, length, cancelled, failed"] &[],
        "pagetide_requests_total by API key.";
    TENANT_REJECTED = "pagetide_tenant_rejected_total" Counter "requests" ["tenant": "as above", "reason": "queue_full, too_long, invalid, draining, request_limit, token_limit, concurrency_limit, connection_limit, parsing_full"] &[],
        "pagetide_rejected_total by API key.";
    TENANT_TOKENS = "pagetide_tenant_tokens_total" Counter "tokens" ["tenant": "as above", "kind": "prompt, generated"] &[],
        "pagetide_prompt_tokens_total and pagetide_generated_tokens_total by API key.";
    TENANT_BLOCKS = "pagetide_tenant_blocks" Gauge "blocks" ["tenant": "as above", "tier": "device, swap"] &[],
        "KV blocks that sequences of the API key hold, on the device and in the swap pool. A block shared by \
         several sequences counts for each, so the sum can exceed the pool.";
    TENANT_QUOTA = "pagetide_tenant_quota_total" Counter "decisions" ["tenant": "as above", "tier": "device, swap"] &[],
        "How often a quota of the API key took effect. device: a request had to wait because the key held \
         cache.max_share_per_key; each request counts once. swap: a preempted sequence had to be recomputed because \
         the key held swap.max_share_per_key.";
    HTTP_REQUESTS = "pagetide_http_requests_total" Counter "requests" ["path": "the route, or other", "status": "HTTP status"] &[],
        "Answers of the HTTP server. Status 499: the client disconnected before there was an answer.";
    TEXT_JOBS = "pagetide_text_jobs" Gauge "jobs" ["state": "waiting, running"] &[],
        "Jobs of the text threads (intake.tokenizer_threads) at the time of the scrape: parsing large bodies, \
         rendering chat templates, tokenising, compiling grammars.";
    TEXT_JOB_SECONDS = "pagetide_text_job_seconds" Histogram "seconds" ["weight": "light, heavy"] REQUEST_BOUNDS,
        "Duration of a job of the text threads. Heavy jobs leave one thread free for light ones.";
    TEXT_JOB_OLDEST = "pagetide_text_oldest_job_seconds" Gauge "seconds" [] &[],
        "Running time of the oldest job on a text thread at the time of the scrape. If it is far above \
         intake.job_timeout_s, the job is stuck. /ready returns 503 when all text threads have been busy for 10 s \
         and light jobs wait.";
    LOG_DROPPED = "pagetide_log_dropped_lines_total" Counter "lines" [] &[],
        "Log lines that were dropped: standard error accepted none (a pipe without a reader, a full disk) and too \
         many lines waited, or writing failed.";
    CONFIG_CHANGES = "pagetide_config_changes_total" Counter "changes" ["result": "applied, refused"] &[],
        "Attempts to change settings while the server runs, by SIGHUP or POST /admin/config.";
    EXECUTOR_RESTARTS = "pagetide_executor_restarts_total" Counter "restarts" [] &[],
        "Times that the model executor failed and was restarted. The requests that were running have failed.";
    RECORDER_BYTES = "pagetide_recorder_bytes" Gauge "bytes" [] &[],
        "Memory of the flight recorder (at most recorder.max_mib).";
    RECORDER_SECONDS = "pagetide_recorder_seconds" Gauge "seconds" [] &[],
        "Time span that a recording written now would cover (at most recorder.minutes).";
    RECORDINGS = "pagetide_recordings_total" Counter "files" ["cause": "asked, failure"] &[],
        "Recordings written. asked: by POST /admin/recording. failure: because the executor failed.";
    WEIGHTS_BYTES = "pagetide_weights_bytes" Gauge "bytes" ["format": "bfloat16, float16, float32, FP8, or one of ggml's, such as Q4_K"] &[],
        "Size of the weight matrices that the device holds in this format, without norms and biases.";
    START_TIME = "process_start_time_seconds" Gauge "seconds" [] &[],
        "Start time of the process, in seconds since 1970.";
    BUILD_INFO = "pagetide_build_info" Gauge "none" ["version": "of the program", "model": "as served", "device": "as said at the start", "dtype": "of weights and KV cache"] &[],
        "Always 1. The labels describe the running program and model.";
}
