//! What the API's description (OpenAPI) says about bodies, answers and paths. The server's routes make the description
//! as a whole.

pub mod answers;
mod operation;

pub use operation::{Operation, PathAccess, Tag};
