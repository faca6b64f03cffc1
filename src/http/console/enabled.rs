//! Whether there is a console.

use pagetide_base::error::ApiError;
use pagetide_config::ConsoleConfig;

/// Refuses if the console is switched off.
pub fn check_enabled(config: &ConsoleConfig, path: &str) -> Result<(), ApiError> {
    if config.enabled { Ok(()) } else { Err(ApiError::not_found(path)) }
}
