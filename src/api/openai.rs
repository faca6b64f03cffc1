//! OpenAI's chat and completions with vLLM's additions, embeddings, and vLLM's /tokenize: JSON in, a checked
//! [`ApiRequest`] out; text in, JSON out.
//!
//! `null` means "not given", and unknown fields are ignored. Fields that would change the answer and are not supported
//! are refused ([`unsupported`](crate::fields::unsupported)).

pub mod accepted;
pub mod chat;
pub mod completion;
pub mod embeddings;
pub mod error;
pub mod logprobs;
mod message;
pub mod response;
pub mod stream;
pub mod tokenize;
pub mod tools;

use crate::body::read_value;
use crate::model_info::ModelInfo;
use crate::request::ApiRequest;
use pagetide_base::error::ApiError;
use serde_json::Value;

/// Where a generation request came in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Endpoint {
    Chat,
    Completion,
}

impl Endpoint {
    pub fn path(self) -> &'static str {
        match self {
            Endpoint::Chat => "/v1/chat/completions",
            Endpoint::Completion => "/v1/completions",
        }
    }
}

/// Reads a body that is a JSON value already.
pub fn parse(endpoint: Endpoint, body: &Value, model: &ModelInfo) -> Result<ApiRequest, ApiError> {
    match endpoint {
        Endpoint::Chat => chat::parse(read_value(body)?, model),
        Endpoint::Completion => completion::parse(read_value(body)?, model),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::ParsedBody;
    use crate::fields::sampling::SamplingFields;
    use crate::request::StreamOptions;
    use serde_json::json;

    fn sampling(body: Value) -> Result<SamplingFields, ApiError> {
        let ParsedBody { body, problems } = read_value(&body)?;
        problems.check()?;
        Ok(body)
    }

    #[test]
    fn a_wrong_type_names_its_path_in_the_words_of_json() {
        let error = sampling(json!({"n": "two"})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("n"));
        assert_eq!(error.message, "n must be an integer, got string \"two\"");
        let error = sampling(json!({"stream_options": {"include_usage": 1}})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("stream_options.include_usage"));
        assert_eq!(error.message, "stream_options.include_usage must be a boolean, got integer `1`");
        let error = sampling(json!({"stream_options": 5})).unwrap_err();
        assert_eq!(error.message, "stream_options must be an object, got integer `5`");
        let error = sampling(json!({"stop_token_ids": [1, "a"]})).unwrap_err();
        assert_eq!(error.message, "stop_token_ids[1] must be an integer, got string \"a\"");
        let error = sampling(json!({"seed": 9_223_372_036_854_775_808u64})).unwrap_err();
        assert_eq!(
            error.message,
            "seed must be in [-9223372036854775808, 9223372036854775807], got 9223372036854775808"
        );
        let error = sampling(json!({"n": "long".repeat(1000)})).unwrap_err();
        assert!(error.message.len() < 200, "{error}");
    }

    #[test]
    fn null_is_not_given() {
        let fields =
            sampling(json!({"n": null, "ignore_eos": null, "stream_options": {"include_usage": null}})).unwrap();
        assert_eq!(fields.n, None);
        assert!(!fields.ignore_eos);
        assert_eq!(fields.stream_options, Some(StreamOptions::default()));
    }
}
