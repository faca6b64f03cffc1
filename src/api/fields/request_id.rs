//! The id that a client gives its request.

use crate::body::body_fields;
use crate::checks::shown;
use crate::request::ApiRequest;
use pagetide_base::error::ApiError;

/// Characters of an id.
const MAX_REQUEST_ID: usize = 256;

body_fields! {
    pub struct RequestIdFields {
        /// The request's id: that of the answer after its prefix. No other request under way may have it. Default: a
        /// random one.
        #[schema(min_length = 1, max_length = 256)]
        pub request_id: Option<String>,
        /// SGLang's name for request_id.
        #[schema(min_length = 1, max_length = 256)]
        pub rid: Option<String>,
    }
}

impl RequestIdFields {
    /// The request with the client's id, if it gave one.
    pub fn name(self, request: ApiRequest) -> Result<ApiRequest, ApiError> {
        let (param, id) = match (self.request_id, self.rid) {
            (Some(_), Some(_)) => return Err(ApiError::invalid("rid", "rid and request_id cannot be combined")),
            (Some(id), None) => ("request_id", id),
            (None, Some(id)) => ("rid", id),
            (None, None) => return Ok(request),
        };
        if is_request_id(&id) {
            return Ok(ApiRequest { id, ..request });
        }
        let got = shown(&id.into());
        let message = format!("{param} must have 1 to {MAX_REQUEST_ID} visible ASCII characters, got {got}");
        Err(ApiError::invalid(param, message))
    }
}

/// Whether a request can have this id.
pub fn is_request_id(id: &str) -> bool {
    (1..=MAX_REQUEST_ID).contains(&id.len()) && id.chars().all(|letter| letter.is_ascii_graphic())
}
