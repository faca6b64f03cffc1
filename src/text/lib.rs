//! Between text and token ids: tokenizer, chat templates, incremental detokenizer, stop strings, grammars.

pub mod breakers;
pub mod chat_output;
pub mod chat_template;
pub mod detokenizer;
pub mod fill_in;
pub mod grammar;
pub mod output;
mod pieces;
mod python;
mod spaces;
pub mod stop;
pub mod stop_regex;
pub mod tokenizer;
pub mod truncation;
