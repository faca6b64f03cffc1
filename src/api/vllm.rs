//! vLLM's API beside OpenAI's.

pub mod abort;
pub mod generate;
pub mod generated;
pub mod render;
pub mod rerank;
pub mod score;
