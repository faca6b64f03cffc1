//! llama.cpp's samplers: their fields, ranges and defaults. [`pagetide_base::sampling::sampler`] says how they work.

use super::sampling::SamplingFields;
use crate::checks::{in_range, shown};
use pagetide_base::error::ApiError;
use pagetide_base::sampling::extra::{
    Dry, DryBreakers, DynamicTemperature, ExtraSamplers, Mirostat, MirostatVersion, Xtc,
};
use pagetide_base::sampling::params::SamplingParams;
use serde_json::Value;
use std::sync::Arc;

const DEFAULT_REPEAT_LAST_N: u32 = 64;
const DEFAULT_BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];
/// Each is looked for in every token of the vocabulary.
const MAX_BREAKERS: usize = 16;
const MAX_BREAKER_BYTES: usize = 40;
/// XTC needs two tokens at least as likely as its threshold.
const MAX_XTC_THRESHOLD: f32 = 0.5;

/// The names of `samplers` in the order in which they work here, with llama.cpp's letters.
pub const ORDER: [(&str, char); 9] = [
    ("penalties", 'e'),
    ("dry", 'd'),
    ("top_n_sigma", 's'),
    ("temperature", 't'),
    ("min_p", 'm'),
    ("top_k", 'k'),
    ("typ_p", 'y'),
    ("top_p", 'p'),
    ("xtc", 'x'),
];

/// What mirostat switches off.
const FILTERS: [&str; 7] = ["top_n_sigma", "dynatemp", "min_p", "top_k", "typ_p", "top_p", "xtc"];

impl SamplingFields {
    /// Adds to `params` what these fields say.
    pub fn set_samplers(&self, params: &mut SamplingParams) -> Result<(), ApiError> {
        let dry = self.dry()?;
        let extra = ExtraSamplers {
            dry,
            top_n_sigma: float("top_n_sigma", self.top_n_sigma, -1.0, -1.0, 1000.0)?.max(0.0),
            typical_p: float("typical_p", self.typical_p, 1.0, 0.0, 1.0)?,
            xtc: self.xtc()?,
            dynamic_temperature: self.dynamic_temperature()?,
            mirostat: self.mirostat()?,
            min_keep: count("min_keep", self.min_keep, 0, 0)?,
            logprobs_of_draw: false,
        };
        let repeat_penalty = self.repeat_penalty.filter(|penalty| *penalty != 1.0);
        let default = repeat_penalty.map(|_| DEFAULT_REPEAT_LAST_N);
        let given = last_n("repeat_last_n", self.repeat_last_n)?.unwrap_or(default);
        params.repeat_last_n = given.filter(|_| params.has_penalties());
        let is_mirostat = extra.mirostat.is_some();
        params.extra = Some(Box::new(extra));
        if is_mirostat {
            // It takes the place of all filters, and the temperature is fixed.
            FILTERS.iter().for_each(|name| switch_off(name, params));
        }
        if let Some(names) = &self.samplers {
            apply_names(&read_names(names)?, params)?;
        }
        if params.repeat_last_n == Some(0) {
            switch_off("penalties", params);
        }
        params.extra = params.extra.take().filter(|extra| changes_something(extra, params));
        Ok(())
    }

    /// `repetition_penalty` by either name.
    pub fn repetition_penalty(&self) -> Result<(&'static str, Option<f64>), ApiError> {
        match (self.repetition_penalty, self.repeat_penalty) {
            (Some(one), Some(other)) if one != other => {
                let message = format!(
                    "repeat_penalty is another name of repetition_penalty, and they differ: {other} and {one}; give one of them"
                );
                Err(ApiError::invalid("repeat_penalty", message))
            }
            (None, Some(given)) => Ok(("repeat_penalty", Some(given))),
            (given, _) => Ok(("repetition_penalty", given)),
        }
    }

    fn dry(&self) -> Result<Option<Dry>, ApiError> {
        let multiplier = float("dry_multiplier", self.dry_multiplier, 0.0, 0.0, 100.0)?;
        let base = float("dry_base", self.dry_base, 1.75, 1.0, 100.0)?;
        let allowed_length = count("dry_allowed_length", self.dry_allowed_length, 2, 0)?;
        let last_n = last_n("dry_penalty_last_n", self.dry_penalty_last_n)?.flatten();
        if let Some(breakers) = &self.dry_sequence_breakers {
            check_breakers(breakers)?;
        }
        if multiplier == 0.0 || last_n == Some(0) {
            return Ok(None);
        }
        let default = || DEFAULT_BREAKERS.map(str::to_owned).to_vec();
        let texts = self.dry_sequence_breakers.clone().unwrap_or_else(default);
        let breakers = DryBreakers { texts, ..DryBreakers::default() };
        Ok(Some(Dry { multiplier, base, allowed_length, last_n, breakers: Arc::new(breakers) }))
    }

