//! Compressed bodies. Requests may come with gzip or deflate (`Content-Encoding`); their limit is that of
//! the bytes that they unpack to. Answers are compressed for clients that ask for it (`Accept-Encoding`), with the
//! exceptions below.

use crate::error::error_response;
use actix_web::Error;
use actix_web::body::{BodySize, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::StatusCode;
use actix_web::http::header::{CONTENT_ENCODING, ContentEncoding};
use actix_web::middleware::Next;
use pagetide_base::error::ApiError;

/// Below this a compressed body saves nothing: it goes out in one packet either way.
const MIN_BYTES: u64 = 1024;
/// Encodings that request bodies may have.
const READABLE: [&str; 3] = ["gzip", "deflate", "identity"];

/// Refuses request bodies in other encodings. Tells the compressor, which is further out, to leave short bodies and
/// streams alone: an event must go out when it happens, and not when the compressor has enough for a block.
pub async fn encodings(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse, Error> {
    if let Some(encoding) = request.headers().get(CONTENT_ENCODING)
        && !READABLE.iter().any(|known| encoding.as_bytes().eq_ignore_ascii_case(known.as_bytes()))
    {
        let error = ApiError::unsupported_encoding(&String::from_utf8_lossy(encoding.as_bytes()));
        return Ok(request.into_response(error_response(error)));
    }
    let mut answer = next.call(request).await?.map_into_boxed_body();
    if !matches!(answer.response().body().size(), BodySize::Sized(MIN_BYTES..)) {
        answer.headers_mut().insert(CONTENT_ENCODING, ContentEncoding::Identity.to_header_value());
    }
    Ok(answer)
}

/// Removes what [`encodings`] has written, which is not for clients, and gives the compressor's one error the API's
/// form.
pub async fn without_identity(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse, Error> {
    let mut answer = next.call(request).await?.map_into_boxed_body();
    if answer.status() == StatusCode::NOT_ACCEPTABLE {
        let error = ApiError::not_acceptable();
        return Ok(answer.into_response(error_response(error)));
    }
    let headers = answer.headers_mut();
    if headers.get(CONTENT_ENCODING).is_some_and(|encoding| encoding == ContentEncoding::Identity.as_str()) {
        headers.remove(CONTENT_ENCODING);
    }
    Ok(answer)
}
