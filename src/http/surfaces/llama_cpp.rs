//! llama.cpp's API.

use crate::answer_format::AnswerFormat;
use crate::auth::Watcher;
use crate::body::{self, Body};
use crate::error::HttpError;
use crate::paths::{ApiPath, for_all, for_watchers, get, post};
use crate::serving::{SubmittingHandle, convert, parse};
use crate::stream::EventBody;
use actix_web::http::header::HeaderMap;
use actix_web::web::{self, Data, Path, Query};
use actix_web::{HttpRequest, HttpResponse};
use pagetide_actors::generation::{self, embedded};
use pagetide_actors::live_settings::LiveSettings;
use pagetide_actors::runtime::RuntimeHandle;
use pagetide_actors::slots::SavedPrefix;
use pagetide_actors::snapshot::Watched;
use pagetide_api::llama_cpp::completion::NativeRequest;
use pagetide_api::llama_cpp::embedding::NativeEmbeddingRequest;
use pagetide_api::llama_cpp::error::error_body;
use pagetide_api::llama_cpp::slots::{BusySlot, ErasedSlot, RestoreTimings, RestoredSlot, SaveTimings, SavedSlot};
use pagetide_api::llama_cpp::stream::CompletionEvents;
use pagetide_api::llama_cpp::{completion, describe, embedding, infill, props, slots, template};
use pagetide_base::error::ApiError;
use pagetide_engine::scheduler::SeqPhase;
use serde::Deserialize;
use serde_json::json;
use std::time::Instant;

pub static PATHS: [ApiPath; 12] = [
    post("/completion", || web::to(complete), describe::completion),
    post("/infill", || web::to(fill_in), describe::infill),
    post("/embedding", || web::to(embed), describe::embedding),
    post("/apply-template", || web::to(apply_template), describe::apply_template),
    post("/v1/chat/completions/input_tokens", || web::to(input_tokens), describe::input_tokens),
    get("/props", || web::to(properties), describe::props),
    post("/props", || web::to(change_properties), describe::change_props),
    for_watchers(get("/slots", || web::to(list_slots), describe::slots)),
    post("/slots/{id}", || web::to(act_on_slot), describe::slot_action),
    get("/lora-adapters", || web::to(lora_adapters), describe::lora_adapters),
    post("/lora-adapters", || web::to(change_lora_adapters), describe::change_lora_adapters),
    for_all(get("/v1/health", || web::to(health), describe::health)),
];

pub static FORMAT: AnswerFormat = AnswerFormat { error_body, id_header: None };

/// The first parts of the paths that only llama.cpp has.
const SPOKEN: [&str; 7] = ["completion", "infill", "embedding", "apply-template", "props", "slots", "lora-adapters"];

/// What llama.cpp serves on a path that is OpenAI's without `/v1`, where the two differ.
pub fn in_place_of(path: &str) -> Option<&'static [ApiPath]> {
    let own = match path {
        "/completions" => "/completion",
        "/embeddings" => "/embedding",
        _ => return None,
    };
    PATHS.iter().find(|known| known.path == own).map(std::slice::from_ref)
}

/// Whether a request speaks llama.cpp's API, so that errors are told in its format.
pub fn is_spoken(path: &str, _: &HeaderMap) -> bool {
    let first = path.strip_prefix('/').and_then(|path| path.split('/').next());
    first.is_some_and(|first| SPOKEN.contains(&first))
}

async fn complete(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    let request = parse(&handle, body, completion::parse).await?;
    answer(&handle, request).await
}

async fn fill_in(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    let request = parse(&handle, body, infill::parse).await?;
    answer(&handle, request).await
}

async fn answer(handle: &RuntimeHandle, request: NativeRequest) -> Result<HttpResponse, HttpError> {
    let NativeRequest { mut request, mut answer } = request;
    if let Some(slot) = handle.choose_slot(&mut request)? {
        answer.id_slot = slot.into();
    }
    if request.stream.is_some() {
        return Ok(EventBody::start(handle, request, CompletionEvents::new(answer)).await?.into_response());
    }
    let num_values = request.num_answer_values(handle.model().max_model_len as usize);
    let (choices, answers) = generation::collect(handle, &mut request).await?;
    body::answer(handle, answer.whole(choices, &answers), num_values).await
}

async fn embed(handle: SubmittingHandle, body: Body) -> Result<HttpResponse, HttpError> {
    let NativeEmbeddingRequest { mut request, norm } = parse(&handle, body, embedding::parse).await?;
    let num_values = request.prompts.len() * handle.model().embedding_size as usize;
    let prompts = embedded(&handle, &mut request).await?;
    body::answer(&handle, embedding::embeddings(prompts, norm), num_values).await
}

async fn apply_template(handle: SubmittingHandle, request: HttpRequest, body: Body) -> Result<HttpResponse, HttpError> {
    convert(&handle, &request, body, template::apply).await
}

