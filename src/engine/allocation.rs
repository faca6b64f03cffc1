//! What the scheduler and the two pools say to each other, and how a pool answers: pure code, carried by actors.
//!
//! One [`Demand`] a step goes to the device pool. It tells what has happened to the tables since the last one and
//! asks for the next step's blocks; [`serve`] applies it in a fixed order and makes room by preempting sequences in
//! the order the scheduler gives. Before it, where somebody may start, the swap pool is asked what it holds of them
//! ([`find`]). One [`SwapDemand`] follows to the swap pool where something is copied between the tiers.

use crate::engine::block_pool::{BlockPool, PoolStats};
use crate::engine::expected::{Expected, Life};
use crate::engine::prefix_cache::BlockHash;
use crate::ids::{BlockId, IdMap, IdSet, SeqId};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::fmt;
use std::iter::Peekable;
use std::sync::Arc;
use std::vec::IntoIter;

/// A sequence's blocks in order; block `i` holds the KV of its tokens `i * block_size ..`.
pub type BlockTable = Arc<Vec<BlockId>>;

/// scheduler → device pool, applied in the order of the fields.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Demand {
    /// Tables that one more sequence holds now: a fork's.
    pub forks: Vec<BlockTable>,
    /// Blocks that have become full, with the name of their content.
    pub publish: Vec<(BlockId, BlockHash)>,
    /// Tables that a sequence no longer holds.
    pub release: Vec<BlockTable>,
    /// Running sequences that need blocks in this step, most senior first.
    pub grow: Vec<Grow>,
    /// Who yields when blocks run out, first to yield first: all that run but those who need not. May be left empty where
    /// nothing can run out and nobody is urgent.
    pub victims: Vec<Victim>,
    /// Sequences that have to come back now, others yielding.
    pub urgent: Vec<Admit>,
    /// Blocks promised to running sequences' prompts and not yet allocated, those of this step included.
    pub promised: usize,
    /// Sequences that want to start or to come back, in order; the first that does not fit ends admission, and
    /// nothing is admitted in a step that preempts.
    pub admit: Vec<Admit>,
    /// Blocks that an admission leaves available.
    pub watermark: usize,
    /// What those who run are expected to need, where that decides who is admitted beside them.
    pub expected: Option<Expected>,
    /// Sequences that may still start.
    pub seats: usize,
    /// Tokens that the admitted may compute in this step, in all.
    pub token_budget: usize,
    /// Blocks to have free, not only cached, for the steps to come: what is evicted for it is copied to the swap pool
    /// before they need it.
    pub reserve: usize,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Grow {
    pub seq: SeqId,
    pub new_blocks: usize,
    /// How many of `new_blocks` were promised at admission.
    pub promised: usize,
    /// The partly filled block that the step writes into, which may be shared: its place in the table.
    pub writes_into: Option<(usize, BlockId)>,
}

