//! Counts and buckets, and what requests have taken from them. Each amount is given back exactly once, in whatever
//! order requests come and go (`tests/interleavings` runs the orders).

use pagetide_base::error::ApiError;
use pagetide_base::sync::atomic::{AtomicU64, Ordering};
use pagetide_base::sync::{Mutex, MutexGuard, PoisonError};
use pagetide_engine::bill::Tenant;
use pagetide_metrics::{self as metrics, Rejection};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Limits of one kind of caller. 0: none.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Rates {
    pub requests_per_minute: u64,
    pub tokens_per_minute: u64,
    pub max_requests: u64,
    pub max_connections: u64,
}

/// A minute's worth of something. The level may be below zero.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bucket {
    /// 0: there is no limit, and the level means nothing.
    pub per_minute: u64,
    pub level: f64,
    /// When the level was set.
    at: Instant,
}

impl Bucket {
    fn new(per_minute: u64, now: Instant) -> Self {
        Self { per_minute, level: per_minute as f64, at: now }
    }

    fn set(&mut self, per_minute: u64, now: Instant) {
        self.refill(now);
        self.level = if self.per_minute == 0 { per_minute as f64 } else { self.level.min(per_minute as f64) };
        self.per_minute = per_minute;
    }

    pub fn refill(&mut self, now: Instant) {
        let minutes = now.saturating_duration_since(self.at).as_secs_f64() / 60.0;
        self.level = (self.level + minutes * self.per_minute as f64).min(self.per_minute as f64);
        self.at = now;
    }

