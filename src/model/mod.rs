//! A checkpoint as data and the one forward pass over it.

pub mod decoder;
pub mod files;
pub mod loader;
pub mod rope;
pub mod runner;
pub mod spec;
pub mod weights;
