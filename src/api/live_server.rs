//! Settings of the server that may change while it runs.

use pagetide_config::ServerConfig;
use std::sync::{Arc, PoisonError, RwLock};

/// The section `server` as it is now. All clones share it. To use several values for one request, get them with one
/// call.
#[derive(Clone, Debug, Default)]
pub struct LiveServer(Arc<RwLock<Arc<ServerConfig>>>);

impl LiveServer {
    pub fn new(config: ServerConfig) -> Self {
        Self(Arc::new(RwLock::new(Arc::new(config))))
    }

    pub fn get(&self) -> Arc<ServerConfig> {
        // Nothing panics while the lock is held, and the value would be consistent anyway.
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn set(&self, config: ServerConfig) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(config);
    }
}
