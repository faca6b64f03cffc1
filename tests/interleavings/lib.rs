//! The parts of Pagetide that share data between threads, compiled from the program's own sources with shuttle's locks
//! and threads (see `Cargo.toml`). This file has stand-ins for the modules that those parts import.

#[path = "../../src/error.rs"]
pub mod error;
#[path = "../../src/ids.rs"]
pub mod ids;

/// Takes the place of `src/sync.rs`.
mod sync {
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

#[path = "../../src/engine/bill.rs"]
pub mod bill;

pub mod engine {
    pub use crate::bill;
}

/// Metrics that count nothing.
mod metrics {
    use crate::engine::bill::Tenant;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Rejection {
        ConcurrencyLimit,
        RequestLimit,
        TokenLimit,
        ConnectionLimit,
    }

    pub fn request_rejected(_reason: Rejection, _tenant: Tenant) {}
}

#[path = "../../src/http/limits/limiter.rs"]
pub mod limiter;
#[path = "../../src/actors/places.rs"]
pub mod places;

pub mod backend {
    /// A finished call of the copier.
    #[derive(Clone, Copy, Debug)]
    pub struct FinishedCopy {
        pub to_device: bool,
        pub seconds: f64,
    }

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
