//! Owns the device's blocks and the prefix cache.

use crate::messages::{ClonePool, DropCached, Erase, Locate, PutBack, Reset, Serve, ViewPool};
use actix::{Actor, Context, Handler, MessageResult};
use pagetide_engine::allocation::serve;
use pagetide_engine::block_pool::BlockPool;
use pagetide_engine::kept_prefix;
use pagetide_engine::prefix_cache::EvictionPolicy;
use pagetide_metrics as metrics;

pub struct BlockAllocator {
    pool: BlockPool,
    block_size: usize,
    prefix_caching: bool,
    eviction: EvictionPolicy,
}

impl BlockAllocator {
    pub fn new(num_blocks: usize, block_size: usize, prefix_caching: bool, eviction: EvictionPolicy) -> Self {
        let pool = BlockPool::with_eviction(num_blocks, prefix_caching, eviction);
        Self { pool, block_size, prefix_caching, eviction }
    }

    fn report(&self) {
        let stats = self.pool.stats();
        metrics::set_device_blocks(stats.used, stats.cached, stats.free);
    }
}

impl Actor for BlockAllocator {
    type Context = Context<Self>;

    fn started(&mut self, _: &mut Self::Context) {
        self.report();
    }
}

impl Handler<Serve> for BlockAllocator {
    type Result = MessageResult<Serve>;

    fn handle(&mut self, Serve(demand): Serve, _: &mut Self::Context) -> Self::Result {
        let grant = serve(&mut self.pool, self.block_size, demand);
        self.report();
        MessageResult(grant)
    }
}

impl Handler<ViewPool> for BlockAllocator {
    type Result = MessageResult<ViewPool>;

    fn handle(&mut self, _: ViewPool, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.pool.view())
    }
}

impl Handler<ClonePool> for BlockAllocator {
    type Result = MessageResult<ClonePool>;

    fn handle(&mut self, _: ClonePool, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.pool.clone())
    }
}

impl Handler<DropCached> for BlockAllocator {
    type Result = MessageResult<DropCached>;

    fn handle(&mut self, _: DropCached, _: &mut Self::Context) -> Self::Result {
        self.pool.drop_cached();
        self.report();
        MessageResult(self.pool.stats())
    }
}

impl Handler<Locate> for BlockAllocator {
    type Result = MessageResult<Locate>;

    fn handle(&mut self, Locate(names): Locate, _: &mut Self::Context) -> Self::Result {
        MessageResult(kept_prefix::locate(&self.pool, &names))
    }
}

impl Handler<PutBack> for BlockAllocator {
    type Result = MessageResult<PutBack>;

    fn handle(&mut self, PutBack(names): PutBack, _: &mut Self::Context) -> Self::Result {
        let written = kept_prefix::put_back(&mut self.pool, &names);
        self.report();
        MessageResult(written)
    }
}

impl Handler<Erase> for BlockAllocator {
    type Result = MessageResult<Erase>;

    fn handle(&mut self, Erase(names): Erase, _: &mut Self::Context) -> Self::Result {
        let erased = kept_prefix::erase(&mut self.pool, &names);
        self.report();
        MessageResult(erased)
    }
}

impl Handler<Reset> for BlockAllocator {
    type Result = ();

    fn handle(&mut self, _: Reset, _: &mut Self::Context) {
        self.pool = BlockPool::with_eviction(self.pool.num_blocks(), self.prefix_caching, self.eviction);
        self.report();
    }
}
