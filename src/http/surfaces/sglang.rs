//! SGLang's own paths.

use crate::admin;
use crate::auth::{Operator, Watcher, is_admin};
use crate::body::{self, Body};
use crate::error::HttpError;
use crate::paths::{ApiPath, for_admin, for_all, for_watchers, get, post, put};
use crate::serving::{SubmittingHandle, parse};
use crate::stream::EventBody;
use actix_web::web::{self, Data, Query};
use actix_web::{HttpRequest, HttpResponse};
use futures_util::future::try_join_all;
use pagetide_actors::generation::{Generation, collect};
use pagetide_actors::live_settings::LiveSettings;
use pagetide_actors::runtime::RuntimeHandle;
use pagetide_api::model_info::ModelInfo;
use pagetide_api::request::{ApiRequest, PromptRequest};
use pagetide_api::sglang::answer::{AnswerSettings, GenerateEvents, GeneratedTexts};
use pagetide_api::sglang::control::{AbortedRequests, GenerationState, PauseMode};
use pagetide_api::sglang::generate::GenerateTask;
use pagetide_api::sglang::server::{EngineLoad, ServerFacts};
use pagetide_api::sglang::session::{SessionPlace, SessionTurn, Sessions};
use pagetide_api::sglang::{self as api, describe};
use pagetide_base::error::ApiError;
use pagetide_base::sampling::params::SamplingParams;
use pagetide_engine::block_pool::BlockState;
use serde::Deserialize;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// As long as SGLang waits for the token of a health check.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(20);
/// A result of the last health check is good for this long, so that checks cost at most a token a second.
const HEALTH_LASTS: Duration = Duration::from_secs(1);
/// Time between two looks whether requests have ended.
const FLUSH_AGAIN: Duration = Duration::from_millis(50);
const FLUSHED: &str = "Cache flushed.\n";

pub static PATHS: [ApiPath; 15] = [
    post("/generate", || web::to(generate), describe::generate),
    put("/generate", || web::to(generate), describe::generate_by_put),
    post("/open_session", || web::to(open_session), describe::open_session),
    post("/close_session", || web::to(close_session), describe::close_session),
    post("/abort_request", || web::to(abort_request), describe::abort_request),
    for_admin(post("/pause_generation", || web::to(pause), describe::pause)),
    for_admin(post("/continue_generation", || web::to(resume), describe::resume)),
    get("/model_info", || web::to(model_info), describe::model_info),
    get("/get_model_info", || web::to(model_info), describe::model_info_older),
    get("/get_server_info", || web::to(server_info), describe::server_info),
    for_all(get("/health_generate", || web::to(health), describe::health)),
    for_admin(get("/flush_cache", || web::to(flush), describe::flush_by_get)),
    for_admin(post("/flush_cache", || web::to(flush), describe::flush_by_post)),
    for_watchers(get("/v1/loads", || web::to(loads), describe::loads)),
    for_watchers(get("/get_load", || web::to(load), describe::load)),
];

async fn generate(handle: SubmittingHandle, sessions: Data<Sessions>, body: Body) -> Result<HttpResponse, HttpError> {
    let GenerateTask { mut requests, is_batch, session } = parse(&handle, body, api::generate::parse).await?;
    let mut turn = match (session, requests.first_mut()) {
        (Some(place), Some((request, settings))) => Some(begin_turn(&handle, &sessions, place, request, settings)?),
        _ => None,
    };
    let num_values = |(request, _): &(ApiRequest, _)| request.num_answer_values(handle.model().max_model_len as usize);
    let num_values = requests.iter().map(num_values).sum();
    if requests.iter().any(|(request, _)| request.stream.is_some())
        && let Some((request, settings)) = requests.pop()
    {
        let texts = GeneratedTexts::new(settings, request.num_samples(), handle.model()).in_session(turn);
        let events = GenerateEvents::new(texts, is_batch);
        return Ok(EventBody::start(&handle, request, events).await?.into_response());
    }
    let num_prompts = requests.iter().map(|(request, _)| request.prompts.len()).sum();
    if num_prompts > handle.max_requests() {
        return Err(ApiError::too_many_prompts("text", handle.max_requests(), num_prompts).into());
    }
    let answers =
        try_join_all(requests.into_iter().map(|(request, settings)| texts(&handle, request, settings, turn.take())));
    let mut answers: Vec<Value> = answers.await?.into_iter().flatten().collect();
    let answer = match answers.pop() {
        Some(only) if !is_batch => only,
        last => answers.into_iter().chain(last).collect(),
    };
    body::answer(&handle, answer, num_values).await
}

