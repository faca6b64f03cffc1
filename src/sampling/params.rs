//! What a client asks of one request, in token ids: the engine knows no text.

use crate::ids::TokenId;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// How to pick the next token and when to stop. Validated at intake (`http::openai`); the ranges are stated here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Tokens to generate at most, per sample; at least 1. (0 is answered without the engine, except with
    /// `prompt_logprobs`, where one token is sampled and dropped.)
    pub max_tokens: u32,
    /// No end token and no stop token before this many tokens; at most `max_tokens`.
    pub min_tokens: u32,
    /// 0 is greedy; at most 100 (OpenAI's own range ends at 2).
    pub temperature: f32,
    /// In (0, 1]; 1 switches it off.
    pub top_p: f32,
    /// 0 switches it off.
    pub top_k: u32,
    /// In [0, 1]; 0 switches it off.
    pub min_p: f32,
    /// In [-2, 2]; over generated tokens.
    pub presence_penalty: f32,
    /// In [-2, 2]; over generated tokens.
    pub frequency_penalty: f32,
    /// Above 0; over prompt and generated tokens; 1 switches it off.
    pub repetition_penalty: f32,
    /// Added to the logits, each in [-100, 100].
    pub logit_bias: Vec<(TokenId, f32)>,
    /// No other token is sampled; at least one must be left.
    pub allowed_tokens: Option<Arc<TokenMask>>,
    /// Seed of the random draws; the intake draws one where the client gave none.
    pub seed: u64,
    /// End tokens of the model (empty with `ignore_eos`, which treats them as any other).
    pub eos_token_ids: Vec<TokenId>,
    /// The client's `stop_token_ids`.
    pub stop_token_ids: Vec<TokenId>,
    /// Number of most likely tokens to report with each generated token; `None`: no log-probabilities, `Some(0)`:
    /// only the chosen token's. Log-probabilities are of the raw distribution.
    pub logprobs: Option<u32>,
    /// The same for prompt tokens (from the second on).
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
            logit_bias: Vec::new(),
            allowed_tokens: None,
            seed: 0,
            eos_token_ids: Vec::new(),
            stop_token_ids: Vec::new(),
            logprobs: None,
            prompt_logprobs: None,
        }
    }
}

impl SamplingParams {
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Whether end tokens and stop tokens may not come yet, after an output of this length.
    pub fn is_below_min_tokens(&self, output_len: usize) -> bool {
        output_len < self.min_tokens as usize
    }

    /// Whether anything changes the logits before the draw, after an output of this length.
    pub fn changes_logits(&self, output_len: usize) -> bool {
        self.allowed_tokens.is_some()
            || self.is_below_min_tokens(output_len)
            || !self.logit_bias.is_empty()
            || self.has_penalties()
    }

    /// Whether sampling reads the tokens generated so far (and, for the repetition penalty, the prompt).
    pub fn has_penalties(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 || self.repetition_penalty != 1.0
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

    /// The set with these words.
    pub fn from_words(words: Vec<u32>) -> Self {
        Self(words)
    }

    pub fn contains(&self, token: TokenId) -> bool {
        self.0.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Tokens beyond the last word are not in the set.
    pub fn words(&self) -> &[u32] {
        &self.0
    }
}

/// Sampling a model's authors recommend (`generation_config.json`): used where a request does not say.
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

/// Log-probabilities at one position: the token that stands there, and the most likely ones, best first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PositionLogprobs {
    pub chosen: TokenLogprob,
    pub top: Vec<TokenLogprob>,
}

/// One sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    pub token: TokenId,
    /// Where the request asked for log-probabilities.
    pub logprobs: Option<PositionLogprobs>,
}

/// Why a sequence ended by itself.
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
