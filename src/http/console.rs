//! The console: a page at `/` for chatting with the model and watching its memory, and the stream of events that the
//! page shows.
//!
//! The page is a few files inside the program (`files`); it chats, and makes its demonstration load, through the public
//! API. What the engine shows of itself goes: scheduler → [`Feed`] (one snapshot for all
//! watchers) → `frame` (which block is whose) → `encode` (what has changed since the watcher's last frame) → `events`.

mod enabled;
mod encode;
mod events;
mod feed;
mod files;
mod frame;

pub use events::events;
pub use feed::Feed;
pub use files::{file, is_file, page};

use pagetide_api::openapi::{Operation, Tag};
use serde_json::json;

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
             second otherwise. There are no texts and no tokens in them. Where server.api_keys or server.metrics_key is \
             set, this path wants server.metrics_key or server.admin_key. At most console.max_watchers may watch at once. The \
             format is the page's own and may change.",
        )
        .query_parameter("rate", "Frames a second at most; console.max_rate_hz is a bound on it, and the default.", rate)
        .fails(&[400, 403, 404, 429, 500, 503])
        .answers_events("The events.")
}
