//! The phases of a server's shutdown.

use std::sync::Arc;
use tokio::sync::watch;

/// The phases in their order. A server never goes back.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Phase {
    #[default]
    Serving,
    /// `/ready` says no, but requests are still accepted.
    Leaving,
    /// New requests are refused. Running ones continue.
    Draining,
    /// Requests that still run end with an error.
    Over,
}

/// The current phase. All clones share it.
#[derive(Clone, Default, Debug)]
pub struct LivePhase(Arc<watch::Sender<Phase>>);

impl LivePhase {
    pub fn get(&self) -> Phase {
        *self.0.borrow()
    }

    /// Advances to `phase`, unless the server is already beyond it.
    pub fn advance(&self, phase: Phase) {
        self.0.send_if_modified(|now| {
            let is_later = phase > *now;
            *now = phase.max(*now);
            is_later
        });
    }

    /// Completes when `phase` is reached.
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
    fn phases_only_advance_and_wake_waiters() {
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