/// The answers to one request.
async fn texts(
    handle: &RuntimeHandle,
    mut request: ApiRequest,
    settings: AnswerSettings,
    turn: Option<SessionTurn>,
) -> Result<Vec<Value>, ApiError> {
    let mut texts = GeneratedTexts::new(settings, request.num_samples(), handle.model()).in_session(turn);
    let (choices, answers) = collect(handle, &mut request).await?;
    choices.iter().for_each(|all| texts.keep(all, &answers));
    Ok(choices.iter().map(|all| texts.choice(all, &answers)).collect())
}

/// Puts the tokens of the session before the only text of a request.
fn begin_turn(
    handle: &RuntimeHandle,
    sessions: &Sessions,
    place: SessionPlace,
    request: &mut ApiRequest,
    settings: &AnswerSettings,
) -> Result<SessionTurn, ApiError> {
    let rid = settings.ids.first().map_or("", String::as_str);
    let model = handle.model();
    let mut turn = sessions.begin(handle.tenant(), place, rid, Instant::now(), &model.server.get())?;
    let bos = model.tokenizer.special_tokens().bos.as_ref().map(|bos| bos.id);
    request.prompts = std::mem::take(&mut request.prompts).into_iter().map(|own| turn.behind(own, bos)).collect();
    Ok(turn)
}

async fn open_session(
    handle: SubmittingHandle,
    sessions: Data<Sessions>,
    body: Body,
) -> Result<HttpResponse, HttpError> {
    let asked = body.parse(&handle, api::session::parse_open).await?;
    let id = sessions.open(handle.tenant(), asked, Instant::now(), &handle.model().server.get())?;
    Ok(HttpResponse::Ok().json(id))
}

async fn close_session(
    handle: SubmittingHandle,
    sessions: Data<Sessions>,
    body: Body,
) -> Result<HttpResponse, HttpError> {
    let id = body.parse(&handle, api::session::parse_close).await?;
    sessions.close(handle.tenant(), id);
    Ok(HttpResponse::Ok().finish())
}

/// Aborts requests of the client that asks. Those that are not under way are left out, as they have ended.
async fn abort_request(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    match body.parse(&handle, api::control::parse_abort).await? {
        AbortedRequests::All => handle.requests().abort_all(Some(handle.tenant())),
        AbortedRequests::One(rid) => drop(handle.requests().abort(&rid, handle.tenant())),
    }
    Ok(HttpResponse::Ok().finish())
}

async fn pause(
    _: Operator,
    handle: Data<RuntimeHandle>,
    live_settings: Data<LiveSettings>,
    body: Body,
) -> Result<HttpResponse, HttpError> {
    let mode = body.parse(&handle, api::control::parse_pause).await?;
    live_settings.set_paused(true).await?;
    if mode == PauseMode::Abort {
        handle.requests().abort_all(None);
    }
    Ok(HttpResponse::Ok().json(GenerationState::PAUSED))
}

async fn resume(
    _: Operator,
    handle: Data<RuntimeHandle>,
    live_settings: Data<LiveSettings>,
    body: Body,
) -> Result<HttpResponse, HttpError> {
    body.parse(&handle, api::control::parse_continue).await?;
    live_settings.set_paused(false).await?;
    Ok(HttpResponse::Ok().json(GenerationState::CONTINUED))
}

async fn model_info(handle: Data<RuntimeHandle>, live_settings: Data<LiveSettings>) -> HttpResponse {
    HttpResponse::Ok().json(api::server::model_info(handle.model(), &facts(&live_settings).await))
}

async fn server_info(handle: Data<RuntimeHandle>, live_settings: Data<LiveSettings>) -> HttpResponse {
    HttpResponse::Ok().json(api::server::server_info(handle.model(), &facts(&live_settings).await))
}

/// `/server_info`, which vLLM has too: for who may see the settings, they are in it.
pub async fn server_info_with_config(
    request: HttpRequest,
    handle: Data<RuntimeHandle>,
    live_settings: Data<LiveSettings>,
) -> Result<HttpResponse, HttpError> {
    let mut info = api::server::server_info(handle.model(), &facts(&live_settings).await);
    if is_admin(&request) {
        info["config"] = json!(admin::config(&live_settings).await?);
    }
    Ok(HttpResponse::Ok().json(info))
}

async fn facts(live_settings: &LiveSettings) -> ServerFacts {
    let (config, loaded) = (live_settings.now().await.config, live_settings.loaded());
    ServerFacts {
        model_path: config.model.path,
        family: loaded.family.model_type(),
        dtype: loaded.dtype.name(),
        cache_dtype: loaded.pools.layout.dtype.name(),
        device: loaded.device.clone(),
        block_size: loaded.pools.layout.block_size,
        num_device_blocks: loaded.pools.num_device_blocks,
        max_num_seqs: loaded.max_num_seqs,
        max_num_batched_tokens: loaded.max_num_batched_tokens,
        prefix_caching: config.cache.enable_prefix_caching,
        schedule_policy: config.scheduler.policy.name().into(),
        weights_bytes: loaded.weights_bytes,
    }
}

