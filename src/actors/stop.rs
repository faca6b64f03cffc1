//! The end of an engine that cannot go on.

use actix::System;

/// Ends the engine, which cannot go on. See [`Runtime::ended`](super::runtime::Runtime::ended).
pub(super) fn stop_system(why: &str) {
    tracing::error!("the engine stops: {why}");
    System::current().stop_with_code(1);
}
