//! How the device pool answers.

use super::{Admit, Admitted, BlockTable, Demand, Grant, Grow, Grown, Lack, Victim};
use crate::block_pool::BlockPool;
use crate::expected::{ExpectedNeed, Life};
use pagetide_base::ids::{BlockId, IdMap, SeqId};
use std::cmp::Reverse;
use std::iter::Peekable;
use std::vec::IntoIter;

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
    let victim_order: IdMap<SeqId, usize> = demand.victims.iter().map(|victim| victim.seq).zip(0..).collect();
    let mut victims = demand.victims.into_iter().peekable();
    // The blocks that sequences which are never preempted take in this step.
    let must_grow = demand.grow.iter().filter(|grow| !victim_order.contains_key(&grow.seq));
    let kept: usize = must_grow.map(|grow| grow.most_blocks() - grow.promised).sum();
    for admit in &demand.urgent {
        if let Err(lack) = room.admit_urgent(pool, admit, kept, &mut victims) {
            room.grant.late.push((admit.seq, lack));
        }
    }
    room.grow(pool, demand.grow, &victim_order, &mut victims);
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
        room.grant.refused = demand.admit.first().map(|first| (first.seq, Lack::Preemption));
    }
    let mut grant = room.grant;
    pool.evict_ahead(demand.reserve);
    grant.evicted = pool.take_evicted();
    grant.stats = pool.stats();
    grant
}

/// What is left in the step that is being served, and what has been granted.
struct Room {
    block_size: usize,
    /// Of the pool's blocks.
    promised: usize,
    seats: usize,
    /// Tokens that the admitted may compute.
    budget: usize,
    expected: Option<ExpectedNeed>,
    grant: Grant,
}

impl Room {
    fn preempt(&mut self, pool: &mut BlockPool, victim: &Victim, cause: SeqId) {
        victim.table.iter().rev().for_each(|block| pool.release_to_copy(*block));
        self.promised -= victim.promised;
        self.seats += victim.seats;
        self.grant.preempted.push(victim.seq);
        self.grant.causes.push(cause);
    }

    /// Admits an urgent sequence, if necessary by preempting others: as few as possible, or none if that would not
    /// help. `kept` blocks are left available. The error says what is lacking without preemptions.
    fn admit_urgent(
        &mut self,
        pool: &mut BlockPool,
        admit: &Admit,
        kept: usize,
        victims: &mut Peekable<IntoIter<Victim>>,
    ) -> Result<(), Lack> {
        let Err(lack) = self.try_admit(pool, admit, kept) else { return Ok(()) };
        let needed = admit.num_tokens.div_ceil(self.block_size) + self.promised + kept;
        let (mut room, mut seats, mut num_preempted) = (pool.available(), self.seats, 0);
        let mut given_up: IdMap<BlockId, u32> = IdMap::default();
        for victim in victims.clone().take_while(|victim| victim.may_be_preempted_for_urgent) {
            if room >= needed && seats >= admit.seats {
                break;
            }
            // Blocks that other sequences hold too are not released.
            for block in victim.table.iter() {
                let count = given_up.entry(*block).or_default();
                *count += 1;
                room += usize::from(pool.num_references(*block) == *count);
            }
            room += victim.promised;
            seats += victim.seats;
            num_preempted += 1;
        }
        if room < needed || seats < admit.seats {
            return Err(lack);
        }
        for victim in victims.by_ref().take(num_preempted) {
            self.preempt(pool, &victim, admit.seq);
        }
        self.try_admit(pool, admit, kept)
    }

    /// Allocates blocks to running sequences, in the reverse order of preemption. So a sequence that is preempted has
    /// not been given blocks in this step.
    fn grow(
        &mut self,
        pool: &mut BlockPool,
        grow: Vec<Grow>,
        victim_order: &IdMap<SeqId, usize>,
        victims: &mut Peekable<IntoIter<Victim>>,
    ) {
        let mut grow: Vec<(usize, Grow)> = grow.into_iter().enumerate().collect();
        if !victim_order.is_empty() {
            grow.sort_by_key(|(_, grow)| Reverse(victim_order.get(&grow.seq).copied().unwrap_or(usize::MAX)));
        }
        let mut grown: Vec<(usize, Grown)> = Vec::with_capacity(grow.len());
        for (place, grow) in grow {
            if !victim_order.is_empty() && self.grant.preempted.contains(&grow.seq) {
                continue;
            }
            self.promised -= grow.promised;
            loop {
                if let Some(blocks) = try_grow(pool, &grow, self.promised) {
                    grown.push((place, blocks));
                    break;
                }
                let victim =
                    victims.next().expect("victims name all sequences that may be preempted when blocks may run out");
                let is_itself = victim.seq == grow.seq;
                // Its promised blocks were deducted above and are deducted again below.
                self.promised += if is_itself { grow.promised } else { 0 };
                self.preempt(pool, &victim, grow.seq);
                if is_itself {
                    break;
                }
            }
        }
        grown.sort_unstable_by_key(|(place, _)| *place);
        self.grant.grown = grown.into_iter().map(|(_, grown)| grown).collect();
    }

    /// Admits a sequence if there is a seat and there are blocks for all its tokens in addition to promised ones and
    /// `watermark`, and, if the policy uses it, for what is expected.
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

/// Allocates all the blocks that `grow` needs, or none. Leaves `keep` blocks available.
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
enum BlockSource {
    Cached(BlockId),
    SwappedIn,
}

/// Takes the cached blocks of `admit` on either tier, and allocates blocks for the tokens that follow. Does so only if
/// all its tokens fit in addition to `keep` blocks, and `fit` accepts the number of new blocks.
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
        Some(block) => Some(BlockSource::Cached(block)),
        None => admit.held.get(place).filter(|held| **held).map(|_| BlockSource::SwappedIn),
    };
    let mut sources: Vec<BlockSource> = (0..).map_while(source).collect();
    // A partly filled block that is swapped in is the last one: cached blocks after it do not continue it.
    let partial = (!admit.num_held_tokens.is_multiple_of(block_size)).then(|| admit.num_held_tokens / block_size);
    let partial = partial.filter(|place| matches!(sources.get(*place), Some(BlockSource::SwappedIn)));
    if let Some(place) = partial {
        sources.truncate(place + 1);
    }
    let is_idle = |source: &&BlockSource| matches!(source, BlockSource::Cached(block) if !pool.is_used(*block));
    let num_idle = sources.iter().filter(is_idle).count();
    let num_cached = sources.iter().filter(|source| matches!(source, BlockSource::Cached(_))).count();
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
        if let BlockSource::Cached(block) = source {
            pool.take(*block);
        }
    }
    let (mut table, mut swap_in) = (Vec::with_capacity(sources.len()), Vec::new());
    for source in sources {
        table.push(match source {
            BlockSource::Cached(block) => block,
            BlockSource::SwappedIn => {
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

pub(super) fn allocate(pool: &mut BlockPool) -> BlockId {
    pool.allocate().expect("availability was checked for all blocks of the step")
}
