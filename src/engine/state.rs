//! The engine without actors, device or clock: the scheduler and both pools, driven by calls.

use crate::allocation::{Demand, find, resize_swap, serve, serve_swap};
use crate::block_pool::{BlockPool, PoolStats};
use crate::kept_prefix;
use crate::prefix_cache::{BlockHash, EvictionPolicy};
use crate::scheduler::{NextStep, PlannedStep, Scheduler, SchedulerConfig, Tuning};
use pagetide_base::ids::{BlockId, RequestId};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EngineState {
    pub scheduler: Scheduler,
    /// Blocks of the device, and the prefix cache.
    pub device: BlockPool,
    /// Blocks of the swap pool.
    pub swap: BlockPool,
}

impl EngineState {
    pub fn new(config: SchedulerConfig, eviction: EvictionPolicy) -> Self {
        let pool = |num_blocks| BlockPool::with_eviction(num_blocks, config.prefix_caching, eviction);
        let (device, swap) = (pool(config.num_device_blocks), pool(config.num_swap_blocks));
        Self { scheduler: Scheduler::new(config), device, swap }
    }

    /// Plans a step at time `now`, in seconds since some moment. `None` where none can be planned:
    /// [`NextStep::AwaitResults`] or [`NextStep::Idle`].
    pub fn plan(&mut self, now: f64) -> Option<PlannedStep> {
        self.plan_seen(now, |_| ())
    }

    /// [`EngineState::plan`] for those who want to see what is asked of the device pool.
    pub fn plan_seen(&mut self, now: f64, mut see: impl FnMut(&Demand)) -> Option<PlannedStep> {
        let Self { scheduler, device, swap } = self;
        let block_size = scheduler.config().block_size;
        let mut next = scheduler.next_step(now);
        loop {
            next = match next {
                NextStep::Find(finds) => scheduler.found(find(swap, &finds)),
                NextStep::Serve(demand) => {
                    see(&demand);
                    scheduler.granted(serve(device, block_size, demand))
                }
                NextStep::Reserve(demand) => scheduler.reserved(serve_swap(swap, demand)),
                NextStep::Execute(planned) => return Some(planned),
                NextStep::AwaitResults | NextStep::Idle => return None,
            }
        }
    }

    /// Changes settings between two steps. Returns how the swap pool is then.
    pub fn tune(&mut self, tuning: &Tuning) -> PoolStats {
        let stats = resize_swap(&mut self.swap, tuning.num_swap_blocks);
        self.scheduler.tune(tuning, stats);
        stats
    }

    /// Drops the prefix caches of both pools. The scheduler must have no work: what it has planned counts on blocks
    /// that are cached in the swap pool.
    pub fn drop_cached(&mut self) {
        debug_assert!(!self.scheduler.has_work(), "sequences count on cached blocks");
        self.device.drop_cached();
        self.swap.drop_cached();
    }

    /// Puts a part of a prefix into the device pool's cache, between two steps. Returns the blocks whose content has to
    /// be written: see [`kept_prefix::put_back`].
    pub fn put_back(&mut self, names: &[BlockHash]) -> Vec<(usize, BlockId)> {
        kept_prefix::put_back(&mut self.device, names)
    }

    /// Forgets the blocks of a prefix that no table holds, in both pools, between two steps.
    pub fn erase(&mut self, names: &[BlockHash]) {
        kept_prefix::erase(&mut self.device, names);
        kept_prefix::erase(&mut self.swap, names);
    }

    /// The executor has lost all KV: see [`Scheduler::fail_running`]. Returns the requests that fail with it.
    pub fn fail_running(&mut self) -> Vec<RequestId> {
        let failed = self.scheduler.fail_running();
        (self.device, self.swap) = (self.device.renewed(), self.swap.renewed());
        failed
    }

    /// Bytes of memory that it takes, about.
    pub fn num_bytes(&self) -> usize {
        self.scheduler.num_bytes() + self.device.num_bytes() + self.swap.num_bytes()
    }
}
