//! Models of the Hugging Face hub. They are found in the cache that all clients of the hub share, or downloaded into
//! it.
//!
//! The cache's folder `models--OWNER--NAME` holds `refs` (the commit of a branch), `snapshots` (a folder of links for
//! each commit) and `blobs` (the files). [`find`] downloads the small files, which a start reads first.
//! [`HubModel::fetch_weights`] downloads the weights, once the model is known to be supported. Neither contacts the hub
//! for files in the cache.

mod access;
mod cached;
mod download;
mod failure;
mod file;
mod gguf;
mod meter;
mod name;
mod request;

pub use access::HubAccess;
use cached::{CachedModel, INDEX, SINGLE, shards};
use failure::Failure;
pub use meter::DownloadProgress;
pub use name::{is_revision, split_quant};
use pagetide_base::error::StartError;
use request::HubRequest;
use std::path::PathBuf;
use std::sync::Mutex;

/// The default branch.
pub const DEFAULT_REVISION: &str = "main";

/// Files that a start reads before the weights. Only the first is required.
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
/// A snapshot without one of these was downloaded in part, by a program that needed less. Many models lack the other
/// files.
const EXPECTED: &[&str] = SMALL_FILES.split_at(3).0;

/// Where the files of a model are.
pub enum HubFiles {
    /// In the form of transformers.
    Transformers(HubModel),
    /// The file with which a GGUF model begins. All of its files are in the cache.
    Gguf(PathBuf),
}

/// The same for a model that is in the cache completely.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CachedFiles {
    /// The folder of its files.
    Transformers(PathBuf),
    Gguf(PathBuf),
}

impl CachedFiles {
    pub fn path(&self) -> &PathBuf {
        match self {
            Self::Transformers(path) | Self::Gguf(path) => path,
        }
    }
}

/// Finds a model in the cache, or downloads its small files, or those of a GGUF model. `quant` names the quantisation
/// of GGUF files. Without it they are taken where the model has no others.
pub fn find(
    access: HubAccess,
    model: &str,
    quant: Option<&str>,
    revision: &str,
    progress: DownloadProgress,
) -> Result<HubFiles, StartError> {
    let hub = HubRequest { access, model: model.into(), revision: revision.into(), progress };
    let place = hub.place();
    if quant.is_none() && (place.has_config(place.commit().as_deref()) || place.gguf(None).is_none()) {
        match find_small(&hub, &place) {
            Ok(commit) => {
                return Ok(HubFiles::Transformers(HubModel { hub, commit, fetching: Mutex::new(()) }));
            }
            Err(Failure::OnlyGguf) => {}
            Err(failure) => return Err(failure.of(&hub)),
        }
    }
    let file = match place.gguf(quant) {
        Some(file) => file,
        None => place.locked(|| fetch_gguf(&hub, &place, quant)).map_err(|failure| failure.of(&hub))?,
    };
    tracing::info!("{model}, in {}", file.display());
    Ok(HubFiles::Gguf(file))
}

/// The files of a model that is in the cache completely. This does not contact the hub.
pub fn cached(access: &HubAccess, model: &str, quant: Option<&str>, revision: &str) -> Option<CachedFiles> {
    let place = CachedModel::new(access, model, revision);
    let commit = place.commit()?;
    if quant.is_none() && place.has_config(Some(&commit)) {
        return place.has_weights(&commit).then(|| CachedFiles::Transformers(place.snapshot(&commit)));
    }
    place.gguf(quant).map(CachedFiles::Gguf)
}

/// A model of the hub at one commit, with its small files in the cache.
pub struct HubModel {
    hub: HubRequest,
    commit: String,
    /// Held by the thread that downloads.
    fetching: Mutex<()>,
}

impl std::fmt::Debug for HubModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {} of {:?}", self.hub.model, self.commit, self.hub.access)
    }
}

impl HubModel {
    /// `OWNER/NAME`
    pub fn name(&self) -> &str {
        &self.hub.model
    }

