//! Observes a request from the intake to its end, for limits, logs and traces.

use pagetide_api::event::Event;
use pagetide_base::error::ApiError;
use pagetide_base::ids::RequestId;
use std::fmt;

/// Observes one client's request. It may have several prompts, each of which is a request of the engine. All methods
/// have to return within microseconds, because the engine's thread calls [`RequestObserver::started`].
pub trait RequestObserver: fmt::Debug + Send + Sync {
    /// A valid prompt is about to go to the scheduler. `max_tokens` is the limit of each of its outputs, or `None` if
    /// the client gave none. An error refuses the request.
    fn admit(&self, prompt_tokens: usize, num_outputs: usize, max_tokens: Option<usize>) -> Result<(), ApiError>;

    /// It is on its way to the scheduler.
    fn accepted(&self, request: RequestId, prompt_tokens: usize);

    /// The first step that works on it is planned.
    fn started(&self, request: RequestId);

    /// The client received this event.
    fn heard(&self, request: RequestId, event: &Event);

    /// A stop string ended a sample.
    fn stopped(&self, request: RequestId);

    /// It is cut off by a time-out, by the server's shutdown, or because the client does not read.
    fn cut(&self, why: &'static str);

    /// The client stopped listening.
    fn left(&self, request: RequestId);
}
