//! What SGLang's clients ask about the server.

use super::answer::WEIGHT_VERSION;
use crate::model_info::ModelInfo;
use pagetide_base::error::ApiError;
use serde_json::{Map, Value, json};
use std::time::{SystemTime, UNIX_EPOCH};

/// What is known of the server beside the model.
#[derive(Clone, Debug)]
pub struct ServerFacts {
    /// The model as the server was told it: a name, or a folder.
    pub model_path: String,
    /// transformers' name of the architecture.
    pub family: &'static str,
    pub dtype: &'static str,
    pub cache_dtype: &'static str,
    pub device: String,
    pub block_size: usize,
    pub num_device_blocks: usize,
    pub max_num_seqs: usize,
    pub max_num_batched_tokens: usize,
    pub prefix_caching: bool,
    pub schedule_policy: String,
    pub weights_bytes: u64,
}

/// `/model_info`.
pub fn model_info(model: &ModelInfo, facts: &ServerFacts) -> Value {
    json!({
        "model_path": facts.model_path,
        "served_model_name": model.served_name,
        "tokenizer_path": facts.model_path,
        "is_generation": true,
        "preferred_sampling_params": null,
        "weight_version": WEIGHT_VERSION,
        "load_format": "auto",
        "reasoning_parser": model.chat_format.reasoning.map(|format| format.name()),
        "tool_call_parser": model.chat_format.tools.map(|format| format.name()),
        "disaggregation_mode": "null",
        "has_image_understanding": false,
        "has_audio_understanding": false,
        "model_type": facts.family,
    })
}

/// `/get_server_info`. Settings that tell how the server is run are left out: `/admin/config` has them.
pub fn server_info(model: &ModelInfo, facts: &ServerFacts) -> Value {
    let max_total_num_tokens = facts.block_size * facts.num_device_blocks;
    json!({
        "status": "ready",
        "version": env!("CARGO_PKG_VERSION"),
        "model_path": facts.model_path,
        "served_model_name": model.served_name,
        "tokenizer_path": facts.model_path,
        "dtype": facts.dtype,
        "kv_cache_dtype": facts.cache_dtype,
        "device": facts.device,
        "context_length": model.max_model_len,
        "page_size": facts.block_size,
        "chunked_prefill_size": facts.max_num_batched_tokens,
        "max_prefill_tokens": facts.max_num_batched_tokens,
        "disable_radix_cache": !facts.prefix_caching,
        "max_running_requests": facts.max_num_seqs,
        "max_total_num_tokens": max_total_num_tokens,
        "max_req_input_len": model.max_model_len.saturating_sub(1),
        "schedule_policy": facts.schedule_policy,
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "disaggregation_mode": "null",
        "weight_version": WEIGHT_VERSION,
        "internal_states": [{
            "max_total_num_tokens": max_total_num_tokens,
            "effective_max_running_requests_per_dp": facts.max_num_seqs,
            "memory_usage": {
                "weight": gib(facts.weights_bytes),
                "kvcache": gib((facts.num_device_blocks * model.kv_block_bytes) as u64),
                "token_capacity": max_total_num_tokens,
            },
        }],
    })
}

/// How many requests there are, and how much they hold.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineLoad {
    pub num_running: usize,
    /// Swapped ones included.
    pub num_waiting: usize,
    pub num_swapped: usize,
    pub used_tokens: usize,
    pub max_tokens: usize,
    pub max_num_seqs: usize,
    /// Of prompts since the start.
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub weights_bytes: u64,
    pub kv_bytes: u64,
}

/// Sections of `/v1/loads`.
const SECTIONS: [&str; 7] = ["all", "core", "disagg", "lora", "memory", "queues", "spec"];

/// `/v1/loads`. `include`: names of sections, with commas; all where nothing is given.
pub fn loads(load: EngineLoad, device: &str, include: Option<&str>) -> Result<Value, ApiError> {
    let asked: Vec<&str> = include.map_or_else(|| vec!["all"], |list| list.split(',').map(str::trim).collect());
    if let Some(wrong) = asked.iter().find(|name| !SECTIONS.contains(name)) {
        let message = format!("include must have names of {}, got {wrong:?}", SECTIONS.join(", "));
        return Err(ApiError::invalid("include", message));
    }
    let wants = |section: &str| asked.iter().any(|name| ["all", section].contains(name));
    let part = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
    let token_usage = part(load.used_tokens as f64, load.max_tokens as f64);
    let seats = part(load.num_running as f64, load.max_num_seqs as f64);
    let now = unix_time();
    let mut of_engine = json!({
        "timestamp": now,
        "dp_rank": 0,
        "num_running_reqs": load.num_running,
        "num_waiting_reqs": load.num_waiting,
        "num_used_tokens": load.used_tokens,
        "num_total_tokens": load.used_tokens,
        "num_active_tokens": load.used_tokens,
        "max_total_num_tokens": load.max_tokens,
        "max_running_requests": load.max_num_seqs,
        "token_usage": token_usage,
        "cache_hit_rate": part(load.cached_tokens as f64, load.prompt_tokens as f64),
        "utilization": token_usage.max(seats),
    });
    if wants("memory") {
        of_engine["memory"] = json!({
            "weight_gb": gib(load.weights_bytes), "kv_cache_gb": gib(load.kv_bytes), "graph_gb": 0.0,
            "token_capacity": load.max_tokens,
        });
    }
    if wants("queues") {
        of_engine["queues"] = json!({
            "waiting": load.num_waiting - load.num_swapped, "grammar": 0, "paused": load.num_swapped,
            "retracted": load.num_swapped, "prealloc_ready": 0,
        });
    }
    Ok(json!({
        "timestamp": crate::dates::rfc3339_now(),
        "version": env!("CARGO_PKG_VERSION"),
        "accelerator": device,
        "num_accelerators": 1,
        "loads": [of_engine],
    }))
}

/// `/get_load`, which came before it.
pub fn load(load: EngineLoad) -> Value {
    let mut of_engine = Map::new();
    of_engine.insert("dp_rank".into(), 0.into());
    of_engine.insert("num_reqs".into(), (load.num_running + load.num_waiting).into());
    of_engine.insert("num_waiting_reqs".into(), load.num_waiting.into());
    of_engine.insert("num_tokens".into(), load.used_tokens.into());
    of_engine.insert("ts_tic".into(), unix_time().into());
    json!([of_engine])
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

fn unix_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
