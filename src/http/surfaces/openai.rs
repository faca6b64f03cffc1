//! OpenAI's API: chat, completions, Responses, models and embeddings.

use super::{anthropic, responses};
use crate::body::Body;
use crate::error::{HttpError, error_response};
use crate::paths::{ApiPath, delete, get, post};

use crate::serving::{SubmittingHandle, answer_embeddings, convert, generate, parse};
use actix_web::web::{self, Data, Path};
use actix_web::{HttpRequest, HttpResponse};
use pagetide_actors::runtime::RuntimeHandle;
use pagetide_api as api;
use pagetide_api::fields::model::check_model_name;
use pagetide_api::model_info::ModelInfo;
use pagetide_api::openai::{Endpoint, chat, completion, embeddings};
use pagetide_api::openapi::answers::{ModelCard, ModelList};
use pagetide_api::openapi::{Operation, Tag};
use pagetide_api::responses::request::ResponsesRequest;
use pagetide_base::error::ApiError;
use serde_json::{Value, json};

pub const STORED_RESPONSE: &str = "/v1/responses/{id}";

pub static PATHS: [ApiPath; 11] = [
    post("/v1/chat/completions", || web::to(chat_completions), chat::describe),
    post("/v1/completions", || web::to(completions), completion::describe),
    post("/v1/responses", || web::to(create_response), api::responses::describe::create),
    post("/v1/responses/input_tokens", || web::to(response_input_tokens), api::responses::describe::input_tokens),
    get(STORED_RESPONSE, || web::to(stored_response), api::responses::describe::retrieve),
    delete(STORED_RESPONSE, || web::to(stored_response), api::responses::describe::delete),
    get("/v1/responses/{id}/input_items", || web::to(stored_response), api::responses::describe::input_items),
    post("/v1/responses/{id}/cancel", || web::to(stored_response), api::responses::describe::cancel),
    get("/v1/models", || web::to(models), describe_models),
    // Names may hold slashes.
    ApiPath { pattern: "/v1/models/{id:.+}", ..get("/v1/models/{id}", || web::to(model), describe_model) },
    post("/v1/embeddings", || web::to(embed), embeddings::describe),
];

/// These paths are served without `/v1` too, for clients whose base URL lacks it.
const WITHOUT_PREFIX: [&str; 7] = [
    "/chat/completions",
    "/chat/completions/input_tokens",
    "/completions",
    "/models",
    "/models/{id:.+}",
    "/embeddings",
    "/responses",
];

/// The pattern without `/v1`, if it is served so.
pub fn without_prefix(pattern: &'static str) -> Option<&'static str> {
    pattern.strip_prefix("/v1").filter(|short| WITHOUT_PREFIX.contains(short))
}

async fn chat_completions(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    let request = parse(&handle, body, chat::parse).await?;
    generate(&handle, Endpoint::Chat, request).await
}

async fn completions(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    let request = parse(&handle, body, completion::parse).await?;
    generate(&handle, Endpoint::Completion, request).await
}

async fn create_response(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    responses::create(&handle, parse(&handle, body, ResponsesRequest::parse).await?).await
}

async fn response_input_tokens(
    handle: SubmittingHandle,
    request: HttpRequest,
    body: Body,
) -> Result<HttpResponse, HttpError> {
    convert(&handle, &request, body, api::responses::input_tokens).await
}

/// Nothing is stored, so there is nothing to get, list, cancel or delete.
async fn stored_response(id: Path<String>) -> HttpResponse {
    error_response(ApiError::response_not_stored(&id))
}

fn describe_models() -> Operation {
    Operation::new(Tag::Models, "list_models", "The models that are served").answers::<ModelList>("One model.")
}

fn describe_model() -> Operation {
    Operation::new(Tag::Models, "retrieve_model", "One model")
        .path_parameter("id", "Its name; slashes in it may stand as they are.")
        .answers::<ModelCard>("The model.")
}

async fn models(handle: Data<RuntimeHandle>, request: HttpRequest) -> HttpResponse {
    if anthropic::has_version(request.headers()) {
        return HttpResponse::Ok().json(api::anthropic::models::list(handle.model()));
    }
    let model = handle.model();
    let cards: Vec<Value> = match model.speaks_llama_cpp() {
        true => vec![model_card(model, &model.served_name)],
        false => model.names().map(|name| model_card(model, name)).collect(),
    };
    HttpResponse::Ok().json(json!({"object": "list", "data": cards}))
}

async fn model(handle: Data<RuntimeHandle>, id: Path<String>, request: HttpRequest) -> Result<HttpResponse, HttpError> {
    check_model_name(&id, handle.model())?;
    if anthropic::has_version(request.headers()) {
        return Ok(HttpResponse::Ok().json(api::anthropic::models::card(handle.model(), &id)));
    }
    Ok(HttpResponse::Ok().json(model_card(handle.model(), &id)))
}

/// The card of one of the model's names.
fn model_card(model: &ModelInfo, name: &str) -> Value {
    let mut card = json!({
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "pagetide",
        "root": model.served_name,
        "parent": null,
        "max_model_len": model.max_model_len,
    });
    if model.speaks_llama_cpp() {
        card["aliases"] = model.names().collect();
        card["tags"] = model.server.get().model_tags.as_slice().into();
        card["meta"] = json!({
            "n_vocab": model.vocab_size,
            "n_ctx": model.max_model_len,
            "n_ctx_train": model.max_model_len,
            "n_embd": model.embedding_size,
        });
    }
    card
}

pub async fn embed(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    answer_embeddings(&handle, parse(&handle, body, embeddings::parse).await?).await
}
