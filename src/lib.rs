//! Pagetide: a serving runtime for large language models.
//!
//! A request's way: `http` → intake → scheduler → (block allocator, swap pool) → executor → scheduler → stream.
//! The actors are in [`actors`], the decisions they carry in [`engine`], the forward pass in [`model`], the device
//! in [`backend`]. Imports point down: `cli` › `http` › `actors`, `telemetry` › `model`, `text` › `engine`, `backend` ›
//! `sampling` › `ids`, `config`, `error`, `metrics`; `engine` and `backend` never meet. What the engine was told and
//! decided is kept by [`recorder`], between `actors` and `engine`.

pub mod actors;
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
