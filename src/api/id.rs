//! Ids and times as APIs write them.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Now, as APIs write it.
pub fn unix_time_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A name no other request of this process has, and no other process by accident: `PREFIX-` and 32 hexadecimal digits.
pub fn new_id(prefix: &str) -> String {
    format!("{prefix}-{}", random_hex())
}

/// What makes a name unique: 32 hexadecimal digits.
pub fn random_hex() -> String {
    static STATE: LazyLock<(RandomState, RandomState)> = LazyLock::new(|| (RandomState::new(), RandomState::new()));
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{:016x}{:016x}", STATE.0.hash_one(number), STATE.1.hash_one(number))
}
