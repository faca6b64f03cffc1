//! What the server keeps about a connection: how long it may go without a request, and which key uses it.
//!
//! actix closes an idle connection, and one whose first head does not come in time. It leaves a connection open that
//! stops in the middle of a later head, or of a chunked body that is no longer read. Such connections are closed here.

use crate::auth::Keyed;
use crate::limits::Seat;
use actix_tls::accept::rustls_0_23::TlsStream;
use actix_web::dev::Extensions;
use actix_web::rt::net::{TcpStream, UnixStream};
use actix_web::rt::time::sleep;
use pagetide_base::error::ApiError;
use std::any::Any;
use std::cell::{Cell, OnceCell, RefCell};
use std::net::{Shutdown, TcpStream as TcpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};
use tokio::task::AbortHandle;

/// Time between a connection's last answer and its end: actix' own time for such ends.
const LINGER: Duration = Duration::from_secs(1);

/// One client's connection, as long as actix keeps it.
#[derive(Debug)]
pub struct Connection {
    /// The same socket once more, to end it: a Unix socket is shut down in the same way as one of TCP. `None`: there
    /// was no place for another open file.
    socket: Option<TcpSocket>,
    /// Requests that are read or answered.
    num_busy: Cell<usize>,
    /// When there was last a request.
    idle_since: Cell<Instant>,
    /// No further request follows.
    is_ending: Cell<bool>,
    /// Counts the connection for the key that was used last.
    seat: RefCell<Option<Seat>>,
    watch: OnceCell<AbortHandle>,
}

impl Connection {
    /// Stores what is kept about the connection `io` where its requests find it. `most_idle`: the most time between two
    /// requests, including the time for a head.
    pub fn open(io: &dyn Any, data: &mut Extensions, most_idle: Option<Duration>) {
        let Some(socket) = socket_of(io) else { return };
        let copy = socket.try_clone_to_owned();
        let copy = copy.inspect_err(|error| tracing::warn!("a connection goes without its time-outs: {error}"));
        let connection = Rc::new(Self {
            socket: copy.ok().map(Into::into),
            num_busy: Cell::new(0),
            idle_since: Cell::new(Instant::now()),
            is_ending: Cell::new(false),
            seat: RefCell::new(None),
            watch: OnceCell::new(),
        });
        if let Some(most) = most_idle {
            let watch = actix_web::rt::spawn(end_when_idle(Rc::downgrade(&connection), most));
            connection.watch.get_or_init(|| watch.abort_handle());
        }
        data.insert(connection);
    }

    /// A request has come. It lasts as long as the returned value.
    pub fn begin_request(self: &Rc<Self>) -> Busy {
        self.num_busy.set(self.num_busy.get() + 1);
        Busy(Rc::downgrade(self))
    }

    /// The connection ends with the current answer, whatever else the client sends.
    pub fn end_with_answer(&self) {
        self.is_ending.set(true);
    }

    /// The connection is used with this key. It counts for the key until it ends or is used with another. An error is a
    /// 429.
    pub fn belong_to(&self, key: &Keyed) -> Result<(), ApiError> {
        let own = key.limiters.first().filter(|_| key.name.is_some());
        let mut seat = self.seat.borrow_mut();
        match own {
            Some(own) if seat.as_ref().is_some_and(|seat| seat.is_of(own)) => {}
            Some(own) => *seat = Some(Seat::take(key.tenant, own)?),
            None => *seat = None,
        }
        Ok(())
    }

    /// There are bytes that its client has not taken.
    fn is_writing(&self) -> bool {
        let Some(socket) = &self.socket else { return false };
        let mut asked = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
        // SAFETY: the socket is open; the call writes to `asked` alone, and does not wait.
        let num_ready = unsafe { libc::poll(&raw mut asked, 1, 0) };
        num_ready == 0
    }

