//! What the scheduler and the two pools say to each other, and how a pool answers: pure code, carried by actors.
//!
//! One [`Demand`] a step goes to the device pool. It tells what has happened to the tables since the last one and
//! asks for the next step's blocks; [`serve`] applies it in a fixed order and makes room by preempting sequences in
//! the order the scheduler gives. One [`SwapDemand`] follows to the swap pool where something is swapped.

use crate::engine::block_pool::{BlockPool, PoolStats};
use crate::engine::prefix_cache::BlockHash;
use crate::ids::{BlockId, SeqId};
use std::collections::HashSet;
use std::sync::Arc;

/// A sequence's blocks in order; block `i` holds the KV of its tokens `i * block_size ..`.
pub type BlockTable = Arc<Vec<BlockId>>;

/// scheduler → device pool, applied in the order of the fields.
#[derive(Clone, Debug, Default)]
pub struct Demand {
    /// Tables that one more sequence holds now: a fork's.
    pub forks: Vec<BlockTable>,
    /// Blocks that have become full, with the name of their content.
    pub publish: Vec<(BlockId, BlockHash)>,
    /// Tables that a sequence no longer holds.
    pub release: Vec<BlockTable>,
    /// Running sequences that need blocks in this step, most senior first.
    pub grow: Vec<Grow>,
    /// Who yields when blocks run out, first to yield first. May be left empty where nothing can run out.
    pub victims: Vec<Victim>,
    /// Blocks promised to running sequences' prompts and not yet allocated, those of this step included.
    pub promised: usize,
    /// Sequences that want to start or to come back, in order; the first that does not fit ends admission, and
    /// nothing is admitted in a step that preempts.
    pub admit: Vec<Admit>,
    /// Blocks that an admission leaves available.
    pub watermark: usize,
    /// Sequences that may still start.
    pub seats: usize,
    /// Tokens that the admitted may compute in this step, in all.
    pub token_budget: usize,
}

#[derive(Clone, Debug)]
pub struct Grow {
    pub seq: SeqId,
    pub new_blocks: usize,
    /// How many of `new_blocks` were promised at admission.
    pub promised: usize,
    /// The partly filled block that the step writes into, which may be shared: its place in the table.
    pub writes_into: Option<(usize, BlockId)>,
}

#[derive(Clone, Debug)]
pub struct Victim {
    pub seq: SeqId,
    pub table: BlockTable,
    /// Blocks promised to it and not yet allocated, those of this step included.
    pub promised: usize,
}

#[derive(Clone, Debug)]
pub struct Admit {
    pub seq: SeqId,
    /// Names of the leading full blocks that may be taken from the cache.
    pub hashes: Arc<Vec<BlockHash>>,
    /// How many of `hashes` may be used: at least one token is left to compute.
    pub usable_hashes: usize,
    /// Tokens of the sequence; all their blocks must be available.
    pub num_tokens: usize,
    /// Leading tokens whose KV the swap pool holds.
    pub num_swapped: usize,
    /// Sequences it will become.
    pub seats: usize,
    /// Tokens at its end that are not computed in the step that admits it.
    pub num_held_back: usize,
}

/// device pool → scheduler.
#[derive(Clone, Debug, Default)]
pub struct Grant {
    pub grown: Vec<Grown>,
    /// Their blocks are released.
    pub preempted: Vec<SeqId>,
    pub admitted: Vec<Admitted>,
    pub stats: PoolStats,
}

#[derive(Clone, Debug)]
pub struct Grown {
    pub seq: SeqId,
    pub blocks: Vec<BlockId>,
    /// Copy-on-write: at this place in the table the second block replaces the first, after copying it.
    pub copy: Option<(usize, BlockId, BlockId)>,
}

#[derive(Clone, Debug)]
pub struct Admitted {
    pub seq: SeqId,
    /// Leading blocks that the cache held.
    pub cached: Vec<BlockId>,
    /// The blocks after them, enough for `num_new_tokens` more than are cached or swapped.
    pub blocks: Vec<BlockId>,
    /// Tokens to compute in this step.
    pub num_new_tokens: usize,
}

/// Applies a demand to the device pool.
pub fn serve(pool: &mut BlockPool, block_size: usize, demand: Demand) -> Grant {
    for block in demand.forks.iter().flat_map(|table| table.iter()) {
        pool.retain(*block);
    }
    for (block, hash) in demand.publish {
        pool.publish(block, hash);
    }
    for table in &demand.release {
        release(pool, table);
    }
    let mut grant = Grant::default();
    let mut promised = demand.promised;
    let mut victims = demand.victims.into_iter();
    let mut yielded = HashSet::new();
    for grow in demand.grow {
        if yielded.contains(&grow.seq) {
            continue;
        }
        promised -= grow.promised;
        let grown = loop {
            if let Some(grown) = try_grow(pool, &grow, promised) {
                break Some(grown);
            }
            let victim = victims.next().expect("victims name every running sequence when blocks may run out");
            release(pool, &victim.table);
            yielded.insert(victim.seq);
            grant.preempted.push(victim.seq);
            let own = victim.seq == grow.seq;
            promised -= if own { victim.promised - grow.promised } else { victim.promised };
            if own {
                break None;
            }
        };
        grant.grown.extend(grown);
    }
    if grant.preempted.is_empty() {
        let (mut seats, mut budget) = (demand.seats, demand.token_budget);
        for admit in demand.admit {
            if budget == 0 || admit.seats > seats {
                break;
            }
            let keep = promised + demand.watermark;
            let Some(admitted) = try_admit(pool, block_size, &admit, keep, budget) else { break };
            seats -= admit.seats;
            budget -= admitted.num_new_tokens;
            let allocated = admitted.cached.len() + admitted.blocks.len();
            promised += admit.num_tokens.div_ceil(block_size) - allocated;
            grant.admitted.push(admitted);
        }
    }
    grant.stats = pool.stats();
    grant
}

