//! Models of the Hugging Face hub: found in the cache that all of its clients share, or fetched into it.
//!
//! The cache's folder `models--OWNER--NAME` holds `refs` (a branch's commit), `snapshots` (a folder for each commit,
//! of links) and `blobs` (the files). [`HubModel::find`] brings what a start reads first, which is small;
//! [`HubModel::fetch_weights`] brings the rest once that is known to be a model that can be served. Neither asks the
//! hub for what is in the cache.

mod access;
mod download;
mod failure;
mod file;

use crate::error::StartError;
pub use access::Access;
use download::Hub;
use failure::Failure;
use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Hears of bytes fetched and bytes to fetch.
pub type DownloadProgress = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// The branch that a model without a revision is of.
pub const DEFAULT_REVISION: &str = "main";

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// What a start reads before the weights; only the first must be there.
const SMALL_FILES: [&str; 8] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
];
/// A snapshot without one of these was fetched in part, by a program that needed less. The others many models lack.
const EXPECTED: &[&str] = SMALL_FILES.split_at(3).0;

/// Whether `model` has the form of a hub name, `OWNER/NAME`. A path may have it too.
pub fn is_name(model: &str) -> bool {
    let is_part = |part: &str| {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        !part.is_empty()
            && part.chars().all(is_plain)
            && !part.starts_with(['.', '-'])
            && !part.ends_with(['.', '-'])
            // The cache's folders are named with two dashes between owner and name.
            && !part.contains("--")
            && !part.contains("..")
    };
    model.len() <= 96 && model.split_once('/').is_some_and(|(owner, name)| is_part(owner) && is_part(name))
}

/// Whether `revision` can be a branch, a tag or a commit.
pub fn is_revision(revision: &str) -> bool {
    let is_plain = |c: char| !c.is_whitespace() && !c.is_control() && !"~^:?*[\\%#".contains(c);
    !revision.is_empty()
        && revision.chars().all(is_plain)
        && !revision.contains("..")
        && revision.split('/').all(|part| !part.is_empty() && !part.starts_with('.'))
}

/// A model of the hub at one commit, with its small files in the cache.
pub struct HubModel {
    hub: Hub,
    commit: String,
    /// One thread fetches.
    fetching: Mutex<()>,
}

impl std::fmt::Debug for HubModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {} of {:?}", self.hub.model, self.commit, self.hub.access)
    }
}

impl HubModel {
    /// Finds `model` in the cache, or fetches its small files.
    pub fn find(access: Access, model: &str, revision: &str, progress: DownloadProgress) -> Result<Self, StartError> {
        let hub = Hub { access, model: model.into(), revision: revision.into(), progress };
        let place = hub.place();
        let cached = place.commit();
        let commit = match cached {
            Some(commit) if place.has_all(&commit, EXPECTED) => commit,
            cached => match place.locked(|| fetch_small(&hub, &place)) {
                Ok(commit) => commit,
                // What is there may do.
                Err(failure) if failure.is_no_answer() && place.has_config(cached.as_deref()) => {
                    tracing::warn!("{model} may lack files in the cache, and the hub does not answer: {failure}");
                    cached.expect("it has a config")
                }
                Err(failure) => return Err(failure.of(&hub)),
            },
        };
        tracing::info!("{model} at commit {commit}, in {}", place.snapshot(&commit).display());
        Ok(Self { hub, commit, fetching: Mutex::new(()) })
    }

    /// Where the cache has `model`; `None` if it has it not, or in part. The hub is not asked.
    pub fn cached(access: &Access, model: &str, revision: &str) -> Option<PathBuf> {
        let place = Place::new(access, model, revision);
        let commit = place.commit()?;
        let whole = place.has_all(&commit, &["config.json"]) && place.has_weights(&commit);
        whole.then(|| place.snapshot(&commit))
    }

    /// `OWNER/NAME`
    pub fn name(&self) -> &str {
        &self.hub.model
    }

