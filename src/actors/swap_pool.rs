//! Owns the swap tier's blocks, in host memory.

use crate::actors::messages::{Reserve, Reset};
use crate::engine::allocation::serve_swap;
use crate::engine::block_pool::BlockPool;
use crate::metrics;
use actix::{Actor, Context, Handler, MessageResult};

pub struct SwapPool {
    pool: BlockPool,
}

impl SwapPool {
    pub fn new(num_blocks: usize) -> Self {
        Self { pool: BlockPool::new(num_blocks, false) }
    }

    fn report(&self) {
        let stats = self.pool.stats();
        metrics::set_swap_blocks(stats.used, stats.free);
    }
}

impl Actor for SwapPool {
    type Context = Context<Self>;

    fn started(&mut self, _: &mut Self::Context) {
        self.report();
    }
}

impl Handler<Reserve> for SwapPool {
    type Result = MessageResult<Reserve>;

    fn handle(&mut self, Reserve(demand): Reserve, _: &mut Self::Context) -> Self::Result {
        let grant = serve_swap(&mut self.pool, demand);
        self.report();
        MessageResult(grant)
    }
}

impl Handler<Reset> for SwapPool {
    type Result = ();

    fn handle(&mut self, _: Reset, _: &mut Self::Context) {
        self.pool = BlockPool::new(self.pool.num_blocks(), false);
        self.report();
    }
}
