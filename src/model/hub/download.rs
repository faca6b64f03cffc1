//! Downloads: the list of a model's files, and the files.

use super::cached::CachedModel;
use super::failure::Failure;
use super::file::{BlobSource, client, is_etag};
use super::meter::DownloadMeter;
use super::name::is_revision;
use super::request::HubRequest;
use hf_hub::Cache;
use hf_hub::api::tokio::{Api, ApiBuilder};
use reqwest::Client;
use serde::Deserialize;
use std::fs;
use std::time::Duration;

/// Timeout of answers other than files.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size of a list of files. Real ones have a few megabytes at most.
const MAX_LISTING_BYTES: usize = 64 << 20;
/// Maximum number of attempts for a file without progress.
const MAX_TRIES: u32 = 5;
/// Size of a piece of a file. A piece is held in memory until it is complete, then written. Each piece is a request,
/// and the hub limits requests, so pieces must not be too small.
const PIECE_BYTES: u64 = 16 << 20;
/// Piece size on connections that keep breaking.
const MIN_PIECE_BYTES: u64 = 1 << 20;

/// The files of a model at a commit.
pub struct Listing {
    pub commit: String,
    files: Vec<RemoteFile>,
}

struct RemoteFile {
    name: String,
    /// The hash that names the blob in the cache.
    etag: Option<String>,
    bytes: Option<u64>,
}

/// The hub's JSON.
#[derive(Deserialize)]
struct RepoInfo {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    /// Of a file in git.
    blob_id: Option<String>,
    /// Of a file in large file storage.
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
}

impl From<Sibling> for RemoteFile {
    fn from(file: Sibling) -> Self {
        let sha256 = file.lfs.and_then(|lfs| lfs.sha256);
        let etag = sha256.or(file.blob_id).filter(|etag| etag.chars().all(|c| c.is_ascii_hexdigit()));
        Self { name: file.rfilename, etag, bytes: file.size }
    }
}

impl Listing {
    pub fn has(&self, file: &str) -> bool {
        self.file(file).is_some()
    }

    fn file(&self, name: &str) -> Option<&RemoteFile> {
        self.files.iter().find(|file| file.name == name)
    }

    /// The names of all files.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.files.iter().map(|file| file.name.as_str())
    }

    /// Files that look like weights, a few of them.
    pub fn weights(&self) -> Vec<String> {
        let is_weights =
            |name: &str| [".bin", ".pt", ".pth", ".gguf", ".safetensors"].iter().any(|end| name.ends_with(end));
        self.files.iter().map(|file| file.name.clone()).filter(|name| is_weights(name)).take(3).collect()
    }
}

impl HubRequest {
    pub(super) fn place(&self) -> CachedModel {
        CachedModel::new(&self.access, &self.model, &self.revision)
    }

    fn api(&self) -> Result<Api, Failure> {
        let builder = ApiBuilder::from_cache(Cache::new(self.access.cache.clone()))
            .with_endpoint(self.access.endpoint.clone())
            .with_token(self.access.token.clone())
            .with_user_agent("pagetide", env!("CARGO_PKG_VERSION"))
            .with_progress(false);
        builder.build().map_err(Failure::of_download)
    }

    /// Lists the files of the model at `revision`.
    pub fn list(&self, revision: &str) -> Result<Listing, Failure> {
        if self.access.offline {
            return Err(Failure::Offline);
        }
        let mut tries = 0;
        loop {
            match run(async || self.ask(revision).await) {
                Err(Failure::Status(status)) if Failure::Status(status).is_passing() && tries < MAX_TRIES => {
                    tries += 1;
                    tracing::warn!("{} answers {status}: trying again", self.access.endpoint);
                    std::thread::sleep(pause(tries));
                }
                answer => return answer,
            }
        }
    }

    async fn ask(&self, revision: &str) -> Result<Listing, Failure> {
        let request = self.api()?.repo(self.repo(revision)).info_request();
        let mut answer = request.query(&[("blobs", "true")]).timeout(ANSWER_TIMEOUT).send().await?;
        if !answer.status().is_success() {
            let header = |name: &str| Some(answer.headers().get(name)?.to_str().ok()?.to_owned());
            return Err(Failure::of_answer(answer.status(), header));
        }
        let mut text = Vec::new();
        while let Some(bytes) = answer.chunk().await? {
            if text.len() + bytes.len() > MAX_LISTING_BYTES {
                return Err(Failure::Answer(format!(
                    "the list of a model's files has more than {} MiB",
                    MAX_LISTING_BYTES >> 20
                )));
            }
            text.extend_from_slice(&bytes);
        }
        let info: RepoInfo =
            serde_json::from_slice(&text).map_err(|error| Failure::Answer(format!("a model's listing: {error}")))?;
        if !is_revision(&info.sha) {
            return Err(Failure::Answer(format!("the list of a model's files: '{}' is not a commit", info.sha)));
        }
        Ok(Listing { commit: info.sha, files: info.siblings.into_iter().map(RemoteFile::from).collect() })
    }