    /// The folder of its files.
    pub fn directory(&self) -> PathBuf {
        self.hub.place().snapshot(&self.commit)
    }

    /// Brings the weights into the cache, where they are not.
    pub fn fetch_weights(&self) -> Result<(), StartError> {
        let _one = self.fetching.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let place = self.hub.place();
        if place.has_weights(&self.commit) {
            return Ok(());
        }
        place.locked(|| fetch_weights(&self.hub, &place, &self.commit)).map_err(|failure| failure.of(&self.hub))
    }
}

fn fetch_small(hub: &Hub, place: &Place) -> Result<String, Failure> {
    // Whoever had the lock may have brought it all.
    if let Some(commit) = place.commit().filter(|commit| place.has_all(commit, EXPECTED)) {
        return Ok(commit);
    }
    let listing = hub.list(&hub.revision)?;
    if !listing.has("config.json") {
        return Err(Failure::NoConfig);
    }
    let files: Vec<&str> = SMALL_FILES.into_iter().filter(|file| listing.has(file)).collect();
    hub.fetch(&listing, place, &files)?;
    if hub.revision != listing.commit {
        place.of_revision.create_ref(&listing.commit)?;
    }
    Ok(listing.commit)
}

fn fetch_weights(hub: &Hub, place: &Place, commit: &str) -> Result<(), Failure> {
    if place.has_weights(commit) {
        return Ok(());
    }
    let listing = hub.list(commit)?;
    if !listing.has(INDEX) {
        return match listing.has(SINGLE) {
            true => hub.fetch(&listing, place, &[SINGLE]),
            false => Err(Failure::NoSafetensors { files: listing.weights() }),
        };
    }
    hub.fetch(&listing, place, &[INDEX])?;
    let index = place.snapshot(commit).join(INDEX);
    let shards = shards(&index).ok_or(Failure::BadIndex(index))?;
    if let Some(missing) = shards.iter().find(|shard| !listing.has(shard)) {
        return Err(Failure::NoShard(missing.clone()));
    }
    hub.fetch(&listing, place, &shards.iter().map(String::as_str).collect::<Vec<_>>())
}

/// The files that an index of shards names; `None` if it cannot be read, or names one outside of its folder.
fn shards(index: &Path) -> Option<BTreeSet<String>> {
    let index: Value = serde_json::from_slice(&fs::read(index).ok()?).ok()?;
    let files = index.get("weight_map")?.as_object()?.values();
    files.map(|file| file.as_str().filter(|file| !file.contains(['/', '\\'])).map(str::to_owned)).collect()
}

/// A model's place in the cache.
struct Place {
    root: PathBuf,
    revision: String,
    of_revision: CacheRepo,
    lock: PathBuf,
}

impl Place {
    fn new(access: &Access, model: &str, revision: &str) -> Self {
        let repo = Repo::with_revision(model.into(), RepoType::Model, revision.into());
        let folder = repo.folder_name();
        Self {
            root: access.cache.join(&folder),
            revision: revision.into(),
            // Python keeps its locks there as well, and tools that tidy the cache know the folder.
            lock: access.cache.join(".locks").join(folder).join("pagetide.lock"),
            of_revision: Cache::new(access.cache.clone()).repo(repo),
        }
    }

    /// The commit that the revision is, as far as the cache knows.
    fn commit(&self) -> Option<String> {
        if self.snapshot(&self.revision).is_dir() {
            return Some(self.revision.clone());
        }
        let commit = fs::read_to_string(self.root.join("refs").join(&self.revision)).ok()?;
        let commit = commit.trim();
        (is_revision(commit) && self.snapshot(commit).is_dir()).then(|| commit.into())
    }

