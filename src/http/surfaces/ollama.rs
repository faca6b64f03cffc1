//! Ollama's API.

use crate::answer_format::AnswerFormat;
use crate::body::{self, Body};
use crate::error::{HttpError, error_response};
use crate::paths::{ApiPath, delete, get, post};
use crate::serving::{SubmittingHandle, parse};
use crate::stream::EventBody;
use actix_web::http::header::HeaderMap;
use actix_web::web::{self, Data};
use actix_web::{HttpRequest, HttpResponse};
use pagetide_actors::generation::{Generation, embedded};
use pagetide_actors::live_settings::LiveSettings;
use pagetide_actors::runtime::RuntimeHandle;
use pagetide_api::ollama::embed::{OllamaEmbeddings, OllamaOneEmbedding};
use pagetide_api::ollama::error::error_body;
use pagetide_api::ollama::models::WeightFacts;
use pagetide_api::ollama::{self as api, OllamaTask, describe};
use pagetide_base::error::ApiError;
use serde_json::json;

/// The version whose API this is. Some clients refuse to talk to older ones.
const OLLAMA_VERSION: &str = "0.24.0";

pub static PATHS: [ApiPath; 14] = [
    post("/api/chat", || web::to(chat), describe::chat),
    post("/api/generate", || web::to(generate), describe::generate),
    post("/api/embed", || web::to(embed), describe::embed),
    post("/api/embeddings", || web::to(embeddings), describe::embeddings),
    get("/api/tags", || web::to(tags), describe::tags),
    post("/api/show", || web::to(show), describe::show),
    get("/api/ps", || web::to(running), describe::running),
    get("/api/version", || web::to(version), describe::version),
    post("/api/pull", || web::to(not_managed), describe::pull),
    post("/api/push", || web::to(not_managed), describe::push),
    post("/api/create", || web::to(not_managed), describe::create),
    post("/api/copy", || web::to(not_managed), describe::copy),
    delete("/api/delete", || web::to(not_managed), describe::delete),
    post("/api/blobs/{digest}", || web::to(not_managed), describe::blob),
];

pub static FORMAT: AnswerFormat = AnswerFormat { error_body, id_header: None };

/// Whether a request speaks Ollama's API, so that errors are told in its format.
pub fn is_spoken(path: &str, _: &HeaderMap) -> bool {
    path.starts_with("/api/")
}

async fn chat(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    let task = parse(&handle, body, api::chat::parse).await?;
    answer(&handle, task).await
}

async fn generate(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    let task = parse(&handle, body, api::generate::parse).await?;
    answer(&handle, task).await
}

async fn answer(handle: &RuntimeHandle, task: OllamaTask) -> Result<HttpResponse, HttpError> {
    let (mut request, mut answer) = match task {
        OllamaTask::Load(loaded) => return Ok(HttpResponse::Ok().json(loaded)),
        OllamaTask::Generate(request, answer) => (*request, *answer),
    };
    if request.stream.is_some() {
        return Ok(EventBody::start(handle, request, answer).await?.into_response());
    }
    let num_values = request.num_answer_values(handle.model().max_model_len as usize);
    let mut generation = Generation::start(handle, &mut request).await?;
    generation.keep_logprobs(1);
    answer.accepted();
    generation.finish(|delta| answer.push(delta)).await?;
    body::answer(handle, answer.done(generation.answers()), num_values).await
}

async fn embed(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    let mut embedding = parse(&handle, body, api::embed::parse).await?;
    let num_values = embedding.request.prompts.len() * handle.model().embedding_size as usize;
    let prompts = embedded(&handle, &mut embedding.request).await?;
    body::answer(&handle, OllamaEmbeddings::new(embedding, prompts), num_values).await
}

async fn embeddings(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    let mut request = parse(&handle, body, api::embed::parse_older).await?;
    let num_values = handle.model().embedding_size as usize;
    let prompts = embedded(&handle, &mut request).await?;
    body::answer(&handle, OllamaOneEmbedding::new(prompts), num_values).await
}

async fn tags(handle: Data<RuntimeHandle>, live_settings: Data<LiveSettings>) -> HttpResponse {
    HttpResponse::Ok().json(api::models::tags(handle.model(), weights(&live_settings)))
}

async fn running(handle: Data<RuntimeHandle>, live_settings: Data<LiveSettings>) -> HttpResponse {
    HttpResponse::Ok().json(api::models::running(handle.model(), weights(&live_settings)))
}

async fn show(
    handle: Data<RuntimeHandle>,
    live_settings: Data<LiveSettings>,
    body: Body,
) -> Result<HttpResponse, HttpError> {
    parse(&handle, body, api::models::parse_show).await?;
    Ok(HttpResponse::Ok().json(api::models::show(handle.model(), weights(&live_settings))))
}

fn weights(live_settings: &LiveSettings) -> WeightFacts {
    let loaded = live_settings.loaded();
    WeightFacts {
        family: loaded.family.model_type(),
        num_parameters: loaded.num_parameters,
        num_bytes: loaded.weights_bytes,
        format: loaded.weights.formats().first().map_or(loaded.dtype.name(), |(format, _)| format),
        on_gpu: loaded.is_gpu,
    }
}

async fn version() -> HttpResponse {
    HttpResponse::Ok().json(json!({ "version": OLLAMA_VERSION }))
}

/// The model is the one that the server was started with.
async fn not_managed(request: HttpRequest) -> HttpResponse {
    error_response(ApiError::models_not_managed(request.path()))
}