fn release(pool: &mut BlockPool, table: &BlockTable) {
    for block in table.iter().rev() {
        pool.release(*block);
    }
}

/// All the blocks that `grow` needs, or none. Leaves `keep` blocks available.
fn try_grow(pool: &mut BlockPool, grow: &Grow, keep: usize) -> Option<Grown> {
    let shared = grow.writes_into.filter(|(_, block)| pool.is_shared(*block));
    if pool.available() < grow.new_blocks + usize::from(shared.is_some()) + keep {
        return None;
    }
    let copy = shared.map(|(place, from)| {
        let to = allocate(pool);
        pool.release(from);
        (place, from, to)
    });
    let blocks = (0..grow.new_blocks).map(|_| allocate(pool)).collect();
    Some(Grown { seq: grow.seq, blocks, copy })
}

/// The cached prefix of `admit` and the blocks for its first tokens, if all its tokens fit beside `keep` blocks.
fn try_admit(pool: &mut BlockPool, block_size: usize, admit: &Admit, keep: usize, budget: usize) -> Option<Admitted> {
    let cached: Vec<BlockId> = admit.hashes[..admit.usable_hashes].iter().map_while(|hash| pool.lookup(hash)).collect();
    let idle = cached.iter().filter(|block| !pool.is_used(**block)).count();
    let all_blocks = admit.num_tokens.div_ceil(block_size);
    if pool.available() < all_blocks - cached.len() + idle + keep {
        return None;
    }
    let computed = admit.num_swapped.max(cached.len() * block_size);
    assert!(computed < admit.num_tokens, "{}: nothing is left to compute", admit.seq);
    let num_new_tokens = budget.min(admit.num_tokens - admit.num_held_back - computed);
    for block in &cached {
        pool.take(*block);
    }
    let num_blocks = (computed + num_new_tokens).div_ceil(block_size) - cached.len();
    let blocks = (0..num_blocks).map(|_| allocate(pool)).collect();
    Some(Admitted { seq: admit.seq, cached, blocks, num_new_tokens })
}

fn allocate(pool: &mut BlockPool) -> BlockId {
    pool.allocate().expect("availability was checked for all blocks of the step")
}

/// scheduler → swap pool, applied in the order of the fields.
#[derive(Clone, Debug, Default)]
pub struct SwapDemand {
    /// Tables whose content has been copied back, or that nobody needs any more.
    pub release: Vec<Vec<BlockId>>,
    pub store: Vec<Store>,
}

impl SwapDemand {
    pub fn is_empty(&self) -> bool {
        self.release.is_empty() && self.store.is_empty()
    }
}

/// A preempted sequence that wants its KV kept.
#[derive(Clone, Debug)]
pub struct Store {
    pub seq: SeqId,
    /// Blocks that hold computed tokens.
    pub num_blocks: usize,
    /// Names of the leading full ones; a block that the pool already holds under its name is stored once.
    pub hashes: Vec<BlockHash>,
}

/// swap pool → scheduler.
#[derive(Clone, Debug, Default)]
pub struct SwapGrant {
    /// In the order of `store`; `None` where the pool is too full.
    pub stored: Vec<Option<Vec<SwapBlock>>>,
    pub stats: PoolStats,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwapBlock {
    pub block: BlockId,
    /// False where the pool already holds the content.
    pub copy: bool,
}

/// Applies a demand to the swap pool.
pub fn serve_swap(pool: &mut BlockPool, demand: SwapDemand) -> SwapGrant {
    for block in demand.release.iter().flat_map(|table| table.iter().rev()) {
        pool.release(*block);
    }
    let stored = demand.store.iter().map(|store| try_store(pool, store)).collect();
    SwapGrant { stored, stats: pool.stats() }
}

fn try_store(pool: &mut BlockPool, store: &Store) -> Option<Vec<SwapBlock>> {
    let held = store.hashes.iter().filter(|hash| pool.lookup(hash).is_some()).count();
    if pool.available() < store.num_blocks - held {
        return None;
    }
    let mut blocks = Vec::with_capacity(store.num_blocks);
    for place in 0..store.num_blocks {
        let hash = store.hashes.get(place);
        blocks.push(match hash.and_then(|hash| pool.lookup(hash)) {
            Some(block) => {
                pool.take(block);
                SwapBlock { block, copy: false }
            }
            None => {
                let block = allocate(pool);
                if let Some(hash) = hash {
                    pool.publish(block, *hash);
                }
                SwapBlock { block, copy: true }
            }
        });
    }
    Some(blocks)
}
