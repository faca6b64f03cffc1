//! [`ApiError`]s as HTTP answers.

use actix_web::http::StatusCode;
use actix_web::http::header::{ContentType, RETRY_AFTER};
use actix_web::{HttpResponse, ResponseError};
use pagetide_api::openai::error::ErrorAnswer;
use pagetide_base::error::ApiError;
use std::fmt;

/// The error of a handler: `?` makes it of an [`ApiError`].
#[derive(Debug)]
pub struct HttpError(ApiError);

impl From<ApiError> for HttpError {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl fmt::Display for HttpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl ResponseError for HttpError {
    fn status_code(&self) -> StatusCode {
        StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    fn error_response(&self) -> HttpResponse {
        let mut response = HttpResponse::build(self.status_code());
        response.insert_header(ContentType::json());
        if let Some(seconds) = self.0.retry_after_s {
            response.insert_header((RETRY_AFTER, seconds));
        }
        let mut response = response.json(ErrorAnswer::from(&self.0));
        // Middleware may write it in another format.
        response.extensions_mut().insert(self.0.clone());
        response
    }
}

/// The answer that says `error`.
pub fn error_response(error: ApiError) -> HttpResponse {
    HttpError(error).error_response()
}
