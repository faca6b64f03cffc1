//! The CUDA backend.

pub mod batch;
pub mod device;
pub mod upload;
