//! What the program tells Prometheus.
//!
//! [`install`] once at the start; before it (or without it, in a library or a test) recording does nothing. The
//! functions take plain values and hold their handles: recording is an atomic operation, no lookup, except for
//! [`http_request`] and [`build_info`].

mod table;
pub mod tenants;
pub mod vllm;

pub use table::{Kind, METRICS, Metric};

use crate::engine::arbiter::Choice;
use crate::engine::bill::Tenant;
use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder, Unit};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tenants::TenantMetrics;

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Outcome {
    /// An end token, a stop token or a stop string.
    #[default]
    Stop,
    Length,
    Cancelled,
    Failed,
}

/// Why a request was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rejection {
    QueueFull,
    TooLong,
    Invalid,
    Draining,
    /// More requests a minute than a limit lets in.
    RequestLimit,
    TokenLimit,
    /// More requests at once.
    ConcurrencyLimit,
    /// More connections at once.
    ConnectionLimit,
}

/// As labels say them, in the order of [`Outcome`].
const OUTCOMES: [&str; 4] = ["stop", "length", "cancelled", "failed"];
/// The same of [`Rejection`].
const REJECTIONS: [&str; 8] = [
    "queue_full",
    "too_long",
    "invalid",
    "draining",
    "request_limit",
    "token_limit",
    "concurrency_limit",
    "connection_limit",
];

/// A request that has ended. Times are from its arrival.
#[derive(Clone, Default)]
pub struct EndedRequest {
    pub outcome: Outcome,
    pub tenant: Option<Arc<TenantMetrics>>,
    pub e2e: Duration,
    /// Its first step began; its first token came; its last. `None`: it never got so far.
    pub queued: Option<Duration>,
    pub first_token: Option<Duration>,
    pub last_token: Option<Duration>,
    pub prompt_tokens: usize,
    /// That it could have generated, each sample.
    pub max_tokens: usize,
    /// Tokens of each sample.
    pub generated: Vec<usize>,
}

/// What became of a preempted sequence's blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Preemption {
    Swap,
    Recompute,
}

/// One step of the engine.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct StepMetrics {
    pub sequences: usize,
    pub tokens: usize,
    pub schedule: Duration,
    pub execute: Duration,
    pub sample: Duration,
    /// Between the step before and this one; `None` where there was nothing to do in between.
    pub gap: Option<Duration>,
}

/// Starts recording. Calling it again is harmless.
pub fn install() -> &'static PrometheusHandle {
    let registry = REGISTRY.get_or_init(Registry::new);
    // The recorder keeps every histogram sample until someone drains it; without a scrape that would be for ever.
    static UPKEEP: OnceLock<()> = OnceLock::new();
    UPKEEP.get_or_init(|| {
        let handle = registry.handle.clone();
        let upkeep = move || {
            loop {
                std::thread::sleep(Duration::from_secs(5));
                handle.run_upkeep();
                vllm::run_upkeep();
            }
        };
        if let Err(error) = std::thread::Builder::new().name("pagetide-metrics".into()).spawn(upkeep) {
            tracing::warn!("metrics are drained only when scraped: no thread for it: {error}");
        }
    });
    &registry.handle
}

/// The page of `/metrics` in Prometheus' text format; `None` before [`install`].
pub fn render() -> Option<String> {
    let registry = REGISTRY.get()?;
    registry.handle.run_upkeep();
    Some(registry.handle.render() + &vllm::render())
}

/// Requests held now.
pub fn set_requests(waiting: usize, running: usize, swapped: usize) {
    with(|m| {
        m.requests_waiting.set(waiting as f64);
        m.requests_running.set(running as f64);
        m.requests_swapped.set(swapped as f64);
    });
    vllm::set_requests(waiting + swapped, running);
}

pub fn request_ended(ended: &EndedRequest) {
    with(|m| {
        m.outcomes[ended.outcome as usize].increment(1);
        m.e2e.record(ended.e2e);
    });
    ended.tenant.iter().for_each(|tenant| tenant.ended(ended.outcome));
    vllm::request_ended(ended);
}

