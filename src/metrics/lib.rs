//! The metrics that the program exports to Prometheus.
//!
//! Call [`install`] once at startup. Before that, or without it (in a library or a test), recording does nothing. The
//! functions take plain values and use fixed handles, so recording is an atomic operation without a lookup, except for
//! [`http_request`], [`build_info`] and [`weights_bytes`].

mod ended;
mod events;
pub mod llama_cpp;
mod registry;
mod table;
pub mod tenants;
pub mod vllm;

pub use table::{METRICS, Metric, MetricKind};

pub use ended::EndedRequest;
pub use events::{ArbiterChoice, Outcome, Preemption, QuotaOf, Rejection, TailReason};
use metrics::Label;
use metrics_exporter_prometheus::PrometheusHandle;
use pagetide_base::ids::Tenant;
use registry::{REGISTRY, Registry, with};
use std::sync::OnceLock;
use std::time::Duration;

/// Measurements of one step of the engine.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct StepMetrics {
    pub sequences: usize,
    pub tokens: usize,
    /// First tokens of outputs. The other generated tokens are among `tokens` of the step after theirs.
    pub first_tokens: usize,
    pub schedule: Duration,
    pub execute: Duration,
    pub sample: Duration,
    /// Time since the step before this one; `None` if the engine was idle in between.
    pub gap: Option<Duration>,
}

/// Starts recording. Calling it again does nothing.
pub fn install() -> &'static PrometheusHandle {
    let registry = REGISTRY.get_or_init(Registry::new);
    // The recorder keeps every histogram sample until it is drained. Without scrapes that would be forever.
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
    Some(registry.handle.render() + &vllm::render() + &llama_cpp::render())
}

/// Sets the number of requests in the engine.
pub fn set_requests(waiting: usize, running: usize, swapped: usize) {
    with(|m| {
        m.requests_waiting.set(waiting as f64);
        m.requests_running.set(running as f64);
        m.requests_swapped.set(swapped as f64);
    });
    vllm::set_requests(waiting + swapped, running);
    llama_cpp::set_requests(waiting + swapped, running);
}

pub fn request_ended(ended: &EndedRequest) {
    with(|m| {
        m.outcomes[ended.outcome as usize].increment(1);
        m.e2e.record(ended.e2e);
    });
    ended.tenant.iter().for_each(|tenant| tenant.ended(ended.outcome));
    vllm::request_ended(ended);
    llama_cpp::request_ended(ended);
}

/// Counts a refused request of `tenant`.
pub fn request_rejected(reason: Rejection, tenant: Tenant) {
    with(|m| m.rejections[reason as usize].increment(1));
    tenants::rejected(tenant, reason);
    vllm::request_rejected(reason);
}

/// The first step of a request began `queued` after its arrival.
pub fn queue_time(queued: Duration) {
    with(|m| m.queue.record(queued));
}

/// The first token of a request came `waited` after its arrival.
pub fn first_token(waited: Duration) {
    with(|m| m.first_token.record(waited));
    vllm::first_token(waited);
}

/// The next token of a sequence came `gap` after the one before it.
pub fn inter_token(gap: Duration) {
    with(|m| m.inter_token.record(gap));
    vllm::inter_token(gap);
}

/// A request was admitted: the tokens of its prompt, and how many of them were in the prefix cache.
pub fn prompt_tokens(prompt: usize, cached: usize) {
    with(|m| {
        m.prompt_tokens.increment(prompt as u64);
        m.cached_tokens.increment(cached as u64);
    });
    llama_cpp::prompt_tokens(prompt, cached);
}

pub fn generated_tokens(tokens: usize) {
    with(|m| m.generated_tokens.increment(tokens as u64));
    vllm::generated_tokens(tokens);
    llama_cpp::generated_tokens(tokens);
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
    vllm::step(step.tokens + step.first_tokens);
    llama_cpp::step(step.sequences);
}

/// The estimates with which a step was planned.
pub fn forecast(prompt_limit: usize, decodes_s: f64, prompt_token_s: f64) {
    with(|m| {
        m.prompt_limit.set(prompt_limit as f64);
        m.expected_decodes.set(decodes_s);
        m.expected_prompt_token.set(prompt_token_s);
    });
}

/// The estimates behind admission: the output length, and the number of steps for which blocks must suffice.
pub fn expected_output(output_tokens: usize, horizon: usize) {
    with(|m| {
        m.expected_output.set(output_tokens as f64);
        m.admission_horizon.set(horizon as f64);
    });
}

