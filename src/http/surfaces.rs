//! The APIs that are served, each an adapter to the one [`ApiRequest`](pagetide_api::request::ApiRequest). A surface
//! can be left out with `server.surfaces`.

pub mod anthropic;
mod batches;
pub mod cohere;
pub mod llama_cpp;
mod message_batches;
pub mod ollama;
pub mod openai;
mod responses;
pub mod sglang;
pub mod vllm;

use crate::answer_format::AnswerFormat;
use crate::paths::ApiPath;
use actix_web::http::header::HeaderMap;
use pagetide_config::Surface;

/// An API: its paths, and how it writes errors.
pub struct ApiSurface {
    pub surface: Surface,
    /// Its tables of paths. The methods of one path stand together.
    pub tables: &'static [&'static [ApiPath]],
    /// `None`: as OpenAI's API.
    pub format: Option<SpokenFormat>,
}

/// The format of the requests for which `is_spoken` holds, given their path and headers. They need not have a path that
/// is served.
pub struct SpokenFormat {
    pub is_spoken: fn(&str, &HeaderMap) -> bool,
    pub format: &'static AnswerFormat,
}

/// Every surface, in the order of the API's description.
pub static SURFACES: [ApiSurface; 7] = [
    ApiSurface { surface: Surface::OpenAi, tables: &[&openai::PATHS, &batches::PATHS], format: None },
    ApiSurface {
        surface: Surface::Anthropic,
        tables: &[&anthropic::PATHS, &message_batches::PATHS],
        format: Some(SpokenFormat { is_spoken: anthropic::is_spoken, format: &anthropic::FORMAT }),
    },
    ApiSurface {
        surface: Surface::Vllm,
        tables: &[&vllm::PATHS],
        format: Some(SpokenFormat { is_spoken: vllm::is_spoken, format: &vllm::FORMAT }),
    },
    ApiSurface { surface: Surface::Sglang, tables: &[&sglang::PATHS], format: None },
    ApiSurface {
        surface: Surface::LlamaCpp,
        tables: &[&llama_cpp::PATHS],
        format: Some(SpokenFormat { is_spoken: llama_cpp::is_spoken, format: &llama_cpp::FORMAT }),
    },
    ApiSurface {
        surface: Surface::Ollama,
        tables: &[&ollama::PATHS],
        format: Some(SpokenFormat { is_spoken: ollama::is_spoken, format: &ollama::FORMAT }),
    },
    ApiSurface {
        surface: Surface::Cohere,
        tables: &[&cohere::PATHS],
        format: Some(SpokenFormat { is_spoken: cohere::is_spoken, format: &cohere::FORMAT }),
    },
];
