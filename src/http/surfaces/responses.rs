//! OpenAI's Responses over HTTP.

use crate::body;
use crate::error::HttpError;
use crate::stream::EventBody;
use actix_web::HttpResponse;
use pagetide_actors::answers::whole_response;
use pagetide_actors::runtime::RuntimeHandle;
use pagetide_api::responses::answer::Response;
use pagetide_api::responses::request::ResponsesRequest;
use pagetide_api::responses::stream::ResponseEvents;

/// Answers a request that came to `/v1/responses`.
pub async fn create(handle: &RuntimeHandle, asked: ResponsesRequest) -> Result<HttpResponse, HttpError> {
    if asked.request.stream.is_some() {
        let ResponsesRequest { request, settings } = asked;
        let response = Response::new(settings, &request, handle.model());
        return Ok(EventBody::start(handle, request, ResponseEvents::new(response)).await?.into_response());
    }
    // The tokens of input and output, where the response says them, are no more than the model has room for.
    let room = handle.model().max_model_len as usize;
    let num_values = asked.request.num_answer_values(room) + if asked.settings.with_messages { room } else { 0 };
    body::answer(handle, whole_response(handle, asked).await?, num_values).await
}
