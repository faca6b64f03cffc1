//! The OpenAI-compatible API on actix-web: a handler parses, submits, streams.

pub mod openai;
pub mod routes;
pub mod stream;
