//! The HTTP API over a real socket, before an engine whose every token the test decides.

mod admin;
mod answers;
mod anthropic;
mod bodies;
mod console;
mod embeddings;
mod fake_engine;
mod goldens;
mod keep_alive;
mod limits;
mod llama_cpp;
mod memory;
mod ollama;
mod openapi;
mod parameters;
mod responses;
mod samplers;
mod server;
mod sglang;
mod streams;
mod telemetry;
mod timeouts;
mod tls;
mod tools;
mod transport;
mod vllm;
