//! The clients of requests, and what they are sent.

use crate::observer::RequestObserver;
use crate::pause::Pause;
use crate::places::Place;
use pagetide_api::event::Event;
use pagetide_base::ids::RequestId;
use pagetide_engine::bill::KvBill;
use pagetide_engine::plan::Deliveries;
use pagetide_metrics::tenants::TenantMetrics;
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
    /// Those of them that the prefix cache held.
    pub cached_tokens: usize,
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
    /// It wants to hear how far its prompt is.
    pub hears_progress: bool,
    pub observer: Option<Arc<dyn RequestObserver>>,
    /// The request's place at the intake, given back when it ends.
    pub _place: Place,
}

/// The deliveries of the last commit that have not been sent to the clients.
pub(super) struct News {
    /// How far prompts are computed.
    pub prefilled: Vec<(RequestId, usize)>,
    pub deliveries: Deliveries,
    /// Requests that ended with it.
    pub ended: Vec<RequestId>,
    pub at: Instant,
}
