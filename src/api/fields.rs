//! Fields that several APIs have, and how they are checked.

pub mod beams;
pub mod memory;
pub mod model;
pub mod sampling;
pub mod shared;
pub mod structured;
