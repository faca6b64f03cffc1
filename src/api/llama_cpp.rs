//! The API of llama.cpp's server: completions, filling in the middle, embeddings, chat templates, and what it tells of
//! itself. Its completions have the fields of the one request under llama.cpp's names, with llama.cpp's defaults.

pub mod answer;
pub mod completion;
pub mod describe;
pub mod embedding;
pub mod error;
pub mod infill;
mod logit_bias;
mod probabilities;
pub mod prompt;
pub mod props;
mod settings;
pub mod slots;
pub mod stream;
pub mod template;
