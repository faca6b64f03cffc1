//! Clients that are too slow to send a body, or to read what is ready for them.

use actix_web::dev::Payload;
use actix_web::error::PayloadError;
use actix_web::rt::time::{Sleep, sleep};
use actix_web::web::Bytes;
use futures_util::Stream;
use std::io::{Error, ErrorKind};
use std::net::TcpListener;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

/// A body that has to be complete within a time. The time begins when the body is first waited for.
pub fn timed_body(payload: Payload, timeout: Duration) -> Payload {
    Payload::Stream { payload: Box::pin(TimedBody { payload, timeout, sleep: None }) }
}

/// Whether a body could not be read because of its time-out.
pub fn is_timeout(error: &PayloadError) -> bool {
    matches!(error, PayloadError::Io(error) if error.kind() == ErrorKind::TimedOut)
}

struct TimedBody {
    payload: Payload,
    timeout: Duration,
    /// Most bodies come with their head and need no timer.
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Stream for TimedBody {
    type Item = Result<Bytes, PayloadError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if let Poll::Ready(part) = Pin::new(&mut this.payload).poll_next(cx) {
            return Poll::Ready(part);
        }
        let timeout = this.timeout;
        let sleep = this.sleep.get_or_insert_with(|| Box::pin(sleep(timeout)));
        match sleep.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Some(Err(PayloadError::Io(Error::from(ErrorKind::TimedOut))))),
            Poll::Pending => Poll::Pending,
        }
    }
}

/// Has the operating system end connections of `listener` whose client reads nothing for this long. The server cannot
/// do this: it does not ask a body for more while the socket is full.
#[cfg(target_os = "linux")]
pub fn end_stalled_connections(listener: &TcpListener, timeout: Duration) -> std::io::Result<()> {
    use std::os::fd::AsRawFd;
    let timeout_ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
    let size = size_of_val(&timeout_ms) as libc::socklen_t;
    // SAFETY: the socket is open, and the option is a number of that size. Connections inherit it.
    let done = unsafe {
        let value = (&raw const timeout_ms).cast();
        libc::setsockopt(listener.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, value, size)
    };
    if done == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// This system has no such option: a stalled stream loses its request, and its connection lasts until the client closes
/// it.
#[cfg(not(target_os = "linux"))]
pub fn end_stalled_connections(_: &TcpListener, _: Duration) -> std::io::Result<()> {
    Ok(())
}
