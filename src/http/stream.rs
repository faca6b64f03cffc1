//! Answers as server-sent events, in the words of whichever API was asked.

use crate::actors::runtime::RuntimeHandle;
use crate::error::ApiError;
use crate::http::generation::{Delta, Generation, PauseNotice};
use crate::http::openai::Request;
use actix_web::HttpResponse;
use actix_web::http::header::CACHE_CONTROL;
use actix_web::web::Bytes;
use futures_util::Stream;
use serde::Serialize;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

/// One write takes everything that is ready, up to about this much, so that a client that reads slowly holds us back
/// here and not in the socket's buffers.
const MAX_WRITE_BYTES: usize = 64 << 10;

/// How an API writes the events of one answer.
pub trait WriteEvents: Unpin + 'static {
    /// The request has been accepted.
    fn begin(&mut self, _out: &mut Vec<u8>, _generation: &Generation) {}
    fn delta(&mut self, out: &mut Vec<u8>, delta: Delta, generation: &Generation);
    /// The request failed; nothing follows.
    fn error(&mut self, out: &mut Vec<u8>, error: &ApiError);
    /// Every choice is complete; nothing follows.
    fn end(&mut self, out: &mut Vec<u8>, generation: &Generation);
}

/// Adds an event that has a name.
pub fn write_named_event(out: &mut Vec<u8>, name: &str, data: &impl Serialize) {
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"\ndata: ");
    serde_json::to_writer(&mut *out, data).expect("an event has only string keys and plain values");
    out.extend_from_slice(b"\n\n");
}

/// Adds a comment, which clients that know nothing of pauses skip.
fn write_pause(out: &mut Vec<u8>, PauseNotice { choice, after }: PauseNotice, num_choices: usize) {
    let mut comment = String::from(": ");
    if num_choices > 1 {
        comment.push_str(&format!("choice {choice} "));
    }
    match after {
        None => comment.push_str("paused"),
        Some(after) => comment.push_str(&format!("resumed after {} ms", after.as_millis())),
    }
    out.extend_from_slice(comment.as_bytes());
    out.extend_from_slice(b"\n\n");
}

/// Events of one request. Dropped by the server when the client goes away, which cancels the request.
pub struct EventBody<W> {
    writer: W,
    /// `None` when all has been written.
    generation: Option<Generation>,
    buffer: Vec<u8>,
}

impl<W: WriteEvents> EventBody<W> {
    /// Submits the request; what the intake refuses is refused before the stream begins.
    pub async fn start(handle: &RuntimeHandle, mut request: Request, mut writer: W) -> Result<Self, ApiError> {
        let generation = Generation::start(handle, &mut request).await?;
        let mut buffer = Vec::new();
        writer.begin(&mut buffer, &generation);
        Ok(Self { writer, generation: Some(generation), buffer })
    }

    pub fn into_response(self) -> HttpResponse {
        HttpResponse::Ok()
            .content_type("text/event-stream; charset=utf-8")
            .insert_header((CACHE_CONTROL, "no-cache"))
            // Proxies that collect answers (nginx) let this one through.
            .insert_header(("X-Accel-Buffering", "no"))
            .streaming(self)
    }

    /// Writes what is ready; false if that was nothing.
    fn fill(&mut self, cx: &mut Context<'_>) -> bool {
        while self.buffer.len() < MAX_WRITE_BYTES
            && let Some(mut generation) = self.generation.take()
        {
            let next = generation.poll_next(cx);
            let num_choices = generation.num_choices();
            generation.take_pauses().for_each(|pause| write_pause(&mut self.buffer, pause, num_choices));
            match next {
                Poll::Pending => {
                    self.generation = Some(generation);
                    break;
                }
                Poll::Ready(Some(Ok(delta))) => {
                    self.writer.delta(&mut self.buffer, delta, &generation);
                    self.generation = Some(generation);
                }
                Poll::Ready(Some(Err(error))) => self.writer.error(&mut self.buffer, &error),
                Poll::Ready(None) => self.writer.end(&mut self.buffer, &generation),
            }
        }
        !self.buffer.is_empty()
    }
}

impl<W: WriteEvents> Stream for EventBody<W> {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.fill(cx) {
            let bytes = Bytes::copy_from_slice(&self.buffer);
            self.buffer.clear();
            return Poll::Ready(Some(Ok(bytes)));
        }
        if self.generation.is_some() { Poll::Pending } else { Poll::Ready(None) }
    }
}
