//! The pure core: sequences, block pools, the prefix cache and scheduling. It is deterministic and knows no clock,
//! thread, device or text. A seeded simulation drives all of it (`tests/simulation`).

pub mod allocation;
pub mod arbiter;
mod arrays;
pub mod beam;
pub mod bill;
mod block_hash;
pub mod block_pool;
pub mod expected;
pub mod kept_prefix;
pub mod lengths;
pub mod plan;
pub mod prefix_cache;
pub mod prompt_pace;
pub mod request;
pub mod scheduler;
pub mod sequence;
pub mod state;
pub mod step_time;