    /// Ends the connection, as if its client had gone.
    fn shut_down(&self) {
        // An error is a connection that has ended already.
        let _ = self.socket.as_ref().map(|socket| socket.shutdown(Shutdown::Both));
    }
}

/// The socket behind what actix calls a connection.
fn socket_of(io: &dyn Any) -> Option<BorrowedFd<'_>> {
    let tls = io.downcast_ref::<TlsStream<TcpStream>>().map(|tls| tls.get_ref().0);
    let tcp = tls.or(io.downcast_ref::<TcpStream>()).map(AsFd::as_fd);
    tcp.or_else(|| io.downcast_ref::<UnixStream>().map(AsFd::as_fd))
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(watch) = self.watch.get() {
            watch.abort();
        }
    }
}

/// A request on a connection, until its answer has been handed over.
#[derive(Debug)]
pub struct Busy(Weak<Connection>);

impl Drop for Busy {
    fn drop(&mut self) {
        let Some(connection) = self.0.upgrade() else { return };
        connection.num_busy.set(connection.num_busy.get() - 1);
        connection.idle_since.set(Instant::now());
        if connection.is_ending.get() && connection.num_busy.get() == 0 {
            actix_web::rt::spawn(end_when_written(self.0.clone()));
        }
    }
}

async fn end_when_idle(connection: Weak<Connection>, most: Duration) {
    let mut rest = most;
    loop {
        sleep(rest).await;
        let Some(connection) = connection.upgrade() else { return };
        if connection.num_busy.get() > 0 || connection.is_writing() {
            rest = most;
            continue;
        }
        rest = most.saturating_sub(connection.idle_since.get().elapsed());
        if rest.is_zero() {
            return connection.shut_down();
        }
    }
}

async fn end_when_written(connection: Weak<Connection>) {
    loop {
        sleep(LINGER).await;
        let Some(connection) = connection.upgrade() else { return };
        if connection.num_busy.get() > 0 {
            // Another request came at the same time (HTTP/2, or pipelined): the end of its answer is the connection's
            // end.
            return;
        }
        if !connection.is_writing() {
            return connection.shut_down();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix_web::rt::net::TcpListener;
    use tokio::io::AsyncReadExt;
    use tokio::time::timeout;

    const MOST: Duration = Duration::from_millis(200);
    const SOON: Duration = Duration::from_secs(10);

    /// Both ends of a connection, and what is kept of the first.
    async fn connection() -> (TcpStream, TcpStream, Extensions) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let server = listener.accept().await.unwrap().0;
        let mut data = Extensions::new();
        Connection::open(&server, &mut data, Some(MOST));
        (server, client, data)
    }

    #[actix_web::test]
    async fn an_idle_connection_times_out_and_a_busy_one_does_not() {
        let (_server, mut client, data) = connection().await;
        let connection: &Rc<Connection> = data.get().unwrap();
        let mut byte = [0];
        let busy = connection.begin_request();
        assert!(timeout(3 * MOST, client.read(&mut byte)).await.is_err(), "a request takes as long as it takes");
        drop(busy);
        let since = Instant::now();
        assert_eq!(timeout(SOON, client.read(&mut byte)).await.expect("it ends").unwrap(), 0);
        assert!(since.elapsed() >= MOST, "{:?}", since.elapsed());
    }

    #[actix_web::test]
    async fn a_connection_with_an_unread_answer_is_not_idle() {
        let (server, mut client, _data) = connection().await;
        let mut written = 0;
        // Until no more fits in; the client's side takes some of it a moment later.
        for _ in 0..5 {
            while let Ok(length) = server.try_write(&[7; 1 << 16]) {
                written += length;
            }
            sleep(Duration::from_millis(20)).await;
        }
        sleep(4 * MOST).await;
        assert_eq!(server.try_write(&[7]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "it is open");
        let mut taken = Vec::new();
        timeout(SOON, client.read_to_end(&mut taken)).await.expect("it ends then").unwrap();
        assert_eq!(taken.len(), written);
    }
}
