//! Pagetide: a serving runtime for large language models.
//!
//! This crate is the program `pagetide`, and the crates that it is made of under one name. Each is a folder of `src`;
//! docs/architecture.md says which may use which.
//!
//! The path of a request: [`http`] → intake → scheduler → (block allocator, swap pool) → executor → scheduler → stream.
//! What clients ask and are answered is in [`api`], the actors in [`actors`], the decisions that they carry out in
//! [`engine`], the forward pass in [`model`], the device in [`backend`]. [`recorder`] keeps the inputs and decisions of
//! the engine. [`offline`] runs the engine without a server.

pub use pagetide_actors as actors;
pub use pagetide_actors::offline;
pub use pagetide_api as api;
pub use pagetide_backend as backend;
pub use pagetide_base::{budget, error, ids, rules, sampling};
pub use pagetide_batches as batches;
pub use pagetide_bench as bench;
pub use pagetide_cli as cli;
pub use pagetide_config as config;
pub use pagetide_engine as engine;
pub use pagetide_http as http;
pub use pagetide_metrics as metrics;
pub use pagetide_model as model;
pub use pagetide_recorder as recorder;
pub use pagetide_telemetry as telemetry;
pub use pagetide_text as text;

#[doc(hidden)]
pub mod fuzzing;
