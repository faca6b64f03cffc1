//! The adaptive eviction policy: evicts the block that is worth least, by how blocks of its kind were used lately.
//!
//! Blocks are grouped into classes by how often they were used (once, 2 to 3 times, 4 to 7 times, …). Their *age* is
//! the number of blocks published since no table holds them. For each class, histograms over age count when idle blocks
//! were used again and when they were not. Evicted blocks are remembered for a while as *ghosts*, so that evictions
//! that were too early count too. The *worth* of a block follows from the histograms: the most uses per block and unit
//! of age that keeping it for some more time would bring (the index of Gittins 1979, with a histogram for a
//! distribution). A scan uses its blocks once, so it only affects the worth of its own class, however large it is.
//!
//! Within a class, blocks are worth least that were released first. So the evicted block is the oldest of one class,
//! which takes constant time. Worth never falls with uses and never grows with age; histograms that say otherwise are
//! smoothed. A block is used whenever a later block of its prefix is, so no block is evicted before those after it.

use super::lists::{Ghosts, Lists};
use crate::arrays;
use crate::block_hash::BlockHash;
use pagetide_base::ids::BlockId;
use serde::{Deserialize, Serialize};
use std::num::NonZeroU32;

/// The classes: one for each doubling of uses.
const CLASSES: usize = 6;
/// The buckets of ages: two for each doubling, up to some 10 million blocks.
const BUCKETS: usize = 48;
/// Many blocks are used again long after they were evicted. To observe this, more ghosts are remembered than the pool
/// has blocks. A ghost takes some 50 bytes, a block at least a thousand times as much.
const GHOSTS_PER_BLOCK: usize = 4;
/// The decay of observations each time that worth is computed.
const MEMORY: f64 = 0.9;
/// The number of observations from which on a class is judged by them.
const ENOUGH: f64 = 20.0;
/// Worth is computed again after as many published blocks as the pool has, but not before this many, because it takes
/// thousands of operations.
const LEAST_PERIOD: u64 = 256;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Adaptive {
    lists: Lists<CLASSES>,
    blocks: Vec<BlockHistory>,
    ghosts: Ghosts<Ghost>,
    kinds: [Kind; CLASSES],
    /// Blocks published so far.
    clock: u64,
    /// Blocks released so far: their order.
    num_parked: u64,
    period: u64,
    learned_at: u64,
}

/// What is known about a block.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct BlockHistory {
    /// At least 1 for a published block.
    uses: u32,
    parked_at: u64,
    order: u64,
}

impl BlockHistory {
    fn class(&self) -> usize {
        class(self.uses)
    }
}

/// What is remembered about an evicted block.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Ghost {
    uses: NonZeroU32,
    parked_at: u64,
}

fn class(uses: u32) -> usize {
    (uses.max(1).ilog2() as usize).min(CLASSES - 1)
}

/// Blocks of one class, by age.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Kind {
    /// Used again at this age.
    #[serde(with = "arrays")]
    reused: [f64; BUCKETS],
    /// Not used again until this age, and then forgotten.
    #[serde(with = "arrays")]
    lost: [f64; BUCKETS],
    #[serde(with = "arrays")]
    worth: [f64; BUCKETS],
}

impl Adaptive {
    pub fn new(num_blocks: usize) -> Self {
        // The initial values: they grow with uses and fall with age.
        let first = |class: usize| Kind {
            reused: [0.0; BUCKETS],
            lost: [0.0; BUCKETS],
            worth: std::array::from_fn(|bucket| (class + 1) as f64 / (lowest_age(bucket) + 1.0)),
        };
        Self {
            lists: Lists::new(num_blocks),
            blocks: vec![BlockHistory::default(); num_blocks],
            ghosts: Ghosts::new(num_ghosts(num_blocks)),
            kinds: std::array::from_fn(first),
            clock: 0,
            num_parked: 0,
            period: period(num_blocks),
            learned_at: 0,
        }
    }

    /// Grows to `num_blocks` blocks.
    pub fn grow(&mut self, num_blocks: usize) {
        self.lists.grow(num_blocks);
        self.blocks.resize(num_blocks, BlockHistory::default());
        self.ghosts.grow(num_ghosts(num_blocks));
        self.period = period(num_blocks);
    }