/// `tenant`: whose request it was.
pub fn request_rejected(reason: Rejection, tenant: Tenant) {
    with(|m| m.rejections[reason as usize].increment(1));
    tenants::rejected(tenant, reason);
}

/// A request's first step began `queued` after its arrival.
pub fn queue_time(queued: Duration) {
    with(|m| m.queue.record(queued));
}

/// A request's first token came `waited` after its arrival.
pub fn first_token(waited: Duration) {
    with(|m| m.first_token.record(waited));
    vllm::first_token(waited);
}

/// A sequence's next token came `gap` after the one before.
pub fn inter_token(gap: Duration) {
    with(|m| m.inter_token.record(gap));
    vllm::inter_token(gap);
}

/// A request was admitted: tokens of its prompt, and how many of them the prefix cache had.
pub fn prompt_tokens(prompt: usize, cached: usize) {
    with(|m| {
        m.prompt_tokens.increment(prompt as u64);
        m.cached_tokens.increment(cached as u64);
    });
}

pub fn generated_tokens(tokens: usize) {
    with(|m| m.generated_tokens.increment(tokens as u64));
    vllm::generated_tokens(tokens);
}

pub fn recomputed_tokens(tokens: usize) {
    with(|m| m.recomputed_tokens.increment(tokens as u64));
}

pub fn step(step: &StepMetrics) {
    with(|m| {
        m.batch_sequences.record(step.sequences as f64);
        m.step_tokens.record(step.tokens as f64);
        m.step_schedule.record(step.schedule);
        m.step_execute.record(step.execute);
        m.step_sample.record(step.sample);
        if let Some(gap) = step.gap {
            m.step_gap.record(gap);
        }
    });
    vllm::step(step.tokens);
}

/// What was expected when a step was planned.
pub fn forecast(prompt_limit: usize, decodes_s: f64, prompt_token_s: f64) {
    with(|m| {
        m.prompt_limit.set(prompt_limit as f64);
        m.expected_decodes.set(decodes_s);
        m.expected_prompt_token.set(prompt_token_s);
    });
}

/// What decides who is admitted: how long outputs become, and for how many steps blocks had to suffice.
pub fn expectation(output_tokens: usize, horizon: usize) {
    with(|m| {
        m.expected_output.set(output_tokens as f64);
        m.admission_horizon.set(horizon as f64);
    });
}

pub fn set_device_blocks(used: usize, cached: usize, free: usize) {
    with(|m| {
        m.device_used.set(used as f64);
        m.device_cached.set(cached as f64);
        m.device_free.set(free as f64);
    });
    vllm::set_device_blocks(used, used + cached + free);
}

/// `draining` are used too, and beyond the pool's size; `used` are those within it.
pub fn set_swap_blocks(used: usize, cached: usize, free: usize, draining: usize) {
    with(|m| {
        m.swap_used.set(used as f64);
        m.swap_cached.set(cached as f64);
        m.swap_free.set(free as f64);
        m.swap_draining.set(draining as f64);
    });
}

/// A step's empty slots of used device blocks, and all their slots; the ratio is 0 where none is used.
pub fn kv_waste(empty_slots: usize, used_slots: usize) {
    with(|m| {
        m.kv_waste.set(if used_slots == 0 { 0.0 } else { empty_slots as f64 / used_slots as f64 });
        m.kv_empty_slot_steps.increment(empty_slots as u64);
        m.kv_slot_steps.increment(used_slots as u64);
    });
}

pub fn swapped_in(blocks: usize, bytes: usize) {
    with(|m| {
        m.swap_in_blocks.increment(blocks as u64);
        m.swap_in_bytes.increment(bytes as u64);
    });
}

pub fn swapped_out(blocks: usize, bytes: usize) {
    with(|m| {
        m.swap_out_blocks.increment(blocks as u64);
        m.swap_out_bytes.increment(bytes as u64);
    });
}

