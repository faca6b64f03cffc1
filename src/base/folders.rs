//! Folders of the user.

use std::path::PathBuf;

/// `pagetide/NAME` in the user's cache directory; `None` if the environment names neither that nor a home directory.
pub fn user_cache(name: &str) -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let caches = variable("XDG_CACHE_HOME").filter(|folder| folder.is_absolute());
    Some(caches.or_else(|| Some(variable("HOME")?.join(".cache")))?.join("pagetide").join(name))
}
