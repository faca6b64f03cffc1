//! Owns the swap pool's blocks in host memory: those of swapped sequences, and the second level of the prefix cache.

use crate::messages::{
    AskSwapPool, ClonePool, Discard, DropCached, Erase, FindHeld, Locate, Reserve, Reset, Resize, ViewPool,
};
use actix::{Actor, Context, Handler, MessageResult, Recipient};
use pagetide_engine::allocation::{find, resize_swap, serve_swap};
use pagetide_engine::block_pool::{BlockPool, PoolStats};
use pagetide_engine::kept_prefix;
use pagetide_engine::prefix_cache::EvictionPolicy;
use pagetide_metrics as metrics;

pub struct SwapPool {
    pool: BlockPool,
    prefix_caching: bool,
    eviction: EvictionPolicy,
    /// The executor owns the blocks' memory.
    executor: Recipient<Discard>,
}

impl SwapPool {
    pub fn new(
        num_blocks: usize,
        prefix_caching: bool,
        eviction: EvictionPolicy,
        executor: Recipient<Discard>,
    ) -> Self {
        let pool = BlockPool::with_eviction(num_blocks, prefix_caching, eviction);
        Self { pool, prefix_caching, eviction, executor }
    }

    /// Returns the memory of blocks that have left the pool. Copies into them were planned earlier, and the executor
    /// already has these plans.
    fn discard_retired(&mut self) {
        let retired = self.pool.take_retired();
        if !retired.is_empty() {
            self.executor.do_send(Discard(retired));
        }
    }

    fn report(&self) {
        let PoolStats { used, cached, free, draining, .. } = self.pool.stats();
        metrics::set_swap_blocks(used - draining, cached, free, draining);
    }
}

impl Actor for SwapPool {
    type Context = Context<Self>;

    fn started(&mut self, _: &mut Self::Context) {
        self.report();
    }
}

impl Handler<FindHeld> for SwapPool {
    type Result = MessageResult<FindHeld>;

    fn handle(&mut self, FindHeld(finds): FindHeld, _: &mut Self::Context) -> Self::Result {
        MessageResult(find(&self.pool, &finds))
    }
}

impl Handler<Reserve> for SwapPool {
    type Result = MessageResult<Reserve>;

    fn handle(&mut self, Reserve(demand): Reserve, _: &mut Self::Context) -> Self::Result {
        let grant = serve_swap(&mut self.pool, demand);
        self.discard_retired();
        self.report();
        MessageResult(grant)
    }
}

impl Handler<Resize> for SwapPool {
    type Result = MessageResult<Resize>;

    fn handle(&mut self, Resize(num_blocks): Resize, _: &mut Self::Context) -> Self::Result {
        let stats = resize_swap(&mut self.pool, num_blocks);
        self.discard_retired();
        self.report();
        MessageResult(stats)
    }
}

impl Handler<AskSwapPool> for SwapPool {
    type Result = MessageResult<AskSwapPool>;

    fn handle(&mut self, _: AskSwapPool, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.pool.stats())
    }
}

impl Handler<ViewPool> for SwapPool {
    type Result = MessageResult<ViewPool>;

    fn handle(&mut self, _: ViewPool, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.pool.view())
    }
}

impl Handler<ClonePool> for SwapPool {
    type Result = MessageResult<ClonePool>;

    fn handle(&mut self, _: ClonePool, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.pool.clone())
    }
}

impl Handler<DropCached> for SwapPool {
    type Result = MessageResult<DropCached>;

    fn handle(&mut self, _: DropCached, _: &mut Self::Context) -> Self::Result {
        self.pool.drop_cached();
        self.report();
        MessageResult(self.pool.stats())
    }
}

impl Handler<Locate> for SwapPool {
    type Result = MessageResult<Locate>;

    fn handle(&mut self, Locate(names): Locate, _: &mut Self::Context) -> Self::Result {
        MessageResult(kept_prefix::locate(&self.pool, &names))
    }
}

impl Handler<Erase> for SwapPool {
    type Result = MessageResult<Erase>;

    fn handle(&mut self, Erase(names): Erase, _: &mut Self::Context) -> Self::Result {
        let erased = kept_prefix::erase(&mut self.pool, &names);
        self.report();
        MessageResult(erased)
    }
}

impl Handler<Reset> for SwapPool {
    type Result = ();

    fn handle(&mut self, _: Reset, _: &mut Self::Context) {
        self.pool = BlockPool::with_eviction(self.pool.num_blocks(), self.prefix_caching, self.eviction);
        self.report();
    }
}