pub fn preempted(kind: Preemption) {
    with(|m| m.preemptions[kind as usize].increment(1));
    vllm::preempted();
}

/// Prompt tokens looked up in the prefix cache, how many were there, and how many of these in the swap pool alone.
pub fn prefix_cache(queried: usize, hit: usize, swapped: usize) {
    with(|m| {
        m.prefix_queries.increment(queried as u64);
        m.prefix_hits_device.increment((hit - swapped) as u64);
        m.prefix_hits_cpu.increment(swapped as u64);
    });
    vllm::prefix_cache(queried, hit, swapped);
}

/// Seconds that copying a block takes, to the swap pool and to the device, and the blocks that wait for it.
pub fn copies(out_s: f64, in_s: f64, queued_blocks: usize) {
    with(|m| {
        m.copy_out.set(out_s);
        m.copy_in.set(in_s);
        m.copy_queue.set(queued_blocks as f64);
    });
}

pub fn arbiter_decided(choice: Choice) {
    with(|m| m.arbiter[choice as usize].increment(1));
}

/// An HTTP answer. `path` is the route (never what a client made up: each value is a series of its own).
pub fn http_request(path: &'static str, status: u16) {
    if let Some(registry) = REGISTRY.get() {
        let labels = vec![Label::from_static_parts("path", path), Label::new("status", status.to_string())];
        registry.counter(&table::HTTP_REQUESTS, labels).increment(1);
    }
}

/// Settings were to change while the server runs.
pub fn config_changed(is_applied: bool) {
    with(|m| m.config_changes[usize::from(is_applied)].increment(1));
}

/// A client that took nothing of its stream was cut off.
pub fn slow_client_cut() {
    with(|m| m.slow_clients.increment(1));
}

/// What the flight recorder holds.
pub fn recorder(bytes: usize, length: Duration) {
    with(|m| {
        m.recorder_bytes.set(bytes as f64);
        m.recorder_seconds.set(length.as_secs_f64());
    });
}

/// What it held was written to a file: by itself after a failure, or because somebody asked.
pub fn recording_written(after_failure: bool) {
    with(|m| m.recordings[usize::from(after_failure)].increment(1));
}

pub fn executor_restarted() {
    with(|m| m.executor_restarts.increment(1));
}

/// What is running; once, when the model is loaded.
pub fn build_info(model: &str, device: &str, dtype: &'static str) {
    if let Some(registry) = REGISTRY.get() {
        let labels = vec![
            Label::from_static_parts("version", env!("CARGO_PKG_VERSION")),
            Label::new("model", model.to_owned()),
            Label::new("device", device.to_owned()),
            Label::from_static_parts("dtype", dtype),
        ];
        registry.gauge(&table::BUILD_INFO, labels).set(1.0);
    }
}

static REGISTRY: OnceLock<Registry> = OnceLock::new();

fn with(record: impl FnOnce(&Handles)) {
    if let Some(registry) = REGISTRY.get() {
        record(&registry.handles);
    }
}

struct Registry {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    handles: Handles,
}

/// A handle for each series whose labels are known beforehand, so that each is on the page from the start.
struct Handles {
    requests_waiting: Gauge,
    requests_running: Gauge,
    requests_swapped: Gauge,
    outcomes: [Counter; 4],
    rejections: [Counter; REJECTIONS.len()],
    queue: Histogram,
    first_token: Histogram,
    inter_token: Histogram,
    e2e: Histogram,
    prompt_tokens: Counter,
    generated_tokens: Counter,
    cached_tokens: Counter,
    recomputed_tokens: Counter,
    batch_sequences: Histogram,
    step_tokens: Histogram,
    step_schedule: Histogram,
    step_execute: Histogram,
    step_sample: Histogram,
    step_gap: Histogram,
    prompt_limit: Gauge,
    expected_decodes: Gauge,
    expected_prompt_token: Gauge,
    expected_output: Gauge,
    admission_horizon: Gauge,
    device_used: Gauge,
    device_cached: Gauge,
    device_free: Gauge,
    swap_used: Gauge,
    swap_cached: Gauge,
    swap_free: Gauge,
    swap_draining: Gauge,
    kv_waste: Gauge,
    kv_slot_steps: Counter,
    kv_empty_slot_steps: Counter,
    swap_in_blocks: Counter,
    swap_out_blocks: Counter,
    swap_in_bytes: Counter,
    swap_out_bytes: Counter,
    preemptions: [Counter; 2],
    prefix_queries: Counter,
    prefix_hits_device: Counter,
    prefix_hits_cpu: Counter,
    copy_out: Gauge,
    copy_in: Gauge,
    copy_queue: Gauge,
    arbiter: [Counter; 3],
    config_changes: [Counter; 2],
    executor_restarts: Counter,
    slow_clients: Counter,
    recorder_bytes: Gauge,
    recorder_seconds: Gauge,
    recordings: [Counter; 2],
}

