//! Batches of requests: OpenAI's files and batches, Anthropic's batches of messages, and the lines of both.

pub mod anthropic;
pub mod describe;
pub mod files;
pub mod line;
pub mod openai;
pub mod page;
