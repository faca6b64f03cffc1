//! The clients of requests, and what they are sent.

use crate::actors::observer::RequestObserver;
use crate::actors::pause::Pause;
use crate::actors::places::Place;
use crate::api::event::Event;
use crate::engine::bill::KvBill;
use crate::engine::plan::Deliveries;
use crate::ids::RequestId;
use crate::metrics::tenants::TenantMetrics;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// The client of a request.
pub(super) struct Client {
    pub events: mpsc::UnboundedSender<Event>,
    pub tenant: Option<Arc<TenantMetrics>>,
    pub arrived: Instant,
    /// The time from arrival to its first step.
    pub queued: Option<Duration>,
    /// The time from arrival to its first token.
    pub first_token: Option<Duration>,
    pub prompt_tokens: usize,
    pub max_tokens: usize,
    /// Of each sample.
    pub generated: Vec<usize>,
    /// Of each sample.
    pub last_token: Vec<Option<Instant>>,
    pub ended_by_length: bool,
    /// The bill that was last sent.
    pub bill: KvBill,
    /// Of each sample.
    pub pauses: Vec<Pause>,
    pub observer: Option<Arc<dyn RequestObserver>>,
    /// The request's place at the intake, given back when it ends.
    pub _place: Place,
}

/// The deliveries of the last commit that have not been sent to the clients.
pub(super) struct News {
    pub deliveries: Deliveries,
    /// Requests that ended with it.
    pub ended: Vec<RequestId>,
    pub at: Instant,
}
