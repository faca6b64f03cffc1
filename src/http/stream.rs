//! The answer as server-sent events.

use crate::actors::runtime::RuntimeHandle;
use crate::error::ApiError;
use crate::http::generation::{Delta, Generation};
use crate::http::openai::response::{Answer, Usage};
use crate::http::openai::{Request, StreamOptions};
use actix_web::web::Bytes;
use futures_util::Stream;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

/// One write takes everything that is ready, up to about this much, so that a client that reads slowly holds us back
/// here and not in the socket's buffers.
const MAX_WRITE_BYTES: usize = 64 << 10;

/// Events of one request. Dropped by the server when the client goes away, which cancels the request.
pub struct EventBody {
    answer: Answer,
    options: StreamOptions,
    /// `None` when all has been written.
    generation: Option<Generation>,
    /// Whether a choice's first chunk has been written.
    begun: Vec<bool>,
    buffer: Vec<u8>,
}

impl EventBody {
    /// Submits the request; what the intake refuses is refused before the stream begins.
    pub async fn start(handle: &RuntimeHandle, mut request: Request) -> Result<Self, ApiError> {
        let answer = Answer::new(&request, handle.model());
        let generation = Generation::start(handle, &mut request).await?;
        Ok(Self {
            answer,
            options: request.stream.unwrap_or_default(),
            begun: vec![false; generation.num_choices()],
            generation: Some(generation),
            buffer: Vec::new(),
        })
    }

    /// Writes what is ready; false if that was nothing.
    fn fill(&mut self, cx: &mut Context<'_>) -> bool {
        while self.buffer.len() < MAX_WRITE_BYTES
            && let Some(mut generation) = self.generation.take()
        {
            match generation.poll_next(cx) {
                Poll::Pending => {
                    self.generation = Some(generation);
                    break;
                }
                Poll::Ready(Some(Ok(delta))) => {
                    self.write_delta(&delta, &generation);
                    self.generation = Some(generation);
                }
                Poll::Ready(Some(Err(error))) => {
                    let body = serde_json::json!({ "error": error });
                    self.event(|out, _| out.extend_from_slice(body.to_string().as_bytes()));
                }
                Poll::Ready(None) => self.write_end(&generation),
            }
        }
        !self.buffer.is_empty()
    }

    fn write_delta(&mut self, delta: &Delta, generation: &Generation) {
        let usage = match self.options {
            StreamOptions { include_usage: false, .. } => None,
            StreamOptions { continuous_usage_stats: false, .. } => Some(None),
            StreamOptions { .. } => Some(Some(generation.choice_usage(delta.choice))),
        };
        let first = !std::mem::replace(&mut self.begun[delta.choice as usize], true);
        if first && self.answer.has_role() {
            let usage = usage.map(|usage| usage.map(Usage::of_prompt));
            self.event(|out, answer| answer.write_role(out, delta.choice, generation, usage));
        }
        self.event(|out, answer| answer.write_delta(out, delta, first, generation, usage));
    }

    fn write_end(&mut self, generation: &Generation) {
        if self.options.include_usage {
            self.event(|out, answer| answer.write_usage(out, generation.usage()));
        }
        self.event(|out, _| out.extend_from_slice(b"[DONE]"));
    }

    fn event(&mut self, write: impl FnOnce(&mut Vec<u8>, &Answer)) {
        self.buffer.extend_from_slice(b"data: ");
        write(&mut self.buffer, &self.answer);
        self.buffer.extend_from_slice(b"\n\n");
    }
}

impl Stream for EventBody {
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
