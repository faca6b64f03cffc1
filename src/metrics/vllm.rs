//! The metrics under vLLM's names (`metrics.vllm_names`), for dashboards and gateways that expect those.
//!
//! Names, labels, units and bucket bounds are those of vLLM's V1 engine. Histograms are recorded twice, because their
//! bounds differ from ours. [`VLLM_METRICS`] says where vLLM counts differently.

use super::ended::EndedRequest;
use super::events::{Outcome, Rejection};
use super::registry::{METADATA, unit};
use super::table::{Metric, MetricKind};
use metrics::{Counter, Gauge, Histogram, Key, Label, Recorder};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use std::sync::OnceLock;
use std::time::Duration;

/// The facts that labels and bounds depend on. They are known when the model is loaded.
#[derive(Clone, Debug)]
pub struct ServedModel {
    /// The name that clients use.
    pub name: String,
    /// Tokens.
    pub max_model_len: usize,
    /// Labels of `vllm:cache_config_info`.
    pub cache_config: Vec<(&'static str, String)>,
}

/// Starts recording under vLLM's names. Only the first call has an effect.
pub fn install(model: &ServedModel) {
    EXPORT.get_or_init(|| Export::new(model));
}

static EXPORT: OnceLock<Export> = OnceLock::new();

struct Export {
    handle: PrometheusHandle,
    handles: VllmHandles,
}

/// The metrics as text; empty before [`install`].
pub(super) fn render() -> String {
    run_upkeep();
    EXPORT.get().map(|export| export.handle.render()).unwrap_or_default()
}

pub(super) fn run_upkeep() {
    if let Some(export) = EXPORT.get() {
        export.handle.run_upkeep();
    }
}

fn with(record: impl FnOnce(&VllmHandles)) {
    if let Some(export) = EXPORT.get() {
        record(&export.handles);
    }
}

/// vLLM counts preempted requests as waiting, so `waiting` includes swapped ones.
pub(super) fn set_requests(waiting: usize, running: usize) {
    with(|m| {
        m.running.set(running as f64);
        m.waiting.set(waiting as f64);
        // All of them wait for blocks or a free place. Other reasons of vLLM (LoRA, remote KV) do not exist here.
        m.waiting_by_reason[0].set(waiting as f64);
    });
}

pub(super) fn set_device_blocks(used: usize, all: usize) {
    with(|m| m.cache_usage.iter().for_each(|gauge| gauge.set(used as f64 / all.max(1) as f64)));
}

/// Prompt tokens of a request that starts: all of them, those cached on either tier, and those only in the swap pool.
pub(super) fn prefix_cache(prompt: usize, hit: usize, swapped: usize) {
    with(|m| {
        let local = hit - swapped;
        m.prompt_tokens.increment(prompt as u64);
        m.prompt_tokens_cached.increment(hit as u64);
        let sources = [prompt - hit, local, swapped];
        m.prompt_tokens_by_source.iter().zip(sources).for_each(|(counter, tokens)| counter.increment(tokens as u64));
        m.prefix_queries.increment(prompt as u64);
        m.prefix_hits.increment(local as u64);
        m.external_prefix_queries.increment((prompt - local) as u64);
        m.external_prefix_hits.increment(swapped as u64);
    });
}

pub(super) fn preempted() {
    with(|m| m.preemptions.increment(1));
}

pub(super) fn generated_tokens(tokens: usize) {
    with(|m| m.generation_tokens.increment(tokens as u64));
}

pub(super) fn step(tokens: usize) {
    with(|m| m.iteration_tokens.record(tokens as f64));
}

pub(super) fn first_token(waited: Duration) {
    with(|m| m.time_to_first_token.record(waited));
}

pub(super) fn inter_token(gap: Duration) {
    with(|m| m.inter_token.iter().for_each(|histogram| histogram.record(gap)));
}

pub(super) fn request_ended(ended: &EndedRequest) {
    with(|m| {
        m.success[ended.outcome as usize].increment(1);
        // Cancelled and failed requests do not count in latencies and lengths.
        if !matches!(ended.outcome, Outcome::Stop | Outcome::Length) {
            return;
        }
        let generated: usize = ended.generated.iter().sum();
        let longest = ended.generated.iter().copied().max().unwrap_or(0);
        m.e2e.record(ended.e2e);
        m.request_preemptions.record(ended.preemptions as f64);
        m.request_prompt_tokens.record(ended.prompt_tokens as f64);
        m.request_generation_tokens.record(generated as f64);
        m.request_max_generation_tokens.record(longest as f64);
        m.params_n.record(ended.generated.len() as f64);
        m.params_max_tokens.record(ended.max_tokens as f64);
        let (Some(queued), Some(first)) = (ended.queued, ended.first_token) else { return };
        let last = ended.last_token.unwrap_or(first);
        let decode = last.saturating_sub(first);
        m.queue_time.record(queued);
        m.prefill_time.record(first.saturating_sub(queued));
        m.decode_time.record(decode);
        m.inference_time.record(last.saturating_sub(queued));
        if longest > 1 {
            m.request_time_per_token.record(decode / (longest - 1) as u32);
        }
    });
}

/// Only full queues count: vLLM has no other reasons.
pub(super) fn request_rejected(reason: Rejection) {
    let place = match reason {
        Rejection::QueueFull | Rejection::ConcurrencyLimit => 0,
        Rejection::TokenLimit => 1,
        _ => return,
    };
    with(|m| m.admission_rejections[place].increment(1));
}

struct VllmHandles {
    running: Gauge,
    waiting: Gauge,
    waiting_by_reason: [Gauge; 2],
    /// Under the current name and an older one.
    cache_usage: [Gauge; 2],
    prefix_queries: Counter,
    prefix_hits: Counter,
    external_prefix_queries: Counter,
    external_prefix_hits: Counter,
    preemptions: Counter,
    request_preemptions: Histogram,
    /// By the number of requests, and by that of tokens.
    admission_rejections: [Counter; 2],
    prompt_tokens: Counter,
    prompt_tokens_by_source: [Counter; 3],
    prompt_tokens_cached: Counter,
    generation_tokens: Counter,
    /// In the order of [`Outcome`].
    success: [Counter; 4],
    request_prompt_tokens: Histogram,
    request_generation_tokens: Histogram,
    request_max_generation_tokens: Histogram,
    params_n: Histogram,
    params_max_tokens: Histogram,
    iteration_tokens: Histogram,
    time_to_first_token: Histogram,
    /// Under the current name and an older one.
    inter_token: [Histogram; 2],
    request_time_per_token: Histogram,
    e2e: Histogram,
    queue_time: Histogram,
    inference_time: Histogram,
    prefill_time: Histogram,
    decode_time: Histogram,
}

impl Export {
    fn new(model: &ServedModel) -> Self {
        let mut builder = PrometheusBuilder::new();
        for metric in VLLM_METRICS.iter().filter(|metric| metric.kind == MetricKind::Histogram) {
            let up_to_model = one_two_five(model.max_model_len);
            let bounds = if metric.buckets.is_empty() { &up_to_model } else { metric.buckets };
            builder = builder
                .set_buckets_for_metric(Matcher::Full(metric.name.into()), bounds)
                .expect("every histogram has buckets");
        }
        let recorder = builder.build_recorder();
        for metric in VLLM_METRICS {
            let (name, unit, help) = (metric.name.into(), unit(metric.unit), metric.help.into());
            match metric.kind {
                MetricKind::Counter => recorder.describe_counter(name, unit, help),
                MetricKind::Gauge => recorder.describe_gauge(name, unit, help),
                MetricKind::Histogram => recorder.describe_histogram(name, unit, help),
            }
        }
        let info = model.cache_config.iter().map(|(name, value)| Label::new(*name, value.clone()));
        let info: Vec<_> = info.chain([Label::from_static_parts("engine", ENGINE)]).collect();
        recorder.register_gauge(&Key::from_parts(CACHE_CONFIG.name, info), &METADATA).set(1.0);
        Self { handle: recorder.handle(), handles: VllmHandles::new(&recorder, &model.name) }
    }
}

impl VllmHandles {
    fn new(recorder: &PrometheusRecorder, model: &str) -> Self {
        let key = |metric: &Metric, value: Option<&'static str>| {
            let of_model = [Label::new("model_name", model.to_owned()), Label::from_static_parts("engine", ENGINE)];
            let own = value.map(|value| Label::from_static_parts(metric.labels[2].0, value));
            Key::from_parts(metric.name, of_model.into_iter().chain(own).collect::<Vec<_>>())
        };
        let gauge = |metric| recorder.register_gauge(&key(metric, None), &METADATA);
        let counter = |metric| recorder.register_counter(&key(metric, None), &METADATA);
        let histogram = |metric| recorder.register_histogram(&key(metric, None), &METADATA);
        let counter_of = |metric, value| recorder.register_counter(&key(metric, Some(value)), &METADATA);
        Self {
            running: gauge(&RUNNING),
            waiting: gauge(&WAITING),
            waiting_by_reason: ["capacity", "deferred"]
                .map(|reason| recorder.register_gauge(&key(&WAITING_BY_REASON, Some(reason)), &METADATA)),
            cache_usage: [&CACHE_USAGE, &OLD_CACHE_USAGE].map(gauge),
            prefix_queries: counter(&PREFIX_QUERIES),
            prefix_hits: counter(&PREFIX_HITS),
            external_prefix_queries: counter(&EXTERNAL_PREFIX_QUERIES),
            external_prefix_hits: counter(&EXTERNAL_PREFIX_HITS),
            preemptions: counter(&PREEMPTIONS),
            request_preemptions: histogram(&REQUEST_PREEMPTIONS),
            admission_rejections: ["max_num_queued_reqs", "max_num_queued_tokens"]
                .map(|reason| counter_of(&ADMISSION_REJECTIONS, reason)),
            prompt_tokens: counter(&PROMPT_TOKENS),
            prompt_tokens_by_source: ["local_compute", "local_cache_hit", "external_kv_transfer"]
                .map(|source| counter_of(&PROMPT_TOKENS_BY_SOURCE, source)),
            prompt_tokens_cached: counter(&PROMPT_TOKENS_CACHED),
            generation_tokens: counter(&GENERATION_TOKENS),
            success: ["stop", "length", "abort", "error"].map(|reason| counter_of(&REQUEST_SUCCESS, reason)),
            request_prompt_tokens: histogram(&REQUEST_PROMPT_TOKENS),
            request_generation_tokens: histogram(&REQUEST_GENERATION_TOKENS),
            request_max_generation_tokens: histogram(&REQUEST_MAX_GENERATION_TOKENS),
            params_n: histogram(&PARAMS_N),
            params_max_tokens: histogram(&PARAMS_MAX_TOKENS),
            iteration_tokens: histogram(&ITERATION_TOKENS),
            time_to_first_token: histogram(&TIME_TO_FIRST_TOKEN),
            inter_token: [&INTER_TOKEN, &OLD_INTER_TOKEN].map(histogram),
            request_time_per_token: histogram(&REQUEST_TIME_PER_TOKEN),
            e2e: histogram(&E2E),
            queue_time: histogram(&QUEUE_TIME),
            inference_time: histogram(&INFERENCE_TIME),
            prefill_time: histogram(&PREFILL_TIME),
            decode_time: histogram(&DECODE_TIME),
        }
    }
}