const METADATA: Metadata<'static> = Metadata::new(module_path!(), Level::INFO, Some(module_path!()));

impl Registry {
    fn new() -> Self {
        let mut builder = PrometheusBuilder::new();
        for metric in METRICS.iter().filter(|metric| metric.kind == Kind::Histogram) {
            builder = builder
                .set_buckets_for_metric(Matcher::Full(metric.name.into()), metric.buckets)
                .expect("the table gives every histogram buckets");
        }
        let recorder = builder.build_recorder();
        for metric in METRICS {
            let (name, unit, help) = (metric.name.into(), unit(metric.unit), metric.help.into());
            match metric.kind {
                Kind::Counter => recorder.describe_counter(name, unit, help),
                Kind::Gauge => recorder.describe_gauge(name, unit, help),
                Kind::Histogram => recorder.describe_histogram(name, unit, help),
            }
        }
        let handle = recorder.handle();
        let handles = Handles::new(&recorder);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        recorder.register_gauge(&Key::from_name(table::START_TIME.name), &METADATA).set(now.as_secs_f64());
        Self { recorder, handle, handles }
    }

    fn counter(&self, metric: &'static Metric, labels: Vec<Label>) -> Counter {
        self.recorder.register_counter(&Key::from_parts(metric.name, labels), &METADATA)
    }

    fn gauge(&self, metric: &'static Metric, labels: Vec<Label>) -> Gauge {
        self.recorder.register_gauge(&Key::from_parts(metric.name, labels), &METADATA)
    }
}

fn unit(name: &str) -> Option<Unit> {
    match name {
        "seconds" => Some(Unit::Seconds),
        "bytes" => Some(Unit::Bytes),
        _ => None,
    }
}

