//! Cohere's API, version 2: chat and embed.

pub mod answer;
pub mod chat;
pub mod describe;
pub mod embed;
pub mod error;
mod messages;
