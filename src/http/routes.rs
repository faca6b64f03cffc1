//! The paths. A handler parses, submits, streams.

use crate::actors::messages::Caller;
use crate::actors::phase::Phase;
use crate::actors::runtime::{ModelInfo, RuntimeHandle};
use crate::actors::tuner::Tuner;
use crate::budget::Budget;
use crate::error::ApiError;
use crate::http::account::Account;
use crate::http::admin::Admin;
use crate::http::auth::{Keyed, Watcher};
use crate::http::body::json::Json;
use crate::http::body::{self, Body, Wants};
use crate::http::openai::stream::Chunks;
use crate::http::openai::{Endpoint, Request, chat, check_model, completion, embeddings, tokenize};
use crate::http::openapi::answers::{ModelCard, ModelList, Status, Version};
use crate::http::openapi::{self, Operation, Tag};
use crate::http::responses::request::ResponsesRequest;
use crate::http::stream::EventBody;
use crate::http::translate::count_refused;
use crate::http::{admin, anthropic, complete, console, responses};
use crate::metrics;
use actix_web::dev::Payload;
use actix_web::http::header::{ALLOW, ContentType, RETRY_AFTER};
use actix_web::http::{Method, StatusCode};
use actix_web::web::{self, Data, Path, ServiceConfig};
use actix_web::{FromRequest, HttpMessage, HttpRequest, HttpResponse, Resource, ResponseError, Route, guard};
use serde::Serialize;
use serde_json::{Value, json};
use std::future::{Ready, ready};
use std::ops::Deref;
use std::sync::Arc;

/// The methods there are. HEAD goes with GET.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verb {
    Get,
    Post,
    Delete,
}

impl Verb {
    pub fn method(self) -> Method {
        match self {
            Verb::Get => Method::GET,
            Verb::Post => Method::POST,
            Verb::Delete => Method::DELETE,
        }
    }
}

/// Whom a path answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Everybody. As with vLLM this is what tells nothing of the model, its load or its texts.
    Open,
    /// Who has one of `server.api_keys`, where there are any.
    Key,
    /// Who has `server.admin_key`.
    Admin,
    /// Who may see what is told of all requests: [`Watcher`].
    Watcher,
}

/// A path: its method, who answers, and what the API's description says of it.
#[derive(Clone, Copy)]
pub struct ApiPath {
    pub verb: Verb,
    pub path: &'static str,
    /// The same in the router's words.
    pattern: &'static str,
    pub access: Access,
    handler: fn() -> Route,
    pub describe: fn() -> Operation,
}

const fn post(path: &'static str, handler: fn() -> Route, describe: fn() -> Operation) -> ApiPath {
    ApiPath { verb: Verb::Post, path, pattern: path, access: Access::Key, handler, describe }
}

const fn get(path: &'static str, handler: fn() -> Route, describe: fn() -> Operation) -> ApiPath {
    ApiPath { verb: Verb::Get, ..post(path, handler, describe) }
}

const fn delete(path: &'static str, handler: fn() -> Route, describe: fn() -> Operation) -> ApiPath {
    ApiPath { verb: Verb::Delete, ..post(path, handler, describe) }
}

const fn open(path: ApiPath) -> ApiPath {
    ApiPath { access: Access::Open, ..path }
}

const fn admin(path: ApiPath) -> ApiPath {
    ApiPath { access: Access::Admin, ..path }
}

const fn watcher(path: ApiPath) -> ApiPath {
    ApiPath { access: Access::Watcher, ..path }
}

