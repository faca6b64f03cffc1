//! Anthropic's batches of messages.

use super::line::{BatchEndpoint, RequestLine};
use super::page::{Page, QueryParameters};
use crate::Object;
use crate::body::{ParsedBody, body_fields};
use crate::checks::{object, string, wrong_type};
use crate::dates::rfc3339;
use crate::model_info::ModelInfo;
use pagetide_base::error::ApiError;
use pagetide_batches::batch::{BatchRecord, BatchState};
use pagetide_batches::journal::{CANCELLED, EXPIRED};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use utoipa::ToSchema;

const DEFAULT_LIMIT: usize = 20;
const MAX_LIMIT: usize = 1000;
const MAX_CUSTOM_ID_CHARS: usize = 64;
/// As Anthropic's batches.
pub const WINDOW_S: u64 = 86_400;

body_fields! {
    pub struct MessageBatchFields {
        /// The requests, each with a custom_id of its own of up to 64 characters.
        #[schema(value_type = Option<Vec<MessageBatchItem>>, min_items = 1)]
        requests: Option<Vec<Value>>,
    }
}

#[derive(ToSchema)]
#[allow(dead_code, reason = "only described")]
struct MessageBatchItem {
    #[schema(min_length = 1, max_length = 64)]
    custom_id: String,
    /// The body of a request to /v1/messages, without stream.
    params: Object,
}

/// The requests as lines of a batch. Whether each is right is found when it runs, and its result says so.
pub fn parse(parsed: ParsedBody<MessageBatchFields>, _: &ModelInfo) -> Result<MessageLines, ApiError> {
    check(parsed)
}

/// The lines of a batch.
#[derive(Debug)]
pub struct MessageLines {
    pub lines: Vec<u8>,
    pub num_requests: usize,
}

fn check(ParsedBody { body, problems }: ParsedBody<MessageBatchFields>) -> Result<MessageLines, ApiError> {
    problems.check()?;
    let requests = body.requests.ok_or_else(|| ApiError::invalid("requests", "requests is required"))?;
    if requests.is_empty() {
        return Err(ApiError::invalid("requests", "requests must have at least one request"));
    }
    let (mut lines, mut seen, num_requests) = (Vec::new(), HashSet::new(), requests.len());
    for (i, mut request) in requests.into_iter().enumerate() {
        let path = format!("requests[{i}]");
        let fields = object(&path, &request)?;
        let custom_id = string(&path, fields, "custom_id")?.to_owned();
        let param = format!("{path}.custom_id");
        if custom_id.is_empty() || custom_id.chars().count() > MAX_CUSTOM_ID_CHARS {
            let message = format!("{param} must have 1 to {MAX_CUSTOM_ID_CHARS} characters");
            return Err(ApiError::invalid(param, message));
        }
        if !seen.insert(custom_id.clone()) {
            let message = format!("{param}: an earlier request has the same, {custom_id:?}");
            return Err(ApiError::invalid(param, message));
        }
        let params = fields.get("params");
        if !params.is_some_and(Value::is_object) {
            return Err(wrong_type(&format!("{path}.params"), "an object", params));
        }
        if params.is_some_and(|params| params["stream"] == true) {
            let message = format!("{path}.params.stream: a batch cannot be streamed");
            return Err(ApiError::invalid(format!("{path}.params.stream"), message));
        }
        let request = RequestLine { custom_id, endpoint: BatchEndpoint::Messages, body: request["params"].take() };
        lines.extend_from_slice(request.written().to_string().as_bytes());
        lines.push(b'\n');
    }
    Ok(MessageLines { lines, num_requests })
}

#[derive(Serialize, ToSchema)]
pub struct MessageBatch {
    id: String,
    /// Always message_batch.
    r#type: &'static str,
    /// in_progress, canceling or ended.
    processing_status: &'static str,
    request_counts: MessageBatchCounts,
    /// RFC 3339, as all times.
    ended_at: Option<String>,
    created_at: String,
    /// When requests without an answer are given up.
    expires_at: String,
    /// Always null.
    archived_at: Option<String>,
    cancel_initiated_at: Option<String>,
    /// Where the results are when the batch has ended.
    results_url: Option<String>,
}

#[derive(Serialize, ToSchema)]
struct MessageBatchCounts {
    processing: u64,
    succeeded: u64,
    errored: u64,
    canceled: u64,
    expired: u64,
}

impl MessageBatch {
    /// `base`: where clients find this server.
    pub fn new(batch: BatchRecord, base: &str) -> Self {
        let (counts, has_ended) = (batch.counts, batch.state.has_ended());
        let processing = if has_ended { 0 } else { counts.total - counts.num_done().min(counts.total) };
        Self {
            r#type: "message_batch",
            processing_status: match batch.state {
                state if state.has_ended() => "ended",
                BatchState::Cancelling => "canceling",
                _ => "in_progress",
            },
            request_counts: MessageBatchCounts {
                processing,
                succeeded: counts.succeeded,
                errored: counts.failed,
                canceled: counts.cancelled,
                expired: counts.expired,
            },
            ended_at: batch.ended_at.map(rfc3339),
            created_at: rfc3339(batch.created_at),
            expires_at: rfc3339(batch.expires_at),
            archived_at: None,
            cancel_initiated_at: batch.cancelling_at.map(rfc3339),
            results_url: has_ended.then(|| format!("{base}/v1/messages/batches/{}/results", batch.id)),
            id: batch.id,
        }
    }
}

