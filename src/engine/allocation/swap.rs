//! What is asked of the swap pool, and how it answers.

use super::device::allocate;
use crate::engine::block_pool::{BlockPool, PoolStats};
use crate::engine::prefix_cache::BlockHash;
use crate::ids::{BlockId, IdSet, SeqId};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Which of a prompt's blocks the swap pool holds: what is asked for each sequence that may start.
#[derive(Clone, Debug)]
pub struct Find {
    pub hashes: Arc<Vec<BlockHash>>,
    /// How many of them count.
    pub usable_hashes: usize,
}

/// Answers [`Find`]s, in their order.
pub fn find(pool: &BlockPool, finds: &[Find]) -> Vec<Vec<bool>> {
    let held = |hash: &BlockHash| pool.lookup(hash).is_some();
    finds.iter().map(|find| find.hashes[..find.usable_hashes].iter().map(held).collect()).collect()
}

/// scheduler → swap pool, applied in the order of the fields.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct SwapDemand {
    /// Names of blocks that are copied to the device, for each sequence. Before others let go of them: where the pool
    /// drains, a block that nobody holds is gone.
    pub take: Vec<Vec<BlockHash>>,
    /// Tables that nobody needs any more.
    pub release: Vec<Vec<BlockId>>,
    /// Blocks that hold nothing: a copy failed.
    pub forget: Vec<BlockId>,
    pub store: Vec<Store>,
    /// Names of full blocks of running sequences, for each of them: copied ahead of need, as far as there is room.
    pub back: Vec<Vec<BlockHash>>,
    /// Names of blocks that the device no longer caches.
    pub keep: Vec<BlockHash>,
}

impl SwapDemand {
    pub fn is_empty(&self) -> bool {
        let Self { take, release, forget, store, back, keep } = self;
        take.is_empty()
            && release.is_empty()
            && forget.is_empty()
            && store.is_empty()
            && back.is_empty()
            && keep.is_empty()
    }
}

impl SwapDemand {
    pub fn hashes_mut(&mut self) -> impl Iterator<Item = &mut BlockHash> {
        let stored = self.store.iter_mut().map(|store| &mut store.hashes);
        let lists = self.take.iter_mut().chain(&mut self.back).chain(stored);
        lists.flatten().chain(&mut self.keep)
    }
}

/// A preempted sequence that wants its KV kept.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Store {
    pub seq: SeqId,
    /// Blocks that hold computed tokens.
    pub num_blocks: usize,
    /// Names of the leading full ones; a block that the pool already holds under its name is stored once.
    pub hashes: Vec<BlockHash>,
}

/// swap pool → scheduler: an answer for each entry of the demand's lists, in their order.
#[derive(Clone, Debug, Default)]
pub struct SwapGrant {
    /// Held for the sequence until it releases them.
    pub taken: Vec<Vec<BlockId>>,
    /// The same; `None` where the pool is too full.
    pub stored: Vec<Option<Vec<SwapBlock>>>,
    /// The same, for as many of the names as there is room.
    pub backed: Vec<Vec<SwapBlock>>,
    /// Held by nobody; where it is to be copied to, if it is.
    pub kept: Vec<Option<BlockId>>,
    /// `None`: it was not asked.
    pub stats: Option<PoolStats>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwapBlock {
    pub block: BlockId,
    /// False where the pool already holds the content.
    pub copy: bool,
}

/// Applies a demand to the swap pool.
pub fn serve_swap(pool: &mut BlockPool, demand: SwapDemand) -> SwapGrant {
    let mut take = |hash: &BlockHash| {
        let block = pool.lookup(hash).expect("nothing has left the pool since it was asked for these names");
        pool.take(block);
        block
    };
    let taken = demand.take.iter().map(|hashes| hashes.iter().map(&mut take).collect()).collect();
    for block in demand.release.iter().flat_map(|table| table.iter().rev()) {
        pool.release(*block);
    }
    demand.forget.iter().for_each(|block| pool.forget(*block));
    let stored = demand.store.iter().map(|store| try_store(pool, store)).collect();
    let back = |hashes: &Vec<BlockHash>| hashes.iter().map_while(|hash| try_store_full(pool, *hash)).collect();
    let backed = demand.back.iter().map(back).collect();
    let keep = |hash: &BlockHash| {
        let SwapBlock { block, copy } = try_store_full(pool, *hash)?;
        pool.release(block);
        copy.then_some(block)
    };
    let mut kept: Vec<Option<BlockId>> = demand.keep.iter().map(keep).collect();
    // A block that was given to one and then to another is the other's: no two copies go to it.
    let mut given = IdSet::default();
    kept.iter_mut().rev().for_each(|block| *block = block.filter(|block| given.insert(*block)));
    pool.take_evicted(); // below this tier there is none
    SwapGrant { taken, stored, backed, kept, stats: Some(pool.stats()) }
}

/// Makes the swap pool larger or smaller, between two steps.
pub fn resize_swap(pool: &mut BlockPool, num_blocks: usize) -> PoolStats {
    pool.resize(num_blocks);
    pool.take_evicted(); // below this tier there is none
    pool.stats()
}

fn try_store(pool: &mut BlockPool, store: &Store) -> Option<Vec<SwapBlock>> {
    let held = |hash: &&BlockHash| pool.lookup(hash);
    let idle = store.hashes.iter().filter_map(|hash| held(&hash)).filter(|block| !pool.is_used(*block)).count();
    let num_held = store.hashes.iter().filter(|hash| held(hash).is_some()).count();
    if pool.available() - idle < store.num_blocks - num_held {
        return None;
    }
    let named = store.hashes.iter().map(|hash| Some(*hash));
    let names: Vec<_> = named.chain(std::iter::repeat(None)).take(store.num_blocks).collect();
    // First what is there: room is made by evicting what nobody holds.
    let mut blocks: Vec<Option<SwapBlock>> = names.iter().map(|hash| take_full(pool, &(*hash)?)).collect();
    for (block, hash) in blocks.iter_mut().zip(names).filter(|(block, _)| block.is_none()) {
        *block = Some(match hash {
            Some(hash) => try_store_full(pool, hash).expect("room was checked for all blocks"),
            None => SwapBlock { block: allocate(pool), copy: true },
        });
    }
    Some(blocks.into_iter().flatten().collect())
}

/// The block of this name, if the pool has it: one more table holds it.
fn take_full(pool: &mut BlockPool, hash: &BlockHash) -> Option<SwapBlock> {
    let block = pool.lookup(hash)?;
    pool.take(block);
    Some(SwapBlock { block, copy: false })
}

/// A block of this name, if there is one or room for it: one more table holds it.
fn try_store_full(pool: &mut BlockPool, hash: BlockHash) -> Option<SwapBlock> {
    take_full(pool, &hash).or_else(|| {
        let block = pool.allocate()?;
        pool.publish(block, hash);
        Some(SwapBlock { block, copy: true })
    })
}
