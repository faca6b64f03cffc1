//! `sampling_params` of a request to generate.

use crate::body::fields::BodyFields;
use crate::body::refused::{Off, Refused, RefusedField, RefusedTable, refuse};
use crate::body::{FieldSource, body, body_fields};
use crate::fields::nested::{
    DifferentField, NestedNames, NestedSampling, as_nested, below, describe_object, described, fields_of, read_nested,
};
use crate::fields::sampling::{SamplingFields, max_tokens};
use crate::fields::structured::StructuredFields;
use pagetide_base::error::ApiError;
use pagetide_text::grammar::GrammarRequest;
use serde_json::{Map, Value};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

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
        ("structural_tag", "structural_tag"),
        ("temperature", "temperature"),
        ("top_k", "top_k"),
        ("top_p", "top_p"),
    ];
    const DIFFERENT: &'static [DifferentField] = &[
        DifferentField {
            name: "temperature",
            about: "0 takes the most likely token; higher is more varied.",
            default: Some(1),
        },
        DifferentField {
            name: "top_p",
            about: "Samples from the most likely tokens that together have this probability.",
            default: Some(1),
        },
        DifferentField {
            name: "top_k",
            about: "Samples from this many most likely tokens; -1: from all.",
            default: Some(-1),
        },
        DifferentField {
            name: "min_p",
            about: "Samples from tokens at least this likely, as a part of the most likely one's probability.",
            default: Some(0),
        },
        DifferentField {
            name: "repetition_penalty",
            about: "Above 1: tokens of the prompt and of the answer so far become less likely.",
            default: Some(1),
        },
        DifferentField {
            name: "min_new_tokens",
            about: "No end token, stop token or stop string before this many tokens.",
            default: Some(0),
        },
        DifferentField { name: "n", about: "Answers to each text.", default: Some(1) },
    ];
}

/// The constraints that SGLang knows.
#[derive(Debug, Default)]
struct SglangConstraints(StructuredFields);

impl BodyFields for SglangConstraints {
    fn read<S: FieldSource>(&mut self, name: &str, source: &mut S) -> Result<bool, S::Error> {
        Ok(Self::NAMES.contains(&name) && self.0.read(name, source)?)
    }

    /// They are among [`SglangNames`], for errors.
    fn add_names(_: &mut Vec<&'static str>) {}
}

impl SglangConstraints {
    const NAMES: [&'static str; 4] = ["ebnf", "json_schema", "regex", "structural_tag"];
}

impl PartialSchema for SglangConstraints {
    fn schema() -> RefOr<Schema> {
        let all = fields_of(StructuredFields::schema()).into_iter();
        described(all.filter(|(name, _)| Self::NAMES.contains(&name.as_str())))
    }
}

impl ToSchema for SglangConstraints {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        StructuredFields::schemas(schemas);
    }
}

body_fields! {
    struct SglangFields {
        /// Tokens to generate at most; null: as many as fit.
        #[schema(minimum = 0, default = 128)]
        max_new_tokens: Option<i64>,
        /// Tokens between two events of a stream. Without effect: each token has an event.
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

describe_object!(
    /// What `sampling_params` may have, as it is read.
    DescribedParams as "SglangSamplingParams": SglangFields, NestedSampling<SglangNames>, SglangConstraints
);

#[cfg(test)]
mod tests {
    use super::*;

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
