//! The parts of Pagetide that compute on a CPU, from the same sources: see `Cargo.toml`.

#[path = "../../src/backend/mod.rs"]
pub mod backend;
#[path = "../../src/error.rs"]
pub mod error;
#[path = "../../src/ids.rs"]
pub mod ids;
#[path = "../../src/sampling/mod.rs"]
pub mod sampling;
#[path = "../../src/sync.rs"]
mod sync;
