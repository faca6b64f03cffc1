//! The console: a page at `/` where one chats with the model and watches its memory, and the stream of events that the
//! page shows.
//!
//! The page is a few files inside the program (`files`); it chats, and makes its demonstration load, through the public
//! API. What the engine shows of itself goes: scheduler → [`Feed`] (one snapshot for all who watch, and none for nobody) →
//! `frame` (which block is whose) → `encode` (what has changed since the watcher's last frame) → `events`.

mod encode;
mod events;
mod feed;
mod files;
mod frame;

pub use events::events;
pub use feed::Feed;
pub use files::{file, is_file, page};

use crate::config::ConsoleConfig;
use crate::error::ApiError;
use crate::http::auth::Keys;
use crate::http::openapi::{Operation, Tag};
use actix_web::dev::Payload;
use actix_web::{FromRequest, HttpRequest};
use serde_json::json;
use std::future::{Ready, ready};

/// Whoever sent the request may see what all requests hold: where keys are asked for, who has the admin's; and where there
/// is none, who has any. Handlers ask for it, so that no way of writing a path leads around it.
pub struct Watcher;

impl FromRequest for Watcher {
    type Error = ApiError;
    type Future = Ready<Result<Self, ApiError>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let keys: &Keys = request.app_data().expect("every app is made with keys");
        let (api_keys, admin_key) = &*keys.get();
        ready(match (api_keys.is_empty(), admin_key.is_set()) {
            (true, _) => Ok(Self),
            (false, true) => admin_key.check(request.headers()).map(|()| Self),
            (false, false) => api_keys.who(request.headers()).map(|_| Self).ok_or_else(ApiError::unauthorized),
        })
    }
}

/// Refuses where the console is switched off.
fn check_enabled(config: &ConsoleConfig, path: &str) -> Result<(), ApiError> {
    if config.enabled { Ok(()) } else { Err(ApiError::not_found(path)) }
}

pub fn describe_page() -> Operation {
    Operation::new(Tag::Server, "console", "The console, a page for a browser")
        .about("404 where console.enabled is false.")
        .fails(&[404])
        .answers_text("text/html", "The page.")
}

pub fn describe_file() -> Operation {
    Operation::new(Tag::Server, "console_file", "A file of the console's page")
        .path_parameter("file", "Its name.")
        .answers_text("text/javascript", "The file.")
}

pub fn describe_events() -> Operation {
    let rate = json!({"type": "number", "minimum": events::MIN_RATE_HZ, "maximum": events::MAX_RATE_HZ});
    Operation::new(Tag::Server, "console_events", "What the engine holds, as it changes: for the console's page")
        .about(
            "Server-sent events, until the client leaves: hello, then a frame whenever something has changed, and one a \
             second otherwise. There are no texts and no tokens in them. Where keys are asked for, this path wants \
             server.admin_key; where that is not set, any key. At most console.max_watchers may watch at once. The \
             format is the page's own and may change.",
        )
        .query_parameter("rate", "Frames a second at most; console.max_rate_hz is a bound on it, and the default.", rate)
        .fails(&[400, 404, 429, 500, 503])
        .answers_text("text/event-stream", "The events.")
}
