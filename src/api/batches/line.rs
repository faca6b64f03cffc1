//! The lines of a batch: a request, and its result. `pagetide generate` reads and writes them too.

use crate::body::fields::AnyFields;
use crate::body::{Bounds, ParsedBody, read};
use crate::checks::shown;
use crate::openai::Endpoint;
use crate::openai::error::ErrorAnswer;
use pagetide_base::error::ApiError;
use serde::Serialize;
use serde_json::{Value, json};

/// What the requests of a batch may ask for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BatchEndpoint {
    Generation(Endpoint),
    Embeddings,
    Responses,
    Messages,
}

impl BatchEndpoint {
    /// Those of OpenAI's batches.
    pub const OPENAI: [Self; 4] =
        [Self::Generation(Endpoint::Chat), Self::Generation(Endpoint::Completion), Self::Embeddings, Self::Responses];
    const ALL: [Self; 5] = [Self::OPENAI[0], Self::OPENAI[1], Self::OPENAI[2], Self::OPENAI[3], Self::Messages];

    pub fn path(self) -> &'static str {
        match self {
            Self::Generation(endpoint) => endpoint.path(),
            Self::Embeddings => "/v1/embeddings",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
        }
    }

    pub fn of_path(path: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|endpoint| endpoint.path() == path)
    }
}

/// A line of the input.
#[derive(Debug)]
pub struct RequestLine {
    pub custom_id: String,
    pub endpoint: BatchEndpoint,
    /// An object, as a client would send it to the endpoint.
    pub body: Value,
}

/// A line that is no request: its `custom_id` if it has one, and why.
#[derive(Debug)]
pub struct BadLine {
    pub custom_id: Option<String>,
    pub message: String,
}

impl BadLine {
    /// An earlier line has the same `custom_id`.
    pub fn repeated(custom_id: String) -> Self {
        Self { custom_id: Some(custom_id), message: "custom_id: an earlier line has the same".into() }
    }

    /// The same with the number of the line.
    pub fn at(self, number: u64) -> Self {
        Self { message: format!("line {number}: {}", self.message), ..self }
    }
}

impl RequestLine {
    /// Reads a line of a batch whose requests ask for one of `endpoints`.
    pub fn parse(line: &[u8], bounds: Bounds, endpoints: &[BatchEndpoint]) -> Result<Self, BadLine> {
        let bad =
            |custom_id: Option<&str>, message: String| BadLine { custom_id: custom_id.map(str::to_owned), message };
        let parsed = read::<AnyFields>(line, bounds).and_then(|ParsedBody { body: AnyFields(fields), problems }| {
            problems.check()?;
            Ok(fields)
        });
        let mut fields = parsed.map_err(|error| bad(None, error.message.replace("the request body", "the line")))?;
        let Some(Value::String(custom_id)) = fields.get("custom_id").cloned() else {
            return Err(bad(None, "custom_id: must be given, a text".into()));
        };
        let given = |name: &str| fields.get(name).unwrap_or(&Value::Null);
        if given("method").as_str() != Some("POST") {
            return Err(bad(Some(&custom_id), format!("method: must be \"POST\", not {}", shown(given("method")))));
        }
        let endpoint = given("url").as_str().and_then(BatchEndpoint::of_path);
        let Some(endpoint) = endpoint.filter(|endpoint| endpoints.contains(endpoint)) else {
            let known: Vec<String> = endpoints.iter().map(|endpoint| format!("{:?}", endpoint.path())).collect();
            let message = format!("url: must be {}, not {}", known.join(" or "), shown(given("url")));
            return Err(bad(Some(&custom_id), message));
        };
        if !given("body").is_object() {
            return Err(bad(Some(&custom_id), "body: must be given, an object".into()));
        }
        if given("body")["stream"] == true {
            return Err(bad(Some(&custom_id), "body.stream: a file of results cannot be streamed to".into()));
        }
        let body = fields.get_mut("body").map(Value::take).unwrap_or_default();
        Ok(Self { custom_id, endpoint, body })
    }

    /// The same as a line.
    pub fn written(&self) -> Value {
        json!({"custom_id": self.custom_id, "method": "POST", "url": self.endpoint.path(), "body": self.body})
    }
}

/// One line of the results.
#[derive(Debug, Serialize)]
pub struct ResultLine {
    pub id: String,
    pub custom_id: Option<String>,
    /// What the API would have answered; none if the request did not run.
    pub response: Option<LineResponse>,
    pub error: Option<LineError>,
}

#[derive(Debug, Serialize)]
pub struct LineResponse {
    pub status_code: u16,
    pub request_id: String,
    pub body: Value,
}

