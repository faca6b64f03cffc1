//! Whole answers: those that several callers make, and those to bodies that are JSON values, as the lines of a batch.

use crate::generation::{Generation, embedded, whole_answer};
use crate::runtime::RuntimeHandle;
use pagetide_api::anthropic::{self, answer::MessageAnswer};
use pagetide_api::batches::line::BatchEndpoint;
use pagetide_api::body::read_value;
use pagetide_api::openai::embeddings::{self, EmbeddingAnswer, EmbeddingRequest};
use pagetide_api::openai::{self, Endpoint};
use pagetide_api::request::ApiRequest;
use pagetide_api::responses::LOGPROBS_COPIES;
use pagetide_api::responses::answer::Response;
use pagetide_api::responses::request::ResponsesRequest;
use pagetide_api::timings::Timings;
use pagetide_api::usage::Usage;
use pagetide_base::error::ApiError;
use serde::{Serialize, Serializer};
use serde_json::Value;

/// Answers `body` as `endpoint` does without `stream`. `adjust` may change the request before it is submitted. Dropping
/// the future cancels it.
pub async fn answer_body(
    handle: &RuntimeHandle,
    endpoint: BatchEndpoint,
    body: &Value,
    adjust: impl FnOnce(&mut ApiRequest),
) -> Result<Value, ApiError> {
    match endpoint {
        BatchEndpoint::Generation(endpoint) => generation(handle, endpoint, body, adjust).await,
        BatchEndpoint::Embeddings => {
            let asked = embeddings::parse(read_value(body)?, handle.model())?;
            let EmbeddingRequest { mut request, format } = asked;
            if format.is_bytes() {
                let message = "encoding_format: a line of a batch is JSON; use float or base64";
                return Err(ApiError::invalid("encoding_format", message));
            }
            adjust(&mut request);
            let prompts = embedded(handle, &mut request).await?;
            match format.answer(prompts, handle.model()) {
                EmbeddingAnswer::Json(list) => written(&list),
                EmbeddingAnswer::Bytes { .. } => Err(ApiError::engine("an answer of bytes that nobody asked for")),
            }
        }
        BatchEndpoint::Responses => {
            let mut asked = ResponsesRequest::parse(read_value(body)?, handle.model())?;
            adjust(&mut asked.request);
            written(&whole_response(handle, asked).await?)
        }
        BatchEndpoint::Messages => {
            let mut request = anthropic::request::message(read_value(body)?, handle.model())?;
            adjust(&mut request);
            whole_message(handle, request).await
        }
    }
}

async fn generation(
    handle: &RuntimeHandle,
    endpoint: Endpoint,
    body: &Value,
    adjust: impl FnOnce(&mut ApiRequest),
) -> Result<Value, ApiError> {
    let mut request = openai::parse(endpoint, body, handle.model())?;
    adjust(&mut request);
    written(&whole_answer(handle, endpoint, request).await?)
}

fn written(answer: &impl Serialize) -> Result<Value, ApiError> {
    serde_json::to_value(answer).map_err(|error| ApiError::engine(format!("the answer cannot be written: {error}")))
}

/// The whole message that answers a request of Anthropic's API.
pub async fn whole_message(handle: &RuntimeHandle, mut request: ApiRequest) -> Result<Value, ApiError> {
    let mut message = MessageAnswer::new(&request, handle.model());
    let mut generation = Generation::start(handle, &mut request).await?;
    generation.finish(|delta| message.push(delta, |_, _, _| {})).await?;
    Ok(message.whole(generation.answers().usage()))
}

/// The whole response that answers a request of OpenAI's Responses.
pub async fn whole_response(handle: &RuntimeHandle, request: ResponsesRequest) -> Result<WholeResponse, ApiError> {
    let ResponsesRequest { mut request, settings } = request;
    let mut response = Response::new(settings, &request, handle.model());
    let mut generation = Generation::start(handle, &mut request).await?;
    generation.keep_logprobs(LOGPROBS_COPIES);
    generation.finish(|delta| response.push(delta, |_, _, _, _| {})).await?;
    response.asked(generation.answers().prompt_tokens(0));
    let (usage, timings) = (generation.answers().usage(), generation.answers().timings(0));
    Ok(WholeResponse { response, usage, timings })
}

/// A response whose output is complete.
pub struct WholeResponse {
    response: Response,
    usage: Usage,
    timings: Option<Timings>,
}

impl Serialize for WholeResponse {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Whole<R> {
            #[serde(flatten)]
            response: R,
            #[serde(skip_serializing_if = "Option::is_none")]
            timings: Option<Timings>,
        }
        Whole { response: self.response.ended(self.usage), timings: self.timings }.serialize(serializer)
    }
}
