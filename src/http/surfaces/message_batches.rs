//! Anthropic's batches of messages.

use super::batches::query;
use crate::batches::{BatchClient, download};
use crate::body::{self, Body};
use crate::error::HttpError;
use crate::paths::{ApiPath, delete, get, post};
use actix_web::web::{self, Data, Path};
use actix_web::{HttpRequest, HttpResponse};
use pagetide_actors::runtime::RuntimeHandle;
use pagetide_api::batches::anthropic::{self, MessageBatch, MessageBatchDeleted, WINDOW_S};
use pagetide_api::batches::describe;
use pagetide_api::batches::line::BatchEndpoint;
use pagetide_api::id::random_hex;
use pagetide_base::error::ApiError;
use pagetide_batches::batch::BatchApi;
use pagetide_batches::store::{BatchStore, InputSource, NewBatch};

const API: BatchApi = BatchApi::Anthropic;

pub static PATHS: [ApiPath; 6] = [
    post("/v1/messages/batches", || web::to(create), describe::create_messages),
    get("/v1/messages/batches", || web::to(list), describe::list_messages),
    get("/v1/messages/batches/{id}", || web::to(retrieve), describe::retrieve_messages),
    delete("/v1/messages/batches/{id}", || web::to(remove), describe::delete_messages),
    post("/v1/messages/batches/{id}/cancel", || web::to(cancel), describe::cancel_messages),
    get("/v1/messages/batches/{id}/results", || web::to(results), describe::message_results),
];

/// Where the client finds this server.
fn base(request: &HttpRequest) -> String {
    let connection = request.connection_info();
    format!("{}://{}", connection.scheme(), connection.host())
}

async fn create(
    client: BatchClient,
    handle: Data<RuntimeHandle>,
    request: HttpRequest,
    body: Body,
) -> Result<HttpResponse, HttpError> {
    let asked = body.parse(&handle, anthropic::parse).await?;
    let max_lines = client.batches.max_lines();
    if asked.num_requests as u64 > max_lines {
        let message =
            format!("requests may have up to {max_lines} requests (batches.max_lines), got {}", asked.num_requests);
        return Err(ApiError::invalid("requests", message).into());
    }
    let create = move |store: &BatchStore, owner: &str, now| {
        let new = NewBatch {
            id: format!("msgbatch_{}", random_hex()),
            owner: owner.to_owned(),
            api: API,
            endpoint: BatchEndpoint::Messages.path().to_owned(),
            input: InputSource::Lines(asked.lines),
            metadata: None,
            output_expires_after_s: None,
            window_s: WINDOW_S,
        };
        store.create_batch(new, now)
    };
    let batch = client.work(("batch", ""), create).await?;
    client.batches.changed();
    Ok(HttpResponse::Ok().json(MessageBatch::new(batch, &base(&request))))
}

async fn list(
    client: BatchClient,
    handle: Data<RuntimeHandle>,
    request: HttpRequest,
) -> Result<HttpResponse, HttpError> {
    let query = query(&request)?;
    let batches = client.work(("batch", ""), |store, owner, _| Ok(store.batches(owner, API))).await?;
    let num_values = 20 * batches.len();
    body::answer(&handle, anthropic::list(&query, batches, &base(&request))?, num_values).await
}

async fn retrieve(client: BatchClient, request: HttpRequest, id: Path<String>) -> Result<HttpResponse, HttpError> {
    let id = id.into_inner();
    let asked = id.clone();
    let batch = client.work(("batch", &id), move |store, owner, _| store.batch(owner, API, &asked)).await?;
    Ok(HttpResponse::Ok().json(MessageBatch::new(batch, &base(&request))))
}

async fn cancel(client: BatchClient, request: HttpRequest, id: Path<String>) -> Result<HttpResponse, HttpError> {
    let id = id.into_inner();
    let asked = id.clone();
    let batch = client.work(("batch", &id), move |store, owner, now| store.cancel(owner, API, &asked, now)).await?;
    client.batches.changed();
    Ok(HttpResponse::Ok().json(MessageBatch::new(batch, &base(&request))))
}

async fn remove(client: BatchClient, id: Path<String>) -> Result<HttpResponse, HttpError> {
    let id = id.into_inner();
    let asked = id.clone();
    client.work(("batch", &id), move |store, owner, _| store.delete_batch(owner, API, &asked)).await?;
    Ok(HttpResponse::Ok().json(MessageBatchDeleted::new(id)))
}

async fn results(client: BatchClient, id: Path<String>) -> Result<HttpResponse, HttpError> {
    let id = id.into_inner();
    let asked = id.clone();
    let files = client.work(("batch", &id), move |store, owner, _| store.results(owner, API, &asked)).await?;
    Ok(download::message_results(files))
}
