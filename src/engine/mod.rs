//! The pure core: sequences, block pools, the prefix cache, scheduling policy. Deterministic: no clock,
//! no thread, no device, no text. Everything here can be driven by a seeded simulation (`tests/simulation.rs`).

pub mod allocation;
pub mod arbiter;
mod arrays;
pub mod beam;
pub mod bill;
pub mod block_pool;
pub mod constraint;
pub mod expected;
pub mod lengths;
pub mod plan;
pub mod prefix_cache;
pub mod prompt_pace;
pub mod scheduler;
pub mod sequence;
pub mod state;
pub mod step_time;
