//! The APIs ([`pagetide_api`]) over HTTP, on actix-web: connections, TLS, limits, routes, server-sent events, the
//! console.
//!
//! A generation request: a handler of one of the [`surfaces`] → [`body`] (receives, and has it parsed into an
//! [`ApiRequest`](pagetide_api::request::ApiRequest)) → [`Generation`](pagetide_actors::generation::Generation)
//! (submits, and folds the engine's events into an answer) → one JSON answer, or [`stream`] (server-sent events).

pub mod account;
pub mod admin;
pub mod answer_format;
pub mod auth;
pub mod batches;
pub mod body;
pub mod compression;
pub mod connection;
pub mod console;
pub mod cors;
pub mod error;
pub mod limits;
pub mod load_metrics;
pub mod openapi;
pub mod paths;
pub mod root_path;
pub mod routes;
pub mod server;
pub mod serving;
pub mod stream;
pub mod surfaces;
pub mod timeouts;
pub mod tls;
pub mod unix_socket;
