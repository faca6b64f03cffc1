//! A model in the hub's cache.

use super::access::HubAccess;
use super::failure::Failure;
use super::gguf;
use super::name::is_revision;
use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

pub const INDEX: &str = "model.safetensors.index.json";
pub const SINGLE: &str = "model.safetensors";

/// A model's place in the cache.
pub struct CachedModel {
    root: PathBuf,
    revision: String,
    pub of_revision: CacheRepo,
    lock: PathBuf,
}

impl CachedModel {
    pub fn new(access: &HubAccess, model: &str, revision: &str) -> Self {
        let repo = Repo::with_revision(model.into(), RepoType::Model, revision.into());
        let folder = repo.folder_name();
        Self {
            root: access.cache.join(&folder),
            revision: revision.into(),
            // The Python client keeps its locks there too, and tools that clean the cache know the folder.
            lock: access.cache.join(".locks").join(folder).join("pagetide.lock"),
            of_revision: Cache::new(access.cache.clone()).repo(repo),
        }
    }

    /// The commit of the revision, as far as the cache knows it.
    pub fn commit(&self) -> Option<String> {
        if self.snapshot(&self.revision).is_dir() {
            return Some(self.revision.clone());
        }
        let commit = fs::read_to_string(self.root.join("refs").join(&self.revision)).ok()?;
        let commit = commit.trim();
        (is_revision(commit) && self.snapshot(commit).is_dir()).then(|| commit.into())
    }

    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.of_revision.pointer_path(commit)
    }

    pub fn blob(&self, etag: &str) -> PathBuf {
        self.of_revision.blob_path(etag)
    }

    /// Broken links count as missing files.
    pub fn has_all(&self, commit: &str, files: &[&str]) -> bool {
        let snapshot = self.snapshot(commit);
        files.iter().all(|file| snapshot.join(file).is_file())
    }

    pub fn has_config(&self, commit: Option<&str>) -> bool {
        commit.is_some_and(|commit| self.has_all(commit, &["config.json"]))
    }

    /// The files of a snapshot, also those in its folders.
    pub fn files(&self, commit: &str) -> Vec<String> {
        let names = |folder: &Path| -> Vec<(String, bool)> {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            entries.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path().is_dir()))).collect()
        };
        let snapshot = self.snapshot(commit);
        let mut files = Vec::new();
        for (name, is_folder) in names(&snapshot) {
            if is_folder {
                let inner = names(&snapshot.join(&name)).into_iter();
                files.extend(inner.map(|(file, _)| format!("{name}/{file}")));
            } else {
                files.push(name);
            }
        }
        files.retain(|file| snapshot.join(file).is_file());
        files
    }

    /// The file with which a GGUF model begins that is there completely.
    pub fn gguf(&self, quant: Option<&str>) -> Option<PathBuf> {
        let commit = self.commit()?;
        let files = self.files(&commit);
        let chosen = gguf::choose(&files.iter().map(String::as_str).collect::<Vec<_>>(), quant).ok()?;
        Some(self.snapshot(&commit).join(&chosen[0]))
    }

    pub fn has_weights(&self, commit: &str) -> bool {
        if !self.has_all(commit, &[INDEX]) {
            return self.has_all(commit, &[SINGLE]);
        }
        // The loader reports a broken index with its path.
        let shards = shards(&self.snapshot(commit).join(INDEX));
        shards.is_none_or(|shards| shards.iter().all(|shard| self.has_all(commit, &[shard])))
    }

    /// Runs `work` while no other Pagetide process downloads the same model.
    pub fn locked<T>(&self, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
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

/// The files that an index of shards names. `None` if the index cannot be read or names a file outside of its folder.
pub fn shards(index: &Path) -> Option<BTreeSet<String>> {
    let index: Value = serde_json::from_slice(&fs::read(index).ok()?).ok()?;
    let files = index.get("weight_map")?.as_object()?.values();
    files.map(|file| file.as_str().filter(|file| !file.contains(['/', '\\'])).map(str::to_owned)).collect()
}
