//! `generation_settings`: the parameters that an answer was made with, or would be.

use super::answer::NativeAnswer;
use super::logit_bias::BAN;
use crate::fields::samplers;
use pagetide_base::sampling::extra::{ExtraSamplers, Mirostat, MirostatVersion};
use pagetide_base::sampling::params::SamplingParams;
use serde_json::{Value, json};

/// The parameters of sampling, and the others as they are where a request says nothing.
pub fn sampling(params: &SamplingParams) -> Value {
    let off = ExtraSamplers::default();
    let extra = params.extra.as_deref().unwrap_or(&off);
    let (dry, xtc, mirostat) = (extra.dry.as_ref(), extra.xtc.as_ref(), extra.mirostat.as_ref());
    let dynamic = extra.dynamic_temperature.as_ref();
    // -1: all tokens.
    let last_n = |tokens: Option<u32>| tokens.map_or(-1, i64::from);
    let version = |mirostat: &Mirostat| match mirostat.version {
        MirostatVersion::One => 1,
        MirostatVersion::Two => 2,
    };
    let samplers: Vec<&str> = samplers::ORDER.iter().map(|(name, _)| *name).collect();
    json!({
        // As a request gives it.
        "seed": params.seed as i64,
        "temperature": params.temperature,
        "dynatemp_range": dynamic.map_or(0.0, |dynamic| dynamic.range),
        "dynatemp_exponent": dynamic.map_or(1.0, |dynamic| dynamic.exponent),
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "top_n_sigma": if extra.top_n_sigma > 0.0 { extra.top_n_sigma } else { -1.0 },
        "xtc_probability": xtc.map_or(0.0, |xtc| xtc.probability),
        "xtc_threshold": xtc.map_or(0.1, |xtc| xtc.threshold),
        "typical_p": extra.typical_p,
        "repeat_last_n": last_n(params.repeat_last_n),
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "dry_multiplier": dry.map_or(0.0, |dry| dry.multiplier),
        "dry_base": dry.map_or(1.75, |dry| dry.base),
        "dry_allowed_length": dry.map_or(2, |dry| dry.allowed_length),
        "dry_penalty_last_n": last_n(dry.and_then(|dry| dry.last_n)),
        "mirostat": mirostat.map_or(0, version),
        "mirostat_tau": mirostat.map_or(5.0, |mirostat| mirostat.tau),
        "mirostat_eta": mirostat.map_or(0.1, |mirostat| mirostat.eta),
        "adaptive_target": -1.0,
        "adaptive_decay": 0.0,
        "max_tokens": -1,
        "n_predict": -1,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": false,
        "stream": false,
        "n_probs": 0,
        "min_keep": extra.min_keep,
        "samplers": samplers,
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
            ("post_sampling_probs", json!(self.post_sampling_probs)),
        ] {
            settings[name] = value;
        }
        settings
    }
}
