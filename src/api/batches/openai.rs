//! OpenAI's batches.

use super::files::expires_after;
use super::line::BatchEndpoint;
use super::page::{Page, QueryParameters};
use crate::body::fields::typed_fields;
use crate::body::{ParsedBody, body_fields};
use crate::checks::{check_metadata, one_of};
use crate::model_info::ModelInfo;
use pagetide_base::error::ApiError;
use pagetide_batches::batch::{BatchOutcome, BatchRecord, BatchState, InputProblem};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use utoipa::ToSchema;

const DEFAULT_LIMIT: usize = 20;
const MAX_LIMIT: usize = 100;
const MAX_WINDOW_HOURS: u64 = 168;
const MAX_METADATA: usize = 16;
const MAX_METADATA_CHARS: usize = 512;

body_fields! {
    pub struct BatchFields {
        /// The id of a file with a request in each line.
        input_file_id: Option<String>,
        /// The path that all requests ask for.
        #[schema(value_type = Option<BatchPath>)]
        endpoint: Option<String>,
        /// How long the requests have, in hours: 1h to 168h. Those without an answer then are given up.
        #[schema(pattern = "^([1-9]|[1-9][0-9]|1[0-5][0-9]|16[0-8])h$")]
        completion_window: Option<String>,
        /// Up to 16 notes of the client's own of up to 512 characters; the batch repeats them.
        #[schema(value_type = Option<HashMap<String, String>>)]
        metadata: Option<Map<String, Value>>,
        /// When the files of results expire. Default: when all files do (batches.keep_days).
        output_expires_after: Option<ExpiresAfter>,
    }
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
enum BatchPath {
    #[schema(rename = "/v1/chat/completions")]
    Chat,
    #[schema(rename = "/v1/completions")]
    Completions,
    #[schema(rename = "/v1/embeddings")]
    Embeddings,
    #[schema(rename = "/v1/responses")]
    Responses,
}

#[derive(Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(default)]
struct ExpiresAfter {
    /// created_at
    #[schema(required, value_type = ExpiryAnchor)]
    anchor: Option<String>,
    #[schema(required, value_type = i64, minimum = 3600, maximum = 2592000)]
    seconds: Option<i64>,
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
enum ExpiryAnchor {
    #[schema(rename = "created_at")]
    CreatedAt,
}

typed_fields!(ExpiresAfter);

/// A batch that is asked for.
#[derive(Debug)]
pub struct BatchRequest {
    pub input_file_id: String,
    pub endpoint: BatchEndpoint,
    pub window_s: u64,
    pub metadata: Option<BTreeMap<String, String>>,
    pub output_expires_after_s: Option<u64>,
}

pub fn parse(parsed: ParsedBody<BatchFields>, _: &ModelInfo) -> Result<BatchRequest, ApiError> {
    check(parsed)
}

fn check(ParsedBody { body, problems }: ParsedBody<BatchFields>) -> Result<BatchRequest, ApiError> {
    problems.check()?;
    let required = |param: &'static str, given: Option<String>| {
        given.ok_or_else(|| ApiError::invalid(param, format!("{param} is required")))
    };
    let input_file_id = required("input_file_id", body.input_file_id)?;
    let path = required("endpoint", body.endpoint)?;
    one_of("endpoint", Some(&path), &BatchEndpoint::OPENAI.map(BatchEndpoint::path))?;
    let endpoint = BatchEndpoint::of_path(&path).ok_or_else(|| ApiError::engine("a known path is no endpoint"))?;
    let window_s = window_s(&required("completion_window", body.completion_window)?)?;
    let expiry = body.output_expires_after.as_ref();
    let output_expires_after_s = expiry
        .map(|expiry| {
            let anchor = expiry.anchor.as_deref().or(Some(""));
            expires_after(anchor, expiry.seconds, "output_expires_after")
        })
        .transpose()?
        .flatten();
    Ok(BatchRequest { input_file_id, endpoint, window_s, metadata: metadata(body.metadata)?, output_expires_after_s })
}

/// Hours, as `24h`.
fn window_s(given: &str) -> Result<u64, ApiError> {
    let digits = given.strip_suffix('h').filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()));
    let hours = digits.filter(|digits| !digits.starts_with('0')).and_then(|digits| digits.parse::<u64>().ok());
    let hours = hours.filter(|hours| *hours <= MAX_WINDOW_HOURS).ok_or_else(|| {
        let message =
            format!("completion_window must be a number of hours from 1h to {MAX_WINDOW_HOURS}h, got {given:?}");
        ApiError::invalid("completion_window", message)
    })?;
    Ok(hours * 3600)
}

