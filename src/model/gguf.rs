//! GGUF checkpoints: a file holds the weights, the configuration and the tokenizer.

pub mod reader;
pub mod tokenizer;

#[cfg(test)]
#[path = "../../tests/common/gguf.rs"]
mod test_files;
