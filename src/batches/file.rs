//! What is known of a file besides its content.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// A client uploaded it as the input of a batch.
    Batch,
    /// A batch wrote it.
    BatchOutput,
}

impl Purpose {
    pub fn name(self) -> &'static str {
        match self {
            Purpose::Batch => "batch",
            Purpose::BatchOutput => "batch_output",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileRecord {
    pub id: String,
    /// Who may see it.
    pub owner: String,
    /// Its place among all files and batches: the order in which they were made.
    pub number: u64,
    /// The client's name for it. It is no path here.
    pub filename: String,
    pub purpose: Purpose,
    pub bytes: u64,
    /// Unix time.
    pub created_at: u64,
    /// Unix time from which it is gone.
    pub expires_at: u64,
}
