//! What the handlers of all surfaces share: who asks, and how bodies are read and answers are made.

use crate::account::Account;
use crate::auth::Keyed;
use crate::body::{self, Body};
use crate::error::HttpError;
use crate::stream::EventBody;
use actix_web::dev::Payload;
use actix_web::http::header::ContentType;
use actix_web::web::Data;
use actix_web::{FromRequest, HttpMessage, HttpRequest, HttpResponse};
use pagetide_actors::generation::{self, embedded};
use pagetide_actors::messages::Caller;
use pagetide_actors::runtime::RuntimeHandle;
use pagetide_api::body::{BodyFields, ParsedBody};
use pagetide_api::model_info::ModelInfo;
use pagetide_api::openai::Endpoint;
use pagetide_api::openai::embeddings::{EmbeddingAnswer, EmbeddingRequest};
use pagetide_api::openai::stream::Chunks;
use pagetide_api::request::ApiRequest;
use pagetide_base::budget::Budget;
use pagetide_base::error::ApiError;
use pagetide_metrics as metrics;
use serde::Serialize;
use std::future::{Ready, ready};
use std::ops::Deref;
use std::sync::Arc;

/// The engine's handle for the client that sent the request, which has not used up its limits.
pub struct SubmittingHandle(RuntimeHandle);

impl FromRequest for SubmittingHandle {
    type Error = HttpError;
    type Future = Ready<Result<Self, HttpError>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let handle: &Data<RuntimeHandle> = request.app_data().expect("every app is made with a handle");
        let extensions = request.extensions();
        let caller = extensions.get::<Caller>().cloned().unwrap_or_default();
        let handle = handle.on_behalf_of(caller);
        let (Some(account), Some(keyed)) = (extensions.get::<Arc<Account>>(), extensions.get::<Keyed>()) else {
            return ready(Ok(Self(handle)));
        };
        // A request that is refused in any case uses up no limit.
        let entered = if handle.is_draining() { Ok(()) } else { account.enter(keyed) };
        ready(entered.map(|()| Self(handle.observed_by(account.clone()))).map_err(HttpError::from))
    }
}

impl Deref for SubmittingHandle {
    type Target = RuntimeHandle;

    fn deref(&self) -> &RuntimeHandle {
        &self.0
    }
}

/// What a body asks for. Counts a request that is refused before it is submitted.
pub async fn parse<B: BodyFields + 'static, T: Send + 'static>(
    handle: &RuntimeHandle,
    body: Body,
    parse: fn(ParsedBody<B>, &ModelInfo) -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    let parsed = body.parse(handle, move |body, model| Ok(parse(body, model))).await?;
    parsed.inspect_err(|_| metrics::request_rejected(metrics::Rejection::Invalid, handle.tenant()))
}

/// Answers a chat or a completion in OpenAI's format.
pub async fn generate(
    handle: &RuntimeHandle,
    endpoint: Endpoint,
    request: ApiRequest,
) -> Result<HttpResponse, HttpError> {
    if request.stream.is_none() {
        let num_values = request.num_answer_values(handle.model().max_model_len as usize);
        let answer = generation::whole_answer(handle, endpoint, request).await?;
        return body::answer(handle, answer, num_values).await;
    }
    let chunks = Chunks::new(endpoint, &request, handle.model());
    Ok(EventBody::start(handle, request, chunks).await?.into_response())
}

/// Answers a request for embeddings.
pub async fn answer_embeddings(handle: &RuntimeHandle, asked: EmbeddingRequest) -> Result<HttpResponse, HttpError> {
    let EmbeddingRequest { mut request, format } = asked;
    let num_values = request.prompts.len() * handle.model().embedding_size as usize;
    let prompts = embedded(handle, &mut request).await?;
    match format.answer(prompts, handle.model()) {
        EmbeddingAnswer::Json(list) => body::answer(handle, list, num_values).await,
        EmbeddingAnswer::Bytes { body, metadata } => {
            let mut answer = HttpResponse::Ok();
            answer.content_type(ContentType::octet_stream());
            if let Some(metadata) = metadata {
                answer.insert_header(("metadata", metadata));
            }
            Ok(answer.body(body))
        }
    }
}

/// As [`parse`], where it takes long to make the request of the body: always on a text thread.
pub async fn prepare<B: BodyFields + 'static, T: Send + 'static>(
    handle: &RuntimeHandle,
    body: Body,
    prepare: fn(ParsedBody<B>, &ModelInfo, &Budget) -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    let prepared = body.work(handle, move |body, model, budget| Ok(prepare(body, model, budget))).await?;
    prepared.inspect_err(|_| metrics::request_rejected(metrics::Rejection::Invalid, handle.tenant()))
}

/// Answers a request for a text's tokens, or for the text of tokens, and charges it for them. `convert` makes the
/// answer, and says how many tokens were converted for it.
pub async fn convert<B: BodyFields + 'static, T: Serialize + 'static>(
    handle: &RuntimeHandle,
    request: &HttpRequest,
    body: Body,
    convert: impl FnOnce(ParsedBody<B>, &ModelInfo, &Budget) -> Result<(T, usize), ApiError> + Send + 'static,
) -> Result<HttpResponse, HttpError> {
    let work = move |body: ParsedBody<B>, model: &ModelInfo, budget: &Budget| {
        let (answer, num_tokens) = convert(body, model, budget)?;
        Ok((body::written(&answer)?, num_tokens))
    };
    let (answer, num_tokens) = body.work(handle, work).await?;
    if let Some(account) = request.extensions().get::<Arc<Account>>() {
        account.convert(num_tokens)?;
    }
    Ok(body::written_answer(answer))
}
