//! What the swap pool is asked, and how it answers.

use super::device::allocate;
use crate::block_pool::{BlockPool, PoolStats};
use crate::prefix_cache::BlockHash;
use pagetide_base::ids::{BlockId, IdSet, SeqId};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The question which of a prompt's blocks the swap pool holds, for a sequence that may start.
#[derive(Clone, Debug)]
pub struct Find {
    pub hashes: Arc<Vec<BlockHash>>,
    /// How many of `hashes` may be used.
    pub usable_hashes: usize,
}

/// Answers a list of [`Find`]s in order.
pub fn find(pool: &BlockPool, finds: &[Find]) -> Vec<Vec<bool>> {
    let held = |hash: &BlockHash| pool.lookup(hash).is_some();
    finds.iter().map(|find| find.hashes[..find.usable_hashes].iter().map(held).collect()).collect()
}

/// scheduler → swap pool, applied in the order of the fields.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct SwapDemand {
    /// Hashes of the blocks to copy to the device, for each sequence. This comes before releases, because a draining
    /// pool drops blocks that no table holds.
    pub take: Vec<Vec<BlockHash>>,
    /// Tables that are no longer needed.
    pub release: Vec<Vec<BlockId>>,
    /// Blocks whose copy failed, so that they hold no content.
    pub forget: Vec<BlockId>,
    pub store: Vec<Store>,
    /// Hashes of full blocks to copy ahead, for each running sequence, as far as there is room.
    pub back: Vec<Vec<BlockHash>>,
    /// Hashes of blocks that the device has evicted.
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

/// A preempted sequence whose KV is to be stored.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Store {
    pub seq: SeqId,
    /// Blocks that hold computed tokens.
    pub num_blocks: usize,
    /// Hashes of the leading full blocks. A block whose hash the pool already holds is not stored again.
    pub hashes: Vec<BlockHash>,
}

/// swap pool → scheduler: an answer for each entry of the demand's lists, in their order.
#[derive(Clone, Debug, Default)]
pub struct SwapGrant {
    /// The blocks of `take`, held for the sequence until it releases them.
    pub taken: Vec<Vec<BlockId>>,
    /// The blocks for each `Store`, held in the same way. `None` if the pool has no room.
    pub stored: Vec<Option<Vec<SwapBlock>>>,
    /// The blocks of `back`, held in the same way, for as many hashes as there is room.
    pub backed: Vec<Vec<SwapBlock>>,
    /// The block to copy each of `keep` to, if it is kept. No table holds it.
    pub kept: Vec<Option<BlockId>>,
    /// `None` if the pool was not asked.
    pub stats: Option<PoolStats>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwapBlock {
    pub block: BlockId,
    /// False if the pool already holds the content.
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
    // A block may be evicted and allocated again within this demand. Then only the last copy goes to it.
    let mut given = IdSet::default();
    kept.iter_mut().rev().for_each(|block| *block = block.filter(|block| given.insert(*block)));
    pool.take_evicted(); // there is no tier below this one
    SwapGrant { taken, stored, backed, kept, stats: Some(pool.stats()) }
}

/// Makes the swap pool larger or smaller, between two steps.
pub fn resize_swap(pool: &mut BlockPool, num_blocks: usize) -> PoolStats {
    pool.resize(num_blocks);
    pool.take_evicted(); // there is no tier below this one
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
    // Take the blocks that exist first, because making room evicts blocks that no table holds.
    let mut blocks: Vec<Option<SwapBlock>> = names.iter().map(|hash| take_full(pool, &(*hash)?)).collect();
    for (block, hash) in blocks.iter_mut().zip(names).filter(|(block, _)| block.is_none()) {
        *block = Some(match hash {
            Some(hash) => try_store_full(pool, hash).expect("room was checked for all blocks"),
            None => SwapBlock { block: allocate(pool), copy: true },
        });
    }
    Some(blocks.into_iter().flatten().collect())
}

/// Takes the block with this hash, if the pool has it.
fn take_full(pool: &mut BlockPool, hash: &BlockHash) -> Option<SwapBlock> {
    let block = pool.lookup(hash)?;
    pool.take(block);
    Some(SwapBlock { block, copy: false })
}

/// Takes the block with this hash, or allocates one for it if there is room.
fn try_store_full(pool: &mut BlockPool, hash: BlockHash) -> Option<SwapBlock> {
    take_full(pool, &hash).or_else(|| {
        let block = pool.allocate()?;
        pool.publish(block, hash);
        Some(SwapBlock { block, copy: true })
    })
}
