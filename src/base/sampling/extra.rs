//! The parameters of llama.cpp's samplers that vLLM does not have. They are rare, so they stay out of
//! [`SamplingParams`](super::params::SamplingParams) but for one pointer.

use crate::ids::TokenId;
use std::sync::Arc;

/// Samplers that only the host computes. The default has all of them off. [`sampler`](super::sampler) says in which
/// order they work.
#[derive(Clone, Debug, PartialEq)]
pub struct ExtraSamplers {
    pub dry: Option<Dry>,
    /// Keeps tokens whose logit is at most this many standard deviations below the largest. 0 switches it off.
    pub top_n_sigma: f32,
    /// In [0, 1]. 1 switches it off.
    pub typical_p: f32,
    pub xtc: Option<Xtc>,
    pub dynamic_temperature: Option<DynamicTemperature>,
    /// Takes the place of all filters.
    pub mirostat: Option<Mirostat>,
    /// `min_p`, `typical_p`, `top_p` and XTC leave at least this many tokens.
    pub min_keep: u32,
    /// Log-probabilities are those of the draw, behind all samplers: a token that it cannot give has none.
    pub logprobs_of_draw: bool,
}

impl Default for ExtraSamplers {
    fn default() -> Self {
        Self {
            dry: None,
            top_n_sigma: 0.0,
            typical_p: 1.0,
            xtc: None,
            dynamic_temperature: None,
            mirostat: None,
            min_keep: 0,
            logprobs_of_draw: false,
        }
    }
}

/// DRY ("don't repeat yourself"): a token that would go on with a repetition of `n` tokens loses
/// `multiplier * base^(n - allowed_length)`, from `n = allowed_length` on.
#[derive(Clone, Debug, PartialEq)]
pub struct Dry {
    /// Above 0.
    pub multiplier: f32,
    /// At least 1.
    pub base: f32,
    pub allowed_length: u32,
    /// Looks at this many last tokens of prompt and output. `None`: at all.
    pub last_n: Option<u32>,
    pub breakers: Arc<DryBreakers>,
}

/// The texts over which no repetition counts, in tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DryBreakers {
    /// The texts themselves, until the intake has found their tokens: that reads the whole vocabulary.
    pub texts: Vec<String>,
    /// Tokens that contain such a text, in ascending order. They never lose anything.
    pub single: Vec<TokenId>,
    /// Tokens that end with the beginning of such a text, each with the tokens of its rest. Ordered by the first token.
    pub longer: Vec<(TokenId, Vec<TokenId>)>,
}

/// XTC ("exclude top choices"): with a probability, of the tokens that are at least as likely as the threshold only the
/// least likely stays.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Xtc {
    /// In (0, 1].
    pub probability: f32,
    /// In [0, 0.5].
    pub threshold: f32,
}

/// A temperature in `temperature ± range`, the higher the more open the choice is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DynamicTemperature {
    /// Above 0.
    pub range: f32,
    /// At least 0.
    pub exponent: f32,
}

/// Mirostat holds the surprise of the output near a target (Basu et al. 2021, arXiv:2007.14966).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mirostat {
    pub version: MirostatVersion,
    /// The target in bits.
    pub tau: f32,
    /// The learning rate.
    pub eta: f32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MirostatVersion {
    One,
    Two,
}
