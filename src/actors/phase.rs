//! How far the server's end has come.

use std::sync::Arc;
use tokio::sync::watch;

/// In this order, and never back.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Phase {
    #[default]
    Serving,
    /// Whoever asks is told that this server goes; requests are still taken.
    Leaving,
    /// Nothing new is taken. What runs goes on.
    Draining,
    /// What still runs ends with an error.
    Over,
}

/// The phase; all clones say the same.
#[derive(Clone, Default, Debug)]
pub struct LivePhase(Arc<watch::Sender<Phase>>);

impl LivePhase {
    pub fn get(&self) -> Phase {
        *self.0.borrow()
    }

    /// Goes on to `phase`, if that is not behind already.
    pub fn advance(&self, phase: Phase) {
        self.0.send_if_modified(|now| {
            let is_later = phase > *now;
            *now = phase.max(*now);
            is_later
        });
    }

    /// Completes when `phase` has come.
    pub fn reached(&self, phase: Phase) -> impl Future<Output = ()> + use<> {
        let mut receiver = self.0.subscribe();
        let sender = self.0.clone();
        async move {
            // The sender is here, so that the channel cannot close.
            let _ = receiver.wait_for(|now| *now >= phase).await;
            drop(sender);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn phases_only_advance_and_wake_who_waits() {
        let phase = LivePhase::default();
        let mut over = Box::pin(phase.reached(Phase::Over));
        phase.advance(Phase::Draining);
        phase.advance(Phase::Leaving);
        assert_eq!(phase.get(), Phase::Draining);
        assert!((&mut over).now_or_never().is_none());
        phase.clone().advance(Phase::Over);
        assert!(over.now_or_never().is_some());
        assert!(phase.reached(Phase::Serving).now_or_never().is_some());
    }
}
