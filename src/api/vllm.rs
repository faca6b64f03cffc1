//! vLLM's API beside OpenAI's.

pub mod abort;
pub mod decisions;
pub mod derender;
pub mod error;
pub mod generate;
pub mod generated;
pub mod generative_score;
pub mod given;
pub mod render;
pub mod rerank;
pub mod score;