    /// Of the model, within the cache.
    fn folder_name(&self) -> Cow<'_, str> {
        self.root.file_name().expect("it is one in the cache").to_string_lossy()
    }

    fn snapshot(&self, commit: &str) -> PathBuf {
        self.of_revision.pointer_path(commit)
    }

    fn blob(&self, etag: &str) -> PathBuf {
        self.of_revision.blob_path(etag)
    }

    /// Links to files that are gone count as missing.
    fn has_all(&self, commit: &str, files: &[&str]) -> bool {
        let snapshot = self.snapshot(commit);
        files.iter().all(|file| snapshot.join(file).is_file())
    }

    fn has_config(&self, commit: Option<&str>) -> bool {
        commit.is_some_and(|commit| self.has_all(commit, &["config.json"]))
    }

    fn has_weights(&self, commit: &str) -> bool {
        if !self.has_all(commit, &[INDEX]) {
            return self.has_all(commit, &[SINGLE]);
        }
        // What is wrong with an index the loader tells, with its path.
        let shards = shards(&self.snapshot(commit).join(INDEX));
        shards.is_none_or(|shards| shards.iter().all(|shard| self.has_all(commit, &[shard])))
    }

    /// Runs `work` while no other process of ours fetches the same model.
    fn locked<T>(&self, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        fs::create_dir_all(self.lock.parent().expect("it is in a folder"))?;
        let lock = File::create(&self.lock)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                tracing::info!("another process is fetching this model: waiting for it ({})", self.lock.display());
                lock.lock()?;
            }
            Err(TryLockError::Error(error)) => {
                tracing::warn!("{} cannot be locked: {error}; start one process at a time", self.lock.display());
            }
        }
        work()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub_are_told_from_paths() {
        for name in ["Qwen/Qwen2.5-1.5B-Instruct", "meta-llama/Llama-3.2-1B", "a/b", "01-ai/Yi_1.5"] {
            assert!(is_name(name), "{name}");
        }
        let long = format!("a/{}", "b".repeat(100));
        for path in
            ["demo", "/a/b", "./a", "../a", "a/", "/a", "a/b/c", "~/a", "a/..", "a//b", "a b/c", "a/b--c", "", &long]
        {
            assert!(!is_name(path), "{path}");
        }
    }

    #[test]
    fn revisions_stay_in_their_folder() {
        for revision in ["main", "v1.0", "refs/pr/3", "0123456789abcdef0123456789abcdef01234567"] {
            assert!(is_revision(revision), "{revision}");
        }
        for revision in ["", "../x", "/x", "a//b", "a b", "x/", ".git", "a?b", "a%2e"] {
            assert!(!is_revision(revision), "{revision}");
        }
    }

    fn access(cache: &Path) -> Access {
        Access { endpoint: "http://127.0.0.1:9".into(), cache: cache.into(), token: None, offline: true }
    }

    #[test]
    fn a_snapshot_is_whole_with_all_of_its_shards() {
        let cache = tempfile::tempdir().unwrap();
        let root = cache.path().join("models--o--n");
        let snapshot = root.join("snapshots/abc");
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(root.join("refs")).unwrap();
        let find = || HubModel::cached(&access(cache.path()), "o/n", "main");
        fs::write(snapshot.join("config.json"), "{}").unwrap();
        fs::write(snapshot.join(SINGLE), "").unwrap();
        assert_eq!(find(), None, "no branch of that name is known");
        fs::write(root.join("refs/main"), "abc\n").unwrap();
        assert_eq!(find().as_ref(), Some(&snapshot));
        assert_eq!(HubModel::cached(&access(cache.path()), "o/n", "abc").as_ref(), Some(&snapshot));

        fs::write(snapshot.join(INDEX), r#"{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}"#).unwrap();
        fs::write(snapshot.join("1.safetensors"), "").unwrap();
        assert_eq!(find(), None, "a shard is missing");
        std::os::unix::fs::symlink("../../blobs/gone", snapshot.join("2.safetensors")).unwrap();
        assert_eq!(find(), None, "the link leads nowhere");
        fs::create_dir_all(root.join("blobs")).unwrap();
        fs::write(root.join("blobs/gone"), "").unwrap();
        assert_eq!(find(), Some(snapshot));
    }
}
