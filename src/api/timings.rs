//! How long a prompt and an output took, as llama.cpp says it.

use serde::Serialize;
use std::time::{Duration, Instant};
use utoipa::ToSchema;

/// When the tokens of a sample came.
#[derive(Clone, Copy, Debug)]
pub struct TokenClock {
    /// The engine took the request.
    accepted: Instant,
    first: Option<Instant>,
    last: Option<Instant>,
}

impl TokenClock {
    pub fn start() -> Self {
        Self { accepted: Instant::now(), first: None, last: None }
    }

    /// A token has come.
    pub fn tick(&mut self) {
        let now = Instant::now();
        self.first.get_or_insert(now);
        self.last = Some(now);
    }

    /// From the first token to the last.
    pub fn generating(&self) -> Duration {
        self.first.zip(self.last).map_or(Duration::ZERO, |(first, last)| last - first)
    }

    fn prompt(&self) -> Duration {
        self.first.map_or(Duration::ZERO, |first| first - self.accepted)
    }
}

/// llama.cpp's `timings`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct Timings {
    /// Prompt tokens that were in the prefix cache.
    pub cache_n: usize,
    /// Prompt tokens that were computed.
    pub prompt_n: usize,
    /// From the request to the first token; waiting for blocks or seats included.
    pub prompt_ms: f64,
    pub prompt_per_token_ms: f64,
    pub prompt_per_second: f64,
    /// Tokens of the output.
    pub predicted_n: usize,
    /// From the first token to the last.
    pub predicted_ms: f64,
    /// Of each token but the first, which comes with the prompt.
    pub predicted_per_token_ms: f64,
    pub predicted_per_second: f64,
}

/// How far a prompt is computed, in llama.cpp's words.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ToSchema)]
pub struct PromptProgress {
    /// The prompt's tokens.
    pub total: usize,
    /// Those that came from the prefix cache.
    pub cache: usize,
    /// Those that are computed, cached ones included.
    pub processed: usize,
    /// Since the request started.
    pub time_ms: f64,
}

impl PromptProgress {
    pub fn new(total: usize, cache: usize, processed: usize, time: Duration) -> Self {
        Self { total, cache, processed, time_ms: millis(time) }
    }
}

impl Timings {
    /// Those of a prompt of which `computed` tokens are there after `time`.
    pub fn of_prompt(cache_n: usize, computed: usize, time: Duration) -> Self {
        let (prompt_n, prompt_ms) = (computed.saturating_sub(cache_n), millis(time));
        Self {
            cache_n,
            prompt_n,
            prompt_ms,
            prompt_per_token_ms: ratio(prompt_ms, prompt_n as f64),
            prompt_per_second: ratio(1e3 * prompt_n as f64, prompt_ms),
            ..Self::default()
        }
    }

    pub fn new(clock: &TokenClock, prompt_tokens: usize, cached_tokens: usize, predicted_n: usize) -> Self {
        // Nothing of the prompt counts as computed before the first token.
        let prompt_n = if clock.first.is_some() { prompt_tokens.saturating_sub(cached_tokens) } else { 0 };
        let (prompt_ms, predicted_ms) = (millis(clock.prompt()), millis(clock.generating()));
        let steps = predicted_n.saturating_sub(1);
        Self {
            cache_n: cached_tokens,
            prompt_n,
            prompt_ms,
            prompt_per_token_ms: ratio(prompt_ms, prompt_n as f64),
            prompt_per_second: ratio(1e3 * prompt_n as f64, prompt_ms),
            predicted_n,
            predicted_ms,
            predicted_per_token_ms: ratio(predicted_ms, steps as f64),
            predicted_per_second: ratio(1e3 * steps as f64, predicted_ms),
        }
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// 0 where there is nothing to divide by.
fn ratio(of: f64, by: f64) -> f64 {
    if by > 0.0 { of / by } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_leave_the_first_token_out_and_are_finite() {
        let accepted = Instant::now();
        let first = accepted + Duration::from_millis(20);
        let clock = TokenClock { accepted, first: Some(first), last: Some(first + Duration::from_millis(30)) };
        let timings = Timings::new(&clock, 12, 2, 4);
        assert_eq!((timings.cache_n, timings.prompt_n, timings.predicted_n), (2, 10, 4));
        assert_eq!((timings.prompt_ms, timings.prompt_per_token_ms), (20.0, 2.0));
        assert_eq!((timings.prompt_per_second, timings.predicted_ms), (500.0, 30.0));
        assert_eq!((timings.predicted_per_token_ms, timings.predicted_per_second), (10.0, 100.0));
        let none = TokenClock { accepted, first: None, last: None };
        assert_eq!(Timings::new(&none, 12, 0, 0), Timings::default());
    }
}
