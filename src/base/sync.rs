//! Locks, atomics, channels and threads for code whose interleavings are tested: `tests/interleavings` compiles the
//! same sources with shuttle's versions of these.

pub use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};

use std::time::{Duration, Instant};

pub mod atomic {
    pub use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
}

pub mod channel {
    pub use crossbeam::channel::{Receiver, Sender, unbounded};
}

pub mod thread {
    pub use std::thread::{Builder, JoinHandle, Thread, current, park};
}

/// Spins until `done` returns true, for at most `most`. Returns whether it did.
pub fn spin_until(most: Duration, done: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        // Reading the clock costs as much as a few dozen calls of `done`.
        for _ in 0..64 {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() >= most {
            return false;
        }
    }
}
