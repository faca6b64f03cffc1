//! OpenAI's Responses over HTTP.

use crate::body;
use crate::error::HttpError;
use crate::stream::EventBody;
use actix_web::HttpResponse;
use pagetide_actors::generation::Generation;
use pagetide_actors::runtime::RuntimeHandle;
use pagetide_api::responses::LOGPROBS_COPIES;
use pagetide_api::responses::answer::Response;
use pagetide_api::responses::request::ResponsesRequest;
use pagetide_api::responses::stream::ResponseEvents;
use pagetide_api::timings::Timings;
use pagetide_api::usage::Usage;
use serde::{Serialize, Serializer};

/// Answers a request that came to `/v1/responses`.
pub async fn create(handle: &RuntimeHandle, request: ResponsesRequest) -> Result<HttpResponse, HttpError> {
    let ResponsesRequest { mut request, settings } = request;
    if request.stream.is_some() {
        let response = Response::new(settings, &request, handle.model());
        return Ok(EventBody::start(handle, request, ResponseEvents::new(response)).await?.into_response());
    }
    // The tokens of input and output, where the response says them, are no more than the model has room for.
    let room = handle.model().max_model_len as usize;
    let num_values = request.num_answer_values(room) + if settings.with_messages { room } else { 0 };
    let mut response = Response::new(settings, &request, handle.model());
    let mut generation = Generation::start(handle, &mut request).await?;
    generation.keep_logprobs(LOGPROBS_COPIES);
    generation.finish(|delta| response.push(delta, |_, _, _, _| {})).await?;
    response.asked(generation.answers().prompt_tokens(0));
    let (usage, timings) = (generation.answers().usage(), generation.answers().timings(0));
    body::answer(handle, WholeResponse { response, usage, timings }, num_values).await
}

/// A response whose output is complete.
struct WholeResponse {
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
