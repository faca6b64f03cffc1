//! Settings of the server that may change while it runs, for all who go by them.

use crate::config::ServerConfig;
use std::sync::{Arc, PoisonError, RwLock};

/// The section `server` as it is now; all clones say the same. Whoever needs several of its values for one request gets
/// them at once.
#[derive(Clone, Debug, Default)]
pub struct LiveServer(Arc<RwLock<Arc<ServerConfig>>>);

impl LiveServer {
    pub fn new(config: ServerConfig) -> Self {
        Self(Arc::new(RwLock::new(Arc::new(config))))
    }

    pub fn get(&self) -> Arc<ServerConfig> {
        // Nothing panics while it is held, and nothing would be left in between.
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set(&self, config: ServerConfig) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(config);
    }
}
