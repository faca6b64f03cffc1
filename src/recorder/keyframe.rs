//! The state that a recording starts from.

use pagetide_engine::prefix_cache::EvictionPolicy;
use pagetide_engine::scheduler::SchedulerConfig;
use pagetide_engine::state::EngineState;
use serde::{Deserialize, Serialize};

/// What a recording starts from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Keyframe {
    /// A new scheduler and new pools.
    Start { config: SchedulerConfig, eviction: EvictionPolicy },
    /// A scheduler and pools at work, between two events.
    State(Box<EngineState>),
}

impl Keyframe {
    pub fn state(&self) -> EngineState {
        match self {
            Keyframe::Start { config, eviction } => EngineState::new(config.clone(), *eviction),
            Keyframe::State(state) => EngineState::clone(state),
        }
    }

    pub fn config(&self) -> &SchedulerConfig {
        match self {
            Keyframe::Start { config, .. } => config,
            Keyframe::State(state) => state.scheduler.config(),
        }
    }

    pub(super) fn num_bytes(&self) -> usize {
        match self {
            Keyframe::Start { .. } => size_of::<Self>(),
            Keyframe::State(state) => state.num_bytes(),
        }
    }
}
