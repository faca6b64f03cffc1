//! Cohere's API, version 2: under its own paths, and under those that vLLM has for it.

use crate::answer_format::AnswerFormat;
use crate::body::{self, Body};
use crate::error::HttpError;
use crate::paths::{ApiPath, post};
use crate::serving::{SubmittingHandle, parse};
use crate::stream::EventBody;
use crate::surfaces::vllm::rendered;
use actix_web::http::header::HeaderMap;
use actix_web::{HttpRequest, HttpResponse, web};
use pagetide_actors::generation::{Generation, embedded};
use pagetide_api::cohere::answer::CohereAnswer;
use pagetide_api::cohere::error::error_body;
use pagetide_api::cohere::{self as api, describe};

pub static PATHS: [ApiPath; 4] = [
    post("/v2/chat", || web::to(chat), || describe::chat("cohere_chat")),
    post("/v2/embed", || web::to(embed), describe::embed),
    post("/cohere/v2/chat", || web::to(chat), || describe::chat("cohere_chat_vllm")),
    post("/cohere/v2/chat/render", || web::to(render_chat), describe::render),
];

pub static FORMAT: AnswerFormat = AnswerFormat { error_body, id_header: None };

/// Whether a request speaks Cohere's API, so that errors are told in its format.
pub fn is_spoken(path: &str, _: &HeaderMap) -> bool {
    // Documents are ranked by the same function on all their paths, and told of in one format.
    let is_own = path.starts_with("/v2/") || path.starts_with("/cohere/v2/");
    is_own && path != "/v2/rerank"
}

async fn chat(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    let mut request = parse(&handle, body, api::chat::parse).await?;
    let mut answer = CohereAnswer::new(handle.model());
    if request.stream.is_some() {
        return Ok(EventBody::start(&handle, request, answer).await?.into_response());
    }
    let num_values = request.num_answer_values(handle.model().max_model_len as usize);
    let mut generation = Generation::start(&handle, &mut request).await?;
    generation.keep_logprobs(1);
    generation.finish(|delta| answer.push(delta, |_, _, _| {})).await?;
    body::answer(&handle, answer.whole(generation.answers().usage()), num_values).await
}

async fn render_chat(handle: SubmittingHandle, request: HttpRequest, body: Body) -> Result<HttpResponse, HttpError> {
    rendered(&handle, &request, body, |renderer, body| renderer.cohere_chat(body)).await
}

async fn embed(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    let mut embedding = parse(&handle, body, api::embed::parse).await?;
    let num_values = embedding.request.prompts.len() * handle.model().embedding_size as usize;
    let prompts = embedded(&handle, &mut embedding.request).await?;
    body::answer(&handle, embedding.answer(prompts), num_values).await
}