    /// Time until the bucket holds `amount`; `None`: it never does.
    pub fn wait_for(&self, amount: u64) -> Option<Duration> {
        let missing = amount as f64 - self.level;
        match self.per_minute {
            0 => Some(Duration::ZERO),
            most if amount > most => None,
            most => Some(Duration::from_secs_f64((missing.max(0.0) * 60.0) / most as f64)),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct LimiterState {
    pub requests: Bucket,
    pub tokens: Bucket,
    max_requests: u64,
    num_requests: u64,
    max_connections: u64,
    num_connections: u64,
}

/// What counts for one key, or for all.
#[derive(Debug)]
pub struct Limiter {
    /// Its name in errors.
    whose: &'static str,
    state: Mutex<LimiterState>,
}

/// Why a request was refused, and when it may be sent again.
#[derive(Debug, PartialEq)]
struct LimitRefusal {
    reason: Rejection,
    message: String,
    /// `None`: never.
    wait: Option<Duration>,
}

impl Limiter {
    pub fn of_key(rates: Rates) -> Self {
        Self::new("this API key", rates)
    }

    pub fn of_all(rates: Rates) -> Self {
        Self::new("this server", rates)
    }

    fn new(whose: &'static str, rates: Rates) -> Self {
        let now = Instant::now();
        let (requests, tokens) =
            (Bucket::new(rates.requests_per_minute, now), Bucket::new(rates.tokens_per_minute, now));
        let Rates { max_requests, max_connections, .. } = rates;
        let state =
            LimiterState { requests, tokens, max_requests, num_requests: 0, max_connections, num_connections: 0 };
        Self { whose, state: Mutex::new(state) }
    }

    /// Sets other limits. What has been used stays used.
    pub fn set(&self, rates: Rates) {
        let now = Instant::now();
        let mut state = self.state();
        state.requests.set(rates.requests_per_minute, now);
        state.tokens.set(rates.tokens_per_minute, now);
        state.max_requests = rates.max_requests;
        state.max_connections = rates.max_connections;
    }

    pub(super) fn state(&self) -> MutexGuard<'_, LimiterState> {
        // It holds numbers only: a panic leaves nothing half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, now: Instant) -> Result<(), LimitRefusal> {
        let mut state = self.state();
        if state.max_requests > 0 && state.num_requests >= state.max_requests {
            let most = state.max_requests;
            let message = format!("{} may have {most} requests at once, and has them", self.whose);
            return Err(LimitRefusal { reason: Rejection::ConcurrencyLimit, message, wait: Some(Duration::ZERO) });
        }
        state.requests.refill(now);
        let wait = state.requests.wait_for(1);
        if wait != Some(Duration::ZERO) {
            let message =
                format!("{} may have {} requests a minute, and has had them", self.whose, state.requests.per_minute);
            return Err(LimitRefusal { reason: Rejection::RequestLimit, message, wait });
        }
        state.requests.level -= 1.0;
        state.num_requests += 1;
        Ok(())
    }

    fn leave(&self) {
        self.state().num_requests -= 1;
    }

    /// Another limit has refused the request that [`Limiter::enter`] let in.
    fn undo_enter(&self) {
        let mut state = self.state();
        state.num_requests -= 1;
        state.requests.level = (state.requests.level + 1.0).min(state.requests.per_minute as f64);
    }

    fn connect(&self) -> Result<(), LimitRefusal> {
        let mut state = self.state();
        if state.max_connections > 0 && state.num_connections >= state.max_connections {
            let message =
                format!("{} may have {} connections at once, and has them", self.whose, state.max_connections);
            return Err(LimitRefusal { reason: Rejection::ConnectionLimit, message, wait: Some(Duration::ZERO) });
        }
        state.num_connections += 1;
        Ok(())
    }

    /// `taken`: what the request has taken already. It gives this back if it is refused.
    fn take_tokens(&self, tokens: u64, taken: u64, now: Instant) -> Result<(), LimitRefusal> {
        let mut state = self.state();
        state.tokens.refill(now);
        let whole = taken + tokens;
        // A request that is too large as a whole is never let in, however little its last part needs.
        let wait = state.tokens.wait_for(whole).and(state.tokens.wait_for(tokens));
        if wait != Some(Duration::ZERO) {
            let Bucket { per_minute, level, .. } = state.tokens;
            let level = (level + taken as f64).min(per_minute as f64);
            let message = format!(
                "{} may have {per_minute} tokens a minute, prompts and outputs together: {} of them are left, and the \
                 request asks for {whole}",
                self.whose,
                level.max(0.0) as u64
            );
            return Err(LimitRefusal { reason: Rejection::TokenLimit, message, wait });
        }
        state.tokens.level -= tokens as f64;
        Ok(())
    }

    /// A negative number of tokens is put back.
    fn charge_tokens(&self, tokens: i64) {
        let mut state = self.state();
        let now = Instant::now();
        state.tokens.refill(now);
        state.tokens.level = (state.tokens.level - tokens as f64).min(state.tokens.per_minute as f64);
    }
}

impl LimitRefusal {
    /// Counts it.
    fn into_error(self, tenant: Tenant) -> ApiError {
        metrics::request_rejected(self.reason, tenant);
        let retry_after_s = self.wait.map(|wait| (wait.as_secs_f64().ceil() as u64).max(1));
        let advice = match retry_after_s {
            Some(seconds) => format!("try again in {seconds} s"),
            None => "it can never be let in: ask for fewer tokens (max_tokens, or a shorter prompt)".into(),
        };
        ApiError::rate_limited(format!("{}; {advice}", self.message), retry_after_s)
    }
}

/// A request that has been let in, until it is dropped.
#[derive(Debug)]
pub struct Ticket {
    tenant: Tenant,
    limiters: Vec<Arc<Limiter>>,
    /// Tokens taken so far.
    taken: AtomicU64,
    /// Tokens used, once that is known.
    used: AtomicU64,
}

impl Ticket {
    /// Lets a request in that all of `limiters` let in. An error is a 429.
    pub fn enter(tenant: Tenant, limiters: Vec<Arc<Limiter>>) -> Result<Self, ApiError> {
        let now = Instant::now();
        for (place, limiter) in limiters.iter().enumerate() {
            if let Err(refusal) = limiter.enter(now) {
                limiters[..place].iter().for_each(|entered| entered.undo_enter());
                return Err(refusal.into_error(tenant));
            }
        }
        Ok(Self { tenant, limiters, taken: AtomicU64::new(0), used: AtomicU64::new(0) })
    }

    /// Takes what a prompt and its outputs may need. A request of several prompts calls this for each of them. An error
    /// is a 429 and refuses the whole request.
    pub fn take_tokens(&self, tokens: usize) -> Result<(), ApiError> {
        let (tokens, taken, now) = (tokens as u64, self.taken.load(Ordering::Relaxed), Instant::now());
        for (place, limiter) in self.limiters.iter().enumerate() {
            if let Err(refusal) = limiter.take_tokens(tokens, taken, now) {
                self.limiters[..place].iter().for_each(|taken| taken.charge_tokens(-(tokens as i64)));
                return Err(refusal.into_error(self.tenant));
            }
        }
        self.taken.fetch_add(tokens, Ordering::Relaxed);
        Ok(())
    }

    /// The request has used this many tokens in all. What it has taken beyond that is put back when it ends.
    pub fn set_used(&self, tokens: usize) {
        self.used.store(tokens as u64, Ordering::Relaxed);
    }
}

/// A connection that counts for a key, until it is dropped.
#[derive(Debug)]
pub struct Seat(Arc<Limiter>);

impl Seat {
    /// An error is a 429.
    pub fn take(tenant: Tenant, limiter: &Arc<Limiter>) -> Result<Self, ApiError> {
        limiter.connect().map_err(|refusal| refusal.into_error(tenant))?;
        Ok(Self(limiter.clone()))
    }

    pub fn is_of(&self, limiter: &Arc<Limiter>) -> bool {
        Arc::ptr_eq(&self.0, limiter)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.state().num_connections -= 1;
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let beyond = *self.used.get_mut() as i64 - *self.taken.get_mut() as i64;
        for limiter in &self.limiters {
            limiter.charge_tokens(beyond);
            limiter.leave();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limiter(requests_per_minute: u64, tokens_per_minute: u64, max_requests: u64) -> Arc<Limiter> {
        let rates = Rates { requests_per_minute, tokens_per_minute, max_requests, ..Rates::default() };
        Arc::new(Limiter::of_key(rates))
    }

    #[test]
    fn a_bucket_fills_up_at_its_rate_and_no_further() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut bucket = Bucket::new(60, start);
        assert_eq!(bucket.wait_for(60), Some(Duration::ZERO));
        assert_eq!(bucket.wait_for(61), None, "so much never fits");
        bucket.level -= 90.0;
        assert_eq!(bucket.wait_for(1), Some(Duration::from_secs(31)));
        bucket.refill(at(31));
        assert!((bucket.level - 1.0).abs() < 1e-9, "{}", bucket.level);
        assert_eq!(bucket.wait_for(1), Some(Duration::ZERO));
        bucket.refill(at(1000));
        assert_eq!(bucket.level, 60.0);
        // Less from now on; then none; then another, which begins full.
        bucket.set(30, at(1000));
        assert_eq!(bucket.level, 30.0);
        bucket.set(0, at(1000));
        assert_eq!(bucket.wait_for(1_000_000), Some(Duration::ZERO));
        bucket.set(10, at(1000));
        assert_eq!(bucket.level, 10.0);
    }

    #[test]
    fn requests_at_once_are_counted_until_they_end() {
        let one = limiter(0, 0, 2);
        let enter = || Ticket::enter(Tenant(1), vec![one.clone()]);
        let (first, _second) = (enter().unwrap(), enter().unwrap());
        let refused = enter().unwrap_err();
        assert_eq!((refused.status, refused.code, refused.retry_after_s), (429, Some("rate_limit_exceeded"), Some(1)));
        assert!(refused.message.contains("2 requests at once"), "{}", refused.message);
        drop(first);
        assert!(enter().is_ok());
    }

    #[test]
    fn a_refusal_by_one_limit_uses_nothing_of_another() {
        let (wide, narrow) = (limiter(10, 100, 10), limiter(1, 50, 10));
        let ticket = Ticket::enter(Tenant(1), vec![wide.clone(), narrow.clone()]).unwrap();
        ticket.take_tokens(60).unwrap_err();
        assert!((wide.state().tokens.level - 100.0).abs() < 1.0);
        ticket.take_tokens(50).unwrap();
        let refused = Ticket::enter(Tenant(1), vec![wide.clone(), narrow]).unwrap_err();
        assert!(refused.retry_after_s.is_some_and(|s| (50..=60).contains(&s)), "{refused:?}");
        assert_eq!(wide.state().num_requests, 1);
        let level = wide.state().requests.level;
        assert!((level - 9.0).abs() < 0.5, "one was let in: {level}");
    }

    #[test]
    fn a_batch_that_never_fits_is_refused_without_retry_after() {
        let one = limiter(0, 100, 0);
        let ticket = Ticket::enter(Tenant(1), vec![one.clone()]).unwrap();
        ticket.take_tokens(40).unwrap();
        ticket.take_tokens(40).unwrap();
        let refused = ticket.take_tokens(40).unwrap_err();
        assert_eq!(refused.retry_after_s, None, "{refused:?}");
        assert!(refused.message.contains("asks for 120"), "{}", refused.message);
        drop(ticket);
        assert!((one.state().tokens.level - 100.0).abs() < 1.0);
        // What fits, though not now, may come again.
        one.charge_tokens(50);
        let ticket = Ticket::enter(Tenant(1), vec![one.clone()]).unwrap();
        ticket.take_tokens(40).unwrap();
        assert!(ticket.take_tokens(40).unwrap_err().retry_after_s.is_some());
    }

    #[test]
    fn connections_at_once_are_counted_until_they_end() {
        let one = Arc::new(Limiter::of_key(Rates { max_connections: 2, ..Rates::default() }));
        let take = || Seat::take(Tenant(1), &one);
        let (first, _second) = (take().unwrap(), take().unwrap());
        let refused = take().unwrap_err();
        assert_eq!((refused.status, refused.retry_after_s), (429, Some(1)));
        assert!(refused.message.contains("2 connections at once"), "{}", refused.message);
        drop(first);
        assert!(take().is_ok());
    }

    #[test]
    fn tokens_that_were_not_used_come_back_and_more_than_taken_are_owed() {
        let one = limiter(0, 1000, 0);
        let level = || one.state().tokens.level;
        let ticket = Ticket::enter(Tenant(1), vec![one.clone()]).unwrap();
        ticket.take_tokens(900).unwrap();
        assert!((level() - 100.0).abs() < 2.0);
        let other = Ticket::enter(Tenant(1), vec![one.clone()]).unwrap();
        let refused = other.take_tokens(600).unwrap_err();
        assert_eq!(refused.retry_after_s, Some(30), "500 of 1000 a minute are missing: {refused:?}");
        assert_eq!(other.take_tokens(1001).unwrap_err().retry_after_s, None);
        drop(other);
        ticket.set_used(300);
        drop(ticket);
        assert!((level() - 700.0).abs() < 2.0);
        let ticket = Ticket::enter(Tenant(1), vec![one.clone()]).unwrap();
        ticket.take_tokens(100).unwrap();
        ticket.set_used(1700);
        drop(ticket);
        assert!((level() + 1000.0).abs() < 2.0);
    }
}