/// When a health check last ended, and how. There is one for the server.
#[derive(Debug, Default)]
pub struct HealthChecks(Mutex<Option<(Instant, Result<(), ApiError>)>>);

/// One check at a time; those who wait for it share its result.
async fn health(handle: Data<RuntimeHandle>, checks: Data<HealthChecks>) -> Result<HttpResponse, HttpError> {
    let mut last = checks.0.lock().await;
    let known = last.as_ref().filter(|(at, _)| at.elapsed() < HEALTH_LASTS).map(|(_, result)| result.clone());
    if let Some(known) = known {
        known?;
    } else {
        let checked = actix_web::rt::time::timeout(HEALTH_TIMEOUT, one_token(&handle)).await;
        let result = checked.unwrap_or_else(|_| Err(ApiError::unhealthy(HEALTH_TIMEOUT.as_secs())));
        *last = Some((Instant::now(), result.clone()));
        result?;
    }
    Ok(HttpResponse::Ok().finish())
}

/// Has the engine generate a token.
async fn one_token(handle: &RuntimeHandle) -> Result<(), ApiError> {
    let params = SamplingParams { max_tokens: 1, temperature: 0.0, ..SamplingParams::default() };
    let each = PromptRequest { ignore_eos: true, ..PromptRequest::without_prompt(params) };
    let mut request = ApiRequest::new(vec![vec![first_token(handle.model())].into()], each);
    let mut generation = Generation::start(handle, &mut request).await?;
    generation.finish(drop).await
}

fn first_token(model: &ModelInfo) -> u32 {
    model.eos_token_ids.first().copied().unwrap_or(0)
}

#[derive(Deserialize)]
struct FlushQuery {
    /// Seconds.
    timeout: Option<f64>,
}

async fn flush(
    _: Operator,
    live_settings: Data<LiveSettings>,
    query: Result<Query<FlushQuery>, actix_web::Error>,
) -> Result<HttpResponse, HttpError> {
    let wrong = |got: String| {
        ApiError::invalid("timeout", format!("timeout must be a number of seconds of at least 0, got {got}"))
    };
    let seconds = query.map_err(|error| wrong(error.to_string()))?.timeout.unwrap_or(0.0);
    let timeout = Duration::try_from_secs_f64(seconds).map_err(|_| wrong(seconds.to_string()))?;
    let begun = Instant::now();
    loop {
        if live_settings.flush_caches().await? {
            return Ok(HttpResponse::Ok().content_type("text/plain; charset=utf-8").body(FLUSHED));
        }
        if begun.elapsed() >= timeout {
            return Err(ApiError::cache_in_use().into());
        }
        actix_web::rt::time::sleep(FLUSH_AGAIN).await;
    }
}

#[derive(Deserialize)]
struct LoadsQuery {
    include: Option<String>,
    format: Option<String>,
}

async fn loads(
    _: Watcher,
    handle: Data<RuntimeHandle>,
    live_settings: Data<LiveSettings>,
    query: Query<LoadsQuery>,
) -> Result<HttpResponse, HttpError> {
    if let Some(format) = query.format.as_deref().filter(|format| *format != "json") {
        let message = format!("format must be json, got {format:?}; /metrics is for Prometheus");
        return Err(ApiError::invalid("format", message).into());
    }
    let load = engine_load(&handle, &live_settings).await?;
    let device = &live_settings.loaded().device;
    Ok(HttpResponse::Ok().json(api::server::loads(load, device, query.include.as_deref())?))
}

async fn load(
    _: Watcher,
    handle: Data<RuntimeHandle>,
    live_settings: Data<LiveSettings>,
) -> Result<HttpResponse, HttpError> {
    Ok(HttpResponse::Ok().json(api::server::load(engine_load(&handle, &live_settings).await?)))
}

async fn engine_load(handle: &RuntimeHandle, live_settings: &LiveSettings) -> Result<EngineLoad, ApiError> {
    let (snapshot, loaded) = (handle.look(0).await?, live_settings.loaded());
    let states = snapshot.device.states();
    let num_used = states.iter().filter(|state| matches!(state, BlockState::Used(_))).count();
    let population = snapshot.population;
    Ok(EngineLoad {
        num_running: population.running,
        num_waiting: population.waiting + population.swapped,
        num_swapped: population.swapped,
        used_tokens: num_used * snapshot.block_size,
        max_tokens: states.len() * snapshot.block_size,
        max_num_seqs: loaded.max_num_seqs,
        prompt_tokens: snapshot.totals.prompt_tokens,
        cached_tokens: snapshot.totals.cached_tokens,
        weights_bytes: loaded.weights_bytes,
        kv_bytes: (states.len() * snapshot.block_bytes) as u64,
    })
}
