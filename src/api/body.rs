//! Bodies of requests as JSON: bytes into typed fields, in one pass and in bounded memory.
//!
//! A body is a struct of groups of fields (the macros `body!` and `body_fields!`). The reader goes over the bytes once
//! ([`read`]): a field that the body has is read into it, any other field is skipped, and a field of the wrong type is
//! noted ([`FieldProblems`]) while reading goes on, so that JSON that is broken is always reported as such.

pub mod fields;
pub mod ids;
pub mod json;
pub mod nested;
pub mod parsed;
pub mod refused;
pub mod value;

pub use fields::{BodyFields, FieldSource};
pub(crate) use fields::{body, body_fields};
pub use json::{read, read_value};
pub use parsed::{FieldProblems, ParsedBody};
pub use value::Bounds;
