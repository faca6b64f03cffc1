//! Notifications for systemd: ready, reloading, stopping, alive.
//!
//! The protocol is a datagram of `NAME=value` lines to the socket in `NOTIFY_SOCKET` (sd_notify(3)), which needs no
//! crate.

use pagetide_actors::live_settings::LiveSettings;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

/// The supervisor that started the process; without one, notifications do nothing.
#[derive(Clone, Debug, Default)]
pub struct Supervisor {
    socket: Option<String>,
    /// The interval in which it expects a sign of life.
    watchdog: Option<Duration>,
}

impl Supervisor {
    /// The supervisor in `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID`.
    pub fn of_environment() -> Self {
        let var = |name| std::env::var(name).ok();
        let is_ours = var("WATCHDOG_PID").is_none_or(|id| id == std::process::id().to_string());
        let watchdog = var("WATCHDOG_USEC").filter(|_| is_ours).and_then(|time| time.parse().ok());
        let watchdog = watchdog.filter(|time| *time > 0).map(Duration::from_micros);
        Self { socket: var("NOTIFY_SOCKET").filter(|socket| !socket.is_empty()), watchdog }
    }

    /// Reports that requests are accepted.
    pub fn ready(&self) {
        self.tell("READY=1");
    }

    /// Reports that the configuration is read again. [`Supervisor::ready`] must follow.
    pub fn reloading(&self) {
        self.tell(&format!("RELOADING=1\nMONOTONIC_USEC={}", monotonic_usec()));
    }

    pub fn stopping(&self) {
        self.tell("STOPPING=1");
    }

    /// Sends a sign of life twice per interval, as long as the engine answers.
    pub async fn prove_alive(self, live_settings: LiveSettings) {
        let Some(interval) = self.watchdog else { return };
        while live_settings.swap_pool().await.is_ok() {
            self.tell("WATCHDOG=1");
            actix_web::rt::time::sleep(interval / 2).await;
        }
    }

    fn tell(&self, state: &str) {
        let Some(socket) = &self.socket else { return };
        if let Err(error) = send(socket, state) {
            tracing::warn!("cannot send {state:?} to NOTIFY_SOCKET {socket}: {error}");
        }
    }
}

fn send(socket: &str, state: &str) -> std::io::Result<()> {
    let ours = UnixDatagram::unbound()?;
    match socket.strip_prefix('@') {
        None => ours.send_to(state.as_bytes(), socket).map(drop),
        Some(name) => send_abstract(&ours, name, state),
    }
}

#[cfg(target_os = "linux")]
fn send_abstract(ours: &UnixDatagram, name: &str, state: &str) -> std::io::Result<()> {
    use std::os::linux::net::SocketAddrExt;
    let addr = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
    ours.send_to_addr(state.as_bytes(), &addr).map(drop)
}

#[cfg(not(target_os = "linux"))]
fn send_abstract(_: &UnixDatagram, _: &str, _: &str) -> std::io::Result<()> {
    Err(std::io::Error::from(std::io::ErrorKind::Unsupported))
}

/// The clock by which systemd orders events.
fn monotonic_usec() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call only writes to `now`.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000
}
