//! Answers as streams of events, in the format of the API that was asked.

use actix_web::HttpResponse;
use actix_web::http::header::CACHE_CONTROL;
use actix_web::web::Bytes;
use futures_util::Stream;
use pagetide_actors::generation::Generation;
use pagetide_actors::observer::RequestObserver;
use pagetide_actors::runtime::RuntimeHandle;
use pagetide_api::events::WriteEvents;
use pagetide_api::request::ApiRequest;
use pagetide_base::error::ApiError;
use pagetide_metrics as metrics;
use std::cell::RefCell;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::task::AbortHandle;
use tracing::Instrument;

/// One write takes everything that is ready, up to about this many bytes. So a client that reads slowly is noticed
/// here, and not hidden by the socket's buffers.
const MAX_WRITE_BYTES: usize = 64 << 10;

/// Time between two checks of how much waits to be read, and for how long.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Events of one request. Dropped by the server when the client goes away, which cancels the request.
pub struct EventBody<W> {
    events: Rc<RefCell<StreamState<W>>>,
    /// Cuts the stream off if its client reads nothing, or too slowly.
    watch: AbortHandle,
}

struct StreamState<W> {
    writer: W,
    /// `None` when all has been written.
    generation: Option<Generation>,
    buffer: Vec<u8>,
    /// When the client was last given something, if it has not asked for more since.
    given: Option<Instant>,
    is_cut: bool,
}

/// The client took nothing for `server.write_timeout_s`.
#[derive(Debug, thiserror::Error)]
#[error("the client does not read")]
pub struct SlowClient;

impl<W: WriteEvents> EventBody<W> {
    /// Submits the request. A request that the intake refuses is refused before the stream begins.
    pub async fn start(handle: &RuntimeHandle, mut request: ApiRequest, mut writer: W) -> Result<Self, ApiError> {
        let mut generation = Generation::start(handle, &mut request).await?;
        if W::LOGPROBS_COPIES > 0 {
            generation.keep_logprobs(W::LOGPROBS_COPIES);
        }
        let mut buffer = Vec::new();
        writer.begin(&mut buffer, generation.answers());
        let events = StreamState { writer, generation: Some(generation), buffer, given: None, is_cut: false };
        let events = Rc::new(RefCell::new(events));
        let server = handle.model().server.get();
        let timeout = Some(Duration::from_secs(server.write_timeout_s)).filter(|timeout| !timeout.is_zero());
        let max_unread = Some(server.max_unread_mib << 20).filter(|most| *most > 0);
        let watch = cut_if_not_read(Rc::downgrade(&events), timeout, max_unread, handle.observer().cloned());
        let watch = actix_web::rt::spawn(watch.in_current_span()).abort_handle();
        Ok(Self { events, watch })
    }

    pub fn into_response(self) -> HttpResponse {
        HttpResponse::Ok()
            .content_type(W::CONTENT_TYPE)
            .insert_header((CACHE_CONTROL, "no-cache"))
            // Proxies that collect answers (nginx) let this one through.
            .insert_header(("X-Accel-Buffering", "no"))
            .streaming(self)
    }
}

impl<W> Drop for EventBody<W> {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

/// Ends a stream whose client takes nothing for `timeout`, or so little that more than `max_unread` bytes wait for it.
/// The server asks a body for more only when there is room for it, so the body cannot do this itself; and what the
/// engine says meanwhile would be kept in vain.
async fn cut_if_not_read<W>(
    events: Weak<RefCell<StreamState<W>>>,
    timeout: Option<Duration>,
    max_unread: Option<usize>,
    observer: Option<Arc<dyn RequestObserver>>,
) {
    let mut rest = timeout;
    loop {
        actix_web::rt::time::sleep(rest.map_or(LOOK_EVERY, |rest| rest.min(LOOK_EVERY))).await;
        let Some(events) = events.upgrade() else { return };
        let mut events = events.borrow_mut();
        let taken_nothing_for = events.given.map_or(Duration::ZERO, |given| given.elapsed());
        let unread = events.generation.as_ref().map_or(0, Generation::unread_bytes);
        let why = match timeout {
            _ if max_unread.is_some_and(|most| unread > most) => {
                let mib = unread >> 20;
                format!("a client reads more slowly than its answer comes, and {mib} MiB wait (server.max_unread_mib)")
            }
            Some(timeout) if taken_nothing_for >= timeout => {
                format!("a client took nothing for {} s", timeout.as_secs())
            }
            _ => {
                rest = timeout.map(|timeout| timeout - taken_nothing_for);
                continue;
            }
        };
        events.is_cut = true;
        events.buffer = Vec::new();
        drop(events.generation.take());
        if let Some(observer) = &observer {
            observer.cut("write_timeout");
        }
        metrics::slow_client_cut();
        tracing::info!("{why}: its stream is cut off");
        return;
    }
}

impl<W: WriteEvents> StreamState<W> {
    /// Writes what is ready. Returns false if nothing is.
    fn fill(&mut self, cx: &mut Context<'_>) -> bool {
        while self.buffer.len() < MAX_WRITE_BYTES
            && let Some(mut generation) = self.generation.take()
        {
            let next = generation.poll_next(cx);
            let num_choices = generation.answers().num_choices();
            for pause in generation.answers_mut().take_pauses() {
                self.writer.pause(&mut self.buffer, pause, num_choices);
            }
            for notice in generation.answers_mut().take_progress() {
                self.writer.progress(&mut self.buffer, notice, generation.answers());
            }
            match next {
                Poll::Pending => {
                    self.generation = Some(generation);
                    break;
                }
                Poll::Ready(Some(Ok(delta))) => {
                    self.writer.delta(&mut self.buffer, delta, generation.answers());
                    self.generation = Some(generation);
                }
                Poll::Ready(Some(Err(error))) => self.writer.error(&mut self.buffer, &error),
                Poll::Ready(None) => self.writer.end(&mut self.buffer, generation.answers()),
            }
        }
        !self.buffer.is_empty()
    }
}

impl<W: WriteEvents> Stream for EventBody<W> {
    type Item = Result<Bytes, SlowClient>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut events = self.events.borrow_mut();
        if events.is_cut {
            return Poll::Ready(Some(Err(SlowClient)));
        }
        if events.fill(cx) {
            let bytes = Bytes::copy_from_slice(&events.buffer);
            events.buffer.clear();
            events.given = Some(Instant::now());
            return Poll::Ready(Some(Ok(bytes)));
        }
        events.given = None;
        if events.generation.is_some() { Poll::Pending } else { Poll::Ready(None) }
    }
}
