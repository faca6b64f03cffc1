//! `POST /abort_request`, `/pause_generation` and `/continue_generation`.

use crate::body::{ParsedBody, body_fields};
use crate::chat::template::words;
use crate::checks::one_of;
use crate::model_info::ModelInfo;
use pagetide_base::error::ApiError;
use serde::Serialize;
use utoipa::ToSchema;

body_fields! {
    pub struct AbortFields {
        /// The id of the request: the rid that it was given, or the id of its answer.
        rid: Option<String>,
        /// Ends all requests of the client.
        #[schema(default = false)]
        abort_all: bool,
        /// What SGLang's answer says of the end. Without effect.
        abort_message: Option<String>,
    }
}

body_fields! {
    pub struct PauseFields {
        /// abort: all requests end, and later ones wait. in_place: all requests wait.
        #[schema(value_type = Option<PauseModeWord>, default = "abort")]
        mode: Option<String>,
    }
}

words! {
    PauseModeWord { Abort = "abort", InPlace = "in_place" }
}

body_fields! {
    pub struct ContinueFields {
        /// Whether SGLang gives memory back to the driver first. Without effect.
        #[schema(default = true)]
        torch_empty_cache: Option<bool>,
    }
}

/// Which requests are to end.
#[derive(Debug, PartialEq)]
pub enum AbortedRequests {
    One(String),
    All,
}

pub fn parse_abort(
    ParsedBody { body, problems }: ParsedBody<AbortFields>,
    _: &ModelInfo,
) -> Result<AbortedRequests, ApiError> {
    problems.check_object()?;
    problems.check()?;
    body.aborted()
}

impl AbortFields {
    fn aborted(self) -> Result<AbortedRequests, ApiError> {
        match self.rid.filter(|rid| !rid.is_empty()) {
            _ if self.abort_all => Ok(AbortedRequests::All),
            Some(rid) => Ok(AbortedRequests::One(rid)),
            None => Err(ApiError::invalid("rid", "rid is required where abort_all is false")),
        }
    }
}

/// What becomes of the requests under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseMode {
    Abort,
    InPlace,
}

pub fn parse_pause(
    ParsedBody { body, problems }: ParsedBody<PauseFields>,
    _: &ModelInfo,
) -> Result<PauseMode, ApiError> {
    problems.check_object()?;
    problems.check()?;
    if body.mode.as_deref() == Some("retract") {
        let message =
            "mode: retract is not supported, because weights do not change here; use in_place, which keeps the KV";
        return Err(ApiError::invalid("mode", message));
    }
    one_of("mode", body.mode.as_deref(), PauseModeWord::WORDS)?;
    Ok(if body.mode.as_deref() == Some("in_place") { PauseMode::InPlace } else { PauseMode::Abort })
}

pub fn parse_continue(ParsedBody { problems, .. }: ParsedBody<ContinueFields>, _: &ModelInfo) -> Result<(), ApiError> {
    problems.check_object()?;
    problems.check()
}

/// What SGLang says of a pause and its end.
#[derive(Serialize, ToSchema)]
pub struct GenerationState {
    message: &'static str,
    /// ok.
    status: &'static str,
}

impl GenerationState {
    pub const PAUSED: Self = Self { message: "Generation paused successfully.", status: "ok" };
    pub const CONTINUED: Self = Self { message: "Generation continued successfully.", status: "ok" };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::read_value;
    use serde_json::{Value, json};

    #[test]
    fn a_body_that_says_nothing_aborts_nothing() {
        let parsed = |body: Value| read_value::<AbortFields>(&body)?.body.aborted();
        assert_eq!(parsed(json!({"rid": "", "abort_all": true})), Ok(AbortedRequests::All));
        assert_eq!(parsed(json!({"rid": "a"})), Ok(AbortedRequests::One("a".into())));
        for nothing in [json!({}), json!({"rid": ""}), json!({"rid": null, "abort_all": false})] {
            assert_eq!(parsed(nothing).unwrap_err().param.as_deref(), Some("rid"));
        }
    }
}
