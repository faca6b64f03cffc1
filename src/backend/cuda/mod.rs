//! The CUDA backend.

pub mod batch;
pub mod device;
mod upload;
