//! Receives the bodies of requests and has them parsed.
//!
//! The HTTP threads write the streams of all clients, so they parse only small bodies. A larger body is parsed on a
//! text thread, which makes the request of it and drops it. What all large bodies hold together is bounded
//! (`limits.max_parsing_bytes`).

use crate::error::HttpError;
use crate::timeouts::is_timeout;
use actix_web::dev::{Decompress, Payload};
use actix_web::error::PayloadError;
use actix_web::http::header::{CONTENT_ENCODING, CONTENT_LENGTH, ContentType};
use actix_web::web::{Bytes, BytesMut, Data};
use actix_web::{FromRequest, HttpRequest, HttpResponse};
use futures_util::future::LocalBoxFuture;
use futures_util::{StreamExt, stream};
use pagetide_actors::runtime::RuntimeHandle;
use pagetide_actors::workers::Weight;
use pagetide_api::body::{self, BodyFields, Bounds, FieldSource, ParsedBody};
use pagetide_api::model_info::ModelInfo;
use pagetide_base::budget::Budget;
use pagetide_base::error::ApiError;
use pagetide_config::{LimitsConfig, ServerConfig};
use pagetide_engine::bill::Tenant;
use pagetide_metrics::{self as metrics, Rejection};
use serde::Serialize;
use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A body of up to this many bytes is parsed on the HTTP thread: that takes less time than asking another thread.
pub const SMALL_BYTES: usize = 16 << 10;
/// Bytes of a compressed body that are unpacked at once. gzip makes at most a thousand times as many of them.
const COMPRESSED_SLICE: usize = 1024;
/// An answer of up to this many values is written where it goes out.
const SMALL_ANSWER: usize = 4096;

/// Counts and limits what large bodies make the server hold. There is one for the server.
#[derive(Clone, Debug)]
pub struct Parsing {
    /// Bytes of large bodies, each from its first part until it has been parsed.
    held: Arc<AtomicUsize>,
    limits: LimitsConfig,
}

impl Parsing {
    pub fn new(limits: &LimitsConfig) -> Self {
        Self { held: Arc::default(), limits: limits.clone() }
    }

    /// Holds this many more bytes, if there is room for them.
    fn take(&self, num_bytes: usize) -> Result<(), ApiError> {
        let most = self.limits.max_parsing_bytes;
        let add = |held: usize| Some(held + num_bytes).filter(|held| most == 0 || *held <= most);
        let taken = self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        taken.map(drop).map_err(|_| {
            metrics::request_rejected(Rejection::ParsingFull, Tenant::default());
            ApiError::parsing_full(most)
        })
    }
}

/// What one body holds.
#[derive(Debug)]
struct Held {
    parsing: Parsing,
    num_bytes: usize,
}

impl Held {
    /// Holds what a body of `length` needs, where it is a large one.
    fn grow_to(&mut self, length: usize) -> Result<(), ApiError> {
        if length > SMALL_BYTES {
            self.parsing.take(length - self.num_bytes)?;
            self.num_bytes = length;
        }
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.parsing.held.fetch_sub(self.num_bytes, Ordering::Relaxed);
    }
}

/// A received body, or the error that receiving it met. Errors of the rest of the request are reported first.
pub struct Body(Result<(Bytes, Held), ApiError>);

impl FromRequest for Body {
    type Error = HttpError;
    type Future = LocalBoxFuture<'static, Result<Self, HttpError>>;

    fn from_request(request: &HttpRequest, payload: &mut Payload) -> Self::Future {
        let handle: &Data<RuntimeHandle> = request.app_data().expect("every app is made with a handle");
        let parsing: &Data<Parsing> = request.app_data().expect("every app is made with one");
        let (server, held) = (handle.model().server.get(), Held { parsing: parsing.get_ref().clone(), num_bytes: 0 });
        let announced = request.headers().get(CONTENT_LENGTH);
        let announced = announced.and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
        if announced.is_some_and(|length| length > server.max_body_bytes) {
            return Box::pin(ready(Ok(Self(Err(ApiError::body_too_large(server.max_body_bytes))))));
        }
        let payload = match request.headers().contains_key(CONTENT_ENCODING) {
            true => in_slices(payload.take()),
            false => payload.take(),
        };
        let payload = Decompress::from_headers(payload, request.headers());
        Box::pin(async move { Ok(Self(receive(payload, held, &server).await)) })
    }
}

