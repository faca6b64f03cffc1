//! Takes one snapshot for all watchers, and none while there are no watchers.

use super::frame::{Frame, MAX_ROWS};
use pagetide_actors::places::{Place, Places};
use pagetide_actors::runtime::RuntimeHandle;
use pagetide_base::error::ApiError;
use pagetide_engine::bill::Tenant;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// Snapshots may take at most this share of the engine's thread: with huge pools, frames are rarer.
const MAX_SHARE: u32 = 200;

/// What all watchers share.
pub struct Feed {
    seats: Places,
    began: Instant,
    latest: Mutex<Option<TakenFrame>>,
}

struct TakenFrame {
    frame: Arc<Frame>,
    at: Instant,
}

impl Default for Feed {
    fn default() -> Self {
        Self { seats: Places::default(), began: Instant::now(), latest: Mutex::default() }
    }
}

impl Feed {
    /// A place among `most` watchers, until it is dropped.
    pub fn take_seat(&self, most: usize) -> Result<Place, ApiError> {
        let seat = self.seats.try_take(Tenant::default(), most, most);
        seat.map_err(|_| ApiError::too_many_watchers(most))
    }

    /// A frame later than number `after`: the latest, or a new one. A new one is taken at the earliest `interval` after
    /// the one before.
    pub async fn next(&self, handle: &RuntimeHandle, after: u64, interval: Duration) -> Result<Arc<Frame>, ApiError> {
        // A watcher that comes later waits here, and gets the same frame.
        let mut latest = self.latest.lock().await;
        let mut number = 1;
        if let Some(TakenFrame { frame, at }) = &*latest {
            let due = *at + interval.max(frame.cost * MAX_SHARE);
            if frame.number > after && Instant::now() < due {
                return Ok(frame.clone());
            }
            number = frame.number + 1;
            tokio::time::sleep_until(due.into()).await;
        }
        let snapshot = handle.look(MAX_ROWS).await?;
        let at = Instant::now();
        let frame = Arc::new(Frame::new(number, self.began, snapshot));
        *latest = Some(TakenFrame { frame: frame.clone(), at });
        Ok(frame)
    }
}
