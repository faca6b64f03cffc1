//! The OpenAI-compatible API on actix-web: a handler parses, submits, streams.
//!
//! A generation request: [`routes`] → [`openai::Request::parse`] → [`generation::Generation`] (submits, and turns the
//! engine's events into text) → [`complete`] (one JSON answer) or [`stream`] (server-sent events).

pub mod auth;
pub mod complete;
pub mod compression;
pub mod cors;
pub mod generation;
pub mod openai;
pub mod openapi;
pub mod routes;
pub mod server;
pub mod stream;
