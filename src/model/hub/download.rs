//! The hub's answers: what a model holds, and its files.

use super::{Access, DownloadProgress, Failure, Place};
use hf_hub::api::tokio::{Api, ApiBuilder, Progress};
use hf_hub::{Cache, Repo, RepoType};
use serde::Deserialize;
use std::fs;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// For an answer that is no file.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// A download that brings nothing for so long has lost its connection.
const STALL: Duration = Duration::from_secs(60);
/// Times that a file is asked for again without having come any farther.
const MAX_TRIES: u32 = 5;
/// Pieces of a file that come side by side.
const NUM_CONNECTIONS: usize = 4;
/// A piece. It is kept once it is whole, and held in memory until then. Each is a request to the hub, which counts
/// them: not too small.
const PIECE_BYTES: usize = 16 << 20;
/// Where the connection keeps breaking.
const MIN_PIECE_BYTES: usize = 1 << 20;

/// A model on the hub.
pub struct Hub {
    pub access: Access,
    /// `OWNER/NAME`
    pub model: String,
    /// As asked for: a branch, a tag or a commit.
    pub revision: String,
    pub progress: DownloadProgress,
}

/// What a model holds at a commit.
pub struct Listing {
    pub commit: String,
    files: Vec<RemoteFile>,
}

struct RemoteFile {
    name: String,
    /// Names its blob in the cache.
    etag: Option<String>,
    bytes: Option<u64>,
}

/// The hub's own words for it.
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

    /// Files that look like weights, a few of them.
    pub fn weights(&self) -> Vec<String> {
        let is_weights =
            |name: &str| [".bin", ".pt", ".pth", ".gguf", ".safetensors"].iter().any(|end| name.ends_with(end));
        self.files.iter().map(|file| file.name.clone()).filter(|name| is_weights(name)).take(3).collect()
    }
}

impl Hub {
    pub(super) fn place(&self) -> Place {
        Place::new(&self.access, &self.model, &self.revision)
    }

    fn api(&self, piece_bytes: usize) -> Result<Api, Failure> {
        let builder = ApiBuilder::from_cache(Cache::new(self.access.cache.clone()))
            .with_endpoint(self.access.endpoint.clone())
            .with_token(self.access.token.clone())
            .with_user_agent("pagetide", env!("CARGO_PKG_VERSION"))
            .with_max_files(NUM_CONNECTIONS)
            .with_chunk_size(Some(piece_bytes))
            .with_progress(false);
        builder.build().map_err(Failure::of_download)
    }

    fn repo(&self, revision: &str) -> Repo {
        Repo::with_revision(self.model.clone(), RepoType::Model, revision.into())
    }

    /// What the model holds at `revision`.
    pub fn list(&self, revision: &str) -> Result<Listing, Failure> {
        if self.access.offline {
            return Err(Failure::Offline);
        }
        let mut tries = 0;
        loop {
            match run(async || self.ask(revision).await) {
                Err(Failure::Status(status)) if Failure::Status(status).is_passing() && tries < MAX_TRIES => {
                    tries += 1;
                    tracing::warn!("{} answers {status}: asking again", self.access.endpoint);
                    std::thread::sleep(pause(tries));
                }
                answer => return answer,
            }
        }
    }

    async fn ask(&self, revision: &str) -> Result<Listing, Failure> {
        let request = self.api(PIECE_BYTES)?.repo(self.repo(revision)).info_request();
        let answer = request.query(&[("blobs", "true")]).timeout(ANSWER_TIMEOUT).send().await?;
        if !answer.status().is_success() {
            let header = |name: &str| Some(answer.headers().get(name)?.to_str().ok()?.to_owned());
            return Err(Failure::of_answer(answer.status(), header));
        }
        let text = answer.bytes().await?;
        let info: RepoInfo =
            serde_json::from_slice(&text).map_err(|error| Failure::Answer(format!("a model's listing: {error}")))?;
        if !super::is_revision(&info.sha) {
            return Err(Failure::Answer(format!("a model's listing: '{}' is no commit", info.sha)));
        }
        Ok(Listing { commit: info.sha, files: info.siblings.into_iter().map(RemoteFile::from).collect() })
    }

