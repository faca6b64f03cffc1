//! Files and batches: who may see which, and their store, which is used off the HTTP threads. [`runner`] answers the
//! requests of batches.

pub mod download;
mod requests;
pub mod runner;
pub mod upload;

use crate::auth::Keyed;
use crate::error::HttpError;
use actix_web::dev::Payload;
use actix_web::web::{Data, block};
use actix_web::{FromRequest, HttpMessage, HttpRequest};
use pagetide_api::id::unix_time_s;
use pagetide_base::error::{ApiError, StartError};
use pagetide_batches::batch::BatchState;
use pagetide_batches::store::{BatchStore, StoreError, StoreLimits};
use pagetide_config::BatchesConfig;
use std::future::{Ready, ready};
use std::path::Path;
use std::sync::Arc;
use tokio::sync::watch;

const DAY_S: u64 = 86_400;

/// The store of the server, if it has one. All clones are of the same store.
#[derive(Clone)]
pub struct Batches(Option<OpenBatches>);

#[derive(Clone)]
pub struct OpenBatches {
    store: Arc<BatchStore>,
    /// Changes with every batch that is made or cancelled.
    changes: watch::Sender<u64>,
    config: Arc<BatchesConfig>,
}

impl Batches {
    /// Opens `batches.folder`.
    pub fn open(config: &BatchesConfig) -> Result<Self, StartError> {
        if config.folder.is_empty() {
            return Ok(Self(None));
        }
        let limits = StoreLimits {
            max_file_bytes: config.max_file_mib << 20,
            max_folder_bytes: config.max_folder_gib << 30,
            max_files: config.max_files,
            max_batches: config.max_batches,
            keep_s: config.keep_days * DAY_S,
        };
        let store = BatchStore::open(Path::new(&config.folder), limits, unix_time_s())
            .map_err(|error| StartError::new(format!("cannot use {} (batches.folder): {error}", config.folder)))?;
        let (changes, _) = watch::channel(0);
        Ok(Self(Some(OpenBatches { store: Arc::new(store), changes, config: Arc::new(config.clone()) })))
    }

    pub fn get(&self) -> Option<&OpenBatches> {
        self.0.as_ref()
    }
}

impl OpenBatches {
    /// Does work that waits for the disk. `what` and `id`: what the client asks for.
    pub async fn work<T: Send + 'static>(
        &self,
        (what, id): (&'static str, &str),
        work: impl FnOnce(&BatchStore) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let store = self.store.clone();
        let done = block(move || work(&store)).await;
        done.map_err(|error| ApiError::storage_failed(&error.to_string()))?.map_err(|error| self.error(error, what, id))
    }

    /// Requests of a batch at most.
    pub fn max_lines(&self) -> u64 {
        self.config.max_lines
    }

    /// Batches have been made or cancelled.
    pub fn changed(&self) {
        self.changes.send_modify(|number| *number = number.wrapping_add(1));
    }

    fn error(&self, error: StoreError, what: &str, id: &str) -> ApiError {
        let BatchesConfig { max_file_mib, max_folder_gib, max_files, max_batches, .. } = *self.config;
        match error {
            StoreError::NotFound => ApiError::not_kept(what, id),
            StoreError::FileTooLarge => ApiError::file_too_large(max_file_mib),
            StoreError::FolderFull => {
                let message = format!("all files together would have more than {max_folder_gib} GiB");
                ApiError::batches_full(message, "batches.max_folder_gib")
            }
            StoreError::TooManyFiles => {
                let message = format!("there are {max_files} files of this key already: delete some");
                ApiError::batches_full(message, "batches.max_files")
            }
            StoreError::TooManyBatches => {
                let message = format!("{max_batches} batches of this key have not ended yet");
                ApiError::batches_full(message, "batches.max_batches")
            }
            StoreError::WrongState(BatchState::Validating | BatchState::InProgress | BatchState::Cancelling) => {
                ApiError::wrong_batch_state(format!("batch '{id}' has not ended yet"))
            }
            StoreError::WrongState(_) => ApiError::wrong_batch_state(format!("batch '{id}' has ended")),
            StoreError::Disk(error) => {
                tracing::error!("files of batches: {error}");
                ApiError::storage_failed(&error.kind().to_string())
            }
        }
    }
}

/// A client that asks for its files or batches.
pub struct BatchClient {
    pub batches: OpenBatches,
    pub owner: Arc<str>,
}

impl FromRequest for BatchClient {
    type Error = HttpError;
    type Future = Ready<Result<Self, HttpError>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let batches: &Data<Batches> = request.app_data().expect("every app is made with one");
        let owner = request.extensions().get::<Keyed>().map(|keyed| keyed.owner.clone()).unwrap_or_default();
        let client = batches.get().cloned().map(|batches| Self { batches, owner });
        ready(client.ok_or_else(|| ApiError::batches_off().into()))
    }
}

impl BatchClient {
    /// [`OpenBatches::work`] with the client's owner and the time.
    pub async fn work<T: Send + 'static>(
        &self,
        asked: (&'static str, &str),
        work: impl FnOnce(&BatchStore, &str, u64) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let owner = self.owner.clone();
        self.batches.work(asked, move |store| work(store, &owner, unix_time_s())).await
    }
}
