//! `completion_probabilities`.

use crate::delta::Position;
use crate::openai::logprobs::json_logprob;
use pagetide_base::sampling::params::{PositionLogprobs, TokenLogprob};
use pagetide_text::tokenizer::Tokenizer;
use serde::{Serialize, Serializer};
use utoipa::ToSchema;

/// Those of some tokens. They become JSON as they are written: log-probabilities are large.
pub struct Probabilities<'a> {
    pub tokenizer: &'a Tokenizer,
    pub positions: &'a [Position],
    /// Most likely tokens of each.
    pub num_top: u32,
    /// They are those of the draw: llama.cpp then writes probabilities, not their logarithms.
    pub of_draw: bool,
}

/// A token and the most likely ones in its place.
#[derive(Serialize, ToSchema)]
pub struct TokenProbabilities {
    #[serde(flatten)]
    chosen: TokenProbability,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<TokenProbability>>,
    /// With post_sampling_probs.
    #[serde(skip_serializing_if = "Option::is_none")]
    top_probs: Option<Vec<TokenProbability>>,
}

#[derive(Serialize, ToSchema)]
struct TokenProbability {
    id: u32,
    /// Its text, without bytes at the end that are no whole character.
    token: String,
    bytes: Vec<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprob: Option<f64>,
    /// With post_sampling_probs.
    #[serde(skip_serializing_if = "Option::is_none")]
    prob: Option<f64>,
}

impl Serialize for Probabilities<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let known = self.positions.iter().filter_map(|at| at.logprobs.as_ref());
        serializer.collect_seq(known.map(|at| self.of_position(at)))
    }
}

impl Probabilities<'_> {
    fn of_position(&self, at: &PositionLogprobs) -> TokenProbabilities {
        let top = at.top.iter().take(self.num_top as usize);
        let top: Vec<_> = top.map(|of| self.of_token(of)).collect();
        let (top_logprobs, top_probs) = if self.of_draw { (None, Some(top)) } else { (Some(top), None) };
        TokenProbabilities { chosen: self.of_token(&at.chosen), top_logprobs, top_probs }
    }

    fn of_token(&self, of: &TokenLogprob) -> TokenProbability {
        let bytes = self.tokenizer.token_bytes(of.token);
        let valid = bytes.utf8_chunks().next().map_or("", |chunk| chunk.valid());
        let (logprob, prob) = match self.of_draw {
            true => (None, Some(f64::from(of.logprob).exp())),
            false => (Some(json_logprob(of)), None),
        };
        TokenProbability { id: of.token, token: valid.to_owned(), logprob, prob, bytes }
    }
}
