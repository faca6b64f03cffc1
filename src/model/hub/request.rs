//! The model that is wanted from the hub.

use super::access::HubAccess;
use super::meter::DownloadProgress;
use hf_hub::{Repo, RepoType};

/// A model on the hub, and how to get it.
pub struct HubRequest {
    pub access: HubAccess,
    /// `OWNER/NAME`
    pub model: String,
    /// As asked for: a branch, a tag or a commit.
    pub revision: String,
    pub progress: DownloadProgress,
}

impl HubRequest {
    pub fn repo(&self, revision: &str) -> Repo {
        Repo::with_revision(self.model.clone(), RepoType::Model, revision.into())
    }

    /// The model's folder in the cache.
    pub fn folder_name(&self) -> String {
        self.repo(&self.revision).folder_name()
    }
}