    fn xtc(&self) -> Result<Option<Xtc>, ApiError> {
        let probability = float("xtc_probability", self.xtc_probability, 0.0, 0.0, 1.0)?;
        let threshold = float("xtc_threshold", self.xtc_threshold, 0.1, 0.0, 1.0)?;
        let acts = probability > 0.0 && threshold <= MAX_XTC_THRESHOLD;
        Ok(acts.then_some(Xtc { probability, threshold }))
    }

    fn dynamic_temperature(&self) -> Result<Option<DynamicTemperature>, ApiError> {
        let range = float("dynatemp_range", self.dynatemp_range, 0.0, 0.0, 100.0)?;
        let exponent = float("dynatemp_exponent", self.dynatemp_exponent, 1.0, 0.0, 100.0)?;
        Ok((range > 0.0).then_some(DynamicTemperature { range, exponent }))
    }

    fn mirostat(&self) -> Result<Option<Mirostat>, ApiError> {
        let tau = float("mirostat_tau", self.mirostat_tau, 5.0, 0.0, 100.0)?;
        let eta = float("mirostat_eta", self.mirostat_eta, 0.1, 0.0, 10.0)?;
        let version = match in_range("mirostat", self.mirostat.unwrap_or(0), 0..=2)? {
            0 => return Ok(None),
            1 => MirostatVersion::One,
            _ => MirostatVersion::Two,
        };
        Ok(Some(Mirostat { version, tau, eta }))
    }

