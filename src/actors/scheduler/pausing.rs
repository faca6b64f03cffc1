//! Pauses the engine between two steps.

use super::SchedulerActor;
use crate::messages::SetPaused;
use actix::Handler;

impl Handler<SetPaused> for SchedulerActor {
    type Result = ();

    fn handle(&mut self, SetPaused(is_paused): SetPaused, ctx: &mut Self::Context) {
        if self.is_paused != is_paused {
            tracing::info!("the engine {}", if is_paused { "is paused" } else { "goes on" });
        }
        self.is_paused = is_paused;
        self.wake_soon(ctx);
    }
}
