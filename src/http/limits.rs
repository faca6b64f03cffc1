//! Limits of clients: requests and tokens per minute, and requests at once, for each key and for all together.
//!
//! A limit per minute is a bucket that holds a minute's worth and fills up at that rate. A request takes one from the
//! bucket of requests. It takes its prompt and the longest possible output from the bucket of tokens, and puts back at
//! its end what it has not used. If the client has not said how long the output may become, the request takes
//! [`ASSUMED_OUTPUT_TOKENS`], and at its end what it has used beyond that: the bucket may then be below zero for a
//! while.

mod limiter;

use actix_web::http::header::{HeaderMap, HeaderName, HeaderValue};
use limiter::LimiterState;
pub use limiter::{Limiter, Rates, Seat, Ticket};
use pagetide_config::{ApiKeyConfig, Config, LimitsConfig};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tokens that an output is charged with at first if its client has not said how long it may become.
pub const ASSUMED_OUTPUT_TOKENS: usize = 256;

impl Rates {
    pub fn of_all(limits: &LimitsConfig) -> Self {
        let LimitsConfig { requests_per_minute, tokens_per_minute, .. } = *limits;
        Self { requests_per_minute, tokens_per_minute, ..Self::default() }
    }

    pub fn of_key(key: &ApiKeyConfig, config: &Config) -> Self {
        let limits = &config.limits;
        Self {
            requests_per_minute: key.requests_per_minute.unwrap_or(limits.key_requests_per_minute),
            tokens_per_minute: key.tokens_per_minute.unwrap_or(limits.key_tokens_per_minute),
            max_requests: key.max_requests.unwrap_or(limits.key_max_requests),
            max_connections: key.max_connections.unwrap_or(config.key_max_connections()),
        }
    }
}

/// The headers that OpenAI's clients read: the tightest limit of each kind.
pub fn write_headers(limiters: &[Arc<Limiter>], headers: &mut HeaderMap) {
    let now = Instant::now();
    let states = limiters.iter().map(|limiter| {
        let mut state = *limiter.state();
        state.requests.refill(now);
        state.tokens.refill(now);
        state
    });
    let states: Vec<LimiterState> = states.collect();
    let kinds = [("requests", states.iter().map(|state| state.requests).collect::<Vec<_>>())];
    let kinds = kinds.into_iter().chain([("tokens", states.iter().map(|state| state.tokens).collect())]);
    for (kind, buckets) in kinds {
        let limited = buckets.iter().filter(|bucket| bucket.per_minute > 0);
        let Some(bucket) = limited.min_by(|one, other| one.level.total_cmp(&other.level)) else { continue };
        let reset = bucket.wait_for(bucket.per_minute).unwrap_or_default();
        let values = [
            ("limit", bucket.per_minute.to_string()),
            ("remaining", (bucket.level.max(0.0) as u64).to_string()),
            ("reset", in_gos_words(reset)),
        ];
        for (what, value) in values {
            let name = HeaderName::try_from(format!("x-ratelimit-{what}-{kind}"));
            if let (Ok(name), Ok(value)) = (name, HeaderValue::try_from(value)) {
                headers.insert(name, value);
            }
        }
    }
}

/// As OpenAI writes times: `6m0s`, `1.5s`, `12ms`.
fn in_gos_words(time: Duration) -> String {
    let ms = time.as_millis();
    match (ms / 60_000, ms % 60_000) {
        (0, ms) if ms < 1000 => format!("{ms}ms"),
        (0, ms) => format!("{}s", ms as f64 / 1e3),
        (minutes, ms) => format!("{minutes}m{}s", ms as f64 / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_engine::bill::Tenant;

    fn limiter(requests_per_minute: u64, tokens_per_minute: u64, max_requests: u64) -> Arc<Limiter> {
        let rates = Rates { requests_per_minute, tokens_per_minute, max_requests, ..Rates::default() };
        Arc::new(Limiter::of_key(rates))
    }

    #[test]
    fn headers_are_of_the_tightest_limit() {
        let (key, all) = (limiter(60, 0, 0), limiter(1000, 500, 0));
        let limiters = [key, all];
        let ticket = Ticket::enter(Tenant(1), limiters.to_vec()).unwrap();
        ticket.take_tokens(200).unwrap();
        let mut headers = HeaderMap::new();
        write_headers(&limiters, &mut headers);
        let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        assert_eq!((header("x-ratelimit-limit-requests"), header("x-ratelimit-remaining-requests")), ("60", "59"));
        assert_eq!((header("x-ratelimit-limit-tokens"), header("x-ratelimit-remaining-tokens")), ("500", "300"));
        assert!(header("x-ratelimit-reset-tokens").ends_with('s'));
        let times = [12, 1500, 360_000, 61_500].map(|ms| in_gos_words(Duration::from_millis(ms)));
        assert_eq!(times, ["12ms", "1.5s", "6m0s", "1m1.5s"]);
    }
}
