//! The paths. A handler parses, submits, streams.

use crate::actors::runtime::RuntimeHandle;
use crate::error::ApiError;
use crate::http::openai::stream::Chunks;
use crate::http::openai::{Endpoint, Request, check_model, tokenize};
use crate::http::server::Limits;
use crate::http::stream::EventBody;
use crate::http::{anthropic, complete, responses};
use crate::metrics;
use actix_web::http::header::{ALLOW, ContentType, RETRY_AFTER};
use actix_web::http::{Method, StatusCode};
use actix_web::web::{self, Bytes, Data, Path, ServiceConfig};
use actix_web::{HttpRequest, HttpResponse, Resource, ResponseError, Route, guard};
use serde_json::{Value, json};

/// Names may hold slashes.
const MODEL: &str = "/v1/models/{id:.+}";

/// The paths but [`MODEL`].
const PATHS: [&str; 15] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/{id}",
    "/v1/responses/{id}/input_items",
    "/v1/responses/{id}/cancel",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ready",
    "/version",
    "/metrics",
];

/// How metrics name the path of a matched route; what a client made up is `other`.
pub fn metrics_path(pattern: Option<&str>) -> &'static str {
    match pattern {
        Some(MODEL) => "/v1/models/{id}",
        _ => PATHS.into_iter().find(|path| pattern == Some(*path)).unwrap_or("other"),
    }
}

pub fn configure(config: &mut ServiceConfig) {
    let get = || [Method::GET];
    let post = || [Method::POST];
    config
        .service(resource("/v1/chat/completions", &post(), web::to(chat_completions)))
        .service(resource("/v1/completions", &post(), web::to(completions)))
        .service(resource("/v1/responses", &post(), web::to(create_response)))
        .service(resource("/v1/responses/{id}", &[Method::GET, Method::DELETE], web::to(stored_response)))
        .service(resource("/v1/responses/{id}/input_items", &get(), web::to(stored_response)))
        .service(resource("/v1/responses/{id}/cancel", &post(), web::to(stored_response)))
        .service(resource("/v1/messages", &post(), web::to(messages)))
        .service(resource("/v1/messages/count_tokens", &post(), web::to(count_tokens)))
        .service(resource("/v1/models", &get(), web::to(models)))
        .service(resource(MODEL, &get(), web::to(model)))
        .service(resource("/tokenize", &post(), web::to(tokenize)))
        .service(resource("/detokenize", &post(), web::to(detokenize)))
        .service(resource("/health", &get(), web::to(health)))
        .service(resource("/ready", &get(), web::to(ready)))
        .service(resource("/version", &get(), web::to(version)))
        .service(resource("/metrics", &get(), web::to(prometheus)))
        .default_service(web::to(not_found));
}

/// A path with its methods, HEAD going with GET; another is answered with 405.
fn resource(path: &'static str, methods: &[Method], route: Route) -> Resource {
    let with_head = methods.iter().flat_map(|method| {
        let head = (*method == Method::GET).then_some(Method::HEAD);
        std::iter::once(method.clone()).chain(head)
    });
    let methods: Vec<Method> = with_head.collect();
    let allowed = methods.iter().map(Method::as_str).collect::<Vec<_>>().join(", ");
    let guarded = route.guard(guard::fn_guard(move |context| methods.contains(&context.head().method)));
    web::resource(path).route(guarded).default_service(web::to(move |request: HttpRequest| {
        let error = ApiError::method_not_allowed(request.method().as_str(), &allowed);
        let mut response = error.error_response();
        if let Ok(value) = allowed.parse() {
            response.headers_mut().insert(ALLOW, value);
        }
        std::future::ready(response)
    }))
}

async fn chat_completions(
    handle: Data<RuntimeHandle>,
    limits: Data<Limits>,
    body: Body,
) -> Result<HttpResponse, ApiError> {
    generate(&handle, Endpoint::Chat, &json_body(body, &limits)?).await
}

async fn completions(handle: Data<RuntimeHandle>, limits: Data<Limits>, body: Body) -> Result<HttpResponse, ApiError> {
    generate(&handle, Endpoint::Completion, &json_body(body, &limits)?).await
}

async fn generate(handle: &RuntimeHandle, endpoint: Endpoint, body: &Value) -> Result<HttpResponse, ApiError> {
    let request = Request::parse(endpoint, body, handle.model())
        .inspect_err(|_| metrics::request_rejected(metrics::Rejection::Invalid))?;
    if request.stream.is_none() {
        return Ok(HttpResponse::Ok().json(complete::answer(handle, request).await?));
    }
    let chunks = Chunks::new(&request, handle.model());
    Ok(EventBody::start(handle, request, chunks).await?.into_response())
}