impl Grow {
    /// With a copy, if what it writes into is shared.
    fn most_blocks(&self) -> usize {
        self.new_blocks + usize::from(self.writes_into.is_some())
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Victim {
    pub seq: SeqId,
    pub table: BlockTable,
    /// Sequences it is or will become.
    pub seats: usize,
    /// It also yields to who is urgent.
    pub yields_to_urgent: bool,
    /// Blocks promised to it and not yet allocated, those of this step included.
    pub promised: usize,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Admit {
    pub seq: SeqId,
    /// Names of the leading full blocks that may be taken from the cache.
    pub hashes: Arc<Vec<BlockHash>>,
    /// How many of `hashes` may be used: at least one token is left to compute.
    pub usable_hashes: usize,
    /// Tokens of the sequence; all their blocks must be available.
    pub num_tokens: usize,
    /// For each leading block, whether it is to come from the swap pool where the device has it not.
    pub held: Vec<bool>,
    /// Tokens in the leading blocks that `held` tells of.
    pub num_held_tokens: usize,
    /// Sequences it will become.
    pub seats: usize,
    /// Steps that it is expected to run.
    pub steps: usize,
    /// For so many steps, blocks are to suffice for all who run.
    pub horizon: usize,
    /// Tokens at its end that are not computed in the step that admits it.
    pub num_held_back: usize,
}

/// device pool → scheduler.
#[derive(Clone, Debug, Default)]
pub struct Grant {
    pub grown: Vec<Grown>,
    /// Their blocks are released.
    pub preempted: Vec<SeqId>,
    /// For each of them, who needed blocks or a seat: it may be itself.
    pub causes: Vec<SeqId>,
    /// Who asked first for what there was not enough of.
    pub refused: Option<(SeqId, Lack)>,
    /// Who has to come back now, and could not even with others yielding.
    pub late: Vec<(SeqId, Lack)>,
    pub admitted: Vec<Admitted>,
    /// Cached blocks that were given away, and what they hold until this step writes them.
    pub evicted: Vec<(BlockId, BlockHash)>,
    pub stats: PoolStats,
}

/// What a sequence that wants to start has to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Lack {
    /// Places in a step.
    Seats { wanted: usize, free: usize },
    /// Blocks, with those that are promised to others or kept free.
    Blocks { wanted: usize, available: usize },
    /// Blocks for what those who run are expected to need in so many steps.
    Expected { horizon: usize },
    /// Tokens that the step may still compute.
    Tokens,
    /// Others have to yield in this step, or somebody has to come back first: nobody starts then.
    Yielding,
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lack::Seats { wanted, free } => {
                write!(f, "for places in a step (scheduler.max_num_seqs): {free} free, {wanted} wanted")
            }
            Lack::Blocks { wanted, available } => {
                write!(f, "for device blocks: {available} available, {wanted} wanted (with those promised to others)")
            }
            Lack::Expected { horizon } => {
                write!(f, "for device blocks: those that run are expected to need them in the next {horizon} steps")
            }
            Lack::Tokens => write!(f, "for prompt tokens that a step may compute"),
            Lack::Yielding => write!(f, "for a step in which nobody has to yield"),
        }
    }
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
    /// Enough for `num_computed` and `num_new_tokens` tokens.
    pub table: Vec<BlockId>,
    /// Places of the table whose content comes from the swap pool. The leading ones besides were cached.
    pub swap_in: Vec<usize>,
    /// Leading tokens that are there once it has come.
    pub num_computed: usize,
    /// Tokens to compute in this step; none where something has to come before.
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
    let mut room = Room {
        block_size,
        promised: demand.promised,
        seats: demand.seats,
        budget: demand.token_budget,
        expected: None,
        grant: Grant::default(),
    };
    let yields_at: IdMap<SeqId, usize> = demand.victims.iter().map(|victim| victim.seq).zip(0..).collect();
    let mut victims = demand.victims.into_iter().peekable();
    // What those take in this step who need not yield.
    let must_grow = demand.grow.iter().filter(|grow| !yields_at.contains_key(&grow.seq));
    let kept: usize = must_grow.map(|grow| grow.most_blocks() - grow.promised).sum();
    for admit in &demand.urgent {
        if let Err(lack) = room.admit_urgent(pool, admit, kept, &mut victims) {
            room.grant.late.push((admit.seq, lack));
        }
    }
    room.grow(pool, demand.grow, &yields_at, &mut victims);
    if room.grant.preempted.is_empty() && room.grant.late.is_empty() {
        room.expected = demand.expected;
        for admit in &demand.admit {
            let admitted = match room.budget {
                0 => Err(Lack::Tokens),
                _ => room.try_admit(pool, admit, demand.watermark),
            };
            if let Err(lack) = admitted {
                room.grant.refused = Some((admit.seq, lack));
                break;
            }
        }
    } else {
        room.grant.refused = demand.admit.first().map(|first| (first.seq, Lack::Yielding));
    }
    let mut grant = room.grant;
    pool.evict_ahead(demand.reserve);
    grant.evicted = pool.take_evicted();
    grant.stats = pool.stats();
    grant
}

/// What there still is in a step that is being served, and what has been granted.
struct Room {
    block_size: usize,
    /// Of the pool's blocks.
    promised: usize,
    seats: usize,
    /// Tokens that the admitted may compute.
    budget: usize,
    expected: Option<Expected>,
    grant: Grant,
}

