//! SGLang's own paths: generate, and what its clients ask about the server.

pub mod answer;
pub mod control;
pub mod describe;
pub mod generate;
pub mod sampling;
pub mod server;
pub mod session;
