//! `/console/events`: the frames as server-sent events.

use super::enabled::check_enabled;
use super::frame::Frame;
use super::{Feed, encode};
use crate::auth::Watcher;
use crate::error::HttpError;
use actix_web::http::header::CACHE_CONTROL;
use actix_web::web::{Bytes, Data, Query};
use actix_web::{HttpRequest, HttpResponse};
use futures_util::stream::unfold;
use pagetide_actors::live_settings::LiveSettings;
use pagetide_actors::places::Place;
use pagetide_actors::runtime::RuntimeHandle;
use pagetide_api::events::write_named_event;
use pagetide_api::openai::error::ErrorAnswer;
use pagetide_base::error::ApiError;
use serde::Deserialize;
use serde_json::json;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Frames per second that a watcher may ask for.
pub const MIN_RATE_HZ: f64 = 1.0;
pub const MAX_RATE_HZ: f64 = 60.0;
/// A frame comes at least this often, even if nothing changes, so that both sides know that the other is there.
const IDLE: Duration = Duration::from_secs(1);

#[derive(Deserialize)]
pub struct Options {
    rate: Option<f64>,
}

/// One watcher.
struct Watching {
    handle: Data<RuntimeHandle>,
    live_settings: Data<LiveSettings>,
    feed: Data<Feed>,
    rate_hz: f64,
    /// The last frame that it was sent.
    last: Option<Arc<Frame>>,
    /// The number of the latest frame that it has looked at.
    seen: u64,
    /// When the last event went out.
    said: Instant,
    due: Instant,
    _seat: Place,
}

pub async fn events(
    _: Watcher,
    request: HttpRequest,
    options: Result<Query<Options>, actix_web::Error>,
    handle: Data<RuntimeHandle>,
    live_settings: Data<LiveSettings>,
    feed: Data<Feed>,
) -> Result<HttpResponse, HttpError> {
    let config = live_settings.console().await;
    check_enabled(&config, request.path())?;
    if handle.is_draining() {
        return Err(ApiError::draining().into());
    }
    let rate = options.map(|options| options.rate.unwrap_or(config.max_rate_hz)).ok();
    let rate_hz = rate.filter(|rate| (MIN_RATE_HZ..=MAX_RATE_HZ).contains(rate)).ok_or_else(|| {
        let message = format!("rate must be a number from {MIN_RATE_HZ} to {MAX_RATE_HZ}, in frames a second");
        ApiError::invalid("rate", message)
    })?;
    let seat = feed.take_seat(config.max_watchers)?;
    let now = Instant::now();
    let watching =
        Watching { handle, live_settings, feed, rate_hz, last: None, seen: 0, said: now, due: now, _seat: seat };
    let frames = unfold(Some(watching), |watching| async {
        let (bytes, watching) = watching?.next().await?;
        Some((Ok::<_, Infallible>(bytes), watching))
    });
    Ok(HttpResponse::Ok()
        .content_type("text/event-stream; charset=utf-8")
        .insert_header((CACHE_CONTROL, "no-cache"))
        // The same headers as streams of answers have.
        .insert_header(("X-Accel-Buffering", "no"))
        .streaming(Box::pin(frames)))
}

impl Watching {
    /// The next event, and the watcher that waits for the one after it (none after the last event). `None`: the server
    /// stops, or the console has been switched off.
    async fn next(mut self) -> Option<(Bytes, Option<Self>)> {
        loop {
            tokio::time::sleep_until(self.due.into()).await;
            let config = self.live_settings.console().await;
            if self.handle.is_draining() || !config.enabled {
                return None;
            }
            let shortest = Duration::from_secs_f64(1.0 / config.max_rate_hz);
            let frame = match self.feed.next(&self.handle, self.seen, shortest).await {
                Ok(frame) => frame,
                Err(error) => {
                    let mut out = Vec::new();
                    write_named_event(&mut out, "error", &ErrorAnswer::from(&error));
                    return Some((out.into(), None));
                }
            };
            self.seen = frame.number;
            // A watcher that wants every frame comes early and waits for the next one. Others skip some.
            let period = Duration::from_secs_f64(1.0 / self.rate_hz);
            self.due = Instant::now() + if period > shortest { period } else { shortest / 2 };
            let is_news = self.last.as_ref().is_none_or(|last| differ(last, &frame));
            if !is_news && self.said.elapsed() < IDLE {
                continue;
            }
            let mut out = Vec::new();
            if self.last.is_none() {
                write_named_event(&mut out, "hello", &self.hello(&frame));
            }
            write_named_event(&mut out, "frame", &encode::frame(&frame, self.last.as_deref()));
            (self.last, self.said) = (Some(frame), Instant::now());
            return Some((out.into(), Some(self)));
        }
    }

    fn hello(&self, frame: &Frame) -> serde_json::Value {
        let model = self.handle.model();
        json!({
            "model": model.served_name,
            "version": env!("CARGO_PKG_VERSION"),
            "max_model_len": model.max_model_len,
            "block_size": frame.block_size,
            "block_bytes": frame.block_bytes,
        })
    }
}

fn differ(old: &Frame, new: &Frame) -> bool {
    old.totals != new.totals || old.rows != new.rows || old.device != new.device || old.swap != new.swap
}