impl Room {
    fn yields(&mut self, pool: &mut BlockPool, victim: &Victim, cause: SeqId) {
        victim.table.iter().rev().for_each(|block| pool.release_to_copy(*block));
        self.promised -= victim.promised;
        self.seats += victim.seats;
        self.grant.preempted.push(victim.seq);
        self.grant.causes.push(cause);
    }

    /// Admits, if need be with others yielding: as few as it takes, or none where that would not help. `kept` blocks are
    /// left. An error says what there is too little of while nobody yields.
    fn admit_urgent(
        &mut self,
        pool: &mut BlockPool,
        admit: &Admit,
        kept: usize,
        victims: &mut Peekable<IntoIter<Victim>>,
    ) -> Result<(), Lack> {
        let Err(lack) = self.try_admit(pool, admit, kept) else { return Ok(()) };
        let needed = admit.num_tokens.div_ceil(self.block_size) + self.promised + kept;
        let (mut room, mut seats, mut num_yielding) = (pool.available(), self.seats, 0);
        let mut given_up: IdMap<BlockId, u32> = IdMap::default();
        for victim in victims.clone().take_while(|victim| victim.yields_to_urgent) {
            if room >= needed && seats >= admit.seats {
                break;
            }
            // What others hold too is not given back.
            for block in victim.table.iter() {
                let count = given_up.entry(*block).or_default();
                *count += 1;
                room += usize::from(pool.num_references(*block) == *count);
            }
            room += victim.promised;
            seats += victim.seats;
            num_yielding += 1;
        }
        if room < needed || seats < admit.seats {
            return Err(lack);
        }
        for victim in victims.by_ref().take(num_yielding) {
            self.yields(pool, &victim, admit.seq);
        }
        self.try_admit(pool, admit, kept)
    }

    /// The blocks of the running, in the opposite order of yielding: who yields has not been given any in this step.
    fn grow(
        &mut self,
        pool: &mut BlockPool,
        grow: Vec<Grow>,
        yields_at: &IdMap<SeqId, usize>,
        victims: &mut Peekable<IntoIter<Victim>>,
    ) {
        let mut grow: Vec<(usize, Grow)> = grow.into_iter().enumerate().collect();
        if !yields_at.is_empty() {
            grow.sort_by_key(|(_, grow)| Reverse(yields_at.get(&grow.seq).copied().unwrap_or(usize::MAX)));
        }
        let mut grown: Vec<(usize, Grown)> = Vec::with_capacity(grow.len());
        for (place, grow) in grow {
            if !yields_at.is_empty() && self.grant.preempted.contains(&grow.seq) {
                continue;
            }
            self.promised -= grow.promised;
            loop {
                if let Some(blocks) = try_grow(pool, &grow, self.promised) {
                    grown.push((place, blocks));
                    break;
                }
                let victim = victims.next().expect("victims name all who may have to yield when blocks may run out");
                let is_itself = victim.seq == grow.seq;
                // Its promise has been counted as kept.
                self.promised += if is_itself { grow.promised } else { 0 };
                self.yields(pool, &victim, grow.seq);
                if is_itself {
                    break;
                }
            }
        }
        grown.sort_unstable_by_key(|(place, _)| *place);
        self.grant.grown = grown.into_iter().map(|(_, grown)| grown).collect();
    }