    /// Brings `files`, which are in the listing, into the snapshot of its commit.
    pub fn fetch(&self, listing: &Listing, place: &CachedModel, files: &[&str]) -> Result<(), Failure> {
        let mut missing = Vec::new();
        for name in files {
            let file = listing.file(name).expect("only listed files are asked for");
            if !place.has_all(&listing.commit, &[name]) && !link_blob(place, &listing.commit, file)? {
                missing.push(file);
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        let total = missing.iter().filter_map(|file| file.bytes).fold(0, u64::saturating_add);
        let meter = DownloadMeter::new(total, self.progress.clone());
        let client = client()?;
        for file in missing {
            let file = self.fetch_file(&client, place, &listing.commit, file, &meter)?;
            meter.file_done();
            if !link_blob(place, &listing.commit, &file)? {
                return Err(Failure::Answer(format!("{} is gone from the cache again", file.name)));
            }
        }
        Ok(())
    }

    fn fetch_file(
        &self,
        client: &Client,
        place: &CachedModel,
        commit: &str,
        file: &RemoteFile,
        meter: &DownloadMeter,
    ) -> Result<RemoteFile, Failure> {
        let (mut tries, mut farthest) = (0, 0);
        loop {
            let piece_bytes = (PIECE_BYTES >> (2 * tries)).max(MIN_PIECE_BYTES);
            let failure = match run(async || self.try_file(client, place, commit, file, piece_bytes, meter).await) {
                Ok(file) => return Ok(file),
                Err(failure) => failure,
            };
            let reached = meter.file_bytes();
            if reached > farthest {
                (tries, farthest) = (0, reached);
            }
            tries += 1;
            if !failure.is_passing() || tries > MAX_TRIES {
                return Err(failure);
            }
            tracing::warn!(
                "the download of {} stopped: {failure}; continuing in {} s",
                file.name,
                pause(tries).as_secs()
            );
            std::thread::sleep(pause(tries));
        }
    }

    /// Goes on where the last try ended. The file, with what its listing did not say.
    async fn try_file(
        &self,
        client: &Client,
        place: &CachedModel,
        commit: &str,
        file: &RemoteFile,
        piece_bytes: u64,
        meter: &DownloadMeter,
    ) -> Result<RemoteFile, Failure> {
        let url = self.api()?.repo(self.repo(commit)).url(&file.name);
        let (etag, bytes) = match (&file.etag, file.bytes) {
            (Some(etag), Some(bytes)) => (etag.clone(), bytes),
            _ => self.ask_for(&url).await?,
        };
        let source = BlobSource { client, access: &self.access, url, etag: &etag, bytes };
        source.fetch(&place.blob(&etag), piece_bytes, meter).await?;
        Ok(RemoteFile { name: file.name.clone(), etag: Some(etag), bytes: Some(bytes) })
    }

    /// A file's hash and size, from a mirror whose listings do not say them.
    async fn ask_for(&self, url: &str) -> Result<(String, u64), Failure> {
        let asked = tokio::time::timeout(ANSWER_TIMEOUT, async {
            self.api()?.metadata(url).await.map_err(Failure::of_download)
        });
        let told = asked.await.unwrap_or_else(|_| Err(Failure::Network("no answer".into())))?;
        match is_etag(told.etag()) {
            true => Ok((told.etag().to_owned(), told.size() as u64)),
            false => Err(Failure::Answer(format!(
                "{url}: '{}' is not a valid name in the cache",
                told.etag().escape_debug()
            ))),
        }
    }
}

/// Links a file of a snapshot to a blob that the cache has, from another commit. False if it has none.
fn link_blob(place: &CachedModel, commit: &str, file: &RemoteFile) -> Result<bool, Failure> {
    let (Some(etag), Some(bytes)) = (&file.etag, file.bytes) else { return Ok(false) };
    if !fs::metadata(place.blob(etag)).is_ok_and(|blob| blob.len() == bytes) {
        return Ok(false);
    }
    let link = place.snapshot(commit).join(&file.name);
    fs::create_dir_all(link.parent().expect("a file is in a folder"))?;
    // A link that leads nowhere, or it would be no missing file.
    let _ = fs::remove_file(&link);
    std::os::unix::fs::symlink(format!("../../{}blobs/{etag}", "../".repeat(file.name.matches('/').count())), &link)?;
    Ok(true)
}

/// Seconds before try number `tries` + 1.
fn pause(tries: u32) -> Duration {
    Duration::from_secs(1 << (tries - 1).min(4))
}

/// Runs a request to its end on its own thread and runtime: the caller may be a task of another runtime, and failed
/// parts of a download end with this one.
fn run<T: Send>(request: impl AsyncFnOnce() -> Result<T, Failure> + Send) -> Result<T, Failure> {
    let work = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let result = runtime.block_on(request());
        runtime.shutdown_background();
        result
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("pagetide-hub".into()).spawn_scoped(scope, work)?;
        // A panic has been reported where it happened.
        thread.join().unwrap_or_else(|_| Err(Failure::Answer("the client of the hub failed on it".into())))
    })
}