/// vLLM numbers its engine processes. There is only one here.
const ENGINE: &str = "0";

/// 1, 2, 5, 10, 20, 50 and so on up to `most`.
fn one_two_five(most: usize) -> Vec<f64> {
    let tens = (0..).map_while(|power| 10usize.checked_pow(power));
    let bounds = tens.flat_map(|ten| [1, 2, 5].map(|digit: usize| digit.checked_mul(ten)));
    bounds.map_while(|bound| bound.filter(|bound| *bound <= most.max(1))).map(|bound| bound as f64).collect()
}

const FIRST_TOKEN_BOUNDS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
const TOKEN_TIME_BOUNDS: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
const REQUEST_TIME_BOUNDS: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
const ITERATION_BOUNDS: &[f64] =
    &[1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];
/// 1, 2, 5, ... as far as the model's length.
const UP_TO_MODEL: &[f64] = &[];

macro_rules! vllm_metrics {
    ($($const_name:ident = $name:literal $kind:ident $unit:literal [$($label:literal: $values:literal),*] $buckets:expr, $help:literal;)+) => {
        $(
            const $const_name: Metric = Metric {
                name: $name,
                kind: MetricKind::$kind,
                unit: $unit,
                labels: &[("model_name", "as served"), ("engine", "0"), $(($label, $values)),*],
                help: $help,
                buckets: $buckets,
            };
        )+

        /// All of them, in the order of the documentation. All have the labels `model_name` and `engine`, but the last,
        /// which has `engine` and the settings.
        pub const VLLM_METRICS: &[&Metric] = &[$(&$const_name,)+ &CACHE_CONFIG];
    };
}

