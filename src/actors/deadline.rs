//! Ends an answer that takes too long, or that the server's end cuts off.

use crate::observer::RequestObserver;
use crate::phase::Phase;
use crate::runtime::RuntimeHandle;
use pagetide_base::error::ApiError;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::sleep;

/// The time that an answer may take. It begins when this is made.
pub struct Deadline {
    end: Pin<Box<dyn Future<Output = ApiError>>>,
    observer: Option<Arc<dyn RequestObserver>>,
}

impl Deadline {
    pub fn new(handle: &RuntimeHandle) -> Self {
        let server = handle.model().server.get();
        let over = handle.phase().reached(Phase::Over);
        let end = async move {
            let seconds = server.request_timeout_s;
            let drain_timeout_s = server.drain_timeout_s;
            if seconds == 0 {
                over.await;
                return ApiError::cut_off(drain_timeout_s);
            }
            tokio::select! {
                () = over => ApiError::cut_off(drain_timeout_s),
                () = sleep(Duration::from_secs(seconds)) => ApiError::timed_out(seconds),
            }
        };
        Self { end: Box::pin(end), observer: handle.observer().cloned() }
    }

    /// The error that the answer ends with. Must not be called again after that.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<ApiError> {
        self.end.as_mut().poll(cx).map(|error| {
            if let (Some(observer), Some(code)) = (&self.observer, error.code) {
                observer.cut(code);
            }
            error
        })
    }

    /// `work`, or the error.
    pub async fn or<T>(&mut self, work: impl Future<Output = Result<T, ApiError>>) -> Result<T, ApiError> {
        let mut work = pin!(work);
        poll_fn(|cx| match work.as_mut().poll(cx) {
            Poll::Pending => self.poll(cx).map(Err),
            done => done,
        })
        .await
    }
}
