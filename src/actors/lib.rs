//! The five actors. They own state and call pure code. Their messages are in [`messages`].

pub mod answers;
pub mod block_allocator;
pub mod deadline;
pub mod direct;
pub mod engine_config;
pub mod executor;
pub mod generation;
pub mod intake;
pub mod live_settings;
pub mod messages;
pub mod observer;
pub mod offline;
mod pause;
pub mod phase;
pub mod places;
pub mod preflight;
pub mod recordings;
pub mod runtime;
pub mod scheduler;
pub mod slots;
pub mod snapshot;
mod stop;
pub mod swap_pool;
mod text_files;
pub mod under_way;
pub mod workers;

#[cfg(test)]
mod tests;
