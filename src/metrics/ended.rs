//! A request that has ended, as metrics record it.

use super::events::Outcome;
use super::tenants::TenantMetrics;
use std::sync::Arc;
use std::time::Duration;

/// A request that has ended. Times are from its arrival.
#[derive(Clone, Default)]
pub struct EndedRequest {
    pub outcome: Outcome,
    pub tenant: Option<Arc<TenantMetrics>>,
    pub e2e: Duration,
    /// Its first step began; its first token came; its last. `None`: it never got so far.
    pub queued: Option<Duration>,
    pub first_token: Option<Duration>,
    pub last_token: Option<Duration>,
    pub prompt_tokens: usize,
    /// Those of them that the prefix cache held.
    pub cached_tokens: usize,
    /// Times that one of its sequences was preempted.
    pub preemptions: usize,
    /// That it could have generated, each sample.
    pub max_tokens: usize,
    /// Tokens of each sample.
    pub generated: Vec<usize>,
}
