//! The OpenAI-compatible API on actix-web: a handler parses, submits, streams.
//!
//! A generation request: [`routes`] → [`openai::Request::parse`] → [`generation::Generation`] (submits, and turns the
//! engine's events into text) → [`complete`] (one JSON answer) or [`stream`] (server-sent events). [`responses`] and
//! [`anthropic`] make a chat request of theirs ([`translate`]) and write what the chat says in their own shapes.

pub mod account;
pub mod admin;
pub mod anthropic;
pub mod auth;
pub mod body;
pub mod complete;
pub mod compression;
pub mod connection;
pub mod console;
pub mod cors;
pub mod deadline;
pub mod generation;
pub mod items;
pub mod limits;
pub mod openai;
pub mod openapi;
pub mod responses;
pub mod routes;
pub mod server;
pub mod stream;
pub mod timeouts;
pub mod tls;
pub mod translate;
