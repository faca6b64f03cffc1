//! The paths and their handlers. A handler parses, submits, streams.

use crate::account::Account;
use crate::admin::Admin;
use crate::auth::{Keyed, Watcher};
use crate::body::{self, Body};
use crate::error::{HttpError, error_response};
use crate::openapi;
use crate::paths::{ApiPath, MatchedPath, delete, for_admin, for_all, for_watchers, get, post};
use crate::stream::EventBody;
use crate::{admin, anthropic, console, responses};
use actix_web::dev::Payload;
use actix_web::http::Method;
use actix_web::http::header::{ALLOW, ContentType};
use actix_web::web::{self, Data, Path, ServiceConfig};
use actix_web::{FromRequest, HttpMessage, HttpRequest, HttpResponse, Resource, guard};
use pagetide_actors::generation::{self, Generation};
use pagetide_actors::live_settings::LiveSettings;
use pagetide_actors::messages::Caller;
use pagetide_actors::phase::Phase;
use pagetide_actors::runtime::RuntimeHandle;
use pagetide_api as api;
use pagetide_api::body::fields::AnyFields;
use pagetide_api::body::{BodyFields, ParsedBody};
use pagetide_api::fields::model::check_model_name;
use pagetide_api::fold::engine_stopped;
use pagetide_api::model_info::ModelInfo;
use pagetide_api::openai::embeddings::{EmbeddingList, EmbeddingRequest};
use pagetide_api::openai::stream::Chunks;
use pagetide_api::openai::{Endpoint, chat, completion, embeddings, tokenize};
use pagetide_api::openapi::answers::{ModelCard, ModelList, Status, Version};
use pagetide_api::openapi::{Operation, PathAccess, Tag};
use pagetide_api::request::ApiRequest;
use pagetide_api::responses::request::ResponsesRequest;
use pagetide_base::budget::Budget;
use pagetide_base::error::ApiError;
use pagetide_metrics as metrics;
use serde::Serialize;
use serde_json::{Value, json};
use std::future::{Ready, ready};
use std::ops::Deref;
use std::sync::{Arc, LazyLock};

const STORED_RESPONSE: &str = "/v1/responses/{id}";

/// Every path that is served. The methods of one path stand together.
pub static PATHS: [ApiPath; 27] = [
    for_all(get("/", || web::to(console::page), console::describe_page)),
    for_watchers(get("/console/events", || web::to(console::events), console::describe_events)),
    for_all(get("/console/{file}", || web::to(console::file), console::describe_file)),
    post("/v1/chat/completions", || web::to(chat_completions), chat::describe),
    post("/v1/completions", || web::to(completions), completion::describe),
    post("/v1/responses", || web::to(create_response), api::responses::describe::create),
    get(STORED_RESPONSE, || web::to(stored_response), api::responses::describe::retrieve),
    delete(STORED_RESPONSE, || web::to(stored_response), api::responses::describe::delete),
    get("/v1/responses/{id}/input_items", || web::to(stored_response), api::responses::describe::input_items),
    post("/v1/responses/{id}/cancel", || web::to(stored_response), api::responses::describe::cancel),
    post("/v1/messages", || web::to(messages), api::anthropic::describe::create),
    post("/v1/messages/count_tokens", || web::to(count_tokens), api::anthropic::describe::count_tokens),
    get("/v1/models", || web::to(models), describe_models),
    // Names may hold slashes.
    ApiPath { pattern: "/v1/models/{id:.+}", ..get("/v1/models/{id}", || web::to(model), describe_model) },
    post("/v1/embeddings", || web::to(embed), embeddings::describe),
    post("/tokenize", || web::to(tokenize), tokenize::describe_tokenize),
    post("/detokenize", || web::to(detokenize), tokenize::describe_detokenize),
    for_all(get("/health", || web::to(health), describe_health)),
    for_all(get("/ready", || web::to(is_ready), describe_ready)),
    get("/version", || web::to(version), describe_version),
    for_watchers(get("/metrics", || web::to(prometheus), describe_metrics)),
    for_admin(get("/admin/config", || web::to(config), admin::describe_config)),
    for_admin(post("/admin/config", || web::to(change_config), admin::describe_change)),
    for_admin(post("/admin/debug/fail_step", || web::to(fail_step), admin::describe_failure)),
    for_admin(post("/admin/recording", || web::to(record), admin::describe_recording)),
    for_all(get("/openapi.json", || web::to(openapi_json), describe_openapi)),
    for_all(get("/docs", || web::to(docs), describe_docs)),
];

/// The clients that may use a path. A path that does not exist is like most that do.
pub fn access_to(path: &str) -> PathAccess {
    let known = PATHS.iter().find(|known| known.path == path).map(|known| known.access);
    known.unwrap_or(if console::is_file(path) { PathAccess::Open } else { PathAccess::Key })
}

/// Whether a path is for the operator. If `server.admin_listen` is set, it is found only there.
pub fn is_private(path: &str) -> bool {
    path == "/metrics" || path.starts_with("/admin/")
}

