//! The state that a recording starts from.

use crate::engine::block_pool::BlockPool;
use crate::engine::prefix_cache::{BlockHash, EvictionPolicy};
use crate::engine::scheduler::{Scheduler, SchedulerConfig};
use serde::{Deserialize, Serialize};

/// The scheduler and both pools, between two events.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct State {
    pub scheduler: Scheduler,
    pub device: BlockPool,
    pub swap: BlockPool,
}

impl State {
    pub fn new(config: SchedulerConfig, eviction: EvictionPolicy) -> Self {
        let pool = |num_blocks| BlockPool::with_eviction(num_blocks, config.prefix_caching, eviction);
        let (device, swap) = (pool(config.num_device_blocks), pool(config.num_swap_blocks));
        Self { scheduler: Scheduler::new(config), device, swap }
    }

    /// The rules of outputs are code, with a state that the running engine goes on with.
    pub(super) fn without_rules(mut self) -> Self {
        self.scheduler.forget_rules();
        self
    }

    /// See [`Scheduler::redact`].
    pub(super) fn redact(&mut self, keep_tokens: bool, rename: impl Fn(BlockHash) -> BlockHash + Copy) {
        self.scheduler.redact(keep_tokens, rename);
        self.device.rename(rename);
        self.swap.rename(rename);
    }

    fn num_bytes(&self) -> usize {
        self.scheduler.num_bytes() + self.device.num_bytes() + self.swap.num_bytes()
    }
}

/// What a recording starts from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Keyframe {
    /// A scheduler and pools that have just been made.
    Start { config: SchedulerConfig, eviction: EvictionPolicy },
    /// Those at work.
    State(Box<State>),
}

impl Keyframe {
    pub fn state(&self) -> State {
        match self {
            Keyframe::Start { config, eviction } => State::new(config.clone(), *eviction),
            Keyframe::State(state) => State::clone(state),
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
