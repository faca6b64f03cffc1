//! The CUDA backend.

pub mod device;
