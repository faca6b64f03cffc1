//! The parts of Pagetide where threads meet, from the same sources: see `Cargo.toml`. What they import is here too, as far
//! as they need it.

#[path = "../../src/error.rs"]
pub mod error;
#[path = "../../src/ids.rs"]
pub mod ids;

/// In the place of `src/sync.rs`.
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

    /// Looks twice: so both happen, that it is done in time and that it is not.
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

/// Counts nothing.
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
    /// A call of the copier that has ended.
    #[derive(Clone, Copy, Debug)]
    pub struct FinishedCopy {
        pub to_device: bool,
        pub seconds: f64,
    }

    pub mod cpu {
        pub(crate) mod memory {
            /// An address that threads may have.
            #[derive(Clone, Copy)]
            pub struct Shared<T>(*mut T);

            // SAFETY: whoever uses the address says why it may.
            unsafe impl<T> Send for Shared<T> {}

            impl<T> Shared<T> {
                pub fn new(start: *mut T) -> Self {
                    Self(start)
                }

                pub fn get(self) -> *mut T {
                    self.0
                }
            }

            /// Leaves zeros, as the system does.
            ///
            /// # Safety
            /// The range lives, and nobody else uses it meanwhile.
            pub unsafe fn give_back(start: *mut u8, bytes: usize) {
                // SAFETY: the caller's promise.
                unsafe { start.write_bytes(0, bytes) };
            }
        }

        #[expect(dead_code, reason = "the backend's")]
        #[path = "../../../../src/backend/cpu/copier.rs"]
        pub(crate) mod copier;
        #[path = "../../../../src/backend/cpu/team.rs"]
        pub(crate) mod team;

        pub mod models;
    }
}
