//! A batch and its states. This is pure: the time comes in with each call.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The API that a batch was made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchApi {
    /// Its results become files.
    OpenAi,
    /// Its results belong to the batch.
    Anthropic,
}

/// How a batch ends when its requests have all been answered or given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchOutcome {
    Completed,
    Expired,
    Cancelled,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchState {
    /// Its input has not been read yet.
    Validating,
    InProgress,
    /// All its requests are done, and its results are being filed.
    Finalizing(BatchOutcome),
    /// No further request starts.
    Cancelling,
    /// Its input was no batch.
    Failed,
    Ended(BatchOutcome),
}

impl BatchState {
    pub fn has_ended(self) -> bool {
        matches!(self, BatchState::Failed | BatchState::Ended(_))
    }
}

/// Requests of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchCounts {
    /// 0 until the input has been read.
    pub total: u64,
    pub succeeded: u64,
    /// Lines that are no requests, and requests that were refused or failed.
    pub failed: u64,
    pub cancelled: u64,
    pub expired: u64,
}

impl BatchCounts {
    pub fn count(&mut self, result: ResultKind) {
        *match result {
            ResultKind::Succeeded => &mut self.succeeded,
            ResultKind::Failed => &mut self.failed,
            ResultKind::Cancelled => &mut self.cancelled,
            ResultKind::Expired => &mut self.expired,
        } += 1;
    }

    pub fn num_done(self) -> u64 {
        self.succeeded + self.failed + self.cancelled + self.expired
    }
}

/// What became of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResultKind {
    Succeeded,
    Failed,
    Cancelled,
    Expired,
}

/// Something wrong with an input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputProblem {
    pub code: String,
    pub message: String,
    /// Of the input, from 1 on.
    pub line: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BatchRecord {
    pub id: String,
    pub owner: String,
    /// Its place among all files and batches.
    pub number: u64,
    pub api: BatchApi,
    /// The path that answers all its requests.
    pub endpoint: String,
    pub input_file_id: Option<String>,
    pub metadata: Option<BTreeMap<String, String>>,
    /// How long its output files are kept, in seconds. `None`: as long as the store keeps files.
    pub output_expires_after_s: Option<u64>,
    pub state: BatchState,
    pub counts: BatchCounts,
    pub problems: Vec<InputProblem>,
    pub output_file_id: Option<String>,
    pub error_file_id: Option<String>,
    /// Unix times.
    pub created_at: u64,
    /// When requests that have no answer are given up.
    pub expires_at: u64,
    pub in_progress_at: Option<u64>,
    pub finalizing_at: Option<u64>,
    pub cancelling_at: Option<u64>,
    /// When it ended, however it did.
    pub ended_at: Option<u64>,
}

impl BatchRecord {
    /// Its input has been read. An input without a request fails the batch.
    pub fn validated(&mut self, total: u64, problems: Vec<InputProblem>, is_usable: bool, now: u64) {
        if self.state != BatchState::Validating {
            return;
        }
        self.counts.total = total;
        if is_usable {
            (self.state, self.in_progress_at) = (BatchState::InProgress, Some(now));
        } else {
            (self.state, self.ended_at, self.problems) = (BatchState::Failed, Some(now), problems);
        }
    }

    /// A client wants no further request to start. False: it has ended or is about to.
    pub fn cancel(&mut self, now: u64) -> bool {
        match self.state {
            BatchState::Validating | BatchState::InProgress => {
                (self.state, self.cancelling_at) = (BatchState::Cancelling, Some(now));
                true
            }
            BatchState::Cancelling => true,
            BatchState::Finalizing(_) | BatchState::Failed | BatchState::Ended(_) => false,
        }
    }

    /// All its requests have results. Their files will have these ids.
    pub fn finalize(&mut self, outcome: BatchOutcome, output: Option<String>, errors: Option<String>, now: u64) {
        self.state = BatchState::Finalizing(outcome);
        (self.output_file_id, self.error_file_id, self.finalizing_at) = (output, errors, Some(now));
    }

    /// Its results are where clients find them.
    pub fn end(&mut self, now: u64) {
        if let BatchState::Finalizing(outcome) = self.state {
            (self.state, self.ended_at) = (BatchState::Ended(outcome), Some(now));
        }
    }
}
