//! Whoever follows a request from the intake to its end: for limits, logs and traces.

use crate::actors::messages::Event;
use crate::error::ApiError;
use crate::ids::RequestId;
use std::fmt;

/// Told of one client's request, which may have several prompts: each is a request of the engine. What it does must be
/// over in microseconds; [`RequestObserver::started`] is called by the engine's thread.
pub trait RequestObserver: fmt::Debug + Send + Sync {
    /// A prompt is valid and about to go to the scheduler. `max_tokens`: what each of its outputs may get at most; `None`
    /// where the client has not said. An error refuses it.
    fn admit(&self, prompt_tokens: usize, num_outputs: usize, max_tokens: Option<usize>) -> Result<(), ApiError>;

    /// It is on its way to the scheduler.
    fn accepted(&self, request: RequestId, prompt_tokens: usize);

    /// The first step that works on it is planned: it does not queue any longer.
    fn started(&self, request: RequestId);

    /// Its owner has heard this.
    fn heard(&self, request: RequestId, event: &Event);

    /// Its owner has found the end of a sample (a stop string).
    fn stopped(&self, request: RequestId);

    /// It ends before its time, for a reason that is not its own: a time-out, the server's end, a client that does not
    /// read.
    fn cut(&self, why: &'static str);

    /// Its owner listens no longer.
    fn left(&self, request: RequestId);
}
