//! The parts of Pagetide that share data between threads, compiled from the program's own sources with shuttle's locks
//! and threads (see `Cargo.toml`). This file has stand-ins for the modules that those parts import.

// The sources name crates of Pagetide. In this crate these names mean the modules below.
extern crate self as pagetide_base;
extern crate self as pagetide_engine;
extern crate self as pagetide_metrics;

pub use base::{error, ids};
pub use engine::bill;

/// Takes the place of `src/base/sync.rs`.
pub mod sync {
    pub use shuttle::sync::{Condvar, Mutex, MutexGuard};
    pub use std::sync::{PoisonError, TryLockError};

    pub mod atomic {
        pub use shuttle::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
    }

    pub mod channel {
        pub use shuttle::sync::mpsc::{Receiver, Sender, channel as unbounded};
    }

    pub mod thread {
        pub use shuttle::thread::{Builder, JoinHandle, Thread, current, park};
    }

    /// Checks only twice, so that shuttle tries both cases: `done` becomes true in time, and it does not.
    pub fn spin_until(_most: std::time::Duration, done: impl Fn() -> bool) -> bool {
        let is_done = done();
        is_done || {
            shuttle::thread::yield_now();
            done()
        }
    }
}

/// Of the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejection {
    ConcurrencyLimit,
    RequestLimit,
    TokenLimit,
    ConnectionLimit,
}

/// A metric that counts nothing.
pub fn request_rejected(_reason: Rejection, _tenant: ids::Tenant) {}

#[path = "../../src/http/limits/limiter.rs"]
pub mod limiter;
#[path = "../../src/actors/places.rs"]
pub mod places;

/// A finished call of the copier.
#[derive(Clone, Copy, Debug)]
pub struct FinishedCopy {
    pub to_device: bool,
    pub seconds: f64,
}

pub mod backend {
    pub mod cpu {
        pub(crate) mod memory {
            /// An address that may be sent to other threads.
            #[derive(Clone, Copy)]
            pub struct Shared<T>(*mut T);

            // SAFETY: sending an address is harmless. The code that dereferences it says why that is sound.
            unsafe impl<T> Send for Shared<T> {}

            impl<T> Shared<T> {
                pub fn new(start: *mut T) -> Self {
                    Self(start)
                }

                pub fn get(self) -> *mut T {
                    self.0
                }
            }

            /// Fills the range with zeros, as the system does with pages that are given back.
            ///
            /// # Safety
            /// The range must be allocated, and nothing else may use it during the call.
            pub unsafe fn give_back(start: *mut u8, bytes: usize) {
                // SAFETY: the caller guarantees it.
                unsafe { start.write_bytes(0, bytes) };
            }
        }

        #[expect(dead_code, reason = "only the backend uses all of it")]
        #[path = "../../../../src/backend/cpu/copier.rs"]
        pub(crate) mod copier;
        #[path = "../../../../src/backend/cpu/team.rs"]
        pub(crate) mod team;

        pub mod models;
    }
}