    /// Admits if there is a seat, and blocks for all tokens beside those promised and `watermark`, and, where that counts,
    /// for what is expected to come.
    fn try_admit(&mut self, pool: &mut BlockPool, admit: &Admit, watermark: usize) -> Result<(), Lack> {
        if admit.seats > self.seats {
            return Err(Lack::Seats { wanted: admit.seats, free: self.seats });
        }
        let keep = self.promised + watermark;
        let life = Life { num_tokens: admit.num_tokens, steps: admit.steps, seats: admit.seats };
        let (num_used, num_blocks) =
            (pool.num_blocks() - pool.available() + self.promised, pool.num_blocks() - watermark);
        let fits = |num_new| {
            let expected = self.expected.as_mut();
            expected.is_none_or(|expected| expected.fits(life, num_new, admit.horizon, num_used, num_blocks))
        };
        let admitted = try_admit(pool, self.block_size, admit, keep, self.budget, fits)?;
        if let Some(expected) = &mut self.expected {
            expected.push(life);
        }
        self.seats -= admit.seats;
        self.budget -= admitted.num_new_tokens;
        self.promised += admit.num_tokens.div_ceil(self.block_size) - admitted.table.len();
        self.grant.admitted.push(admitted);
        Ok(())
    }
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

/// Where a leading block of a sequence comes from.
enum Source {
    Cached(BlockId),
    SwappedIn,
}

/// What there is of `admit` on either tier, and the blocks for the tokens that follow, if all its tokens fit beside `keep`
/// blocks, and so many more `fit`.
fn try_admit(
    pool: &mut BlockPool,
    block_size: usize,
    admit: &Admit,
    keep: usize,
    budget: usize,
    fits: impl FnOnce(usize) -> bool,
) -> Result<Admitted, Lack> {
    let usable = &admit.hashes[..admit.usable_hashes];
    let cached = |place: usize| usable.get(place).and_then(|hash| pool.lookup(hash));
    let source = |place| match cached(place) {
        Some(block) => Some(Source::Cached(block)),
        None => admit.held.get(place).filter(|held| **held).map(|_| Source::SwappedIn),
    };
    let mut sources: Vec<Source> = (0..).map_while(source).collect();
    // A block that is swapped in partly filled is the last: what the cache has behind it does not follow it.
    let partial = (!admit.num_held_tokens.is_multiple_of(block_size)).then(|| admit.num_held_tokens / block_size);
    let partial = partial.filter(|place| matches!(sources.get(*place), Some(Source::SwappedIn)));
    if let Some(place) = partial {
        sources.truncate(place + 1);
    }
    let is_idle = |source: &&Source| matches!(source, Source::Cached(block) if !pool.is_used(*block));
    let num_idle = sources.iter().filter(is_idle).count();
    let num_cached = sources.iter().filter(|source| matches!(source, Source::Cached(_))).count();
    let num_new = admit.num_tokens.div_ceil(block_size) - num_cached + num_idle;
    if pool.available() < num_new + keep {
        return Err(Lack::Blocks { wanted: num_new + keep, available: pool.available() });
    }
    if !fits(num_new) {
        return Err(Lack::Expected { horizon: admit.horizon });
    }
    let num_computed = if partial.is_some() { admit.num_held_tokens } else { sources.len() * block_size };
    assert!(num_computed < admit.num_tokens, "{}: nothing is left to compute", admit.seq);
    for source in &sources {
        if let Source::Cached(block) = source {
            pool.take(*block);
        }
    }
    let (mut table, mut swap_in) = (Vec::with_capacity(sources.len()), Vec::new());
    for source in sources {
        table.push(match source {
            Source::Cached(block) => block,
            Source::SwappedIn => {
                swap_in.push(table.len());
                allocate(pool)
            }
        });
    }
    let num_new_tokens = match swap_in.is_empty() {
        true => budget.min(admit.num_tokens - admit.num_held_back - num_computed),
        false => 0,
    };
    let num_blocks = (num_computed + num_new_tokens).div_ceil(block_size);
    table.extend((table.len()..num_blocks).map(|_| allocate(pool)));
    Ok(Admitted { seq: admit.seq, table, swap_in, num_computed, num_new_tokens })
}

fn allocate(pool: &mut BlockPool) -> BlockId {
    pool.allocate().expect("availability was checked for all blocks of the step")
}

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
    /// Gives all content another name.
    pub fn rename(&mut self, rename: impl Fn(BlockHash) -> BlockHash) {
        let stored = self.store.iter_mut().map(|store| &mut store.hashes);
        let lists = self.take.iter_mut().chain(&mut self.back).chain(stored);
        lists.flatten().chain(&mut self.keep).for_each(|name| *name = rename(*name));
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