async fn create_response(
    handle: Data<RuntimeHandle>,
    limits: Data<Limits>,
    body: Body,
) -> Result<HttpResponse, ApiError> {
    responses::create(&handle, &json_body(body, &limits)?).await
}

/// Nothing is stored, so there is nothing to get, list, cancel or delete.
async fn stored_response(id: Path<String>) -> HttpResponse {
    ApiError::response_not_stored(&id).error_response()
}

async fn messages(handle: Data<RuntimeHandle>, limits: Data<Limits>, body: Body) -> Result<HttpResponse, ApiError> {
    anthropic::create(&handle, &json_body(body, &limits)?).await
}

async fn count_tokens(handle: Data<RuntimeHandle>, limits: Data<Limits>, body: Body) -> Result<HttpResponse, ApiError> {
    let body = json_body(body, &limits)?;
    let counted = blocking(move || anthropic::count_tokens(&body, handle.model())).await?;
    Ok(HttpResponse::Ok().json(counted))
}

async fn models(handle: Data<RuntimeHandle>, request: HttpRequest) -> HttpResponse {
    if anthropic::has_version(request.headers()) {
        return HttpResponse::Ok().json(anthropic::models::list(handle.model()));
    }
    HttpResponse::Ok().json(json!({"object": "list", "data": [model_card(&handle)]}))
}

async fn model(handle: Data<RuntimeHandle>, id: Path<String>, request: HttpRequest) -> Result<HttpResponse, ApiError> {
    check_model(&json!({ "model": *id }), handle.model())?;
    if anthropic::has_version(request.headers()) {
        return Ok(HttpResponse::Ok().json(anthropic::models::card(handle.model())));
    }
    Ok(HttpResponse::Ok().json(model_card(&handle)))
}

fn model_card(handle: &RuntimeHandle) -> Value {
    let model = handle.model();
    json!({
        "id": model.served_name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "pagetide",
        "max_model_len": model.max_model_len,
    })
}

async fn tokenize(handle: Data<RuntimeHandle>, limits: Data<Limits>, body: Body) -> Result<HttpResponse, ApiError> {
    let body = json_body(body, &limits)?;
    check_model(&body, handle.model())?;
    let tokenized = blocking(move || tokenize::tokenize(&body, handle.model())).await?;
    Ok(HttpResponse::Ok().json(tokenized))
}

async fn detokenize(handle: Data<RuntimeHandle>, limits: Data<Limits>, body: Body) -> Result<HttpResponse, ApiError> {
    let body = json_body(body, &limits)?;
    check_model(&body, handle.model())?;
    let detokenized = blocking(move || tokenize::detokenize(&body, handle.model())).await?;
    Ok(HttpResponse::Ok().json(detokenized))
}

/// Runs what would hold up the other requests of this worker.
async fn blocking<T, F>(work: F) -> Result<T, ApiError>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, ApiError> + Send + 'static,
{
    web::block(work).await.map_err(|_| ApiError::draining())?
}

/// The process lives and answers.
async fn health() -> HttpResponse {
    HttpResponse::Ok().json(json!({"status": "ok"}))
}

/// The model is loaded (before that nothing listens) and requests are admitted.
async fn ready(handle: Data<RuntimeHandle>) -> Result<HttpResponse, ApiError> {
    if handle.is_draining() {
        return Err(ApiError::draining());
    }
    Ok(HttpResponse::Ok().json(json!({"status": "ready"})))
}

async fn version() -> HttpResponse {
    HttpResponse::Ok().json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

async fn prometheus(request: HttpRequest) -> Result<HttpResponse, ApiError> {
    let page = metrics::render().ok_or_else(|| ApiError::not_found(request.path()))?;
    Ok(HttpResponse::Ok().content_type("text/plain; version=0.0.4; charset=utf-8").body(page))
}

async fn not_found(request: HttpRequest) -> HttpResponse {
    ApiError::not_found(request.path()).error_response()
}

type Body = Result<Bytes, actix_web::Error>;

fn json_body(body: Body, limits: &Limits) -> Result<Value, ApiError> {
    let body = body.map_err(|error| match error.as_response_error().status_code() {
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::body_too_large(limits.max_body_bytes),
        _ => ApiError::bad_request(format!("the request body cannot be read: {error}")),
    })?;
    serde_json::from_slice(&body)
        .map_err(|error| ApiError::bad_request(format!("the request body is not JSON: {error}")))
}

impl ResponseError for ApiError {
    fn status_code(&self) -> StatusCode {
        StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    fn error_response(&self) -> HttpResponse {
        let mut response = HttpResponse::build(self.status_code());
        response.insert_header(ContentType::json());
        if let Some(seconds) = self.retry_after_s {
            response.insert_header((RETRY_AFTER, seconds));
        }
        let mut response = response.json(json!({ "error": self }));
        // For those who write it in another format.
        response.extensions_mut().insert(self.clone());
        response
    }
}