/// Every path that is served. Where a path has several methods, they stand together.
pub static PATHS: [ApiPath; 27] = [
    open(get("/", || web::to(console::page), console::describe_page)),
    watcher(get("/console/events", || web::to(console::events), console::describe_events)),
    open(get("/console/{file}", || web::to(console::file), console::describe_file)),
    post("/v1/chat/completions", || web::to(chat_completions), chat::describe),
    post("/v1/completions", || web::to(completions), completion::describe),
    post("/v1/responses", || web::to(create_response), responses::describe::create),
    get("/v1/responses/{id}", || web::to(stored_response), responses::describe::retrieve),
    delete("/v1/responses/{id}", || web::to(stored_response), responses::describe::delete),
    get("/v1/responses/{id}/input_items", || web::to(stored_response), responses::describe::input_items),
    post("/v1/responses/{id}/cancel", || web::to(stored_response), responses::describe::cancel),
    post("/v1/messages", || web::to(messages), anthropic::describe::create),
    post("/v1/messages/count_tokens", || web::to(count_tokens), anthropic::describe::count_tokens),
    get("/v1/models", || web::to(models), describe_models),
    // Names may hold slashes.
    ApiPath { pattern: "/v1/models/{id:.+}", ..get("/v1/models/{id}", || web::to(model), describe_model) },
    post("/v1/embeddings", || web::to(embed), embeddings::describe),
    post("/tokenize", || web::to(tokenize), tokenize::describe_tokenize),
    post("/detokenize", || web::to(detokenize), tokenize::describe_detokenize),
    open(get("/health", || web::to(health), describe_health)),
    open(get("/ready", || web::to(is_ready), describe_ready)),
    get("/version", || web::to(version), describe_version),
    watcher(get("/metrics", || web::to(prometheus), describe_metrics)),
    admin(get("/admin/config", || web::to(config), admin::describe_config)),
    admin(post("/admin/config", || web::to(change_config), admin::describe_change)),
    admin(post("/admin/debug/fail_step", || web::to(fail_step), admin::describe_failure)),
    admin(post("/admin/recording", || web::to(record), admin::describe_recording)),
    open(get("/openapi.json", || web::to(openapi_json), describe_openapi)),
    open(get("/docs", || web::to(docs), describe_docs)),
];

/// Whom a path answers; one that there is not is no different from others.
pub fn access_to(path: &str) -> Access {
    let known = PATHS.iter().find(|known| known.path == path).map(|known| known.access);
    known.unwrap_or(if console::is_file(path) { Access::Open } else { Access::Key })
}

/// Whether a path is for the operator: where `server.admin_listen` is set, it is found there only.
pub fn is_private(path: &str) -> bool {
    path == "/metrics" || path.starts_with("/admin/")
}

/// Whether a path is found at `server.admin_listen` as well.
pub fn is_open_to_all_ports(path: &str) -> bool {
    path == "/health" || path == "/ready"
}

/// How metrics name the path of a matched route; what a client made up is `other`.
pub fn metrics_path(pattern: Option<&str>) -> &'static str {
    PATHS.iter().find(|path| pattern == Some(path.pattern)).map_or("other", |path| path.path)
}

pub fn configure(config: &mut ServiceConfig) {
    for methods in PATHS.chunk_by(|one, other| one.pattern == other.pattern) {
        config.service(resource(methods));
    }
    config.default_service(web::to(not_found));
}

/// One path with its methods, HEAD going with GET; another is answered with 405.
fn resource(methods: &'static [ApiPath]) -> Resource {
    let mut resource = web::resource(methods[0].pattern);
    let mut allowed = Vec::new();
    for path in methods {
        let method = path.verb.method();
        let head = if method == Method::GET { Method::HEAD } else { method.clone() };
        allowed.push(path.verb.method());
        if head != method {
            allowed.push(head.clone());
        }
        let guard = guard::Any(guard::Method(method)).or(guard::Method(head));
        resource = resource.route((path.handler)().guard(guard));
    }
    let allowed = allowed.iter().map(Method::as_str).collect::<Vec<_>>().join(", ");
    resource.default_service(web::to(move |request: HttpRequest| {
        let error = ApiError::method_not_allowed(request.method().as_str(), &allowed);
        let mut response = error.error_response();
        if let Ok(value) = allowed.parse() {
            response.headers_mut().insert(ALLOW, value);
        }
        ready(response)
    }))
}

/// The engine, speaking for whoever sent the request, who has not used up its limits.
struct Engine(RuntimeHandle);