/// Whether a path is found at `server.admin_listen` as well.
pub fn is_open_to_all_ports(path: &str) -> bool {
    path == "/health" || path == "/ready"
}

/// These paths are served without `/v1` too, for clients whose base URL lacks it.
const WITHOUT_PREFIX: [&str; 6] =
    ["/chat/completions", "/completions", "/models", "/models/{id:.+}", "/embeddings", "/responses"];

/// The pattern without `/v1`, if it is served so.
fn without_prefix(pattern: &'static str) -> Option<&'static str> {
    pattern.strip_prefix("/v1").filter(|short| WITHOUT_PREFIX.contains(short))
}

/// The path of a request that matched a pattern of the router.
pub fn matched_path(pattern: Option<&str>) -> MatchedPath {
    let is_matched = |path: &&ApiPath| {
        pattern.is_some_and(|pattern| pattern == path.pattern || without_prefix(path.pattern) == Some(pattern))
    };
    match PATHS.iter().find(is_matched) {
        Some(path) => MatchedPath { name: path.path, access: path.access },
        None => MatchedPath { name: "other", access: PathAccess::Key },
    }
}

pub fn configure(config: &mut ServiceConfig) {
    for methods in PATHS.chunk_by(|one, other| one.pattern == other.pattern) {
        let pattern = methods[0].pattern;
        for pattern in [Some(pattern), without_prefix(pattern)].into_iter().flatten() {
            config.service(resource(pattern, methods));
        }
    }
    config.default_service(web::to(not_found));
}

/// One path with its methods, where HEAD goes with GET. Other methods are answered with 405.
fn resource(pattern: &'static str, methods: &'static [ApiPath]) -> Resource {
    let mut resource = web::resource(pattern);
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
    if pattern == STORED_RESPONSE {
        // A POST asks for a path that OpenAI has there and this server does not, such as input_tokens.
        return resource.default_service(web::to(not_found));
    }
    let allowed = allowed.iter().map(Method::as_str).collect::<Vec<_>>().join(", ");
    resource.default_service(web::to(move |request: HttpRequest| {
        let error = ApiError::method_not_allowed(request.method().as_str(), &allowed);
        let mut response = error_response(error);
        if let Ok(value) = allowed.parse() {
            response.headers_mut().insert(ALLOW, value);
        }
        ready(response)
    }))
}

/// The engine's handle for the client that sent the request, which has not used up its limits.
struct SubmittingHandle(RuntimeHandle);

impl FromRequest for SubmittingHandle {
    type Error = HttpError;
    type Future = Ready<Result<Self, HttpError>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let handle: &Data<RuntimeHandle> = request.app_data().expect("every app is made with a handle");
        let extensions = request.extensions();
        let caller = extensions.get::<Caller>().cloned().unwrap_or_default();
        let handle = handle.on_behalf_of(caller);
        let (Some(account), Some(keyed)) = (extensions.get::<Arc<Account>>(), extensions.get::<Keyed>()) else {
            return ready(Ok(Self(handle)));
        };
        // A request that is refused in any case uses up no limit.
        let entered = if handle.is_draining() { Ok(()) } else { account.enter(keyed) };
        ready(entered.map(|()| Self(handle.observed_by(account.clone()))).map_err(HttpError::from))
    }
}

impl Deref for SubmittingHandle {
    type Target = RuntimeHandle;

    fn deref(&self) -> &RuntimeHandle {
        &self.0
    }
}

async fn chat_completions(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    let request = parse(&handle, body, chat::parse).await?;
    generate(&handle, Endpoint::Chat, request).await
}

async fn completions(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    let request = parse(&handle, body, completion::parse).await?;
    generate(&handle, Endpoint::Completion, request).await
}

/// What a body asks for. Counts a request that is refused before it is submitted.
async fn parse<B: BodyFields + 'static, T: Send + 'static>(
    handle: &RuntimeHandle,
    body: Body,
    parse: fn(ParsedBody<B>, &ModelInfo) -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    let parsed = body.parse(handle, move |body, model| Ok(parse(body, model))).await?;
    parsed.inspect_err(|_| metrics::request_rejected(metrics::Rejection::Invalid, handle.tenant()))
}

async fn generate(handle: &RuntimeHandle, endpoint: Endpoint, request: ApiRequest) -> Result<HttpResponse, HttpError> {
    if request.stream.is_none() {
        let num_values = request.num_answer_values(handle.model().max_model_len as usize);
        let answer = generation::whole_answer(handle, endpoint, request).await?;
        return body::answer(handle, answer, num_values).await;
    }
    let chunks = Chunks::new(endpoint, &request, handle.model());
    Ok(EventBody::start(handle, request, chunks).await?.into_response())
}

async fn create_response(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    responses::create(&handle, parse(&handle, body, ResponsesRequest::parse).await?).await
}

/// Nothing is stored, so there is nothing to get, list, cancel or delete.
async fn stored_response(id: Path<String>) -> HttpResponse {
    error_response(ApiError::response_not_stored(&id))
}

async fn messages(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    anthropic::create(&handle, parse(&handle, body, api::anthropic::request::message).await?).await
}

