//! `sampling_params` of a request to generate.

use crate::body::fields::BodyFields;
use crate::body::refused::{Off, Refused, RefusedField, RefusedTable, refuse};
use crate::body::{FieldSource, body, body_fields};
use crate::fields::forms::StopStrings;
use crate::fields::nested::{NestedNames, NestedSampling, as_nested, below, read_nested};
use crate::fields::sampling::{SamplingFields, max_tokens};
use crate::fields::structured::StructuredFields;
use pagetide_base::error::ApiError;
use pagetide_text::grammar::GrammarRequest;
use serde_json::{Map, Value};
use std::collections::HashMap;
use utoipa::ToSchema;

/// `max_new_tokens` where the client does not say.
const DEFAULT_MAX_TOKENS: i64 = 128;

/// SGLang's names of sampling fields.
#[derive(Debug, Default)]
pub struct SglangNames;

impl NestedNames for SglangNames {
    const BASE: &'static str = "sampling_params";
    const NAMES: &'static [(&'static str, &'static str)] = &[
        ("ebnf", "ebnf"),
        ("frequency_penalty", "frequency_penalty"),
        ("ignore_eos", "ignore_eos"),
        ("json_schema", "json_schema"),
        ("logit_bias", "logit_bias"),
        ("min_new_tokens", "min_tokens"),
        ("min_p", "min_p"),
        ("n", "n"),
        ("no_stop_trim", "include_stop_str_in_output"),
        ("presence_penalty", "presence_penalty"),
        ("regex", "regex"),
        ("repetition_penalty", "repetition_penalty"),
        ("sampling_seed", "seed"),
        ("skip_special_tokens", "skip_special_tokens"),
        ("spaces_between_special_tokens", "spaces_between_special_tokens"),
        ("stop", "stop"),
        ("stop_regex", "stop_regex"),
        ("stop_token_ids", "stop_token_ids"),
        ("temperature", "temperature"),
        ("top_k", "top_k"),
        ("top_p", "top_p"),
    ];
}

/// The constraints that SGLang knows.
#[derive(Debug, Default)]
struct SglangConstraints(StructuredFields);

impl BodyFields for SglangConstraints {
    fn read<S: FieldSource>(&mut self, name: &str, source: &mut S) -> Result<bool, S::Error> {
        Ok(["ebnf", "json_schema", "regex"].contains(&name) && self.0.read(name, source)?)
    }

    fn add_names(_: &mut Vec<&'static str>) {}
}

body_fields! {
    struct SglangFields {
        max_new_tokens: Option<i64>,
        stream_interval: Option<i64>,
    }
}

/// Parameters that change what is generated and are not served, or that only SGLang itself sets.
#[derive(Debug, Default)]
pub struct UnsupportedParams;

impl RefusedTable for UnsupportedParams {
    const FIELDS: &'static [RefusedField] = &[
        refuse("beam_width", "leave it out").unless(Off::Number(1.0)),
        refuse("custom_params", "leave it out"),
        refuse("ebnf_full_assistant", "leave it out"),
        refuse("is_normalized", "leave it out"),
        refuse("stop_regex_max_len", "leave it out").unless(Off::Number(0.0)),
        refuse("stop_regex_strs", "use stop_regex"),
        refuse("stop_str_max_len", "leave it out").unless(Off::Number(0.0)),
        refuse("stop_strs", "use stop"),
        refuse("structural_tag", "use json_schema, regex or ebnf"),
        refuse("watermark", "leave it out"),
    ];

    fn message(name: &str, instead: &str) -> String {
        format!("{name} is not supported; {instead}")
    }
}

body! {
    pub struct SglangParams {
        shared: NestedSampling<SglangNames>,
        constraints: SglangConstraints,
        own: SglangFields,
        refused: Refused<UnsupportedParams>,
    }
}

/// What `sampling_params` say.
#[derive(Debug)]
pub(super) struct SglangSampling {
    pub sampling: SamplingFields,
    /// 0: only the prompt is read; `None`: as many as fit.
    pub max_tokens: Option<u32>,
    pub grammar: Option<GrammarRequest>,
}

