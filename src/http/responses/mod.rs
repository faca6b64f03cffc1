//! OpenAI's `POST /v1/responses`, answered as the chat that it stands for. Nothing is stored: a conversation is sent
//! whole with every request.

pub mod answer;
pub mod describe;
mod input;
pub mod request;
pub mod stream;

use crate::actors::runtime::RuntimeHandle;
use crate::error::ApiError;
use crate::http::body;
use crate::http::complete;
use crate::http::generation::Generation;
use crate::http::openai::Request;
use crate::http::openai::response::Usage;
use crate::http::stream::EventBody;
use crate::http::translate::count_refused;
use actix_web::HttpResponse;
use answer::Response;
use request::ResponsesRequest;
use serde::{Serialize, Serializer};
use stream::Events;

/// A stream says log-probabilities five times, four of them when the text has ended.
const LOGPROBS_COPIES: usize = 8;

/// Answers a request's body, of which `parsed` is what it asks for.
pub async fn create(
    handle: &RuntimeHandle,
    parsed: Result<ResponsesRequest, ApiError>,
) -> Result<HttpResponse, ApiError> {
    let ResponsesRequest { chat, names, settings } = count_refused(parsed, handle)?;
    let response = Response::new(settings, &chat, handle.model());
    let answered = if chat.stream.is_some() {
        EventBody::start(handle, chat, Events::new(response)).await.map(EventBody::into_response)
    } else {
        whole(handle, chat, response).await
    };
    answered.map_err(|error| names.in_clients_words(error))
}

async fn whole(handle: &RuntimeHandle, mut chat: Request, mut response: Response) -> Result<HttpResponse, ApiError> {
    let num_values = complete::num_values(&chat, handle.model());
    let mut generation = Generation::start(handle, &mut chat).await?;
    generation.keep_logprobs(LOGPROBS_COPIES);
    while let Some(delta) = generation.next().await {
        response.push(delta?, |_, _, _, _| {});
    }
    let usage = generation.usage();
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
