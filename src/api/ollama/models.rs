//! What Ollama's clients ask about the model: tags, show, ps.

use super::fields::{model_name, tagged};
use crate::body::{ParsedBody, body, body_fields};
use crate::dates::rfc3339;
use crate::fields::model::ModelField;
use crate::model_info::ModelInfo;
use pagetide_base::error::ApiError;
use pagetide_text::fill_in::FillInMarks;
use serde_json::{Map, Value, json};

/// The model stays loaded as long as the server runs, so this is the last time that there is a format for.
const NEVER: &str = "9999-12-31T23:59:59Z";
/// Weights are read as they are published.
const FORMAT: &str = "safetensors";

/// What is known of the model's weights.
#[derive(Clone, Copy, Debug)]
pub struct WeightFacts {
    /// transformers' name of the architecture, such as qwen2.
    pub family: &'static str,
    pub num_parameters: u64,
    pub num_bytes: u64,
    /// The format of most weights: bfloat16, float16, float32, or one of ggml's.
    pub format: &'static str,
    pub on_gpu: bool,
}

body_fields! {
    pub(super) struct OllamaShowFields {
        /// An older name of model.
        name: Option<String>,
        /// Whether long lists are told too. Without effect: there are none.
        verbose: Option<bool>,
    }
}

body! {
    /// The body of `/api/show`.
    pub struct OllamaShowBody {
        own: OllamaShowFields,
        model: ModelField,
    }
}

/// The model that `/api/show` asks about; there is one.
pub fn parse_show(
    ParsedBody { body, problems }: ParsedBody<OllamaShowBody>,
    model: &ModelInfo,
) -> Result<(), ApiError> {
    problems.check()?;
    let name = body.model.model.or(body.own.name);
    if name.is_none() {
        return Err(ApiError::invalid("model", "model is required"));
    }
    model_name(ModelField { model: name }, &problems, model).map(drop)
}

pub fn tags(model: &ModelInfo, weights: WeightFacts) -> Value {
    let cards: Vec<Value> = model
        .names()
        .map(|name| {
            json!({
                "name": tagged(name),
                "model": tagged(name),
                "modified_at": rfc3339(model.created_s),
                "size": weights.num_bytes,
                "digest": "",
                "details": details(weights),
            })
        })
        .collect();
    json!({ "models": cards })
}

/// The models in memory: the one that is served.
pub fn running(model: &ModelInfo, weights: WeightFacts) -> Value {
    let name = tagged(&model.served_name);
    json!({"models": [{
        "name": name,
        "model": name,
        "size": weights.num_bytes,
        "digest": "",
        "details": details(weights),
        "expires_at": NEVER,
        "size_vram": if weights.on_gpu { weights.num_bytes } else { 0 },
        "context_length": model.max_model_len,
    }]})
}

pub fn show(model: &ModelInfo, weights: WeightFacts) -> Value {
    let family = weights.family;
    let mut info = Map::new();
    info.insert("general.architecture".into(), family.into());
    info.insert("general.basename".into(), model.served_name.clone().into());
    info.insert("general.parameter_count".into(), weights.num_parameters.into());
    info.insert(format!("{family}.context_length"), model.max_model_len.into());
    info.insert(format!("{family}.embedding_length"), model.embedding_size.into());
    info.insert(format!("{family}.vocab_size"), model.vocab_size.into());
    json!({
        "license": "",
        "modelfile": "",
        "parameters": parameters(model),
        "template": model.chat_template.as_ref().map_or("", |template| template.source()),
        "details": details(weights),
        "model_info": info,
        "capabilities": capabilities(model),
        "modified_at": rfc3339(model.created_s),
    })
}

fn details(weights: WeightFacts) -> Value {
    json!({
        "parent_model": "",
        "format": FORMAT,
        "family": weights.family,
        "families": [weights.family],
        "parameter_size": parameter_size(weights.num_parameters),
        "quantization_level": match weights.format {
            "bfloat16" => "BF16",
            "float16" => "F16",
            "float32" => "F32",
            quantised => quantised,
        },
    })
}

/// The model's own sampling defaults, a line each.
fn parameters(model: &ModelInfo) -> String {
    let defaults = &model.default_sampling;
    let lines = [
        ("temperature", defaults.temperature.map(|value| value.to_string())),
        ("top_k", defaults.top_k.map(|value| value.to_string())),
        ("top_p", defaults.top_p.map(|value| value.to_string())),
        ("min_p", defaults.min_p.map(|value| value.to_string())),
        ("repeat_penalty", defaults.repetition_penalty.map(|value| value.to_string())),
    ];
    let lines: Vec<String> =
        lines.into_iter().filter_map(|(name, value)| Some(format!("{name:<30} {}", value?))).collect();
    lines.join("\n")
}

/// What the model can do, in Ollama's words.
fn capabilities(model: &ModelInfo) -> Vec<&'static str> {
    let has = [
        ("completion", true),
        ("insert", FillInMarks::find(&model.tokenizer).is_ok()),
        ("tools", model.chat_format.tools.is_some()),
        ("thinking", model.chat_format.reasoning.is_some()),
    ];
    has.into_iter().filter_map(|(name, has)| has.then_some(name)).collect()
}

/// 3.5M, 1.5B.
fn parameter_size(num_parameters: u64) -> String {
    match num_parameters {
        1_000_000_000.. => format!("{:.1}B", num_parameters as f64 / 1e9),
        1_000_000.. => format!("{:.1}M", num_parameters as f64 / 1e6),
        _ => format!("{:.1}K", num_parameters as f64 / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short() {
        let sizes = [3_500_000, 134_515_008, 1_543_714_304, 70_553_706_496, 900].map(parameter_size);
        assert_eq!(sizes, ["3.5M", "134.5M", "1.5B", "70.6B", "0.9K"]);
    }
}
