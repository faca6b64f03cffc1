//! Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`, answered as the chats that they stand for, and
//! its shapes of errors and models.

pub mod answer;
pub mod describe;
pub mod error;
mod messages;
pub mod models;
pub mod request;
pub mod stream;

use crate::actors::runtime::{ModelInfo, RuntimeHandle};
use crate::budget::Budget;
use crate::error::ApiError;
use crate::http::body::json::Json;
use crate::http::generation::Generation;
use crate::http::openai::Request;
use crate::http::stream::EventBody;
use crate::http::translate::{FieldNames, count_refused};
use actix_web::HttpResponse;
use actix_web::http::header::HeaderMap;
use answer::Message;
use serde_json::{Value, json};
use stream::Events;

/// The header that every request of Anthropic's clients has.
const VERSION: &str = "anthropic-version";

/// Whether a request speaks Anthropic's API, so that errors are told in its format.
pub fn is_spoken(path: &str, headers: &HeaderMap) -> bool {
    let below = path.strip_prefix("/v1/messages");
    below.is_some_and(|rest| rest.is_empty() || rest.starts_with('/')) || asks_for_models(path, headers)
}

fn asks_for_models(path: &str, headers: &HeaderMap) -> bool {
    (path == "/v1/models" || path.starts_with("/v1/models/")) && has_version(headers)
}

/// Paths that both APIs have are answered in this one's shape.
pub fn has_version(headers: &HeaderMap) -> bool {
    headers.contains_key(VERSION)
}

/// Answers the body of `/v1/messages`, of which `parsed` is what it asks for.
pub async fn create(
    handle: &RuntimeHandle,
    parsed: Result<(Request, FieldNames), ApiError>,
) -> Result<HttpResponse, ApiError> {
    let (chat, names) = count_refused(parsed, handle)?;
    let message = Message::new(handle.model());
    let answered = if chat.stream.is_some() {
        EventBody::start(handle, chat, Events::new(message)).await.map(EventBody::into_response)
    } else {
        whole(handle, chat, message).await.map(|whole| HttpResponse::Ok().json(whole))
    };
    answered.map_err(|error| names.in_clients_words(error))
}

async fn whole(handle: &RuntimeHandle, mut chat: Request, mut message: Message) -> Result<Value, ApiError> {
    let mut generation = Generation::start(handle, &mut chat).await?;
    while let Some(delta) = generation.next().await {
        message.push(delta?, |_, _, _| {});
    }
    Ok(message.whole(generation.usage()))
}

/// Tokens of the prompt that `/v1/messages` would make of `body`.
pub fn count_tokens(body: Json, model: &ModelInfo, budget: &Budget) -> Result<(Value, usize), ApiError> {
    let (chat, names) = request::counted(&body.value, model)?;
    let tokens = chat.prompts.iter().map(|prompt| model.encode(prompt, "messages", budget).map(|tokens| tokens.len()));
    match tokens.sum::<Result<usize, _>>() {
        Ok(tokens) => Ok((json!({ "input_tokens": tokens }), tokens)),
        Err(error) => Err(names.in_clients_words(error)),
    }
}
