//! Receives a file as `multipart/form-data`.

use super::BatchClient;
use actix_multipart::{Field, Multipart, MultipartError};
use actix_web::HttpRequest;
use actix_web::error::PayloadError;
use actix_web::web::{Bytes, BytesMut, Payload, block};
use futures_util::{Stream, StreamExt};
use pagetide_api::batches::files::UploadFields;
use pagetide_api::id::random_hex;
use pagetide_base::error::ApiError;
use pagetide_batches::file::FileRecord;
use pagetide_batches::store::{BatchStore, StoreError, Upload};
use std::cell::Cell;
use std::rc::Rc;

/// Bytes that are written to the disk at once.
const WRITTEN_AT_ONCE: usize = 256 << 10;
/// Bytes that the form's reader may hold: more than it is given at once, and than a part's head needs.
const MAX_BUFFERED: usize = 1 << 20;
/// Bytes of a field that is not the file.
const MAX_FIELD: usize = 1024;
const MAX_FILENAME_CHARS: usize = 255;
/// Parts of a form.
const MAX_PARTS: usize = 20;

/// Receives the file of a form, and keeps it.
pub async fn receive(client: &BatchClient, request: &HttpRequest, payload: Payload) -> Result<FileRecord, ApiError> {
    let buffered = Rc::new(Cell::new(0));
    let mut form = Multipart::new(request.headers(), bounded(payload, buffered.clone()));
    let (mut fields, mut file) = (UploadFields::default(), None);
    let mut num_parts = 0;
    while let Some(part) = form.next().await {
        let mut part = part.map_err(|error| unreadable(&error))?;
        buffered.set(0);
        num_parts += 1;
        if num_parts > MAX_PARTS {
            return Err(ApiError::bad_request(format!("the form has more than {MAX_PARTS} parts")));
        }
        let name = part.name().unwrap_or_default().to_owned();
        if name == "file" {
            let filename = part.content_disposition().and_then(|head| head.get_filename()).unwrap_or("file");
            let filename = filename.chars().take(MAX_FILENAME_CHARS).collect::<String>();
            file = Some((filename, receive_file(client, &mut part, &buffered).await?));
        } else {
            let text = receive_text(&name, &mut part, &buffered).await?;
            if let Some(place) = fields.place(&name) {
                *place = Some(text);
            }
        }
    }
    let expires_after_s = fields.check()?;
    let (filename, upload) = file.ok_or_else(|| ApiError::invalid("file", "file is required, with a file name"))?;
    let id = format!("file-{}", random_hex());
    let keep = move |store: &BatchStore, owner: &str, now| {
        store.finish_upload(upload, (id, owner, filename), expires_after_s, now)
    };
    client.work(("file", ""), keep).await
}

/// The same stream, which fails where the form's reader holds too much of it.
fn bounded(payload: Payload, buffered: Rc<Cell<usize>>) -> impl Stream<Item = Result<Bytes, PayloadError>> + 'static {
    payload.map(move |part| {
        let part = part?;
        buffered.set(buffered.get() + part.len());
        if buffered.get() > MAX_BUFFERED { Err(PayloadError::Overflow) } else { Ok(part) }
    })
}

async fn receive_file(client: &BatchClient, part: &mut Field, buffered: &Cell<usize>) -> Result<Upload, ApiError> {
    let mut upload = client.work(("file", ""), |store, owner, _| store.begin_upload(owner)).await?;
    let mut waiting = BytesMut::new();
    while let Some(bytes) = part.next().await {
        waiting.extend_from_slice(&bytes.map_err(|error| unreadable(&error))?);
        buffered.set(0);
        if waiting.len() >= WRITTEN_AT_ONCE {
            upload = write(client, upload, waiting.split().freeze()).await?;
        }
    }
    write(client, upload, waiting.freeze()).await
}

async fn write(client: &BatchClient, mut upload: Upload, bytes: Bytes) -> Result<Upload, ApiError> {
    let write = move || -> Result<Upload, StoreError> {
        upload.write(&bytes)?;
        Ok(upload)
    };
    let written = block(write).await.map_err(|error| ApiError::storage_failed(&error.to_string()))?;
    written.map_err(|error| client.batches.error(error, "file", ""))
}

async fn receive_text(name: &str, part: &mut Field, buffered: &Cell<usize>) -> Result<String, ApiError> {
    let mut text = Vec::new();
    while let Some(bytes) = part.next().await {
        text.extend_from_slice(&bytes.map_err(|error| unreadable(&error))?);
        buffered.set(0);
        if text.len() > MAX_FIELD {
            return Err(ApiError::invalid(name, format!("{name} has more than {MAX_FIELD} bytes")));
        }
    }
    String::from_utf8(text).map_err(|_| ApiError::invalid(name, format!("{name} must be a text in UTF-8")))
}

fn unreadable(error: &MultipartError) -> ApiError {
    match error {
        MultipartError::Payload(error) if crate::timeouts::is_timeout(error) => {
            ApiError::bad_request("the form did not arrive in time (server.body_timeout_s)")
        }
        MultipartError::ContentTypeMissing
        | MultipartError::ContentTypeParse
        | MultipartError::ContentTypeIncompatible
        | MultipartError::BoundaryMissing => {
            ApiError::bad_request("the body must be a form: Content-Type: multipart/form-data with a boundary")
        }
        other => ApiError::bad_request(format!("the form cannot be read: {other}")),
    }
}
