//! The series whose labels are known at startup.

use super::events::{ARBITER_CHOICES, OUTCOMES, PREEMPTIONS, REJECTIONS, TAIL_REASONS};
use super::table::{self, METRICS, Metric, MetricKind};
use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder, Unit};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

/// All metrics, once they are installed.
pub static REGISTRY: OnceLock<Registry> = OnceLock::new();

/// Records with the handles; does nothing before the metrics are installed.
pub fn with(record: impl FnOnce(&Handles)) {
    if let Some(registry) = REGISTRY.get() {
        record(&registry.handles);
    }
}

/// All metrics of the program.
pub struct Registry {
    recorder: PrometheusRecorder,
    pub handle: PrometheusHandle,
    pub handles: Handles,
}

/// A handle for each series whose labels are known at startup, so that it is exported from the start.
pub struct Handles {
    pub requests_waiting: Gauge,
    pub requests_running: Gauge,
    pub requests_swapped: Gauge,
    pub outcomes: [Counter; 4],
    pub rejections: [Counter; REJECTIONS.len()],
    pub queue: Histogram,
    pub first_token: Histogram,
    pub inter_token: Histogram,
    pub e2e: Histogram,
    pub prompt_tokens: Counter,
    pub generated_tokens: Counter,
    pub cached_tokens: Counter,
    pub recomputed_tokens: Counter,
    pub batch_sequences: Histogram,
    pub step_tokens: Histogram,
    pub step_schedule: Histogram,
    pub step_execute: Histogram,
    pub step_sample: Histogram,
    pub step_gap: Histogram,
    pub prompt_limit: Gauge,
    pub expected_decodes: Gauge,
    pub expected_prompt_token: Gauge,
    pub expected_output: Gauge,
    pub admission_horizon: Gauge,
    pub device_used: Gauge,
    pub device_cached: Gauge,
    pub device_free: Gauge,
    pub swap_used: Gauge,
    pub swap_cached: Gauge,
    pub swap_free: Gauge,
    pub swap_draining: Gauge,
    pub kv_waste: Gauge,
    pub kv_slot_steps: Counter,
    pub kv_empty_slot_steps: Counter,
    pub swap_in_blocks: Counter,
    pub swap_out_blocks: Counter,
    pub swap_in_bytes: Counter,
    pub swap_out_bytes: Counter,
    pub preemptions: [Counter; 2],
    pub preemption_blocks: Histogram,
    pub tail_excesses: [Counter; 5],
    pub max_tail: Gauge,
    pub prefix_queries: Counter,
    pub prefix_hits_device: Counter,
    pub prefix_hits_cpu: Counter,
    pub copy_out: Gauge,
    pub copy_in: Gauge,
    pub copy_queue: Gauge,
    pub arbiter: [Counter; 3],
    pub text_jobs_waiting: Gauge,
    pub text_jobs_running: Gauge,
    /// Of light jobs, of heavy ones.
    pub text_job_seconds: [Histogram; 2],
    pub text_job_oldest: Gauge,
    pub config_changes: [Counter; 2],
    pub executor_restarts: Counter,
    pub slow_clients: Counter,
    pub log_dropped: Counter,
    pub recorder_bytes: Gauge,
    pub recorder_seconds: Gauge,
    pub recordings: [Counter; 2],
}

pub const METADATA: Metadata<'static> = Metadata::new(module_path!(), Level::INFO, Some(module_path!()));

impl Registry {
    pub fn new() -> Self {
        let mut builder = PrometheusBuilder::new();
        for metric in METRICS.iter().filter(|metric| metric.kind == MetricKind::Histogram) {
            builder = builder
                .set_buckets_for_metric(Matcher::Full(metric.name.into()), metric.buckets)
                .expect("the table gives every histogram buckets");
        }
        let recorder = builder.build_recorder();
        for metric in METRICS {
            let (name, unit, help) = (metric.name.into(), unit(metric.unit), metric.help.into());
            match metric.kind {
                MetricKind::Counter => recorder.describe_counter(name, unit, help),
                MetricKind::Gauge => recorder.describe_gauge(name, unit, help),
                MetricKind::Histogram => recorder.describe_histogram(name, unit, help),
            }
        }
        let handle = recorder.handle();
        let handles = Handles::new(&recorder);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        recorder.register_gauge(&Key::from_name(table::START_TIME.name), &METADATA).set(now.as_secs_f64());
        Self { recorder, handle, handles }
    }

    pub fn counter(&self, metric: &'static Metric, labels: Vec<Label>) -> Counter {
        self.recorder.register_counter(&Key::from_parts(metric.name, labels), &METADATA)
    }

    pub fn gauge(&self, metric: &'static Metric, labels: Vec<Label>) -> Gauge {
        self.recorder.register_gauge(&Key::from_parts(metric.name, labels), &METADATA)
    }
}

pub fn unit(name: &str) -> Option<Unit> {
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
        let histogram_of = |metric, value| recorder.register_histogram(&key(metric, Some(value)), &METADATA);
        let step_phase = |phase| recorder.register_histogram(&key(&table::STEP_SECONDS, Some(phase)), &METADATA);
        Self {
            requests_waiting: gauge_of(&table::REQUESTS, "waiting"),
            requests_running: gauge_of(&table::REQUESTS, "running"),
            requests_swapped: gauge_of(&table::REQUESTS, "swapped"),
            outcomes: OUTCOMES.map(|v| counter_of(&table::REQUESTS_TOTAL, v)),
            rejections: REJECTIONS.map(|v| counter_of(&table::REJECTED, v)),
            preemptions: PREEMPTIONS.map(|v| counter_of(&table::PREEMPTIONS, v)),
            tail_excesses: TAIL_REASONS.map(|v| counter_of(&table::TAIL_EXCESSES, v)),
            arbiter: ARBITER_CHOICES.map(|v| counter_of(&table::ARBITER, v)),
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
            preemption_blocks: histogram(&table::PREEMPTION_BLOCKS),
            max_tail: recorder.register_gauge(&key(&table::MAX_TAIL, None), &METADATA),
            prefix_queries: counter(&table::PREFIX_QUERIES),
            prefix_hits_device: counter_of(&table::PREFIX_HITS, "device"),
            prefix_hits_cpu: counter_of(&table::PREFIX_HITS, "cpu"),
            copy_out: gauge_of(&table::COPY_SECONDS, "out"),
            copy_in: gauge_of(&table::COPY_SECONDS, "in"),
            copy_queue: recorder.register_gauge(&key(&table::COPY_QUEUE, None), &METADATA),
            text_jobs_waiting: gauge_of(&table::TEXT_JOBS, "waiting"),
            text_jobs_running: gauge_of(&table::TEXT_JOBS, "running"),
            text_job_seconds: ["light", "heavy"].map(|v| histogram_of(&table::TEXT_JOB_SECONDS, v)),
            text_job_oldest: recorder.register_gauge(&key(&table::TEXT_JOB_OLDEST, None), &METADATA),
            config_changes: ["refused", "applied"].map(|v| counter_of(&table::CONFIG_CHANGES, v)),
            executor_restarts: counter(&table::EXECUTOR_RESTARTS),
            slow_clients: counter(&table::SLOW_CLIENTS),
            log_dropped: counter(&table::LOG_DROPPED),
            recorder_bytes: recorder.register_gauge(&key(&table::RECORDER_BYTES, None), &METADATA),
            recorder_seconds: recorder.register_gauge(&key(&table::RECORDER_SECONDS, None), &METADATA),
            recordings: ["asked", "failure"].map(|v| counter_of(&table::RECORDINGS, v)),
        }
    }
}