vllm_metrics! {
    RUNNING = "vllm:num_requests_running" Gauge "requests" [] &[],
        "Running sequences.";
    WAITING = "vllm:num_requests_waiting" Gauge "requests" [] &[],
        "Waiting sequences: new, preempted and swapped ones.";
    WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason" Gauge "requests" ["reason": "capacity, deferred"] &[],
        "Waiting sequences by reason. All of them wait for capacity.";
    CACHE_USAGE = "vllm:kv_cache_usage_perc" Gauge "ratio" [] &[],
        "Fraction of the device blocks that sequences hold, 0 to 1. Blocks that are only in the prefix cache count \
         as free.";
    OLD_CACHE_USAGE = "vllm:gpu_cache_usage_perc" Gauge "ratio" [] &[],
        "vllm:kv_cache_usage_perc under its older name.";
    PREFIX_QUERIES = "vllm:prefix_cache_queries_total" Counter "tokens" [] &[],
        "Prompt tokens looked up in the prefix cache.";
    PREFIX_HITS = "vllm:prefix_cache_hits_total" Counter "tokens" [] &[],
        "Prompt tokens found in the prefix cache on the device.";
    EXTERNAL_PREFIX_QUERIES = "vllm:external_prefix_cache_queries_total" Counter "tokens" [] &[],
        "Prompt tokens that were not on the device and were looked up in the swap pool.";
    EXTERNAL_PREFIX_HITS = "vllm:external_prefix_cache_hits_total" Counter "tokens" [] &[],
        "Prompt tokens found in the swap pool only.";
    PREEMPTIONS = "vllm:num_preemptions_total" Counter "sequences" [] &[],
        "Preempted sequences, swapped and recomputed.";
    REQUEST_PREEMPTIONS = "vllm:request_num_preemptions" Histogram "preemptions" [] &[1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0],
        "Preemptions of a request, all samples together.";
    ADMISSION_REJECTIONS = "vllm:admission_rejections_total" Counter "requests" ["reason": "max_num_queued_reqs, max_num_queued_tokens"] &[],
        "Requests refused because too many were held, or because a limit of tokens a minute was used up.";
    PROMPT_TOKENS = "vllm:prompt_tokens_total" Counter "tokens" [] &[],
        "Prompt tokens, cached ones included. They count when a request starts; vLLM counts them at the end of the \
         prefill.";
    PROMPT_TOKENS_BY_SOURCE = "vllm:prompt_tokens_by_source_total" Counter "tokens" ["source": "local_compute, local_cache_hit, external_kv_transfer"] &[],
        "Prompt tokens by source: computed, found on the device, or copied from the swap pool.";
    PROMPT_TOKENS_CACHED = "vllm:prompt_tokens_cached_total" Counter "tokens" [] &[],
        "Prompt tokens found on the device or in the swap pool.";
    GENERATION_TOKENS = "vllm:generation_tokens_total" Counter "tokens" [] &[],
        "Generated tokens of all samples.";
    REQUEST_SUCCESS = "vllm:request_success_total" Counter "requests" ["finished_reason": "stop, length, abort, error"] &[],
        "Requests that have ended. abort: the client disconnected. error: the engine failed.";
    REQUEST_PROMPT_TOKENS = "vllm:request_prompt_tokens" Histogram "tokens" [] UP_TO_MODEL,
        "Prompt tokens of a request. This and the following metrics of whole requests cover those that ended with \
         stop or length.";
    REQUEST_GENERATION_TOKENS = "vllm:request_generation_tokens" Histogram "tokens" [] UP_TO_MODEL,
        "Generated tokens of a request, all samples together.";
    REQUEST_MAX_GENERATION_TOKENS = "vllm:request_max_num_generation_tokens" Histogram "tokens" [] UP_TO_MODEL,
        "Generated tokens of a request's longest sample.";
    PARAMS_N = "vllm:request_params_n" Histogram "samples" [] &[1.0, 2.0, 5.0, 10.0, 20.0],
        "Parameter n of a request.";
    PARAMS_MAX_TOKENS = "vllm:request_params_max_tokens" Histogram "tokens" [] UP_TO_MODEL,
        "Parameter max_tokens of a request, or the room for its output.";
    ITERATION_TOKENS = "vllm:iteration_tokens_total" Histogram "tokens" [] ITERATION_BOUNDS,
        "Prompt tokens computed and tokens generated in a step.";
    TIME_TO_FIRST_TOKEN = "vllm:time_to_first_token_seconds" Histogram "seconds" [] FIRST_TOKEN_BOUNDS,
        "Time from the arrival of a request to its first token.";
    INTER_TOKEN = "vllm:inter_token_latency_seconds" Histogram "seconds" [] TOKEN_TIME_BOUNDS,
        "Time between two tokens of a sequence.";
    OLD_INTER_TOKEN = "vllm:time_per_output_token_seconds" Histogram "seconds" [] TOKEN_TIME_BOUNDS,
        "vllm:inter_token_latency_seconds under its older name.";
    REQUEST_TIME_PER_TOKEN = "vllm:request_time_per_output_token_seconds" Histogram "seconds" [] TOKEN_TIME_BOUNDS,
        "Mean time between the tokens of a request.";
    E2E = "vllm:e2e_request_latency_seconds" Histogram "seconds" [] REQUEST_TIME_BOUNDS,
        "Time from the arrival of a request to its end.";
    QUEUE_TIME = "vllm:request_queue_time_seconds" Histogram "seconds" [] REQUEST_TIME_BOUNDS,
        "Time from the arrival of a request to its first step.";
    INFERENCE_TIME = "vllm:request_inference_time_seconds" Histogram "seconds" [] REQUEST_TIME_BOUNDS,
        "Time from a request's first step to its last token.";
    PREFILL_TIME = "vllm:request_prefill_time_seconds" Histogram "seconds" [] REQUEST_TIME_BOUNDS,
        "Time from a request's first step to its first token.";
    DECODE_TIME = "vllm:request_decode_time_seconds" Histogram "seconds" [] REQUEST_TIME_BOUNDS,
        "Time from a request's first token to its last one, pauses included.";
}