    /// Brings `files`, which are in the listing, into the snapshot of its commit.
    pub fn fetch(&self, listing: &Listing, place: &Place, files: &[&str]) -> Result<(), Failure> {
        let mut missing = Vec::new();
        for name in files {
            let file = listing.file(name).expect("only listed files are asked for");
            if !place.has_all(&listing.commit, &[name]) && !link_blob(place, &listing.commit, file)? {
                missing.push(file);
            }
        }
        let total = missing.iter().filter_map(|file| file.bytes).sum();
        let meter = Meter::new(total, self.progress.clone());
        for file in missing {
            self.fetch_file(&listing.commit, file, &meter)?;
            meter.file_done();
        }
        // The crate notes each commit as if it were a branch.
        if self.revision != listing.commit {
            let _ = fs::remove_file(place.root.join("refs").join(&listing.commit));
        }
        Ok(())
    }

    fn fetch_file(&self, commit: &str, file: &RemoteFile, meter: &Meter) -> Result<(), Failure> {
        let (mut tries, mut farthest) = (0, 0);
        loop {
            let piece_bytes = (PIECE_BYTES >> (2 * tries)).max(MIN_PIECE_BYTES);
            let failure = match run(async || self.try_file(commit, file, piece_bytes, meter).await) {
                Ok(()) => return Ok(()),
                Err(failure) => failure,
            };
            let reached = meter.state().file_bytes;
            if reached > farthest {
                (tries, farthest) = (0, reached);
            }
            tries += 1;
            if !failure.is_passing() || tries > MAX_TRIES {
                return Err(failure);
            }
            tracing::warn!("{} broke off: {failure}; going on in {} s", file.name, pause(tries).as_secs());
            std::thread::sleep(pause(tries));
        }
    }

    /// Goes on where the last try ended.
    async fn try_file(
        &self,
        commit: &str,
        file: &RemoteFile,
        piece_bytes: usize,
        meter: &Meter,
    ) -> Result<(), Failure> {
        let repo = self.api(piece_bytes)?.repo(self.repo(commit));
        meter.state().last = Instant::now();
        let download = repo.download_with_progress(&file.name, meter.clone());
        tokio::pin!(download);
        loop {
            tokio::select! {
                done = &mut download => return done.map(drop).map_err(Failure::of_download),
                () = tokio::time::sleep(Duration::from_secs(1)) => {
                    if meter.state().last.elapsed() > STALL {
                        return Err(Failure::Network(format!("nothing came for {} s", STALL.as_secs())));
                    }
                }
            }
        }
    }
}

/// Links a file of a snapshot to a blob that the cache has, from another commit. False if it has none.
fn link_blob(place: &Place, commit: &str, file: &RemoteFile) -> Result<bool, Failure> {
    let (Some(etag), Some(bytes)) = (&file.etag, file.bytes) else { return Ok(false) };
    if !fs::metadata(place.blob(etag)).is_ok_and(|blob| blob.len() == bytes) {
        return Ok(false);
    }
    let link = place.snapshot(commit).join(&file.name);
    fs::create_dir_all(place.snapshot(commit))?;
    // A link that leads nowhere, or it would be no missing file.
    let _ = fs::remove_file(&link);
    std::os::unix::fs::symlink(format!("../../blobs/{etag}"), &link)?;
    Ok(true)
}

/// Seconds before try number `tries` + 1.
fn pause(tries: u32) -> Duration {
    Duration::from_secs(1 << (tries - 1).min(4))
}

/// Runs a request to its end. It has a thread and a runtime of its own: the caller may be a task of another runtime,
/// and parts of a download that failed end with theirs.
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

/// Counts the bytes of a few files, one after the other.
#[derive(Clone)]
struct Meter {
    state: Arc<Mutex<MeterState>>,
    report: DownloadProgress,
}

struct MeterState {
    /// Of files that are whole.
    done: u64,
    /// Of the file that is being fetched, with what earlier tries brought.
    file_bytes: u64,
    total: u64,
    /// When bytes came.
    last: Instant,
}

impl Meter {
    fn new(total: u64, report: DownloadProgress) -> Self {
        let state = MeterState { done: 0, file_bytes: 0, total, last: Instant::now() };
        Self { state: Arc::new(Mutex::new(state)), report }
    }

    fn state(&self) -> MutexGuard<'_, MeterState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn file_done(&self) {
        let mut state = self.state();
        state.done += std::mem::take(&mut state.file_bytes);
    }
}

impl Progress for Meter {
    async fn init(&mut self, size: usize, _filename: &str) {
        let mut state = self.state();
        state.file_bytes = 0;
        // A mirror may not have told it before.
        state.total = state.total.max(state.done + size as u64);
    }

    async fn update(&mut self, size: usize) {
        let (done, total) = {
            let mut state = self.state();
            state.file_bytes += size as u64;
            state.last = Instant::now();
            (state.done + state.file_bytes, state.total)
        };
        (self.report)(done, total);
    }

    async fn finish(&mut self) {}
}
