//! Every metric of the program, once: registered from here, documented from here (`docs/metrics.md`).

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        }
    }
}

/// A metric as Prometheus sees it.
#[derive(Debug)]
pub struct Metric {
    pub name: &'static str,
    pub kind: Kind,
    /// What one of it is: `seconds`, `tokens`, …
    pub unit: &'static str,
    /// Each label with its values (or what they are).
    pub labels: &'static [(&'static str, &'static str)],
    pub help: &'static str,
    /// Upper bounds of a histogram's buckets.
    pub buckets: &'static [f64],
}

/// Waiting times of a whole request: a cached token from an idle server to a long text from a full one.
const REQUEST_BOUNDS: &[f64] =
    &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0];
/// Gaps between tokens: one step of a small model on a fast device to a step behind a swap storm.
const GAP_BOUNDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0];
/// A step and its parts, and the gap between two; scheduling takes microseconds.
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
                kind: Kind::$kind,
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
        "Requests held now: waiting for blocks (new, or to be recomputed), running, or in the swap pool. A request with several samples counts as one until its prompt is computed, and each of its samples from then on.";
    REQUESTS_TOTAL = "pagetide_requests_total" Counter "requests" ["outcome": "stop, length, cancelled, failed"] &[],
        "Requests that ended: at an end token, stop token or stop string; at max_tokens or the model's length; because the client went away; because the engine failed.";
    REJECTED = "pagetide_rejected_total" Counter "requests" ["reason": "queue_full, too_long, invalid, draining, request_limit, token_limit, concurrency_limit, connection_limit, parsing_full"] &[],
        "Requests refused: the queue was full (429); prompt and output can never fit (400); anything else wrong with the request (400); the server was stopping (503); a limit on requests a minute, tokens a minute, requests at once or connections, of the key or of all (429); too many bytes of large bodies were being read (429, counted for no key).";
    SLOW_CLIENTS = "pagetide_slow_clients_total" Counter "requests" [] &[],
        "Streams cut off because the client took nothing of them for server.write_timeout_s, or so little that server.max_unread_mib waited.";
    QUEUE_SECONDS = "pagetide_queue_seconds" Histogram "seconds" [] REQUEST_BOUNDS,
        "From arrival to the first step that worked on the request.";
    TIME_TO_FIRST_TOKEN = "pagetide_time_to_first_token_seconds" Histogram "seconds" [] REQUEST_BOUNDS,
        "From arrival to the first generated token.";
    INTER_TOKEN = "pagetide_inter_token_seconds" Histogram "seconds" [] GAP_BOUNDS,
        "Between two tokens of one sequence.";
    E2E = "pagetide_e2e_seconds" Histogram "seconds" [] REQUEST_BOUNDS,
        "From arrival to the end of the request.";
    PROMPT_TOKENS = "pagetide_prompt_tokens_total" Counter "tokens" [] &[],
        "Prompt tokens of admitted requests, those found in the prefix cache included.";
    GENERATED_TOKENS = "pagetide_generated_tokens_total" Counter "tokens" [] &[],
        "Tokens generated, of all samples.";
    CACHED_TOKENS = "pagetide_cached_tokens_total" Counter "tokens" [] &[],
        "Prompt tokens that were not computed because the prefix cache had them.";
    RECOMPUTED_TOKENS = "pagetide_recomputed_tokens_total" Counter "tokens" [] &[],
        "Tokens computed a second time after a preemption had dropped their blocks.";
    BATCH_SEQUENCES = "pagetide_batch_sequences" Histogram "sequences" [] SEQUENCE_BOUNDS,
        "Sequences in a step.";
    STEP_TOKENS = "pagetide_step_tokens" Histogram "tokens" [] TOKEN_BOUNDS,
        "Tokens computed in a step, of prompts and of decoding together.";
    STEP_SECONDS = "pagetide_step_seconds" Histogram "seconds" ["phase": "schedule, execute, sample"] STEP_BOUNDS,
        "Where a step's time goes: planning with the block pools, the forward pass with its copies, sampling.";
    STEP_GAP = "pagetide_step_gap_seconds" Histogram "seconds" [] STEP_BOUNDS,
        "From the end of a step to the start of the next, as the host sees it: 0 where that one had been submitted before. Times without work are not counted.";
    PROMPT_LIMIT = "pagetide_prompt_limit_tokens" Gauge "tokens" [] &[],
        "Prompt tokens that the latest step could have had beside its decodes: what scheduler.max_num_batched_tokens left, or what was expected to keep within scheduler.inter_token_target_ms.";
    EXPECTED_SECONDS = "pagetide_expected_seconds" Gauge "seconds" ["of": "decodes, prompt_token"] &[],
        "What the scheduler has learned from the steps so far: what the decodes of the latest step take by themselves; what a prompt token adds to a step.";
    EXPECTED_OUTPUT = "pagetide_expected_output_tokens" Gauge "tokens" [] &[],
        "Tokens that an output which may end by itself is expected to get, learned from those that have ended.";
    ADMISSION_HORIZON = "pagetide_admission_horizon_tokens" Gauge "tokens" [] &[],
        "For how many steps, of a token for each sequence, blocks had to suffice for whoever was considered last for admission: until a preemption would be worth its cost.";
    DEVICE_BLOCKS = "pagetide_device_blocks" Gauge "blocks" ["state": "used, cached, free"] &[],
        "KV blocks on the device: held by a sequence; held by nobody but still in the prefix cache; empty.";
    SWAP_BLOCKS = "pagetide_swap_blocks" Gauge "blocks" ["state": "used, cached, free, draining"] &[],
        "KV blocks of the swap pool in CPU memory: of a swapped sequence, or copied ahead for a running one; held by nobody but still in the prefix cache's second level; empty; held beyond the size that the pool was given since (swap.space_gib), until they are given back.";
    COPY_SECONDS = "pagetide_copy_seconds" Gauge "seconds" ["direction": "out, in"] &[],
        "Seconds that copying a block takes, to the swap pool or to the device, learned from the last hundred or so: by these the arbiter decides.";
    COPY_QUEUE = "pagetide_copy_queue_blocks" Gauge "blocks" [] &[],
        "Blocks that wait to be copied between the device and the swap pool.";
    ARBITER = "pagetide_arbiter_decisions_total" Counter "decisions" ["choice": "swap, swap_full, recompute"] &[],
        "What scheduler.preemption_mode = auto chose for sequences that had to yield: all blocks to the swap pool, the full ones, or none.";
    KV_WASTE = "pagetide_kv_waste_ratio" Gauge "ratio" [] &[],
        "Slots of used device blocks that hold no token, as a fraction of all slots of used blocks, in the latest step.";
    KV_SLOT_STEPS = "pagetide_kv_slot_steps_total" Counter "slots" [] &[],
        "Slots of used device blocks, summed over all steps.";
    KV_EMPTY_SLOT_STEPS = "pagetide_kv_empty_slot_steps_total" Counter "slots" [] &[],
        "Slots of used device blocks that hold no token, summed over all steps: divided by pagetide_kv_slot_steps_total, the KV waste of a whole run.";
    SWAP_IN_BLOCKS = "pagetide_swap_in_blocks_total" Counter "blocks" [] &[],
        "Blocks copied from the swap pool to the device.";
    SWAP_OUT_BLOCKS = "pagetide_swap_out_blocks_total" Counter "blocks" [] &[],
        "Blocks copied from the device to the swap pool.";
    SWAP_IN_BYTES = "pagetide_swap_in_bytes_total" Counter "bytes" [] &[],
        "Bytes copied from the swap pool to the device.";
    SWAP_OUT_BYTES = "pagetide_swap_out_bytes_total" Counter "bytes" [] &[],
        "Bytes copied from the device to the swap pool.";
    PREEMPTIONS = "pagetide_preemptions_total" Counter "sequences" ["mode": "swap, recompute"] &[],
        "Sequences that had to give their device blocks away.";
    PREEMPTION_BLOCKS = "pagetide_preemption_blocks" Histogram "blocks" [] BLOCK_BOUNDS,
        "Blocks that a preemption to the swap pool had to copy: those that had not been copied ahead. Times pagetide_copy_seconds, what it cost to leave.";
    TAIL_EXCESSES = "pagetide_preemptions_over_tail_total" Counter "sequences" ["reason": "filled, unforeseen, queue_full, no_room, off"] &[],
        "Preemptions to the swap pool that copied more than pagetide_max_tail_blocks and the partly filled block, by the reason: its last steps had filled blocks (filled); it was not among those expected to yield first, or had just come, or a copy had failed (unforeseen); copies of others were waited for (queue_full); the swap pool had no room for copies ahead (no_room); nothing is copied ahead, as swap.high_watermark is 1 (off).";
    MAX_TAIL = "pagetide_max_tail_blocks" Gauge "blocks" [] &[],
        "The most full blocks that likely victims are to have beside those copied ahead (swap.max_tail_blocks): with the partly filled one, the bound on pagetide_preemption_blocks for preemptions that were foreseen; pagetide_preemptions_over_tail_total counts the others.";
    PREFIX_QUERIES = "pagetide_prefix_cache_queries_total" Counter "tokens" [] &[],
        "Prompt tokens looked up in the prefix cache, both levels.";
    PREFIX_HITS = "pagetide_prefix_cache_hits_total" Counter "tokens" ["tier": "device, cpu"] &[],
        "Prompt tokens found there: on the device, or in the swap pool alone.";
    TENANT_REQUESTS = "pagetide_tenant_requests" Gauge "requests" ["tenant": "name of an API key, or its fingerprint, or other", "state": "waiting, running, swapped"] &[],
        "pagetide_requests of each API key.";
    TENANT_REQUESTS_TOTAL = "pagetide_tenant_requests_total" Counter "requests" ["tenant": "as above", "outcome": "stop, length, cancelled, failed"] &[],
        "pagetide_requests_total of each API key.";
    TENANT_REJECTED = "pagetide_tenant_rejected_total" Counter "requests" ["tenant": "as above", "reason": "queue_full, too_long, invalid, draining, request_limit, token_limit, concurrency_limit, connection_limit, parsing_full"] &[],
        "pagetide_rejected_total of each API key.";
    TENANT_TOKENS = "pagetide_tenant_tokens_total" Counter "tokens" ["tenant": "as above", "kind": "prompt, generated"] &[],
        "pagetide_prompt_tokens_total and pagetide_generated_tokens_total of each API key.";
    TENANT_BLOCKS = "pagetide_tenant_blocks" Gauge "blocks" ["tenant": "as above", "tier": "device, swap"] &[],
        "Blocks that the sequences of each API key hold, on the device and in the swap pool. One that several share counts for each, so that they can add up to more than there are.";
    TENANT_QUOTA = "pagetide_tenant_quota_total" Counter "decisions" ["tenant": "as above", "tier": "device, swap"] &[],
        "Times that an API key's quota stood in the way: its next request had to wait because its others held cache.max_share_per_key, counted once; a preempted sequence was to be computed again, because its others held swap.max_share_per_key.";
    HTTP_REQUESTS = "pagetide_http_requests_total" Counter "requests" ["path": "the route, or other", "status": "HTTP status"] &[],
        "Answers of the HTTP server; 499 where the client left before there was one.";
    TEXT_JOBS = "pagetide_text_jobs" Gauge "jobs" ["state": "waiting, running"] &[],
        "Jobs of the text threads (intake.tokenizer_threads) when this page was made: parsing large bodies, chat templates, tokenising, grammars.";
    TEXT_JOB_SECONDS = "pagetide_text_job_seconds" Histogram "seconds" ["weight": "light, heavy"] REQUEST_BOUNDS,
        "What a job of the text threads took. Heavy jobs leave a thread free for light ones.";
    TEXT_JOB_OLDEST = "pagetide_text_oldest_job_seconds" Gauge "seconds" [] &[],
        "For how long the oldest job that runs on a text thread has run, when this page was made. Far above intake.job_timeout_s: a job does not come back. /ready answers 503 while all text threads have been busy for 10 s and light jobs wait.";
    LOG_DROPPED = "pagetide_log_dropped_lines_total" Counter "lines" [] &[],
        "Lines of the log that were dropped: standard error took nothing (a pipe that nobody reads, a full disk), and too many waited or writing failed.";
    CONFIG_CHANGES = "pagetide_config_changes_total" Counter "changes" ["result": "applied, refused"] &[],
        "Times that settings were to change while the server ran, on SIGHUP or by POST /admin/config, and whether they did.";
    EXECUTOR_RESTARTS = "pagetide_executor_restarts_total" Counter "restarts" [] &[],
        "Times the model executor failed and was rebuilt; the requests running then have failed.";
    RECORDER_BYTES = "pagetide_recorder_bytes" Gauge "bytes" [] &[],
        "Memory that the flight recorder holds (recorder.max_mib).";
    RECORDER_SECONDS = "pagetide_recorder_seconds" Gauge "seconds" [] &[],
        "How far back a recording would begin now (recorder.minutes).";
    RECORDINGS = "pagetide_recordings_total" Counter "files" ["cause": "asked, failure"] &[],
        "Recordings written: because somebody asked (POST /admin/recording), or because the executor failed.";
    START_TIME = "process_start_time_seconds" Gauge "seconds" [] &[],
        "When the process started, in seconds since 1970.";
    BUILD_INFO = "pagetide_build_info" Gauge "none" ["version": "of the program", "model": "as served", "device": "as said at the start", "dtype": "of weights and KV cache"] &[],
        "Always 1; its labels say what is running.";
}