impl Handles {
    fn new(recorder: &PrometheusRecorder) -> Self {
        let key = |metric: &'static Metric, value: Option<&'static str>| match value {
            Some(value) => {
                let (label, values) = metric.labels[0];
                assert!(values.split(", ").any(|known| known == value), "{}: {label}={value}", metric.name);
                Key::from_parts(metric.name, vec![Label::from_static_parts(label, value)])
            }
            None => Key::from_static_name(metric.name),
        };
        let counter = |metric| recorder.register_counter(&key(metric, None), &METADATA);
        let counter_of = |metric, value| recorder.register_counter(&key(metric, Some(value)), &METADATA);
        let gauge_of = |metric, value| recorder.register_gauge(&key(metric, Some(value)), &METADATA);
        let histogram = |metric| recorder.register_histogram(&key(metric, None), &METADATA);
        let step_phase = |phase| recorder.register_histogram(&key(&table::STEP_SECONDS, Some(phase)), &METADATA);
        Self {
            requests_waiting: gauge_of(&table::REQUESTS, "waiting"),
            requests_running: gauge_of(&table::REQUESTS, "running"),
            requests_swapped: gauge_of(&table::REQUESTS, "swapped"),
            outcomes: OUTCOMES.map(|v| counter_of(&table::REQUESTS_TOTAL, v)),
            rejections: REJECTIONS.map(|v| counter_of(&table::REJECTED, v)),
            // In the order of `Preemption`, `Choice`.
            preemptions: ["swap", "recompute"].map(|v| counter_of(&table::PREEMPTIONS, v)),
            arbiter: ["swap", "swap_full", "recompute"].map(|v| counter_of(&table::ARBITER, v)),
            queue: histogram(&table::QUEUE_SECONDS),
            first_token: histogram(&table::TIME_TO_FIRST_TOKEN),
            inter_token: histogram(&table::INTER_TOKEN),
            e2e: histogram(&table::E2E),
            prompt_tokens: counter(&table::PROMPT_TOKENS),
            generated_tokens: counter(&table::GENERATED_TOKENS),
            cached_tokens: counter(&table::CACHED_TOKENS),
            recomputed_tokens: counter(&table::RECOMPUTED_TOKENS),
            batch_sequences: histogram(&table::BATCH_SEQUENCES),
            step_tokens: histogram(&table::STEP_TOKENS),
            step_schedule: step_phase("schedule"),
            step_execute: step_phase("execute"),
            step_sample: step_phase("sample"),
            step_gap: histogram(&table::STEP_GAP),
            prompt_limit: recorder.register_gauge(&key(&table::PROMPT_LIMIT, None), &METADATA),
            expected_decodes: gauge_of(&table::EXPECTED_SECONDS, "decodes"),
            expected_prompt_token: gauge_of(&table::EXPECTED_SECONDS, "prompt_token"),
            expected_output: recorder.register_gauge(&key(&table::EXPECTED_OUTPUT, None), &METADATA),
            admission_horizon: recorder.register_gauge(&key(&table::ADMISSION_HORIZON, None), &METADATA),
            device_used: gauge_of(&table::DEVICE_BLOCKS, "used"),
            device_cached: gauge_of(&table::DEVICE_BLOCKS, "cached"),
            device_free: gauge_of(&table::DEVICE_BLOCKS, "free"),
            swap_used: gauge_of(&table::SWAP_BLOCKS, "used"),
            swap_cached: gauge_of(&table::SWAP_BLOCKS, "cached"),
            swap_free: gauge_of(&table::SWAP_BLOCKS, "free"),
            swap_draining: gauge_of(&table::SWAP_BLOCKS, "draining"),
            kv_waste: recorder.register_gauge(&key(&table::KV_WASTE, None), &METADATA),
            kv_slot_steps: counter(&table::KV_SLOT_STEPS),
            kv_empty_slot_steps: counter(&table::KV_EMPTY_SLOT_STEPS),
            swap_in_blocks: counter(&table::SWAP_IN_BLOCKS),
            swap_out_blocks: counter(&table::SWAP_OUT_BLOCKS),
            swap_in_bytes: counter(&table::SWAP_IN_BYTES),
            swap_out_bytes: counter(&table::SWAP_OUT_BYTES),
            prefix_queries: counter(&table::PREFIX_QUERIES),
            prefix_hits_device: counter_of(&table::PREFIX_HITS, "device"),
            prefix_hits_cpu: counter_of(&table::PREFIX_HITS, "cpu"),
            copy_out: gauge_of(&table::COPY_SECONDS, "out"),
            copy_in: gauge_of(&table::COPY_SECONDS, "in"),
            copy_queue: recorder.register_gauge(&key(&table::COPY_QUEUE, None), &METADATA),
            config_changes: ["refused", "applied"].map(|v| counter_of(&table::CONFIG_CHANGES, v)),
            executor_restarts: counter(&table::EXECUTOR_RESTARTS),
            slow_clients: counter(&table::SLOW_CLIENTS),
            recorder_bytes: recorder.register_gauge(&key(&table::RECORDER_BYTES, None), &METADATA),
            recorder_seconds: recorder.register_gauge(&key(&table::RECORDER_SECONDS, None), &METADATA),
            recordings: ["asked", "failure"].map(|v| counter_of(&table::RECORDINGS, v)),
        }
    }
}

#[cfg(test)]
mod tests;
