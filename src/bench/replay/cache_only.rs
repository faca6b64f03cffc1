//! The hits of a cache of a given size on a trace. Requests come one after the other, without time.

use super::hindsight::best_by_uses_and_age;
use super::optimum::{CacheHolding, optimum};
use super::trace::Trace;
use pagetide_base::ids::BlockId;
use pagetide_engine::block_pool::BlockPool;
use pagetide_engine::prefix_cache::EvictionPolicy;
use serde::Serialize;

/// Hit rate in blocks of each eviction policy.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CacheRow {
    pub capacity_blocks: usize,
    /// Blocks of all prompts, the last of each included however full it is.
    pub asked: usize,
    pub lru: f64,
    pub adaptive: f64,
    /// Upper bound for policies that know only the number of uses and the age of a block, and that know in advance how
    /// such blocks are used.
    pub by_uses_and_age: f64,
    /// With the future known, in a pool: a request's blocks are in it while it runs.
    pub optimum_of_pool: f64,
    /// With the future known, and blocks need not take a place in the cache to be used.
    pub optimum: f64,
}

impl CacheRow {
    pub fn new(trace: &Trace, capacity_blocks: usize) -> Self {
        let asked = trace.num_asked();
        let rate = |num_hits: usize| num_hits as f64 / asked.max(1) as f64;
        let best = |holding| rate(optimum(trace.requests.iter(), capacity_blocks, holding));
        let of = |policy| rate(replay(trace, capacity_blocks, policy));
        Self {
            capacity_blocks,
            asked,
            lru: of(EvictionPolicy::Lru),
            adaptive: of(EvictionPolicy::Adaptive),
            by_uses_and_age: best_by_uses_and_age(&trace.requests, capacity_blocks) / asked.max(1) as f64,
            optimum_of_pool: best(CacheHolding::Request),
            optimum: best(CacheHolding::Bypass),
        }
    }
}

/// Blocks hit in a pool that starts empty. A request takes the longest cached prefix, computes the rest in blocks of
/// the pool, and releases all of them, the last block first. A request that is longer than the pool is cut.
pub fn replay(trace: &Trace, capacity_blocks: usize, policy: EvictionPolicy) -> usize {
    let mut pool = BlockPool::with_eviction(capacity_blocks, true, policy);
    let mut num_hits = 0;
    let mut table: Vec<BlockId> = Vec::new();
    for request in &trace.requests {
        // As if the last block were full: traces name it, and so it is asked for.
        let names = trace.all_names(request);
        let names = &names[..names.len().min(capacity_blocks)];
        table.extend(names.iter().map_while(|name| pool.lookup(name)));
        table.iter().for_each(|block| pool.take(*block));
        num_hits += table.len();
        for name in &names[table.len()..] {
            let block = pool.allocate().expect("all blocks that the request does not hold are free or cached");
            pool.publish(block, *name);
            table.push(block);
        }
        table.drain(..).rev().for_each(|block| pool.release(block));
    }
    num_hits
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::trace::tests::trace_of;

    #[test]
    fn a_pool_hits_what_it_holds() {
        let trace = trace_of(&[&[1, 2], &[1, 2, 3], &[4, 5], &[1, 2, 3]]);
        let hits = |capacity| replay(&trace, capacity, EvictionPolicy::Lru);
        assert_eq!([hits(5), hits(4), hits(3), hits(1)], [5, 4, 3, 1]);
        let row = CacheRow::new(&trace, 3);
        assert_eq!((row.capacity_blocks, row.asked, row.lru), (3, 10, 0.3));
        assert!(row.lru <= row.optimum_of_pool && row.optimum_of_pool <= row.optimum, "{row:?}");
        assert_eq!(row.optimum, 0.5);
    }
}
