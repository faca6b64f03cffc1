//! Pagetide: a serving runtime for large language models.
//!
//! The path of a request: `http` → intake → scheduler → (block allocator, swap pool) → executor → scheduler → stream.
//! What clients ask and are answered is in [`api`], the actors in [`actors`], the decisions that they carry out in
//! [`engine`], the forward pass in [`model`], the device in [`backend`]. [`recorder`] keeps the inputs and decisions of
//! the engine.
//!
//! Imports point down: `cli` › `http` › `actors` › `api`, `config`, `metrics`, `telemetry`, `recorder` › `model`,
//! `text` › `engine`, `backend` › `sampling`, `budget` › `ids`, `error`. `engine` and `backend` do not import each
//! other. `metrics` and `telemetry` import only `ids` and `error`. `config` imports `model`, `text` and `backend`, to
//! resolve settings.

pub mod actors;
pub mod api;
pub mod backend;
pub mod budget;
mod choice;
pub mod cli;
pub mod config;
pub mod engine;
pub mod error;
#[doc(hidden)]
pub mod fuzzing;
pub mod http;
pub mod ids;
pub mod metrics;
pub mod model;
pub mod offline;
pub mod recorder;
pub mod sampling;
mod sync;
pub mod telemetry;
pub mod text;
