//! Models: checkpoints as data, and one forward pass for all families.

mod bytes;
pub mod checkpoint;
pub mod decoder;
pub mod dry;
pub mod families;
pub mod files;
pub mod gguf;
pub mod hub;
pub mod kv_identity;
pub mod loader;
mod names;
pub mod null;
pub mod options;
pub mod quantized;
pub mod quantizer;
pub mod rope;
pub mod runner;
pub mod spec;
pub mod step_runner;
pub mod tally;
pub mod weights;
