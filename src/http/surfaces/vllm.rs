//! vLLM's paths beside OpenAI's.

use crate::body::Body;
use crate::error::HttpError;
use crate::paths::{ApiPath, get, post};
use crate::serving::{SubmittingHandle, convert};
use actix_web::{HttpRequest, HttpResponse, web};
use pagetide_api::openai::tokenize;
use pagetide_api::openapi::answers::Version;
use pagetide_api::openapi::{Operation, Tag};
use serde_json::json;

pub static PATHS: [ApiPath; 3] = [
    post("/tokenize", || web::to(tokenize), tokenize::describe_tokenize),
    post("/detokenize", || web::to(detokenize), tokenize::describe_detokenize),
    get("/version", || web::to(version), describe_version),
];

async fn tokenize(handle: SubmittingHandle, request: HttpRequest, body: Body) -> Result<HttpResponse, HttpError> {
    convert(&handle, &request, body, tokenize::tokenize).await
}

async fn detokenize(handle: SubmittingHandle, request: HttpRequest, body: Body) -> Result<HttpResponse, HttpError> {
    convert(&handle, &request, body, tokenize::detokenize).await
}

fn describe_version() -> Operation {
    Operation::new(Tag::Server, "version", "The program's version").answers::<Version>("The version.")
}

async fn version() -> HttpResponse {
    HttpResponse::Ok().json(json!({"version": env!("CARGO_PKG_VERSION")}))
}