    /// A block was published, and a table holds it.
    pub fn insert(&mut self, block: BlockId, hash: &BlockHash) {
        self.clock += 1;
        let uses = match self.ghosts.remove(hash) {
            Some(ghost) => {
                self.kinds[class(ghost.uses.get())].reused[self.age_bucket(ghost.parked_at)] += 1.0;
                ghost.uses.get().saturating_add(1)
            }
            None => 1,
        };
        self.blocks[block.index()] = BlockHistory { uses, ..BlockHistory::default() };
        if self.clock >= self.learned_at + self.period {
            self.learned_at = self.clock;
            self.learn();
        }
    }

    pub fn park(&mut self, block: BlockId) {
        self.num_parked += 1;
        let seen = &mut self.blocks[block.index()];
        (seen.parked_at, seen.order) = (self.clock, self.num_parked);
        self.lists.push(seen.class(), block);
    }

    pub fn unpark(&mut self, block: BlockId) {
        self.lists.remove(block);
        let seen = self.blocks[block.index()];
        self.kinds[seen.class()].reused[self.age_bucket(seen.parked_at)] += 1.0;
        self.share(block);
    }

    /// Removes an idle block that will not be used again.
    pub fn discard(&mut self, block: BlockId) {
        self.lists.remove(block);
    }

    /// Another table holds it too.
    pub fn share(&mut self, block: BlockId) {
        let uses = &mut self.blocks[block.index()].uses;
        *uses = uses.saturating_add(1);
    }

    pub fn is_idle(&self, block: BlockId) -> bool {
        self.lists.list_of(block).is_some()
    }

    /// Removes the block that is worth least; of equal ones, the one that was released first. `names` has the hashes of
    /// all blocks.
    pub fn evict(&mut self, names: &[BlockHash]) -> Option<BlockId> {
        let oldest = (0..CLASSES).filter_map(|class| self.lists.oldest(class));
        let block = oldest.min_by(|a, b| {
            let order = |block: &BlockId| self.blocks[block.index()].order;
            self.worth(*a).total_cmp(&self.worth(*b)).then(order(a).cmp(&order(b)))
        })?;
        self.lists.remove(block);
        let BlockHistory { uses, parked_at, .. } = self.blocks[block.index()];
        let ghost = Ghost { uses: NonZeroU32::new(uses).unwrap_or(NonZeroU32::MIN), parked_at };
        if let Some(lost) = self.ghosts.add(names[block.index()], ghost) {
            self.kinds[class(lost.uses.get())].lost[self.age_bucket(lost.parked_at)] += 1.0;
        }
        Some(block)
    }

    fn worth(&self, block: BlockId) -> f64 {
        let seen = &self.blocks[block.index()];
        self.kinds[seen.class()].worth[self.age_bucket(seen.parked_at)]
    }

    fn age_bucket(&self, parked_at: u64) -> usize {
        bucket(self.clock - parked_at)
    }

    fn learn(&mut self) {
        for kind in &mut self.kinds {
            kind.learn();
        }
        for class in 1..CLASSES {
            let (fewer, more) = self.kinds.split_at_mut(class);
            let fewer = &fewer[class - 1].worth;
            more[0].worth.iter_mut().zip(fewer).for_each(|(worth, least)| *worth = worth.max(*least));
        }
    }

    pub fn map_hashes(&mut self, map: impl Fn(BlockHash) -> BlockHash) {
        self.ghosts.map_hashes(map);
    }

    /// About how many bytes of memory it takes.
    pub fn num_bytes(&self) -> usize {
        size_of::<Self>()
            + self.lists.num_bytes()
            + self.blocks.len() * size_of::<BlockHistory>()
            + self.ghosts.num_bytes()
    }

