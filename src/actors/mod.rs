//! The five actors. They own state and call pure code; what they say to each other is in [`messages`].

pub mod block_allocator;
pub mod executor;
pub mod intake;
pub mod live;
pub mod messages;
pub mod model_info;
mod pause;
pub mod places;
pub mod runtime;
pub mod scheduler;
pub mod swap_pool;
mod text_files;
pub mod tuner;
pub mod watch;
pub mod workers;

#[cfg(test)]
mod tests;
