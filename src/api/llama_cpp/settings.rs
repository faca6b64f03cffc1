//! `generation_settings`: the parameters that an answer was made with, or would be.

use super::answer::NativeAnswer;
use super::logit_bias::BAN;
use pagetide_base::sampling::params::SamplingParams;
use serde_json::{Value, json};

/// The order in which samplers work here, in llama.cpp's words.
const SAMPLERS: [&str; 5] = ["penalties", "temperature", "min_p", "top_k", "top_p"];

/// The parameters of sampling, and the others as they are where a request says nothing.
pub fn sampling(params: &SamplingParams) -> Value {
    json!({
        "seed": params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.0,
        "max_tokens": -1,
        "n_predict": -1,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": false,
        "stream": false,
        "n_probs": 0,
        "samplers": SAMPLERS,
        "timings_per_token": false,
        "post_sampling_probs": false,
        "backend_sampling": false,
        "speculative.types": "none",
        "lora": [],
    })
}

impl NativeAnswer {
    /// `params`: as the intake accepted them.
    pub(super) fn settings(&self, params: &SamplingParams) -> Value {
        let n_predict = self.asked_tokens.map_or(-1, i64::from);
        let bias = |(token, bias): &(u32, f32)| {
            // llama.cpp adds minus infinity to a token that must not come, which JSON does not have.
            let bias = if *bias <= BAN { Value::Null } else { json!(bias) };
            json!({"bias": bias, "token": token})
        };
        let mut settings = sampling(params);
        for (name, value) in [
            ("max_tokens", json!(n_predict)),
            ("n_predict", json!(n_predict)),
            ("n_keep", json!(self.n_keep)),
            ("n_discard", json!(self.n_discard)),
            ("ignore_eos", json!(self.ignore_eos)),
            ("stream", json!(self.stream)),
            ("stop", json!(self.stop)),
            ("logit_bias", params.logit_bias.iter().map(bias).collect()),
            ("n_probs", json!(self.num_probs.unwrap_or(0))),
            ("grammar", json!(self.grammar.as_deref().unwrap_or_default())),
            ("timings_per_token", json!(self.timings_per_token)),
        ] {
            settings[name] = value;
        }
        settings
    }
}
