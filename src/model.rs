//! A checkpoint as data and the one forward pass over it.

mod bytes;
pub mod checkpoint;
pub mod decoder;
pub mod dry;
pub mod families;
pub mod files;
pub mod hub;
pub mod loader;
mod names;
pub mod null;
pub mod options;
pub mod rope;
pub mod runner;
pub mod spec;
pub mod weights;