/// Reads one object of `sampling_params`.
pub(super) fn params(given: Map<String, Value>) -> Result<SglangSampling, ApiError> {
    let as_many_as_fit = given.get("max_new_tokens").is_some_and(Value::is_null);
    let body: SglangParams = read_nested::<SglangNames, _>(given)?;
    body.refused.check().map_err(below::<SglangNames>)?;
    let mut sampling = body.shared.sampling;
    // The model's own defaults are those of SGLang's OpenAI API alone.
    sampling.temperature.get_or_insert(1.0);
    sampling.top_p.get_or_insert(1.0);
    sampling.top_k.get_or_insert(-1);
    sampling.min_p.get_or_insert(0.0);
    sampling.repetition_penalty.get_or_insert(1.0);
    let grammar = body.constraints.0.check(&sampling).map_err(as_nested::<SglangNames>)?;
    let given = body.own.max_new_tokens.or((!as_many_as_fit).then_some(DEFAULT_MAX_TOKENS));
    let max_tokens = given.map(|given| max_tokens("sampling_params.max_new_tokens", given, 0)).transpose()?;
    Ok(SglangSampling { sampling, max_tokens, grammar })
}

/// What `sampling_params` may have.
#[derive(ToSchema)]
#[schema(as = SglangSamplingParams)]
#[allow(dead_code, reason = "only described: SglangParams is what is read")]
pub struct DescribedParams {
    /// Tokens to generate at most; null: as many as fit.
    #[schema(minimum = 0, default = 128)]
    max_new_tokens: Option<i64>,
    /// No end token, stop token or stop string before this many tokens.
    #[schema(minimum = 0, default = 0)]
    min_new_tokens: Option<i64>,
    /// 0 takes the most likely token; higher is more varied.
    #[schema(minimum = 0, maximum = 100, default = 1)]
    temperature: Option<f64>,
    /// Samples from the most likely tokens that together have this probability.
    #[schema(exclusive_minimum = 0, maximum = 1, default = 1)]
    top_p: Option<f64>,
    /// Samples from this many most likely tokens; -1: from all.
    #[schema(minimum = -1, default = -1)]
    top_k: Option<i64>,
    /// Samples from tokens at least this likely, as a part of the most likely one's probability.
    #[schema(minimum = 0, maximum = 1, default = 0)]
    min_p: Option<f64>,
    #[schema(minimum = -2, maximum = 2, default = 0)]
    frequency_penalty: Option<f64>,
    #[schema(minimum = -2, maximum = 2, default = 0)]
    presence_penalty: Option<f64>,
    #[schema(exclusive_minimum = 0, maximum = 100, default = 1)]
    repetition_penalty: Option<f64>,
    /// Answers to each text.
    #[schema(minimum = 1, maximum = 128, default = 1)]
    n: Option<i64>,
    /// The same seed and request give the same answer.
    sampling_seed: Option<i64>,
    /// Up to 16 strings that end the answer.
    stop: Option<Vec<String>>,
    /// A regular expression, or up to 32 of them: the answer ends with the token that completes a match, which stays in
    /// it. Each has at most 256 bytes, no look-around and no references back.
    #[schema(value_type = Option<StopStrings>)]
    stop_regex: Option<Value>,
    /// Token ids that end the answer.
    stop_token_ids: Option<Vec<i64>>,
    /// The answer ends after the stop string or stop token, not before it.
    no_stop_trim: Option<bool>,
    /// End tokens of the model are tokens like any other.
    ignore_eos: Option<bool>,
    skip_special_tokens: Option<bool>,
    spaces_between_special_tokens: Option<bool>,
    /// Added to the logits, by token id.
    logit_bias: Option<HashMap<String, f64>>,
    /// The answer is JSON that this schema accepts; a schema, or one in a string.
    json_schema: Option<String>,
    /// The answer matches this regular expression.
    regex: Option<String>,
    /// The answer follows this grammar.
    ebnf: Option<String>,
    /// Tokens between two events of a stream. Without effect: each token has an event.
    stream_interval: Option<i64>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use utoipa::PartialSchema;

    #[test]
    fn every_parameter_that_is_read_is_described() {
        let mut read = Vec::new();
        SglangParams::add_names(&mut read);
        read.retain(|name| UnsupportedParams::FIELDS.iter().all(|refused| refused.name != *name));
        read.sort_unstable();
        let schema = serde_json::to_value(DescribedParams::schema()).unwrap();
        let mut described: Vec<&String> = schema["properties"].as_object().unwrap().keys().collect();
        described.sort_unstable();
        assert_eq!(read, described);
    }
}