    /// Which of these fields ask for something, for a search that has none of them.
    pub fn given_samplers(&self, params: &SamplingParams) -> [(&'static str, bool); 9] {
        let extra = params.extra.as_deref();
        let has = |is_on: fn(&ExtraSamplers) -> bool| extra.is_some_and(is_on);
        [
            ("repeat_penalty", self.repeat_penalty.is_some_and(|penalty| penalty != 1.0)),
            ("dry_multiplier", has(|extra| extra.dry.is_some())),
            ("top_n_sigma", has(|extra| extra.top_n_sigma > 0.0)),
            ("typical_p", has(|extra| extra.typical_p < 1.0)),
            ("xtc_probability", has(|extra| extra.xtc.is_some())),
            ("dynatemp_range", has(|extra| extra.dynamic_temperature.is_some())),
            ("mirostat", has(|extra| extra.mirostat.is_some())),
            ("min_keep", has(|extra| extra.min_keep > 1)),
            ("samplers", self.samplers.is_some()),
        ]
    }
}

/// What is above 0 stays so.
fn float(name: &str, given: Option<f64>, default: f32, low: f64, high: f64) -> Result<f32, ApiError> {
    match given {
        None => Ok(default),
        Some(value) if value > 0.0 => in_range(name, value, low..=high).map(|v| (v as f32).max(f32::MIN_POSITIVE)),
        Some(value) => in_range(name, value, low..=high).map(|value| value as f32),
    }
}

fn count(name: &str, given: Option<i64>, default: u32, least: i64) -> Result<u32, ApiError> {
    given.map_or(Ok(default), |given| in_range(name, given, least..=u32::MAX.into()).map(|count| count as u32))
}

/// A number of last tokens. `Some(None)`: all, written -1.
fn last_n(name: &str, given: Option<i64>) -> Result<Option<Option<u32>>, ApiError> {
    let checked = given.map(|given| in_range(name, given, -1..=u32::MAX.into())).transpose()?;
    Ok(checked.map(|n| u32::try_from(n).ok()))
}

fn check_breakers(breakers: &[String]) -> Result<(), ApiError> {
    let name = "dry_sequence_breakers";
    if !(1..=MAX_BREAKERS).contains(&breakers.len()) {
        let message = format!("{name} must have 1 to {MAX_BREAKERS} texts, got {}", breakers.len());
        return Err(ApiError::invalid(name, message));
    }
    match breakers.iter().enumerate().find(|(_, text)| !(1..=MAX_BREAKER_BYTES).contains(&text.len())) {
        None => Ok(()),
        Some((i, text)) => {
            let message = format!("{name}[{i}] must have 1 to {MAX_BREAKER_BYTES} bytes, got {}", text.len());
            Err(ApiError::invalid(format!("{name}[{i}]"), message))
        }
    }
}

/// The places in [`ORDER`] that `samplers` names.
fn read_names(given: &Value) -> Result<Vec<usize>, ApiError> {
    let known = || ORDER.map(|(name, letter)| format!("{name} ({letter})")).join(", ");
    let unknown = |i: usize, what: String| {
        let param = format!("samplers[{i}]");
        Err(ApiError::invalid(&param, format!("{param} must be one of {}, got {what}", known())))
    };
    let num = given.as_array().map_or(given.as_str().map_or(0, str::len), Vec::len);
    if num > ORDER.len() {
        let message = format!("samplers must name each sampler at most once, and there are {}; got {num}", ORDER.len());
        return Err(ApiError::invalid("samplers", message));
    }
    match given {
        Value::String(letters) => {
            let place = |(i, letter): (usize, char)| match ORDER.iter().position(|(_, known)| *known == letter) {
                Some(place) => Ok(place),
                None => unknown(i, shown(&letter.to_string().into())),
            };
            letters.chars().enumerate().map(place).collect()
        }
        Value::Array(names) => {
            let place = |(i, name): (usize, &Value)| match ORDER.iter().position(|(known, _)| *name == *known) {
                Some(place) => Ok(place),
                None => unknown(i, shown(name)),
            };
            names.iter().enumerate().map(place).collect()
        }
        other => {
            let message = format!("samplers must be an array of names or a string of letters, got {}", shown(other));
            Err(ApiError::invalid("samplers", message))
        }
    }
}

/// Switches off what is not named, and refuses another order of what is on.
fn apply_names(places: &[usize], params: &mut SamplingParams) -> Result<(), ApiError> {
    for (place, (name, _)) in ORDER.iter().enumerate() {
        if !places.contains(&place) {
            switch_off(name, params);
        }
    }
    // A dynamic temperature comes last.
    let is_dynamic = params.extra.as_ref().is_some_and(|extra| extra.dynamic_temperature.is_some());
    let rank = |place: usize| if is_dynamic && ORDER[place].0 == "temperature" { ORDER.len() } else { place };
    let active: Vec<usize> = places.iter().copied().filter(|place| is_on(ORDER[*place].0, params)).map(rank).collect();
    if active.is_sorted_by(|a, b| a < b) {
        return Ok(());
    }
    let mut order = ORDER.map(|(name, _)| name);
    order.sort_by_key(|name| (is_dynamic && *name == "temperature", 0));
    let message = format!("samplers work in another order here, each once: {}", order.join(", "));
    Err(ApiError::invalid("samplers", message))
}

fn is_on(name: &str, params: &SamplingParams) -> bool {
    let mut without = params.clone();
    switch_off(name, &mut without);
    without != *params
}

/// Gives the parameters of a sampler of [`ORDER`] or [`FILTERS`] the values that change nothing.
fn switch_off(name: &str, params: &mut SamplingParams) {
    let off = SamplingParams::default();
    match name {
        "penalties" => {
            params.presence_penalty = off.presence_penalty;
            params.frequency_penalty = off.frequency_penalty;
            params.repetition_penalty = off.repetition_penalty;
            params.repeat_last_n = off.repeat_last_n;
        }
        "temperature" => params.temperature = off.temperature,
        "min_p" => params.min_p = off.min_p,
        "top_k" => params.top_k = off.top_k,
        "top_p" => params.top_p = off.top_p,
        _ => {}
    }
    let Some(extra) = &mut params.extra else { return };
    let off = ExtraSamplers::default();
    match name {
        "dry" => extra.dry = off.dry,
        "top_n_sigma" => extra.top_n_sigma = off.top_n_sigma,
        "temperature" | "dynatemp" => extra.dynamic_temperature = off.dynamic_temperature,
        "typ_p" => extra.typical_p = off.typical_p,
        "xtc" => extra.xtc = off.xtc,
        _ => {}
    }
}

/// Whether a request with these samplers differs from one without them.
fn changes_something(extra: &ExtraSamplers, params: &SamplingParams) -> bool {
    let draws = extra.top_n_sigma > 0.0
        || extra.typical_p < 1.0
        || extra.xtc.is_some()
        || extra.dynamic_temperature.is_some()
        || extra.mirostat.is_some()
        || (extra.min_keep > 1 && (params.top_p < 1.0 || params.min_p > 0.0));
    extra.logprobs_of_draw || extra.dry.is_some() || (draws && !params.is_greedy())
}