#[derive(Debug, Serialize)]
pub struct LineError {
    pub code: &'static str,
    pub message: String,
}

impl ResultLine {
    /// Of a request that ran, or was refused. `id`: that of the result.
    pub fn answered(id: String, request: (String, BatchEndpoint), answer: Result<Value, ApiError>) -> Self {
        let (custom_id, endpoint) = request;
        let response = match answer {
            Ok(body) => {
                let request_id = body["id"].as_str().unwrap_or(&id).to_owned();
                LineResponse { status_code: 200, request_id, body }
            }
            Err(error) => {
                let body = match endpoint {
                    BatchEndpoint::Messages => crate::anthropic::error::error_body(&error, &id),
                    _ => json!(ErrorAnswer::from(&error)),
                };
                LineResponse { status_code: error.status, request_id: id.clone(), body }
            }
        };
        Self { id, custom_id: Some(custom_id), response: Some(response), error: None }
    }

    /// Of a line that is no request.
    pub fn bad(id: String, BadLine { custom_id, message }: BadLine) -> Self {
        Self { id, custom_id, response: None, error: Some(LineError { code: "invalid_request", message }) }
    }

    /// Of a request that was given up, for the reason that `code` names.
    pub fn given_up(id: String, custom_id: Option<String>, code: &'static str, message: &str) -> Self {
        Self { id, custom_id, response: None, error: Some(LineError { code, message: message.to_owned() }) }
    }

    pub fn has_succeeded(&self) -> bool {
        self.response.as_ref().is_some_and(|response| response.status_code == 200)
    }

    pub fn completion_tokens(&self) -> u64 {
        let response = self.response.as_ref();
        response.and_then(|response| response.body["usage"]["completion_tokens"].as_u64()).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds { max_values: 100, max_prompts: 10 };

    fn parse(line: &str) -> Result<RequestLine, BadLine> {
        RequestLine::parse(line.as_bytes(), BOUNDS, &BatchEndpoint::OPENAI)
    }

    #[test]
    fn a_request_is_read_and_written() {
        let line = r#"{"custom_id":"a","method":"POST","url":"/v1/embeddings","body":{"input":"x"}}"#;
        let request = parse(line).unwrap();
        assert_eq!((request.custom_id.as_str(), request.endpoint), ("a", BatchEndpoint::Embeddings));
        assert_eq!(request.written().to_string(), line);
    }

    #[test]
    fn a_wrong_line_says_why() {
        let many = format!(
            r#"{{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {{"prompt": [{}]}}}}"#,
            ["1"; 200].join(",")
        );
        for (line, custom_id, message) in [
            ("{not json", None, "the line is not JSON"),
            ("[]", None, "the line must be a JSON object"),
            ("{}", None, "custom_id: must be given, a text"),
            (r#"{"custom_id": 1}"#, None, "custom_id: must be given, a text"),
            (r#"{"custom_id": "a", "method": "GET"}"#, Some("a"), "method: must be \"POST\", not \"GET\""),
            (r#"{"custom_id": "a", "method": "POST", "url": "/v1/messages"}"#, Some("a"), "url: must be \"/v1/chat"),
            (r#"{"custom_id": "a", "method": "POST", "url": "/v1/completions"}"#, Some("a"), "body: must be given"),
            (
                r#"{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"stream": true}}"#,
                Some("a"),
                "body.stream: a file",
            ),
            (&many, None, "the line has too many JSON values"),
        ] {
            let bad = parse(line).unwrap_err();
            assert!(bad.message.starts_with(message), "{line}: {}", bad.message);
            assert_eq!(bad.custom_id.as_deref(), custom_id, "{line}");
        }
        assert_eq!(BadLine::repeated("a".into()).at(3).message, "line 3: custom_id: an earlier line has the same");
    }

    #[test]
    fn errors_are_those_of_the_api() {
        let refused = |endpoint| {
            let error = ApiError::invalid("max_tokens", "max_tokens is wrong");
            ResultLine::answered("batch_req_1_2".into(), ("a".into(), endpoint), Err(error)).response.unwrap()
        };
        let response = refused(BatchEndpoint::Responses);
        assert_eq!((response.status_code, &response.body["error"]["param"]), (400, &json!("max_tokens")));
        let response = refused(BatchEndpoint::Messages);
        assert_eq!(response.body["error"]["type"], "invalid_request_error");
        assert_eq!(
            (response.body["type"].as_str(), response.body["request_id"].as_str()),
            (Some("error"), Some("batch_req_1_2"))
        );
    }
}
