//! `POST /abort_requests`.

use crate::body::{ParsedBody, body_fields};
use crate::model_info::ModelInfo;
use crate::openapi::{Operation, Tag};
use pagetide_base::error::ApiError;

body_fields! {
    pub struct AbortFields {
        /// The ids that the requests were given, or those of their answers.
        request_ids: Option<Vec<String>>,
    }
}

/// `id`: the operation's name in generated clients.
pub fn describe(id: &'static str) -> Operation {
    Operation::new(Tag::Generation, id, "Ends requests under way")
        .about(
            "A request ends with the text that it has, and the finish reason abort. A client can end its own requests \
             alone. Ids of other requests are ignored: they may have ended.",
        )
        .body("AbortRequest")
        .fields::<AbortFields>()
        .requires(&["request_ids"])
}

/// The ids.
pub fn parse(ParsedBody { body, problems }: ParsedBody<AbortFields>, _: &ModelInfo) -> Result<Vec<String>, ApiError> {
    problems.check()?;
    body.request_ids.ok_or_else(|| ApiError::invalid("request_ids", "request_ids is required"))
}