const CACHE_CONFIG: Metric = Metric {
    name: "vllm:cache_config_info",
    kind: MetricKind::Gauge,
    unit: "none",
    labels: &[
        ("engine", "0"),
        ("block_size", "tokens"),
        ("num_gpu_blocks", "device blocks"),
        ("num_cpu_blocks", "blocks of the swap pool at the start"),
        ("cache_dtype", "of the KV cache"),
        ("enable_prefix_caching", "True, False"),
    ],
    help: "Always 1; its labels say how large the KV cache is.",
    buckets: &[],
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_go_as_far_as_the_model() {
        assert_eq!(one_two_five(100), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        assert_eq!(one_two_five(130), one_two_five(100));
        assert_eq!(one_two_five(0), [1.0]);
        assert_eq!(one_two_five(usize::MAX).len(), 58, "no bound is past what a number can hold");
    }

    /// Uses its own export, because the program's is global.
    #[test]
    fn names_and_labels_are_vllms() {
        let cache_config = vec![("block_size", "16".into()), ("num_gpu_blocks", "64".into())];
        let model = ServedModel { name: "org/model".into(), max_model_len: 100, cache_config };
        let export = Export::new(&model);
        let handles = &export.handles;
        handles.running.set(2.0);
        handles.success[2].increment(1);
        handles.request_prompt_tokens.record(30.0);
        handles.prefill_time.record(0.4);
        let page = export.handle.render();
        for series in [
            "vllm:num_requests_running{model_name=\"org/model\",engine=\"0\"} 2",
            "vllm:num_requests_waiting_by_reason{model_name=\"org/model\",engine=\"0\",reason=\"deferred\"} 0",
            "vllm:request_success_total{model_name=\"org/model\",engine=\"0\",finished_reason=\"abort\"} 1",
            "vllm:request_prompt_tokens_bucket{model_name=\"org/model\",engine=\"0\",le=\"20\"} 0",
            "vllm:request_prompt_tokens_bucket{model_name=\"org/model\",engine=\"0\",le=\"50\"} 1",
            "vllm:request_prefill_time_seconds_bucket{model_name=\"org/model\",engine=\"0\",le=\"0.3\"} 0",
            "vllm:request_prefill_time_seconds_sum{model_name=\"org/model\",engine=\"0\"} 0.4",
            "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"64\",engine=\"0\"} 1",
        ] {
            assert!(page.lines().any(|line| line == series), "{series} is not in\n{page}");
        }
        for metric in VLLM_METRICS {
            assert!(page.contains(&format!("# TYPE {} {}\n", metric.name, metric.kind.name())), "{}", metric.name);
        }
    }
}
