//! OpenAI's files and batches.

use crate::batches::{BatchClient, download, upload};
use crate::body::{self, Body};
use crate::error::HttpError;
use crate::paths::{ApiPath, delete, get, post};
use actix_web::web::{self, Data, Path, Payload, Query};
use actix_web::{HttpRequest, HttpResponse};
use pagetide_actors::runtime::RuntimeHandle;
use pagetide_api::batches::files::{self, FileDeleted, FileObject};
use pagetide_api::batches::openai::{self, BatchObject, BatchRequest};
use pagetide_api::batches::{describe, page::QueryParameters};
use pagetide_api::id::random_hex;
use pagetide_base::error::ApiError;
use pagetide_batches::batch::BatchApi;
use pagetide_batches::store::{BatchStore, InputSource, NewBatch};

pub static PATHS: [ApiPath; 9] = [
    post("/v1/files", || web::to(upload_file), describe::upload_file),
    get("/v1/files", || web::to(list_files), describe::list_files),
    get("/v1/files/{id}", || web::to(retrieve_file), describe::retrieve_file),
    delete("/v1/files/{id}", || web::to(delete_file), describe::delete_file),
    get("/v1/files/{id}/content", || web::to(file_content), describe::file_content),
    post("/v1/batches", || web::to(create_batch), describe::create_batch),
    get("/v1/batches", || web::to(list_batches), describe::list_batches),
    get("/v1/batches/{id}", || web::to(retrieve_batch), describe::retrieve_batch),
    post("/v1/batches/{id}/cancel", || web::to(cancel_batch), describe::cancel_batch),
];

/// The parameters of a query. A request says each of them once; of several the last counts.
pub fn query(request: &HttpRequest) -> Result<QueryParameters, ApiError> {
    let query = Query::<QueryParameters>::from_query(request.query_string());
    query.map(Query::into_inner).map_err(|error| ApiError::bad_request(format!("the query cannot be read: {error}")))
}

async fn upload_file(client: BatchClient, request: HttpRequest, payload: Payload) -> Result<HttpResponse, HttpError> {
    let file = upload::receive(&client, &request, payload).await?;
    Ok(HttpResponse::Ok().json(FileObject::from(file)))
}

async fn list_files(
    client: BatchClient,
    handle: Data<RuntimeHandle>,
    request: HttpRequest,
) -> Result<HttpResponse, HttpError> {
    let query = query(&request)?;
    let files = client.work(("file", ""), |store, owner, now| Ok(store.files(owner, now))).await?;
    let num_values = 8 * files.len();
    body::answer(&handle, files::list(&query, files)?, num_values).await
}

async fn retrieve_file(client: BatchClient, id: Path<String>) -> Result<HttpResponse, HttpError> {
    let id = id.into_inner();
    let asked = id.clone();
    let file = client.work(("file", &id), move |store, owner, now| store.file(owner, &asked, now)).await?;
    Ok(HttpResponse::Ok().json(FileObject::from(file)))
}

async fn delete_file(client: BatchClient, id: Path<String>) -> Result<HttpResponse, HttpError> {
    let id = id.into_inner();
    let asked = id.clone();
    client.work(("file", &id), move |store, owner, now| store.delete_file(owner, &asked, now)).await?;
    Ok(HttpResponse::Ok().json(FileDeleted::new(id)))
}

async fn file_content(client: BatchClient, id: Path<String>) -> Result<HttpResponse, HttpError> {
    let id = id.into_inner();
    let asked = id.clone();
    let content = client.work(("file", &id), move |store, owner, now| store.content(owner, &asked, now));
    let (file, content) = content.await?;
    Ok(download::content(content, file.bytes))
}

async fn create_batch(client: BatchClient, handle: Data<RuntimeHandle>, body: Body) -> Result<HttpResponse, HttpError> {
    let BatchRequest { input_file_id, endpoint, window_s, metadata, output_expires_after_s } =
        body.parse(&handle, openai::parse).await?;
    let file = input_file_id.clone();
    let create = move |store: &BatchStore, owner: &str, now| {
        let new = NewBatch {
            id: format!("batch_{}", random_hex()),
            owner: owner.to_owned(),
            api: BatchApi::OpenAi,
            endpoint: endpoint.path().to_owned(),
            input: InputSource::File(input_file_id),
            metadata,
            output_expires_after_s,
            window_s,
        };
        store.create_batch(new, now)
    };
    let batch = client.work(("file", &file), create).await?;
    client.batches.changed();
    Ok(HttpResponse::Ok().json(BatchObject::from(batch)))
}

async fn list_batches(
    client: BatchClient,
    handle: Data<RuntimeHandle>,
    request: HttpRequest,
) -> Result<HttpResponse, HttpError> {
    let query = query(&request)?;
    let batches = client.work(("batch", ""), |store, owner, _| Ok(store.batches(owner, BatchApi::OpenAi))).await?;
    let num_values = 30 * batches.len();
    body::answer(&handle, openai::list(&query, batches)?, num_values).await
}

async fn retrieve_batch(client: BatchClient, id: Path<String>) -> Result<HttpResponse, HttpError> {
    let id = id.into_inner();
    let asked = id.clone();
    let batch = client.work(("batch", &id), move |store, owner, _| store.batch(owner, BatchApi::OpenAi, &asked));
    Ok(HttpResponse::Ok().json(BatchObject::from(batch.await?)))
}

async fn cancel_batch(client: BatchClient, id: Path<String>) -> Result<HttpResponse, HttpError> {
    let id = id.into_inner();
    let asked = id.clone();
    let batch =
        client.work(("batch", &id), move |store, owner, now| store.cancel(owner, BatchApi::OpenAi, &asked, now));
    let batch = batch.await?;
    client.batches.changed();
    Ok(HttpResponse::Ok().json(BatchObject::from(batch)))
}
