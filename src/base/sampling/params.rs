//! The sampling parameters of one request, in token ids.

use super::extra::{Dry, ExtraSamplers, Mirostat};
use crate::ids::TokenId;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// How to pick the next token and when to stop. The API checks these values when a request arrives
/// (`api::fields::sampling`). The ranges are documented here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// The most tokens to generate for each sample, at least 1. (A request for 0 tokens is answered without the engine,
    /// except with `prompt_logprobs`: then one token is sampled and dropped.)
    pub max_tokens: u32,
    /// End tokens and stop tokens are not sampled before this many tokens. At most `max_tokens`.
    pub min_tokens: u32,
    /// 0 means greedy. At most 100 (OpenAI's own range ends at 2).
    pub temperature: f32,
    /// In (0, 1]. 1 switches it off.
    pub top_p: f32,
    /// 0 switches it off.
    pub top_k: u32,
    /// In [0, 1]. 0 switches it off.
    pub min_p: f32,
    /// In [-2, 2], applied to generated tokens.
    pub presence_penalty: f32,
    /// In [-2, 2], applied to generated tokens.
    pub frequency_penalty: f32,
    /// Above 0, applied to tokens of the prompt and generated tokens. 1 switches it off.
    pub repetition_penalty: f32,
    /// The three penalties look at this many last tokens of prompt and output, at least 1. `None`: at all.
    pub repeat_last_n: Option<u32>,
    /// Samplers that only the host computes. Decisions do not depend on them, so recordings leave them out.
    #[serde(skip)]
    pub extra: Option<Box<ExtraSamplers>>,
    /// Added to the logits, each in [-100, 100].
    pub logit_bias: Vec<(TokenId, f32)>,
    /// The only tokens that may be sampled. At least one must be possible.
    pub allowed_tokens: Option<Arc<TokenMask>>,
    /// Sequences of tokens that must not occur in the output, unless no other token is possible.
    pub bad_words: Vec<Vec<TokenId>>,
    /// Set if the request wants an embedding of the prompt instead of output.
    pub pooling: Option<Pooling>,
    /// Set for beam search instead of sampling.
    pub beam: Option<BeamParams>,
    /// Seed of the random draws. If the client gave none, the intake draws one.
    pub seed: u64,
    /// End tokens of the model. Empty with `ignore_eos`, which treats them like any other token.
    pub eos_token_ids: Vec<TokenId>,
    /// The client's `stop_token_ids`.
    pub stop_token_ids: Vec<TokenId>,
    /// Number of most likely tokens to report with each generated token. `None`: no log-probabilities; `Some(0)`: only
    /// that of the chosen token. Log-probabilities are those of the raw distribution.
    pub logprobs: Option<u32>,
    /// With `logprobs`: report these tokens instead of the most likely ones, after the chosen token if it is none of
    /// them. Decisions do not depend on them, so recordings leave them out.
    #[serde(skip)]
    pub logprob_token_ids: Vec<TokenId>,
    /// `logprobs` for the tokens of the prompt, starting with the second.
    pub prompt_logprobs: Option<u32>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            max_tokens: 16,
            min_tokens: 0,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            repeat_last_n: None,
            extra: None,
            logit_bias: Vec::new(),
            allowed_tokens: None,
            bad_words: Vec::new(),
            pooling: None,
            beam: None,
            seed: 0,
            eos_token_ids: Vec::new(),
            stop_token_ids: Vec::new(),
            logprobs: None,
            logprob_token_ids: Vec::new(),
            prompt_logprobs: None,
        }
    }
}

impl SamplingParams {
    /// How likely each of these tokens comes next. One token is sampled, which nobody needs.
    pub fn scoring(ids: Vec<TokenId>) -> Self {
        let logprobs = Some(ids.len() as u32 + 1);
        Self { max_tokens: 1, temperature: 0.0, logprobs, logprob_token_ids: ids, ..Self::default() }
    }

    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Whether end tokens and stop tokens are still forbidden after an output of this length.
    pub fn is_below_min_tokens(&self, output_len: usize) -> bool {
        output_len < self.min_tokens as usize
    }

    /// The limits after any output of this length.
    pub fn limits(&self, output_len: usize) -> TokenLimits {
        let ends = if self.is_below_min_tokens(output_len) { self.end_tokens().collect() } else { Vec::new() };
        TokenLimits { allowed: self.allowed_tokens.clone(), banned: ends }
    }

    /// The tokens that end an output.
    pub fn end_tokens(&self) -> impl Iterator<Item = TokenId> {
        self.eos_token_ids.iter().chain(&self.stop_token_ids).copied()
    }

    /// Whether the logits are changed before the draw.
    pub fn changes_logits(&self, limits: &TokenLimits) -> bool {
        limits.excludes_any() || !self.logit_bias.is_empty() || self.has_penalties()
    }

    /// Whether sampling reads the tokens generated so far (and, for the repetition penalty and DRY, the prompt).
    pub fn has_penalties(&self) -> bool {
        self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
            || self.repetition_penalty != 1.0
            || self.dry().is_some()
    }

    pub fn dry(&self) -> Option<&Dry> {
        self.extra.as_ref()?.dry.as_ref()
    }