/// The same body in slices, so that what one of them unpacks to can be looked at before the next.
fn in_slices(payload: Payload) -> Payload {
    let slices = |part: Result<Bytes, PayloadError>| {
        let (mut rest, error) = match part {
            Ok(part) => (part, None),
            Err(error) => (Bytes::new(), Some(Err(error))),
        };
        let slices =
            std::iter::from_fn(move || (!rest.is_empty()).then(|| Ok(rest.split_to(rest.len().min(COMPRESSED_SLICE)))));
        stream::iter(slices.chain(error))
    };
    Payload::Stream { payload: Box::pin(payload.flat_map(slices)) }
}

async fn receive(
    mut payload: Decompress<Payload>,
    mut held: Held,
    server: &ServerConfig,
) -> Result<(Bytes, Held), ApiError> {
    let mut body = BytesMut::new();
    while let Some(part) = payload.next().await {
        let part = part.map_err(|error| unreadable(&error, server))?;
        let length = body.len() + part.len();
        if length > server.max_body_bytes {
            return Err(ApiError::body_too_large(server.max_body_bytes));
        }
        // As they come: a client that announces a long body and sends nothing holds nothing.
        held.grow_to(length)?;
        body.extend_from_slice(&part);
    }
    Ok((body.freeze(), held))
}

fn unreadable(error: &PayloadError, server: &ServerConfig) -> ApiError {
    if is_timeout(error) {
        return ApiError::body_timeout(server.body_timeout_s);
    }
    ApiError::bad_request(format!("the request body cannot be read: {error}"))
}

/// Whether a body has fields of these names.
#[derive(Debug, Default)]
struct FieldsNamed(Vec<String>);

impl BodyFields for FieldsNamed {
    fn read<S: FieldSource>(&mut self, name: &str, _: &mut S) -> Result<bool, S::Error> {
        self.0.push(name.to_owned());
        Ok(false)
    }

    fn add_names(_: &mut Vec<&'static str>) {}
}

impl Body {
    /// Which of `names` the body has as fields.
    pub fn names<const N: usize>(&self, names: &[&str; N]) -> Result<[bool; N], ApiError> {
        let (bytes, _) = self.0.as_ref().map_err(Clone::clone)?;
        let bounds = Bounds { max_values: 0, max_prompts: 0 };
        let ParsedBody { body: FieldsNamed(given), problems } = body::read(bytes, bounds)?;
        problems.check_object()?;
        Ok(names.map(|name| given.iter().any(|other| other == name)))
    }

    /// Parses the body and makes what the endpoint works on of it with `parse`: a small body on this thread, a large
    /// body on a text thread.
    pub async fn parse<B: BodyFields, T: Send + 'static>(
        self,
        handle: &RuntimeHandle,
        parse: impl FnOnce(ParsedBody<B>, &ModelInfo) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (bytes, held) = self.0?;
        if bytes.len() <= SMALL_BYTES {
            return parse(read(&bytes, &held, handle.model())?, handle.model());
        }
        let model = handle.model().clone();
        let work = move |_: &Budget| {
            let body = read(&bytes, &held, &model)?;
            drop(bytes);
            parse(body, &model)
        };
        handle.text().run(Weight::Heavy, work).await
    }

    /// As [`Body::parse`], but always on a text thread: for work that takes long even for a small body.
    pub async fn work<B: BodyFields, T: Send + 'static>(
        self,
        handle: &RuntimeHandle,
        work: impl FnOnce(ParsedBody<B>, &ModelInfo, &Budget) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let ((bytes, held), model) = (self.0?, handle.model().clone());
        let weight = Weight::of_bytes(bytes.len());
        let work = move |budget: &Budget| work(read(&bytes, &held, &model)?, &model, budget);
        handle.text().run(weight, work).await
    }
}

fn read<B: BodyFields>(bytes: &[u8], held: &Held, model: &ModelInfo) -> Result<ParsedBody<B>, ApiError> {
    let bounds =
        Bounds { max_values: held.parsing.limits.max_body_values, max_prompts: model.server.get().max_requests };
    body::read(bytes, bounds)
}

/// Answers with `value`. `num_values` is about how many JSON values it has. A long value is written and dropped on a
/// text thread.
pub async fn answer(
    handle: &RuntimeHandle,
    value: impl Serialize + Send + 'static,
    num_values: usize,
) -> Result<HttpResponse, HttpError> {
    let written = match num_values <= SMALL_ANSWER {
        true => written(&value)?,
        false => handle.text().run(Weight::Heavy, move |_| written(&value)).await?,
    };
    Ok(written_answer(written))
}

/// `value` as JSON.
pub fn written(value: &impl Serialize) -> Result<Vec<u8>, ApiError> {
    serde_json::to_vec(value).map_err(|error| ApiError::engine(format!("the answer cannot be written: {error}")))
}

pub fn written_answer(json: Vec<u8>) -> HttpResponse {
    HttpResponse::Ok().content_type(ContentType::json()).body(json)
}