async fn count_tokens(handle: SubmittingHandle, request: HttpRequest, body: Body) -> Result<HttpResponse, HttpError> {
    convert(&handle, &request, body, api::anthropic::count_tokens).await
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
    HttpResponse::Ok().json(json!({"object": "list", "data": [model_card(&handle)]}))
}

async fn model(handle: Data<RuntimeHandle>, id: Path<String>, request: HttpRequest) -> Result<HttpResponse, HttpError> {
    check_model_name(&id, handle.model())?;
    if anthropic::has_version(request.headers()) {
        return Ok(HttpResponse::Ok().json(api::anthropic::models::card(handle.model())));
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

async fn embed(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    let EmbeddingRequest { mut request, format } = body.parse(&handle, embeddings::parse).await?;
    let num_values = request.prompts.len() * handle.model().embedding_size as usize;
    let mut generation = Generation::start(&handle, &mut request).await?;
    generation.finish(drop).await?;
    let prompts = generation.into_answers().into_prompts();
    if prompts.iter().any(|prompt| prompt.facts.embedding.is_none()) {
        return Err(engine_stopped().into());
    }
    body::answer(&handle, EmbeddingList::new(prompts, format, handle.model()), num_values).await
}

async fn tokenize(handle: SubmittingHandle, request: HttpRequest, body: Body) -> Result<HttpResponse, HttpError> {
    convert(&handle, &request, body, tokenize::tokenize).await
}

async fn detokenize(handle: SubmittingHandle, request: HttpRequest, body: Body) -> Result<HttpResponse, HttpError> {
    convert(&handle, &request, body, tokenize::detokenize).await
}

/// Makes an answer, and says how many tokens were converted for it.
type Convert<B, T> = fn(ParsedBody<B>, &ModelInfo, &Budget) -> Result<(T, usize), ApiError>;

/// Answers a request for a text's tokens, or for the text of tokens, and charges it for them.
async fn convert<B: BodyFields + 'static, T: Serialize + 'static>(
    handle: &RuntimeHandle,
    request: &HttpRequest,
    body: Body,
    convert: Convert<B, T>,
) -> Result<HttpResponse, HttpError> {
    let work = move |body: ParsedBody<B>, model: &ModelInfo, budget: &Budget| {
        let (answer, num_tokens) = convert(body, model, budget)?;
        Ok((body::written(&answer)?, num_tokens))
    };
    let (answer, num_tokens) = body.work(handle, work).await?;
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
async fn is_ready(handle: Data<RuntimeHandle>) -> Result<HttpResponse, HttpError> {
    if handle.phase().get() != Phase::Serving {
        return Err(ApiError::draining().into());
    }
    if handle.text().is_stuck() {
        return Err(ApiError::intake_stuck().into());
    }
    Ok(HttpResponse::Ok().json(json!({"status": "ready"})))
}

async fn version() -> HttpResponse {
    HttpResponse::Ok().json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

async fn prometheus(_: Watcher, handle: Data<RuntimeHandle>, request: HttpRequest) -> Result<HttpResponse, HttpError> {
    handle.text().report();
    let page = metrics::render().ok_or_else(|| ApiError::not_found(request.path()))?;
    Ok(HttpResponse::Ok().content_type("text/plain; version=0.0.4; charset=utf-8").body(page))
}

async fn config(_: Admin, live_settings: Data<LiveSettings>) -> Result<HttpResponse, HttpError> {
    Ok(HttpResponse::Ok().json(admin::config(&live_settings).await?))
}

async fn change_config(
    _: Admin,
    handle: Data<RuntimeHandle>,
    live_settings: Data<LiveSettings>,
    body: Body,
) -> Result<HttpResponse, HttpError> {
    let settings = body.parse(&handle, |ParsedBody { body: AnyFields(settings), problems }, _| {
        problems.check()?;
        Ok(Value::Object(settings))
    });
    let settings = settings.await?;
    Ok(HttpResponse::Ok().json(admin::change(&live_settings, &settings).await?))
}

async fn record(_: Admin, live_settings: Data<LiveSettings>) -> Result<HttpResponse, HttpError> {
    Ok(HttpResponse::Ok().json(admin::RecordingWritten::from(live_settings.recordings().write().await?)))
}

async fn fail_step(
    _: Admin,
    handle: Data<RuntimeHandle>,
    live_settings: Data<LiveSettings>,
) -> Result<HttpResponse, HttpError> {
    if !handle.model().server.get().debug_endpoints {
        return Err(ApiError::debug_closed().into());
    }
    live_settings.fail_next_step().await?;
    Ok(HttpResponse::Ok().json(json!({"status": "the next step fails"})))
}

async fn openapi_json() -> HttpResponse {
    static TEXT: LazyLock<String> = LazyLock::new(|| openapi::document(&PATHS).to_string());
    HttpResponse::Ok().insert_header(ContentType::json()).body(TEXT.as_str())
}

async fn docs() -> HttpResponse {
    HttpResponse::Ok().insert_header(ContentType::html()).body(openapi::PAGE)
}

async fn not_found(request: HttpRequest) -> HttpResponse {
    error_response(ApiError::not_found(request.path()))
}