fn metadata(given: Option<Map<String, Value>>) -> Result<Option<BTreeMap<String, String>>, ApiError> {
    check_metadata(given.as_ref())?;
    let Some(given) = given else { return Ok(None) };
    if given.len() > MAX_METADATA {
        let message = format!("metadata may have up to {MAX_METADATA} notes, got {}", given.len());
        return Err(ApiError::invalid("metadata", message));
    }
    let mut notes = BTreeMap::new();
    for (name, value) in given {
        let text = value.as_str().unwrap_or_default().to_owned();
        if name.chars().count() > MAX_METADATA_CHARS || text.chars().count() > MAX_METADATA_CHARS {
            let message = format!("names and notes of metadata may have up to {MAX_METADATA_CHARS} characters");
            return Err(ApiError::invalid("metadata", message));
        }
        notes.insert(name, text);
    }
    Ok(Some(notes))
}

#[derive(Serialize, ToSchema)]
pub struct BatchObject {
    id: String,
    /// Always batch.
    object: &'static str,
    endpoint: String,
    /// What was wrong with the input of a batch that failed.
    errors: Option<BatchProblems>,
    input_file_id: Option<String>,
    completion_window: String,
    /// validating, failed, in_progress, finalizing, completed, expired, cancelling or cancelled.
    status: &'static str,
    /// Its answers, if there are any. One a line, in any order.
    output_file_id: Option<String>,
    /// Lines that were no request, and requests that were refused, failed or given up.
    error_file_id: Option<String>,
    /// Unix times, as all that follow.
    created_at: u64,
    in_progress_at: Option<u64>,
    expires_at: u64,
    finalizing_at: Option<u64>,
    completed_at: Option<u64>,
    failed_at: Option<u64>,
    expired_at: Option<u64>,
    cancelling_at: Option<u64>,
    cancelled_at: Option<u64>,
    request_counts: RequestCounts,
    metadata: Option<BTreeMap<String, String>>,
}

#[derive(Serialize, ToSchema)]
struct BatchProblems {
    /// Always list.
    object: &'static str,
    data: Vec<BatchProblem>,
}

#[derive(Serialize, ToSchema)]
struct BatchProblem {
    code: String,
    /// Of the input, from 1 on.
    line: Option<u64>,
    message: String,
    /// Always null.
    param: Option<String>,
}

impl From<InputProblem> for BatchProblem {
    fn from(InputProblem { code, message, line }: InputProblem) -> Self {
        Self { code, line, message, param: None }
    }
}

#[derive(Serialize, ToSchema)]
struct RequestCounts {
    /// 0 while the input is validated.
    total: u64,
    completed: u64,
    /// Also those that were given up.
    failed: u64,
}

impl From<BatchRecord> for BatchObject {
    fn from(batch: BatchRecord) -> Self {
        let counts = batch.counts;
        let ended = |state: BatchState| batch.ended_at.filter(|_| batch.state == state);
        let (completed_at, failed_at) = (ended(BatchState::Ended(BatchOutcome::Completed)), ended(BatchState::Failed));
        let expired_at = ended(BatchState::Ended(BatchOutcome::Expired));
        let cancelled_at = ended(BatchState::Ended(BatchOutcome::Cancelled));
        let has_failed = batch.state == BatchState::Failed;
        // The files are there when the batch has ended.
        let file = |id: Option<String>| id.filter(|_| batch.state.has_ended());
        Self {
            id: batch.id,
            object: "batch",
            endpoint: batch.endpoint,
            errors: has_failed.then(|| BatchProblems {
                object: "list",
                data: batch.problems.into_iter().map(BatchProblem::from).collect(),
            }),
            input_file_id: batch.input_file_id,
            completion_window: format!("{}h", batch.expires_at.saturating_sub(batch.created_at) / 3600),
            status: status(batch.state),
            output_file_id: file(batch.output_file_id),
            error_file_id: file(batch.error_file_id),
            created_at: batch.created_at,
            in_progress_at: batch.in_progress_at,
            expires_at: batch.expires_at,
            finalizing_at: batch.finalizing_at,
            completed_at,
            failed_at,
            expired_at,
            cancelling_at: batch.cancelling_at,
            cancelled_at,
            request_counts: RequestCounts {
                total: counts.total,
                completed: counts.succeeded,
                failed: counts.num_done() - counts.succeeded,
            },
            metadata: batch.metadata,
        }
    }
}

