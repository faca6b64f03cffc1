//! `options` of a request: samplers and limits, and how a model is loaded.

use crate::body::refused::{Off, Refused, RefusedField, RefusedTable, refuse};
use crate::body::{body, body_fields};
use crate::checks::in_range;
use crate::fields::nested::{
    DifferentField, NestedNames, NestedSampling, as_nested, below, describe_object, read_nested,
};
use crate::fields::sampling::SamplingFields;
use crate::model_info::ModelInfo;
use crate::request::FieldNames;
use pagetide_base::error::ApiError;
use serde_json::{Map, Value};

/// Ollama's defaults, for what neither the request nor the model says.
const TEMPERATURE: f64 = 0.8;
const TOP_K: i64 = 40;
const TOP_P: f64 = 0.9;
/// A seed of a client that wants a random one.
const RANDOM_SEED: i64 = -1;

/// Ollama's names of sampling fields.
#[derive(Debug, Default)]
pub struct OptionNames;

impl NestedNames for OptionNames {
    const BASE: &'static str = "options";
    const NAMES: &'static [(&'static str, &'static str)] = &[
        ("frequency_penalty", "frequency_penalty"),
        ("min_p", "min_p"),
        ("presence_penalty", "presence_penalty"),
        ("mirostat", "mirostat"),
        ("mirostat_eta", "mirostat_eta"),
        ("mirostat_tau", "mirostat_tau"),
        ("repeat_last_n", "repeat_last_n"),
        ("repeat_penalty", "repeat_penalty"),
        ("seed", "seed"),
        ("stop", "stop"),
        ("temperature", "temperature"),
        ("top_k", "top_k"),
        ("top_p", "top_p"),
        ("typical_p", "typical_p"),
    ];
    const DIFFERENT: &'static [DifferentField] = &[
        DifferentField {
            name: "temperature",
            about: "0 takes the most likely token; higher is more varied. Default: the model's own, else 0.8.",
            default: None,
        },
        DifferentField {
            name: "top_k",
            about: "Samples from this many most likely tokens; 0: from all. Default: the model's own, else 40.",
            default: None,
        },
        DifferentField {
            name: "top_p",
            about: "Samples from the most likely tokens that together have this probability. Default: the model's own, \
                    else 0.9.",
            default: None,
        },
        DifferentField {
            name: "seed",
            about: "The same seed and request give the same answer. -1: a random one.",
            default: Some(RANDOM_SEED),
        },
        DifferentField {
            name: "repeat_penalty",
            about: "Above 1: the last repeat_last_n tokens of prompt and answer become less likely. Default: the model's \
                    own, else 1.",
            default: None,
        },
        DifferentField {
            name: "repeat_last_n",
            about: "How many tokens repeat_penalty looks at; 0: none; -1: all. Default: 64 with repeat_penalty.",
            default: None,
        },
    ];
}

body_fields! {
    struct OptionFields {
        /// Tokens to generate at most; below 0: as many as fit. If fewer than this fit, the answer is that much
        /// shorter.
        #[schema(minimum = -2, default = -1)]
        num_predict: Option<i64>,
        /// Without effect: the context is that of the server (model.max_model_len).
        num_ctx: Option<i64>,
        /// Without effect: no context is cut.
        num_keep: Option<i64>,
        /// Without effect, as all that follow: how a model is loaded is a setting of the server.
        num_batch: Option<i64>,
        num_gpu: Option<i64>,
        num_thread: Option<i64>,
        main_gpu: Option<i64>,
        draft_num_predict: Option<i64>,
        use_mmap: Option<bool>,
        use_mlock: Option<bool>,
        numa: Option<bool>,
        low_vram: Option<bool>,
        f16_kv: Option<bool>,
        logits_all: Option<bool>,
        vocab_only: Option<bool>,
        embedding_only: Option<bool>,
        /// Without effect, as in Ollama.
        penalize_newline: Option<bool>,
    }
}

/// Options that change what is generated and are not served.
#[derive(Debug, Default)]
pub struct UnsupportedOptions;

impl RefusedTable for UnsupportedOptions {
    const FIELDS: &'static [RefusedField] = &[refuse("tfs_z", "leave it out").unless(Off::Number(1.0))];

    fn message(name: &str, note: &str) -> String {
        format!("{name} is not supported with this value; {note}")
    }
}

body! {
    pub struct OptionsBody {
        shared: NestedSampling<OptionNames>,
        own: OptionFields,
        refused: Refused<UnsupportedOptions>,
    }
}

/// What `options` say, checked as far as no other field matters.
#[derive(Debug)]
pub(super) struct GenerateOptions {
    pub sampling: SamplingFields,
    pub max_tokens: MaxTokens,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MaxTokens {
    /// As many as fit.
    Fitting,
    /// Only the prompt is read.
    Zero,
    Some(u32),
}

impl MaxTokens {
    /// Tokens that the engine samples at most, where that is known.
    pub fn sampled(self) -> Option<u32> {
        match self {
            Self::Fitting => None,
            Self::Zero => Some(1),
            Self::Some(most) => Some(most),
        }
    }
}

impl GenerateOptions {
    /// Refuses what no answer can be sampled with, where nothing is sampled.
    pub(super) fn check(&self, model: &ModelInfo) -> Result<(), ApiError> {
        let params = self.sampling.params(model).map_err(as_nested::<OptionNames>)?;
        let answer = self.sampling.answer(&params, &FieldNames::OLLAMA_CHAT, model);
        answer.map(drop).map_err(as_nested::<OptionNames>)
    }
}

pub(super) fn options(given: Option<Map<String, Value>>, model: &ModelInfo) -> Result<GenerateOptions, ApiError> {
    let body: OptionsBody = read_nested::<OptionNames, _>(given.unwrap_or_default())?;
    body.refused.check().map_err(below::<OptionNames>)?;
    let mut sampling = body.shared.sampling;
    let defaults = &model.default_sampling;
    if defaults.temperature.is_none() {
        sampling.temperature.get_or_insert(TEMPERATURE);
    }
    if defaults.top_k.is_none() {
        sampling.top_k.get_or_insert(TOP_K);
    }
    if defaults.top_p.is_none() {
        sampling.top_p.get_or_insert(TOP_P);
    }
    sampling.seed = sampling.seed.filter(|seed| *seed != RANDOM_SEED);
    let max_tokens = match body.own.num_predict {
        None | Some(..0) => MaxTokens::Fitting,
        Some(0) => MaxTokens::Zero,
        Some(most) => MaxTokens::Some(in_range("options.num_predict", most, -2..=i64::from(u32::MAX))? as u32),
    };
    Ok(GenerateOptions { sampling, max_tokens })
}

describe_object!(
    /// What `options` may have, as it is read.
    OllamaOptions as "OllamaOptions": NestedSampling<OptionNames>, OptionFields
);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::BodyFields;
    use utoipa::PartialSchema;

    #[test]
    fn every_option_that_is_read_is_described() {
        let mut read = Vec::new();
        OptionsBody::add_names(&mut read);
        read.retain(|name| UnsupportedOptions::FIELDS.iter().all(|refused| refused.name != *name));
        read.sort_unstable();
        let schema = serde_json::to_value(OllamaOptions::schema()).unwrap();
        let mut described: Vec<&String> = schema["properties"].as_object().unwrap().keys().collect();
        described.sort_unstable();
        assert_eq!(read, described);
    }
}
