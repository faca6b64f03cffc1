//! OpenAI's Responses over HTTP.

use crate::actors::generation::Generation;
use crate::actors::runtime::RuntimeHandle;
use crate::api::responses::LOGPROBS_COPIES;
use crate::api::responses::answer::Response;
use crate::api::responses::request::ResponsesRequest;
use crate::api::responses::stream::ResponseEvents;
use crate::api::usage::Usage;
use crate::error::ApiError;
use crate::http::body;
use crate::http::stream::EventBody;
use actix_web::HttpResponse;
use serde::{Serialize, Serializer};

/// Answers a request that came to `/v1/responses`.
pub async fn create(handle: &RuntimeHandle, request: ResponsesRequest) -> Result<HttpResponse, ApiError> {
    let ResponsesRequest { mut request, settings } = request;
    let mut response = Response::new(settings, &request, handle.model());
    if request.stream.is_some() {
        return EventBody::start(handle, request, ResponseEvents::new(response)).await.map(EventBody::into_response);
    }
    let num_values = request.num_answer_values(handle.model().max_model_len as usize);
    let mut generation = Generation::start(handle, &mut request).await?;
    generation.keep_logprobs(LOGPROBS_COPIES);
    generation.finish(|delta| response.push(delta, |_, _, _, _| {})).await?;
    let usage = generation.answers().usage();
    body::answer(handle, WholeResponse { response, usage }, num_values).await
}

/// A response whose output is complete.
struct WholeResponse {
    response: Response,
    usage: Usage,
}

impl Serialize for WholeResponse {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.response.ended(self.usage).serialize(serializer)
    }
}