/// A job of the text threads has ended.
pub fn text_job(is_heavy: bool, took: Duration) {
    with(|m| m.text_job_seconds[usize::from(is_heavy)].record(took));
}

/// Jobs of the text threads now. `oldest` is the running time of the oldest running job.
pub fn text_jobs(waiting: usize, running: usize, oldest: Duration) {
    with(|m| {
        m.text_jobs_waiting.set(waiting as f64);
        m.text_jobs_running.set(running as f64);
        m.text_job_oldest.set(oldest.as_secs_f64());
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

/// `draining` blocks are used too, but beyond the pool's size. `used` are those within it.
pub fn set_swap_blocks(used: usize, cached: usize, free: usize, draining: usize) {
    with(|m| {
        m.swap_used.set(used as f64);
        m.swap_cached.set(cached as f64);
        m.swap_free.set(free as f64);
        m.swap_draining.set(draining as f64);
    });
}

/// Empty slots of used device blocks in a step, and all their slots. The ratio is 0 if no block is used.
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

/// A preemption to the swap pool copied `num_blocks` blocks. `excess` is the reason if that was over the bound.
pub fn preemption_copies(num_blocks: usize, excess: Option<TailReason>) {
    with(|m| {
        m.preemption_blocks.record(num_blocks as f64);
        if let Some(reason) = excess {
            m.tail_excesses[reason as usize].increment(1);
        }
    });
}

pub fn set_max_tail_blocks(num_blocks: usize) {
    with(|m| m.max_tail.set(num_blocks as f64));
}

/// Prompt tokens looked up in the prefix cache, how many were found, and how many of these only in the swap pool.
pub fn prefix_cache(queried: usize, hit: usize, swapped: usize) {
    with(|m| {
        m.prefix_queries.increment(queried as u64);
        m.prefix_hits_device.increment((hit - swapped) as u64);
        m.prefix_hits_cpu.increment(swapped as u64);
    });
    vllm::prefix_cache(queried, hit, swapped);
}

/// Seconds for copying a block to the swap pool and to the device, and the number of blocks that wait for a copy.
pub fn copies(out_s: f64, in_s: f64, queued_blocks: usize) {
    with(|m| {
        m.copy_out.set(out_s);
        m.copy_in.set(in_s);
        m.copy_queue.set(queued_blocks as f64);
    });
}

pub fn arbiter_decided(choice: ArbiterChoice) {
    with(|m| m.arbiter[choice as usize].increment(1));
}

/// Counts an HTTP answer. `path` must be the route, never text from a client, because each value creates a series.
pub fn http_request(path: &'static str, status: u16) {
    if let Some(registry) = REGISTRY.get() {
        let labels = vec![Label::from_static_parts("path", path), Label::new("status", status.to_string())];
        registry.counter(&table::HTTP_REQUESTS, labels).increment(1);
    }
}

/// An attempt to change settings while the server runs.
pub fn config_changed(is_applied: bool) {
    with(|m| m.config_changes[usize::from(is_applied)].increment(1));
}

/// The connection of a slow client was closed.
pub fn slow_client_cut() {
    with(|m| m.slow_clients.increment(1));
}

/// A log line could not be written.
pub fn log_line_dropped() {
    with(|m| m.log_dropped.increment(1));
}

/// Memory and time span of the flight recorder.
pub fn recorder(bytes: usize, length: Duration) {
    with(|m| {
        m.recorder_bytes.set(bytes as f64);
        m.recorder_seconds.set(length.as_secs_f64());
    });
}

/// A recording was written: automatically after a failure, or on request.
pub fn recording_written(after_failure: bool) {
    with(|m| m.recordings[usize::from(after_failure)].increment(1));
}

pub fn executor_restarted() {
    with(|m| m.executor_restarts.increment(1));
}

/// Describes the running program. Call it once, when the model is loaded.
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

/// Size of the weight matrices in one format. Call it once for each, when the model is loaded.
pub fn weights_bytes(format: &'static str, bytes: u64) {
    if let Some(registry) = REGISTRY.get() {
        let labels = vec![Label::from_static_parts("format", format)];
        registry.gauge(&table::WEIGHTS_BYTES, labels).set(bytes as f64);
    }
}

#[cfg(test)]
mod tests;