impl FromRequest for Engine {
    type Error = ApiError;
    type Future = Ready<Result<Self, ApiError>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let handle: &Data<RuntimeHandle> = request.app_data().expect("every app is made with a handle");
        let extensions = request.extensions();
        let caller = extensions.get::<Caller>().cloned().unwrap_or_default();
        let handle = handle.on_behalf_of(caller);
        let (Some(account), Some(keyed)) = (extensions.get::<Arc<Account>>(), extensions.get::<Keyed>()) else {
            return ready(Ok(Self(handle)));
        };
        // What is refused in any case uses up no limit.
        let entered = if handle.is_draining() { Ok(()) } else { account.enter(keyed) };
        ready(entered.map(|()| Self(handle.observed_by(account.clone()))))
    }
}

impl Deref for Engine {
    type Target = RuntimeHandle;

    fn deref(&self) -> &RuntimeHandle {
        &self.0
    }
}

async fn chat_completions(handle: Engine, body: Body) -> Result<HttpResponse, ApiError> {
    generate(&handle, Endpoint::Chat, Wants::default(), body).await
}

async fn completions(handle: Engine, body: Body) -> Result<HttpResponse, ApiError> {
    generate(&handle, Endpoint::Completion, Wants::ids("prompt"), body).await
}

async fn generate(
    handle: &RuntimeHandle,
    endpoint: Endpoint,
    wants: Wants,
    body: Body,
) -> Result<HttpResponse, ApiError> {
    let parsed = body.parse(handle, wants, move |body, model| Ok(Request::of_body(endpoint, body, model))).await?;
    let request = count_refused(parsed, handle)?;
    if request.stream.is_none() {
        let num_values = complete::num_values(&request, handle.model());
        return body::answer(handle, complete::answer(handle, request).await?, num_values).await;
    }
    let chunks = Chunks::new(&request, handle.model());
    Ok(EventBody::start(handle, request, chunks).await?.into_response())
}

async fn create_response(handle: Engine, body: Body) -> Result<HttpResponse, ApiError> {
    let parse = |body: Json, model: &ModelInfo| Ok(ResponsesRequest::parse(&body.value, model));
    responses::create(&handle, body.parse(&handle, Wants::default(), parse).await?).await
}

/// Nothing is stored, so there is nothing to get, list, cancel or delete.
async fn stored_response(id: Path<String>) -> HttpResponse {
    ApiError::response_not_stored(&id).error_response()
}

async fn messages(handle: Engine, body: Body) -> Result<HttpResponse, ApiError> {
    let parse = |body: Json, model: &ModelInfo| Ok(anthropic::request::message(&body.value, model));
    anthropic::create(&handle, body.parse(&handle, Wants::default(), parse).await?).await
}

async fn count_tokens(handle: Engine, request: HttpRequest, body: Body) -> Result<HttpResponse, ApiError> {
    convert(&handle, &request, Wants::default(), body, anthropic::count_tokens).await
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

async fn embed(handle: Engine, body: Body) -> Result<HttpResponse, ApiError> {
    let request = body.parse(&handle, Wants::ids("input"), embeddings::Request::parse).await?;
    let num_values = request.num_prompts() * handle.model().embedding_size as usize;
    body::answer(&handle, embeddings::embeddings(&handle, request).await?, num_values).await
}

async fn tokenize(handle: Engine, request: HttpRequest, body: Body) -> Result<HttpResponse, ApiError> {
    convert(&handle, &request, Wants::default(), body, tokenize::tokenize).await
}

async fn detokenize(handle: Engine, request: HttpRequest, body: Body) -> Result<HttpResponse, ApiError> {
    convert(&handle, &request, Wants::ids("tokens"), body, tokenize::detokenize).await
}

/// Gives an answer, and how many tokens were made of text for it, or text of them.
type Convert<T> = fn(Json, &ModelInfo, &Budget) -> Result<(T, usize), ApiError>;

/// Answers a request for a text's tokens, or for the text of tokens, and charges it for them.
async fn convert<T: Serialize + 'static>(
    handle: &Engine,
    request: &HttpRequest,
    wants: Wants,
    body: Body,
    convert: Convert<T>,
) -> Result<HttpResponse, ApiError> {
    let work = move |body: Json, model: &ModelInfo, budget: &Budget| {
        let (answer, num_tokens) = convert(body, model, budget)?;
        Ok((body::written(&answer)?, num_tokens))
    };
    let (answer, num_tokens) = body.work(handle, wants, work).await?;
    if let Some(account) = request.extensions().get::<Arc<Account>>() {
        account.convert(num_tokens)?;
    }
    Ok(body::written_answer(answer))
}

