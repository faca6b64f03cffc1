//! What every other crate of Pagetide may use: ids, errors, budgets of work, words for choices, and sampling.
//!
//! Nothing here knows a model, a device or a request.

pub mod budget;
mod choice;
pub mod error;
pub mod folders;
pub mod ids;
pub mod rules;
pub mod sampling;
pub mod sync;