    /// The folder of its files.
    pub fn directory(&self) -> PathBuf {
        self.hub.place().snapshot(&self.commit)
    }

    /// Downloads the weights into the cache, unless they are there.
    pub fn fetch_weights(&self) -> Result<(), StartError> {
        let _one = self.fetching.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let place = self.hub.place();
        if place.has_weights(&self.commit) {
            return Ok(());
        }
        place.locked(|| fetch_weights(&self.hub, &place, &self.commit)).map_err(|failure| failure.of(&self.hub))
    }
}

/// The commit of a model whose small files are in the cache now.
fn find_small(hub: &HubRequest, place: &CachedModel) -> Result<String, Failure> {
    let model = &hub.model;
    let cached = place.commit();
    let commit = match cached {
        Some(commit) if place.has_all(&commit, EXPECTED) => commit,
        cached => match place.locked(|| fetch_small(hub, place)) {
            Ok(commit) => commit,
            // The cached files may be enough.
            Err(failure) if failure.is_no_answer() && place.has_config(cached.as_deref()) => {
                tracing::warn!("files of {model} may be missing in the cache, and the hub does not answer: {failure}");
                cached.expect("it has a config")
            }
            Err(failure) => return Err(failure),
        },
    };
    tracing::info!("{model} at commit {commit}, in {}", place.snapshot(&commit).display());
    Ok(commit)
}

/// Downloads the GGUF files of a quantisation. The file with which the model begins.
fn fetch_gguf(hub: &HubRequest, place: &CachedModel, quant: Option<&str>) -> Result<PathBuf, Failure> {
    // The previous owner of the lock may have downloaded it.
    if let Some(file) = place.gguf(quant) {
        return Ok(file);
    }
    let listing = hub.list(&hub.revision)?;
    let files = gguf::choose(&listing.names().collect::<Vec<_>>(), quant)?;
    hub.fetch(&listing, place, &files.iter().map(String::as_str).collect::<Vec<_>>())?;
    if hub.revision != listing.commit {
        place.of_revision.create_ref(&listing.commit)?;
    }
    Ok(place.snapshot(&listing.commit).join(&files[0]))
}

fn fetch_small(hub: &HubRequest, place: &CachedModel) -> Result<String, Failure> {
    // The previous owner of the lock may have downloaded everything.
    if let Some(commit) = place.commit().filter(|commit| place.has_all(commit, EXPECTED)) {
        return Ok(commit);
    }
    let listing = hub.list(&hub.revision)?;
    let has_safetensors = listing.has(SINGLE) || listing.has(INDEX);
    if !has_safetensors && gguf::has_model(listing.names()) {
        return Err(Failure::OnlyGguf);
    }
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

fn fetch_weights(hub: &HubRequest, place: &CachedModel, commit: &str) -> Result<(), Failure> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    fn access(cache: &Path) -> HubAccess {
        HubAccess { endpoint: "http://127.0.0.1:9".into(), cache: cache.into(), token: None, offline: true }
    }

    #[test]
    fn a_snapshot_is_whole_with_all_of_its_shards() {
        let cache = tempfile::tempdir().unwrap();
        let root = cache.path().join("models--o--n");
        let snapshot = root.join("snapshots/abc");
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(root.join("refs")).unwrap();
        let find = || cached(&access(cache.path()), "o/n", None, "main").map(|files| files.path().clone());
        fs::write(snapshot.join("config.json"), "{}").unwrap();
        fs::write(snapshot.join(SINGLE), "").unwrap();
        assert_eq!(find(), None, "no branch of that name is known");
        fs::write(root.join("refs/main"), "abc\n").unwrap();
        assert_eq!(find().as_ref(), Some(&snapshot));
        assert_eq!(
            cached(&access(cache.path()), "o/n", None, "abc"),
            Some(CachedFiles::Transformers(snapshot.clone()))
        );

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
