//! `best_of` and beam search: several outputs, of which the best are the answer.

use super::sampling::{MAX_N, SamplingFields};
use crate::checks::{in_range, shown};
use crate::request::AnswerOptions;
use pagetide_base::error::ApiError;
use pagetide_base::sampling::params::{BeamParams, EarlyStopping, SamplingParams};
use serde_json::Value;

/// Beams of one request at most.
const MAX_BEAMS: i64 = 16;
const MAX_LENGTH_PENALTY: f64 = 10.0;

impl SamplingFields {
    /// Samples to choose from, or beams; at least `n`, which is the default.
    pub fn best_of(&self) -> Result<u32, ApiError> {
        let n = i64::from(self.n()?);
        let most = if self.use_beam_search { MAX_BEAMS } else { MAX_N };
        match self.best_of {
            Some(best_of) if best_of < n => {
                Err(ApiError::invalid("best_of", format!("best_of must be at least n = {n}, got {best_of}")))
            }
            Some(best_of) => in_range("best_of", best_of, n..=most).map(|best_of| best_of as u32),
            None => in_range("n", n, 1..=most).map(|n| n as u32),
        }
    }

    /// Makes `params` those of a beam search where one is asked for, or has the engine report what `best_of` goes by.
    pub fn search(&self, params: &mut SamplingParams, answer: &AnswerOptions) -> Result<(), ApiError> {
        let (n, best_of) = (self.n()?, self.best_of()?);
        let (length_penalty, early_stopping) = (self.length_penalty()?, self.early_stopping()?);
        if !self.use_beam_search {
            self.refuse_without_beams()?;
            if best_of > n {
                if self.stream {
                    return Err(ApiError::invalid("best_of", "best_of must be n where stream is true"));
                }
                params.logprobs = params.logprobs.or(Some(0));
            }
            return Ok(());
        }
        self.refuse_with_beams(params, answer)?;
        params.beam = Some(BeamParams { width: best_of, length_penalty, early_stopping, logprobs: params.logprobs });
        // The model's own default is for sampling.
        params.repetition_penalty = 1.0;
        params.temperature = 0.0;
        Ok(())
    }

    fn length_penalty(&self) -> Result<f32, ApiError> {
        let range = -MAX_LENGTH_PENALTY..=MAX_LENGTH_PENALTY;
        in_range("length_penalty", self.length_penalty.unwrap_or(1.0), range).map(|penalty| penalty as f32)
    }

    fn early_stopping(&self) -> Result<EarlyStopping, ApiError> {
        match &self.early_stopping {
            None | Some(Value::Null | Value::Bool(false)) => Ok(EarlyStopping::No),
            Some(Value::Bool(true)) => Ok(EarlyStopping::Yes),
            Some(Value::String(never)) if never == "never" => Ok(EarlyStopping::Never),
            Some(other) => {
                let message = format!("early_stopping must be true, false or \"never\", got {}", shown(other));
                Err(ApiError::invalid("early_stopping", message))
            }
        }
    }

    /// What only a beam search has. Defaults are let through: clients send them.
    fn refuse_without_beams(&self) -> Result<(), ApiError> {
        let only = |name| Err(ApiError::invalid(name, format!("{name} is only for use_beam_search: true")));
        if self.length_penalty.is_some_and(|penalty| penalty != 1.0) {
            return only("length_penalty");
        }
        if self.early_stopping()? != EarlyStopping::No {
            return only("early_stopping");
        }
        Ok(())
    }

    /// A beam search goes by the model's own probabilities alone.
    fn refuse_with_beams(&self, params: &SamplingParams, answer: &AnswerOptions) -> Result<(), ApiError> {
        let refused = [
            ("presence_penalty", params.presence_penalty != 0.0),
            ("frequency_penalty", params.frequency_penalty != 0.0),
            ("repetition_penalty", self.repetition_penalty.is_some_and(|penalty| penalty != 1.0)),
            ("logit_bias", !params.logit_bias.is_empty()),
            ("allowed_token_ids", params.allowed_tokens.is_some()),
            ("bad_words", !params.bad_words.is_empty()),
            ("prompt_logprobs", params.prompt_logprobs.is_some() && !answer.echo),
            ("echo", params.prompt_logprobs.is_some() && answer.echo),
            ("stop", !answer.text.stop.is_empty()),
            ("stop_regex", !answer.text.stop_regexes.is_empty()),
            ("max_tokens", answer.prompt_only),
        ];
        match refused.into_iter().chain(self.given_samplers(params)).find(|(_, given)| *given) {
            Some(("echo", _)) => {
                Err(ApiError::invalid("echo", "echo with logprobs is not available with use_beam_search: true"))
            }
            Some(("max_tokens", _)) => {
                Err(ApiError::invalid("max_tokens", "max_tokens must be at least 1 with use_beam_search: true"))
            }
            Some((name, _)) => {
                Err(ApiError::invalid(name, format!("{name} is not available with use_beam_search: true")))
            }
            None => Ok(()),
        }
    }
}
