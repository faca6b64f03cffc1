//! The APIs without their transport: what clients ask, and what they are answered.
//!
//! A body is parsed once, into an [`ApiRequest`](request::ApiRequest); each of its prompts becomes a
//! [`PromptRequest`](request::PromptRequest), which goes through the intake to the scheduler. The engine answers with
//! [`Event`](event::Event)s, which [`fold`] turns into an answer. OpenAI's chat and completions ([`openai`]), OpenAI's
//! Responses ([`responses`]), Anthropic's Messages ([`anthropic`]) and the APIs of llama.cpp ([`llama_cpp`]), Ollama
//! ([`ollama`]), SGLang ([`sglang`]) and Cohere ([`cohere`]) are adapters to the one request and from the one answer.
//! Nothing here knows HTTP or actors.

pub mod anthropic;
pub mod batches;
pub mod body;
pub mod chat;
pub mod checks;
pub mod cohere;
pub mod dates;
pub mod delta;
pub mod embedding;
pub mod event;
pub mod events;
pub mod fields;
pub mod fold;
pub mod id;
pub mod input_tokens;
pub mod items;
pub mod line_limits;
pub mod live_server;
pub mod llama_cpp;
pub mod model_info;
pub mod ollama;
pub mod openai;
pub mod openapi;
pub mod prompt;
pub mod request;
pub mod responses;
pub mod sglang;
pub mod timings;
pub mod usage;
pub mod vllm;

/// Any JSON object. The derive of `ToSchema` knows it by this name.
type Object = serde_json::Map<String, serde_json::Value>;