async fn input_tokens(handle: SubmittingHandle, request: HttpRequest, body: Body) -> Result<HttpResponse, HttpError> {
    convert(&handle, &request, body, template::input_tokens).await
}

async fn properties(handle: Data<RuntimeHandle>, live_settings: Data<LiveSettings>) -> Result<HttpResponse, HttpError> {
    Ok(HttpResponse::Ok().json(props::props(handle.model(), num_slots(&live_settings).await)?))
}

/// Sequences that run at once.
async fn num_slots(live_settings: &LiveSettings) -> usize {
    live_settings.now().await.config.scheduler.max_num_seqs as usize
}

async fn change_properties() -> Result<HttpResponse, HttpError> {
    Err(ApiError::not_implemented(None, "properties are not changed here: POST /admin/config changes settings").into())
}

#[derive(Deserialize)]
struct SlotsQuery {
    #[serde(default)]
    fail_on_no_slot: String,
}

async fn list_slots(
    _: Watcher,
    handle: Data<RuntimeHandle>,
    live_settings: Data<LiveSettings>,
    query: Result<Query<SlotsQuery>, actix_web::Error>,
) -> Result<HttpResponse, HttpError> {
    if !handle.model().server.get().slots {
        let message = "this server does not tell of its slots (server.slots is false)";
        return Err(ApiError::not_implemented(None, message).into());
    }
    let query = query.map_err(|error| wrong_query("fail_on_no_slot", &error))?;
    let num_slots = num_slots(&live_settings).await;
    let busy: Vec<BusySlot> = handle.look(0).await?.seqs.iter().filter_map(busy_slot).collect();
    if !query.fail_on_no_slot.is_empty() && busy.len() >= num_slots {
        return Err(ApiError::no_slot(num_slots).into());
    }
    Ok(HttpResponse::Ok().json(slots::slots(&busy, num_slots, handle.model().max_model_len)))
}

/// A sequence that holds blocks.
fn busy_slot(Watched { view, .. }: &Watched) -> Option<BusySlot> {
    (view.phase != SeqPhase::Waiting).then_some(BusySlot {
        request: view.rank.request.0,
        num_prompt: view.num_prompt,
        cached_tokens: view.cached_tokens,
        num_computed: view.num_computed,
        num_output: view.num_output,
        max_output: view.max_output,
    })
}

#[derive(Deserialize)]
struct SlotQuery {
    #[serde(default)]
    action: String,
}

async fn act_on_slot(
    handle: SubmittingHandle,
    slot: Path<String>,
    query: Result<Query<SlotQuery>, actix_web::Error>,
    body: Body,
) -> Result<HttpResponse, HttpError> {
    let query = query.map_err(|error| wrong_query("action", &error))?;
    let Ok(slot) = slot.parse() else {
        return Err(ApiError::invalid("id", format!("a slot's id must be a number of at least 0, got {slot}")).into());
    };
    if !["save", "restore", "erase"].contains(&query.action.as_str()) {
        let message = format!("action must be one of save, restore, erase, got {:?}", query.action);
        return Err(ApiError::invalid("action", message).into());
    }
    let Some(slots) = handle.slots() else {
        let message = "this server does not keep slots: start it with --slot-save-path DIR (server.slot_folder)";
        return Err(ApiError::not_implemented(None, message).into());
    };
    let id_slot = slots.check("id", slot)?;
    if query.action == "erase" {
        let n_erased = slots.erase(handle.caller(), id_slot).await?;
        return Ok(HttpResponse::Ok().json(ErasedSlot { id_slot, n_erased }));
    }
    let filename = body.parse(&handle, slots::parse_file).await?;
    let started = Instant::now();
    let ms = || started.elapsed().as_secs_f64() * 1e3;
    if query.action == "save" {
        let SavedPrefix { num_tokens, num_bytes } = slots.save(handle.caller(), id_slot, &filename).await?;
        let timings = SaveTimings { save_ms: ms() };
        let saved = SavedSlot { id_slot, filename, n_saved: num_tokens, n_written: num_bytes, timings };
        return Ok(HttpResponse::Ok().json(saved));
    }
    let SavedPrefix { num_tokens, num_bytes } = slots.restore(handle.caller(), id_slot, &filename).await?;
    let timings = RestoreTimings { restore_ms: ms() };
    let restored = RestoredSlot { id_slot, filename, n_restored: num_tokens, n_read: num_bytes, timings };
    Ok(HttpResponse::Ok().json(restored))
}

fn wrong_query(param: &str, error: &actix_web::Error) -> ApiError {
    ApiError::invalid(param, format!("{param} must be given once: {error}"))
}

async fn lora_adapters() -> HttpResponse {
    HttpResponse::Ok().json(json!([]))
}

async fn change_lora_adapters() -> Result<HttpResponse, HttpError> {
    Err(ApiError::not_implemented(None, "this server has no LoRA adapters").into())
}

async fn health() -> HttpResponse {
    HttpResponse::Ok().json(json!({"status": "ok"}))
}