    /// Whether log-probabilities are those of the draw.
    pub fn logprobs_of_draw(&self) -> bool {
        self.extra.as_ref().is_some_and(|extra| extra.logprobs_of_draw)
    }

    /// Whether the host draws the tokens, from logits that the device gives it: the kernels do not have all samplers,
    /// and report no tokens but the most likely ones.
    pub fn draws_on_host(&self) -> bool {
        self.extra.is_some() || !self.logprob_token_ids.is_empty()
    }

    fn mirostat(&self) -> Option<&Mirostat> {
        self.extra.as_ref()?.mirostat.as_ref()
    }

    /// Mirostat's mu before the first token of an output; 0 without mirostat.
    pub fn first_mu(&self) -> f32 {
        self.mirostat().map_or(0.0, |mirostat| 2.0 * mirostat.tau)
    }
}

/// How the prompt's final hidden states become its embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// The state of the last token.
    Last,
    /// The mean of the states of all tokens.
    Mean,
}

/// Beam search. Kwon et al. 2023, section 4.4, describes how beams share memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BeamParams {
    /// Number of beams, 1 to 16, at least the number of requested outputs.
    pub width: u32,
    /// In [-10, 10]. A result's score is its sum of log-probabilities divided by its length to this power.
    pub length_penalty: f32,
    pub early_stopping: EarlyStopping,
    /// The log-probabilities that the client asked for. Those in [`SamplingParams::logprobs`] are for the search
    /// itself.
    pub logprobs: Option<u32>,
}

/// When a beam search ends once it has as many results as beams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum EarlyStopping {
    /// At once.
    Yes,
    /// When the best beam at its current length is no better than the worst result.
    #[default]
    No,
    /// When no beam can become better than the worst result at any length.
    Never,
}

/// Which tokens may be sampled at one position of an output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenLimits {
    /// The allowed tokens. `None`: all are allowed.
    pub allowed: Option<Arc<TokenMask>>,
    /// Forbidden tokens.
    pub banned: Vec<TokenId>,
}

impl TokenLimits {
    pub fn excludes_any(&self) -> bool {
        self.allowed.is_some() || !self.banned.is_empty()
    }

    /// The only token that is allowed, if there is just one.
    pub fn only(&self) -> Option<TokenId> {
        let mut left = self.allowed.as_ref()?.iter().filter(|token| !self.banned.contains(token));
        let first = left.next()?;
        left.next().is_none().then_some(first)
    }
}

/// A set of tokens: bit `t % 32` of word `t / 32` stands for token `t`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenMask(Vec<u32>);

impl TokenMask {
    pub fn new(tokens: impl IntoIterator<Item = TokenId>) -> Self {
        let mut words = Vec::new();
        for token in tokens {
            let word = token as usize / 32;
            words.resize(words.len().max(word + 1), 0);
            words[word] |= 1 << (token % 32);
        }
        Self(words)
    }

    pub fn contains(&self, token: TokenId) -> bool {
        self.0.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// The tokens in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = TokenId> {
        self.0.iter().enumerate().flat_map(|(i, word)| {
            let rest = |left: &u32| Some(left & (left - 1)).filter(|left| *left != 0);
            let lowest = move |left: u32| 32 * i as TokenId + left.trailing_zeros();
            std::iter::successors(Some(*word).filter(|word| *word != 0), rest).map(lowest)
        })
    }

    /// The set that has these words.
    pub fn from_words(words: Vec<u32>) -> Self {
        Self(words)
    }

    /// Tokens beyond the last word are not in the set.
    pub fn words(&self) -> &[u32] {
        &self.0
    }
}

/// Limits of temperatures and repetition penalties, both of requests and of a model's defaults.
pub const MAX_TEMPERATURE: f64 = 100.0;
pub const MAX_REPETITION_PENALTY: f64 = 100.0;

/// The sampling that a model's authors recommend (`generation_config.json`), used for what a request does not specify.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct SamplingDefaults {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

/// A token with the log-probability of the raw distribution.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    pub token: TokenId,
    pub logprob: f32,
    /// 1 for the most likely token.
    pub rank: u32,
}

/// Log-probabilities at one position: of the token at the position, and of the most likely tokens, best first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PositionLogprobs {
    pub chosen: TokenLogprob,
    pub top: Vec<TokenLogprob>,
}

impl PositionLogprobs {
    /// A placeholder that says only that there are log-probabilities.
    pub fn unknown() -> Self {
        Self { chosen: TokenLogprob { token: 0, logprob: 0.0, rank: 0 }, top: Vec::new() }
    }
}

/// One sampled token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampled {
    pub token: TokenId,
    /// Mirostat's mu after this token; 0 without mirostat.
    #[serde(default)]
    pub mu: f32,
    /// Set if the request asked for log-probabilities.
    pub logprobs: Option<Box<PositionLogprobs>>,
}

impl Sampled {
    /// A token without anything else.
    pub fn of(token: TokenId) -> Self {
        Self { token, mu: 0.0, logprobs: None }
    }
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// An end token of the model.
    Eos,
    /// One of the client's `stop_token_ids`.
    StopToken(TokenId),
    /// `max_tokens` or the model's length.
    Length,
}