    pub fn check(&self) {
        self.lists.check();
        self.ghosts.check();
        for (block, seen) in self.blocks.iter().enumerate() {
            let list = self.lists.list_of(BlockId(block as u32));
            assert!(list.is_none_or(|class| class == seen.class()), "a block is in another class's list");
        }
        for (class, kind) in self.kinds.iter().enumerate() {
            assert!(kind.worth.windows(2).all(|pair| pair[0] >= pair[1]), "worth grows with age in class {class}");
            let more = &self.kinds[(class + 1).min(CLASSES - 1)].worth;
            assert!(kind.worth.iter().zip(more).all(|(worth, more)| worth <= more), "worth falls with uses");
        }
    }
}

fn num_ghosts(num_blocks: usize) -> usize {
    num_blocks.saturating_mul(GHOSTS_PER_BLOCK)
}

/// Blocks to be published before worth is computed again.
fn period(num_blocks: usize) -> u64 {
    LEAST_PERIOD.max(num_blocks as u64)
}

impl Kind {
    fn learn(&mut self) {
        let total: f64 = self.reused.iter().chain(&self.lost).sum();
        if total >= ENOUGH {
            self.worth = self.found_worth();
            // Worth must not grow with age.
            for age in (1..BUCKETS).rev() {
                self.worth[age - 1] = self.worth[age - 1].max(self.worth[age]);
            }
        }
        self.reused.iter_mut().chain(&mut self.lost).for_each(|count| *count *= MEMORY);
    }

    fn found_worth(&self) -> [f64; BUCKETS] {
        let mut worth = [0.0; BUCKETS];
        for age in 0..BUCKETS {
            let mut left: f64 = self.reused[age..].iter().chain(&self.lost[age..]).sum();
            if left < 1.0 {
                // Beyond what was seen.
                worth[age] = if age > 0 { worth[age - 1] * BEYOND } else { 0.0 };
                continue;
            }
            let (mut uses, mut time) = (0.0, 0.0);
            for end in age..BUCKETS - 1 {
                let gone = self.reused[end] + self.lost[end];
                time += (lowest_age(end + 1) - lowest_age(end)) * (left - gone / 2.0);
                uses += self.reused[end];
                left -= gone;
                worth[age] = f64::max(worth[age], uses / time);
                if left <= 0.0 {
                    break;
                }
            }
        }
        worth
    }
}

/// The worth at an age that was never observed, as a part of that at the age before.
const BEYOND: f64 = 0.7;

/// Two for each factor of two.
fn bucket(age: u64) -> usize {
    if age < 2 {
        return age as usize;
    }
    let log = age.ilog2();
    let half = (age >> (log - 1)) & 1;
    ((2 * log) as usize + half as usize).min(BUCKETS - 1)
}

