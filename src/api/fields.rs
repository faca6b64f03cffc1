//! Fields that several APIs have, and how they are checked.

pub mod beams;
pub mod encoding;
pub mod forms;
pub mod llama_cpp;
pub mod memory;
pub mod model;
pub mod nested;
pub mod pooling;
pub mod request_id;
pub mod samplers;
pub mod sampling;
pub mod shared;
pub mod structured;
pub mod unsupported;
