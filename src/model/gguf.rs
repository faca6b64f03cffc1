//! GGUF checkpoints: a file holds the weights, the configuration and the tokenizer.

pub mod reader;