fn lowest_age(bucket: usize) -> f64 {
    match bucket {
        0 | 1 => bucket as f64,
        _ => (2 + bucket % 2) as f64 * f64::powi(2.0, bucket as i32 / 2 - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// The name of no content.
    const NONE: BlockHash = BlockHash([0xff; 16]);

    /// Sends chains of blocks through a cache of `num_blocks`, as a pool does: cached leading blocks are shared, the
    /// others are published, and all are released, last first. After each chain, the evictions are compared with those
    /// of a search through all idle blocks.
    struct SimulatedCache {
        adaptive: Adaptive,
        names: Vec<BlockHash>,
        free: Vec<BlockId>,
    }

    impl SimulatedCache {
        fn new(num_blocks: u32) -> Self {
            Self {
                adaptive: Adaptive::new(num_blocks as usize),
                names: vec![NONE; num_blocks as usize],
                free: (0..num_blocks).map(BlockId).collect(),
            }
        }

        fn find(&self, name: u64) -> Option<BlockId> {
            let hash = BlockHash::of_number(name.into());
            self.names.iter().position(|name| *name == hash).map(|block| BlockId(block as u32))
        }

        fn evict(&mut self) -> BlockId {
            let all = (0..self.names.len()).map(|block| BlockId(block as u32));
            let idle = all.filter(|block| self.adaptive.is_idle(*block));
            let expected = idle.min_by(|a, b| {
                let key = |block: &BlockId| (self.adaptive.worth(*block), self.adaptive.blocks[block.index()].order);
                key(a).partial_cmp(&key(b)).unwrap()
            });
            let block = self.adaptive.evict(&self.names);
            assert_eq!(block, expected);
            let block = block.expect("a request holds less than the pool");
            self.names[block.index()] = NONE;
            block
        }

        /// Returns how many blocks were cached.
        fn request(&mut self, chain: &[u64]) -> usize {
            let mut table: Vec<BlockId> = chain.iter().map_while(|name| self.find(*name)).collect();
            let num_hits = table.len();
            table.iter().for_each(|block| self.adaptive.unpark(*block));
            for name in &chain[num_hits..] {
                assert_eq!(self.find(*name), None, "a block outlived one before it");
                let block = self.free.pop().unwrap_or_else(|| self.evict());
                let hash = BlockHash::of_number((*name).into());
                self.names[block.index()] = hash;
                self.adaptive.insert(block, &hash);
                table.push(block);
            }
            table.iter().rev().for_each(|block| self.adaptive.park(*block));
            num_hits
        }
    }

    fn random(state: &mut u64, below: u64) -> u64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 33) % below
    }

    #[test]
    fn the_evicted_block_has_the_least_value_and_ends_its_prefix() {
        for seed in 0..4 {
            let mut state = seed;
            let mut engine = SimulatedCache::new(60);
            let mut next = 0;
            let mut chains: Vec<Vec<u64>> = vec![vec![]];
            for turn in 0..1_500 {
                // Continues an earlier chain from a random place. Mostly that is a recent chain or one of the first
                // few.
                let from = match random(&mut state, 3) {
                    0 => random(&mut state, 4.min(chains.len() as u64)) as usize,
                    _ => chains.len() - 1 - random(&mut state, 12.min(chains.len() as u64)) as usize,
                };
                let keep = chains[from].len() as u64;
                let keep = keep - random(&mut state, keep / 2 + 1).min(keep);
                let mut chain = chains[from][..keep as usize].to_vec();
                for _ in 0..1 + random(&mut state, 6) {
                    next += 1;
                    chain.push(next);
                }
                chain.truncate(40);
                engine.request(&chain);
                chains.push(chain);
                if turn % 100 == 0 {
                    engine.adaptive.check();
                }
            }
            assert!(engine.adaptive.learned_at > 0, "nothing was learned");
        }
    }

    #[test]
    fn a_scan_does_not_push_out_what_is_used_again() {
        let mut state = 7;
        let mut engine = SimulatedCache::new(100);
        let templates: Vec<Vec<u64>> = (0..6).map(|template| (0..10).map(|i| template * 10 + i).collect()).collect();
        let mut next = 1_000;
        let (mut hits, mut asked) = (0, 0);
        for turn in 0..2_000 {
            let template = &templates[random(&mut state, 6) as usize];
            let num_hits = engine.request(template);
            if turn >= 1_000 {
                (hits, asked) = (hits + num_hits, asked + template.len());
            }
            // More than the pool holds goes by between two uses of a template.
            for _ in 0..3 {
                let scan: Vec<u64> = (next..next + 10).collect();
                next += 10;
                engine.request(&scan);
            }
        }
        assert!(hits * 10 > asked * 9, "{hits} of {asked}: LRU would have none of most");
    }

    #[test]
    fn unused_prefixes_are_evicted_in_the_end() {
        let mut engine = SimulatedCache::new(64);
        let old: Vec<u64> = (0..20).collect();
        for _ in 0..200 {
            engine.request(&old);
        }
        // Requests that come twice or three times, and then never again.
        let mut seen = HashSet::new();
        for turn in 0..6_000u64 {
            let chain: Vec<u64> = (0..5).map(|i| 100 + turn / 3 % 2_000 * 5 + i).collect();
            seen.extend(chain.iter().copied());
            engine.request(&chain);
        }
        assert!(seen.len() > 9_000);
        assert_eq!(engine.find(19), None, "a block that nobody has used for long is kept for what it once was");
    }

    #[test]
    fn ages_fall_into_buckets() {
        for age in (0..2_000).chain([1 << 20, 3 << 30]) {
            let bucket = bucket(age);
            assert!(lowest_age(bucket) <= age as f64, "{age}");
            assert!(bucket == BUCKETS - 1 || lowest_age(bucket + 1) > age as f64, "{age}");
        }
    }
}