fn status(state: BatchState) -> &'static str {
    match state {
        BatchState::Validating => "validating",
        BatchState::InProgress => "in_progress",
        BatchState::Cancelling | BatchState::Finalizing(BatchOutcome::Cancelled) => "cancelling",
        BatchState::Finalizing(_) => "finalizing",
        BatchState::Failed => "failed",
        BatchState::Ended(BatchOutcome::Completed) => "completed",
        BatchState::Ended(BatchOutcome::Expired) => "expired",
        BatchState::Ended(BatchOutcome::Cancelled) => "cancelled",
    }
}

#[derive(Serialize, ToSchema)]
pub struct BatchList {
    /// Always list.
    object: &'static str,
    data: Vec<BatchObject>,
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
}

/// The page of `batches` (oldest first) that a query asks for, newest first.
pub fn list(query: &QueryParameters, mut batches: Vec<BatchRecord>) -> Result<BatchList, ApiError> {
    batches.reverse();
    let page = Page::asked(query, (DEFAULT_LIMIT, MAX_LIMIT), "after", None)?;
    let (batches, has_more) = page.of(batches, |batch| &batch.id)?;
    let data: Vec<BatchObject> = batches.into_iter().map(BatchObject::from).collect();
    let id = |batch: Option<&BatchObject>| batch.map(|batch| batch.id.clone());
    let (first_id, last_id) = (id(data.first()), id(data.last()));
    Ok(BatchList { object: "list", data, first_id, last_id, has_more })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::read_value;
    use serde_json::json;

    fn checked(change: impl FnOnce(&mut Value)) -> Result<BatchRequest, ApiError> {
        let mut body = json!({"input_file_id": "f", "endpoint": "/v1/responses", "completion_window": "24h"});
        change(&mut body);
        check(read_value(&body)?)
    }

    #[test]
    fn a_batch_is_read() {
        let request = checked(|body| {
            body["metadata"] = json!({"k": "v"});
            body["output_expires_after"] = json!({"anchor": "created_at", "seconds": 3600});
        });
        let request = request.unwrap();
        assert_eq!((request.endpoint, request.window_s), (BatchEndpoint::Responses, 86_400));
        assert_eq!(request.metadata.unwrap()["k"], "v");
        assert_eq!(request.output_expires_after_s, Some(3600));
    }

    #[test]
    fn wrong_fields_are_named() {
        let many: Map<String, Value> = (0..17).map(|note| (note.to_string(), "x".into())).collect();
        for (field, value, param) in [
            ("input_file_id", Value::Null, "input_file_id"),
            ("endpoint", Value::Null, "endpoint"),
            ("endpoint", json!("/v1/messages"), "endpoint"),
            ("completion_window", Value::Null, "completion_window"),
            ("completion_window", json!("0h"), "completion_window"),
            ("completion_window", json!("169h"), "completion_window"),
            ("completion_window", json!("+1h"), "completion_window"),
            ("completion_window", json!("1d"), "completion_window"),
            ("metadata", json!({"k": 1}), "metadata.k"),
            ("metadata", Value::Object(many), "metadata"),
            ("metadata", json!({"k": "x".repeat(513)}), "metadata"),
            ("output_expires_after", json!({"seconds": 3600}), "output_expires_after.anchor"),
            ("output_expires_after", json!({"anchor": "created_at"}), "output_expires_after.seconds"),
            ("output_expires_after", json!({"anchor": "created_at", "seconds": 5}), "output_expires_after.seconds"),
        ] {
            let error = checked(|body| body[field] = value.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{field}: {value}: {error}");
        }
    }
}
