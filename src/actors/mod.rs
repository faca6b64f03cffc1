//! The five actors. They own state and call pure code; what they say to each other is in [`messages`].

pub mod block_allocator;
pub mod executor;
pub mod intake;
pub mod messages;
mod pause;
pub mod runtime;
pub mod scheduler;
pub mod swap_pool;
pub mod workers;

#[cfg(test)]
mod tests;