#[derive(Serialize, ToSchema)]
pub struct MessageBatchList {
    data: Vec<MessageBatch>,
    has_more: bool,
    first_id: Option<String>,
    last_id: Option<String>,
}

/// The page of `batches` (oldest first) that a query asks for, newest first.
pub fn list(query: &QueryParameters, mut batches: Vec<BatchRecord>, base: &str) -> Result<MessageBatchList, ApiError> {
    batches.reverse();
    let page = Page::asked(query, (DEFAULT_LIMIT, MAX_LIMIT), "after_id", Some("before_id"))?;
    let (batches, has_more) = page.of(batches, |batch| &batch.id)?;
    let id = |batch: Option<&BatchRecord>| batch.map(|batch| batch.id.clone());
    let (first_id, last_id) = (id(batches.first()), id(batches.last()));
    let data = batches.into_iter().map(|batch| MessageBatch::new(batch, base)).collect();
    Ok(MessageBatchList { data, has_more, first_id, last_id })
}

#[derive(Serialize, ToSchema)]
pub struct MessageBatchDeleted {
    id: String,
    /// Always message_batch_deleted.
    r#type: &'static str,
}

impl MessageBatchDeleted {
    pub fn new(id: String) -> Self {
        Self { id, r#type: "message_batch_deleted" }
    }
}

/// A line of the results, made of a line of the batch's own results.
pub fn result(line: &[u8]) -> Result<Vec<u8>, ApiError> {
    let unreadable = |error| ApiError::engine(format!("a result cannot be read: {error}"));
    let mut line: Map<String, Value> = serde_json::from_slice(line).map_err(unreadable)?;
    let mut take = |name: &str| line.get_mut(name).map(Value::take).unwrap_or_default();
    let (id, custom_id, mut response, error) = (take("id"), take("custom_id"), take("response"), take("error"));
    let result = match error["code"].as_str() {
        Some(CANCELLED) => json!({"type": "canceled"}),
        Some(EXPIRED) => json!({"type": "expired"}),
        Some(_) => {
            let details = json!({"type": "invalid_request_error", "message": error["message"]});
            json!({"type": "errored", "error": {"type": "error", "error": details, "request_id": id}})
        }
        None if response["status_code"] == 200 => json!({"type": "succeeded", "message": response["body"].take()}),
        None => json!({"type": "errored", "error": response["body"].take()}),
    };
    let mut text = json!({"custom_id": custom_id, "result": result}).to_string().into_bytes();
    text.push(b'\n');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::read_value;

    fn lines(requests: Value) -> Result<String, ApiError> {
        let checked = check(read_value(&json!({"requests": requests}))?)?;
        Ok(String::from_utf8(checked.lines).unwrap())
    }

    #[test]
    fn requests_become_lines() {
        let lines = lines(json!([{"custom_id": "a", "params": {"max_tokens": 1}}, {"custom_id": "b", "params": {}}]));
        let lines: Vec<Value> = lines.unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let expected = json!({"custom_id": "a", "method": "POST", "url": "/v1/messages", "body": {"max_tokens": 1}});
        assert_eq!((lines.len(), &lines[0]), (2, &expected));
    }

    #[test]
    fn wrong_requests_are_named() {
        let one = json!({"custom_id": "a", "params": {}});
        for (requests, param) in [
            (Value::Null, "requests"),
            (json!([]), "requests"),
            (json!([1]), "requests[0]"),
            (json!([{"params": {}}]), "requests[0].custom_id"),
            (json!([{"custom_id": "", "params": {}}]), "requests[0].custom_id"),
            (json!([{"custom_id": "x".repeat(65), "params": {}}]), "requests[0].custom_id"),
            (json!([one, one]), "requests[1].custom_id"),
            (json!([{"custom_id": "a"}]), "requests[0].params"),
            (json!([{"custom_id": "a", "params": {"stream": true}}]), "requests[0].params.stream"),
        ] {
            assert_eq!(lines(requests.clone()).unwrap_err().param.as_deref(), Some(param), "{requests}");
        }
    }

    #[test]
    fn results_have_anthropics_types() {
        let typed = |line: Value| -> Value {
            let text = result(line.to_string().as_bytes()).unwrap();
            serde_json::from_slice(&text).unwrap()
        };
        let answer = |status: u16, body: Value| json!({"id": "r", "custom_id": "a", "response": {"status_code": status, "body": body}, "error": null});
        let succeeded = typed(answer(200, json!({"id": "msg_1"})));
        assert_eq!(succeeded, json!({"custom_id": "a", "result": {"type": "succeeded", "message": {"id": "msg_1"}}}));
        assert_eq!(
            typed(answer(400, json!({"type": "error"})))["result"],
            json!({"type": "errored", "error": {"type": "error"}})
        );
        let given_up =
            |code: &str| typed(json!({"id": "r", "custom_id": "a", "response": null, "error": {"code": code}}));
        assert_eq!(given_up(CANCELLED)["result"], json!({"type": "canceled"}));
        assert_eq!(given_up(EXPIRED)["result"], json!({"type": "expired"}));
        assert_eq!(given_up("invalid_request")["result"]["type"], "errored");
    }
}
