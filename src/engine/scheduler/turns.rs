//! Which tenant's turn it is where requests of several tenants wait.
//!
//! Of the tenants that wait, the one that has least of the engine goes first: of device blocks or of seats in a step,
//! whichever it has the larger part of (its *dominant share*: Ghodsi et al. 2011, "Dominant Resource Fairness"),
//! counting what it was given in the step being planned. So a thousand requests of one tenant do not stand before the
//! first of another. A tenant's own requests keep their order. Priorities go before all this, and so do sequences that
//! were preempted: they come back, by age, before any new sequence. Nothing is kept free: a tenant that is alone may
//! have everything.
//!
//! Sequences of a tenant that holds more than an equal part are preempted before those of others.

use super::SchedulerConfig;
use super::sequences::Sequences;
use crate::bill::Tenant;
use pagetide_base::ids::IdMap;

/// What each tenant has.
pub(super) struct Shares {
    num_blocks: u64,
    num_seats: u64,
    /// Blocks and seats.
    held: IdMap<Tenant, [u64; 2]>,
}

impl Shares {
    /// Of the sequences that run.
    fn of_running(seqs: &Sequences, config: &SchedulerConfig) -> Self {
        let (num_blocks, num_seats) = (config.num_device_blocks as u64, config.max_num_seqs as u64);
        let mut shares = Self { num_blocks, num_seats, held: IdMap::default() };
        for seq in seqs.running.iter() {
            shares.add(seq.tenant, seq.table.len() + seq.promised_blocks(config.block_size), seq.seats());
        }
        shares
    }

    /// The larger of both parts, in units of [`Shares::whole`].
    pub fn of(&self, tenant: Tenant) -> u64 {
        let [blocks, seats] = self.held.get(&tenant).copied().unwrap_or_default();
        (blocks * self.num_seats).max(seats * self.num_blocks)
    }

    fn whole(&self) -> u64 {
        self.num_blocks * self.num_seats
    }

    pub fn add(&mut self, tenant: Tenant, num_blocks: usize, num_seats: usize) {
        let [blocks, seats] = self.held.entry(tenant).or_default();
        *blocks += num_blocks as u64;
        *seats += num_seats as u64;
    }

    /// Whether a tenant has more than an equal part among `num_tenants`.
    pub fn is_large(&self, tenant: Tenant, num_tenants: usize) -> bool {
        self.of(tenant) * num_tenants as u64 > self.whole()
    }
}

/// What the tenants have, where requests of several wait and they take turns.
pub(super) fn turns(seqs: &Sequences, config: &SchedulerConfig) -> Option<Shares> {
    (config.key_turns && seqs.waiting.is_of_several()).then(|| Shares::of_running(seqs, config))
}

/// What the tenants have, where sequences of several run and they take turns, and the number of tenants that run or
/// wait.
pub(super) fn tenant_parts(seqs: &Sequences, config: &SchedulerConfig) -> Option<(Shares, usize)> {
    let mut tenants = seqs.running.iter().map(|seq| seq.tenant);
    let first = tenants.next()?;
    // If all running sequences are of one tenant, the parts make no difference.
    if !config.key_turns || tenants.all(|tenant| tenant == first) {
        return None;
    }
    let shares = Shares::of_running(seqs, config);
    let others = seqs.waiting.tenants().filter(|tenant| !shares.held.contains_key(tenant));
    let mut others: Vec<Tenant> = others.collect();
    others.sort_unstable();
    others.dedup();
    let num_tenants = shares.held.len() + others.len();
    Some((shares, num_tenants))
}

#[cfg(test)]
mod tests {
    use crate::bill::Tenant;
    use crate::scheduler::test_engine::{TestEngine, arrival, config, seqs};
    use crate::scheduler::{EngineRequest, SchedulerConfig, SchedulingPolicy};
    use pagetide_base::ids::{RequestId, SeqId};

    fn arrive(engine: &mut TestEngine, id: u64, tenant: u32, prompt: usize, max_tokens: u32) {
        engine.scheduler.arrive(EngineRequest { tenant: Tenant(tenant), ..arrival(id, prompt, max_tokens) });
    }

    #[test]
    fn the_tenant_that_holds_least_goes_first() {
        for key_turns in [false, true] {
            let mut engine = TestEngine::new(SchedulerConfig { key_turns, max_num_seqs: 3, ..config() });
            // 3 blocks each: the first tenant has all seats, and more requests waiting.
            (1..=6).for_each(|id| arrive(&mut engine, id, 1, 9, 3));
            let plan = engine.plan();
            assert_eq!(seqs(&plan), [1, 2, 3].map(SeqId));
            engine.commit(&plan);
            (7..=8).for_each(|id| arrive(&mut engine, id, 2, 9, 30));
            engine.scheduler.cancel(RequestId(1));
            let plan = engine.plan();
            assert_eq!(seqs(&plan), [2, 3, if key_turns { 7 } else { 4 }].map(SeqId), "{key_turns}");
            engine.commit(&plan);
            engine.scheduler.cancel(RequestId(2));
            let plan = engine.plan();
            assert_eq!(seqs(&plan)[..2], [3, 4].map(SeqId), "each has one: who came first goes");
        }
    }

    #[test]
    fn a_tenants_own_keep_their_order_and_priorities_go_before_turns() {
        let policy = SchedulingPolicy::Priority;
        let mut engine = TestEngine::new(SchedulerConfig { key_turns: true, policy, max_num_seqs: 2, ..config() });
        for (id, tenant, priority) in [(1, 1, 1), (2, 1, 0), (3, 2, 1), (4, 2, 1)] {
            let tenant = Tenant(tenant);
            engine.scheduler.arrive(EngineRequest { tenant, priority, ..arrival(id, 4, 2) });
        }
        let mut started = Vec::new();
        while started.len() < 4 {
            let plan = engine.plan();
            started.extend(seqs(&plan).into_iter().filter(|seq| !started.contains(seq)).collect::<Vec<_>>());
            engine.commit(&plan);
        }
        assert_eq!(started, [2, 3, 1, 4].map(SeqId));
    }

    #[test]
    fn alone_a_tenant_has_all_places() {
        let mut engine = TestEngine::new(SchedulerConfig { key_turns: true, ..config() });
        (1..=8).for_each(|id| arrive(&mut engine, id, 1, 4, 3));
        assert_eq!(engine.plan().batch.len(), 8);
    }

    /// The youngest sequence is preempted, unless another tenant has more than its part.
    #[test]
    fn tenants_with_more_than_their_part_are_preempted_first() {
        for key_turns in [false, true] {
            let mut engine = TestEngine::new(SchedulerConfig { key_turns, ..config() });
            for (id, tenant) in [(1, 1), (2, 1), (3, 1), (4, 2)] {
                arrive(&mut engine, id, tenant, 12, 40);
            }
            let order = |engine: &TestEngine| {
                engine.scheduler.victims().order().iter().map(|seq| seq.rank.seq.0).collect::<Vec<_>>()
            };
            let plan = engine.plan();
            assert_eq!(plan.batch.len(), 4);
            engine.commit(&plan);
            let expected = if key_turns { [3, 2, 4, 1] } else { [4, 3, 2, 1] };
            assert_eq!(order(&engine), expected, "{key_turns}");
        }
    }
}