fn describe_health() -> Operation {
    Operation::new(Tag::Server, "health", "The process lives and answers").answers::<Status>("It does.")
}

fn describe_ready() -> Operation {
    Operation::new(Tag::Server, "ready", "Requests are admitted").fails(&[503]).answers::<Status>("They are.")
}

fn describe_version() -> Operation {
    Operation::new(Tag::Server, "version", "The program's version").answers::<Version>("The version.")
}

fn describe_metrics() -> Operation {
    Operation::new(Tag::Server, "metrics", "Prometheus metrics")
        .about(
            "404 where metrics.enabled is false. Where server.api_keys or server.metrics_key is set, this path wants \
             server.metrics_key or server.admin_key.",
        )
        .fails(&[403, 404])
        .answers_text("text/plain", "The metrics.")
}

fn describe_openapi() -> Operation {
    Operation::new(Tag::Server, "openapi", "This description").answers_json("An OpenAPI document.")
}

fn describe_docs() -> Operation {
    Operation::new(Tag::Server, "docs", "This description as a page").answers_text("text/html", "The page.")
}

/// The process lives and answers.
async fn health() -> HttpResponse {
    HttpResponse::Ok().json(json!({"status": "ok"}))
}

/// The model is loaded (before that nothing is answered) and requests are admitted and read.
async fn is_ready(handle: Data<RuntimeHandle>) -> Result<HttpResponse, ApiError> {
    if handle.phase().get() != Phase::Serving {
        return Err(ApiError::draining());
    }
    if handle.text().is_stuck() {
        return Err(ApiError::intake_stuck());
    }
    Ok(HttpResponse::Ok().json(json!({"status": "ready"})))
}

async fn version() -> HttpResponse {
    HttpResponse::Ok().json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

async fn prometheus(_: Watcher, handle: Data<RuntimeHandle>, request: HttpRequest) -> Result<HttpResponse, ApiError> {
    handle.text().report();
    let page = metrics::render().ok_or_else(|| ApiError::not_found(request.path()))?;
    Ok(HttpResponse::Ok().content_type("text/plain; version=0.0.4; charset=utf-8").body(page))
}

async fn config(_: Admin, tuner: Data<Tuner>) -> Result<HttpResponse, ApiError> {
    Ok(HttpResponse::Ok().json(admin::config(&tuner).await?))
}

async fn change_config(
    _: Admin,
    handle: Data<RuntimeHandle>,
    tuner: Data<Tuner>,
    body: Body,
) -> Result<HttpResponse, ApiError> {
    let settings = body.parse(&handle, Wants::all(), |body, _| Ok(body.value)).await?;
    Ok(HttpResponse::Ok().json(admin::change(&tuner, &settings).await?))
}

async fn record(_: Admin, tuner: Data<Tuner>) -> Result<HttpResponse, ApiError> {
    Ok(HttpResponse::Ok().json(admin::RecordingWritten::from(tuner.recordings().write().await?)))
}

async fn fail_step(_: Admin, handle: Data<RuntimeHandle>, tuner: Data<Tuner>) -> Result<HttpResponse, ApiError> {
    if !handle.model().server.get().debug_endpoints {
        return Err(ApiError::debug_closed());
    }
    tuner.fail_next_step().await?;
    Ok(HttpResponse::Ok().json(json!({"status": "the next step fails"})))
}

async fn openapi_json() -> HttpResponse {
    HttpResponse::Ok().insert_header(ContentType::json()).body(openapi::json())
}

async fn docs() -> HttpResponse {
    HttpResponse::Ok().insert_header(ContentType::html()).body(openapi::PAGE)
}

async fn not_found(request: HttpRequest) -> HttpResponse {
    ApiError::not_found(request.path()).error_response()
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
