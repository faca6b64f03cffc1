//! Quotas: what one tenant may hold of the pools.

use super::SchedulerConfig;
use super::sequences::Sequences;
use crate::bill::{Quota, Tenant};
use crate::sequence::{SeqState, Sequence};
use pagetide_base::ids::IdMap;

/// What each tenant holds of a pool that has a quota.
pub(super) struct Holdings {
    /// In blocks.
    most: Option<usize>,
    held: IdMap<Tenant, usize>,
}

impl Holdings {
    /// A block that several sequences share counts for each.
    fn new<'a>(most: Option<usize>, held: impl Iterator<Item = (&'a Sequence, usize)>) -> Self {
        let mut holdings = Self { most, held: IdMap::default() };
        if most.is_some() {
            held.for_each(|(seq, num_blocks)| *holdings.held.entry(seq.tenant).or_default() += num_blocks);
        }
        holdings
    }

    /// Holdings of the device pool: blocks of running sequences, and blocks promised to them.
    pub fn of_device(seqs: &Sequences, config: &SchedulerConfig) -> Self {
        let held = |seq: &Sequence| seq.table.len() + seq.promised_blocks(config.block_size);
        Self::new(config.quota.device_blocks, seqs.running.iter().map(|seq| (seq, held(seq))))
    }

    /// Of the swap pool.
    pub fn of_swap(seqs: &Sequences, config: &SchedulerConfig) -> Self {
        let swapped = seqs.waiting.iter().filter_map(|seq| match &seq.state {
            SeqState::Swapped(blocks) => Some((seq, blocks.len())),
            _ => None,
        });
        Self::new(config.quota.swap_blocks, swapped)
    }

    /// Gives a tenant more, if it may have it. A tenant that holds nothing may have whatever it asks for.
    pub fn take(&mut self, tenant: Tenant, num_blocks: usize) -> bool {
        let Some(most) = self.most.filter(|_| tenant != Tenant::default()) else { return true };
        let held = self.held.entry(tenant).or_default();
        let may = *held == 0 || *held + num_blocks <= most;
        *held += if may { num_blocks } else { 0 };
        may
    }

    /// Gives a tenant nothing more: one of its sequences waits, and others must not overtake it.
    pub fn close(&mut self, tenant: Tenant) {
        let most = self.most.unwrap_or(0);
        self.held.entry(tenant).and_modify(|held| *held = most.max(*held)).or_insert(most);
    }
}

impl Quota {
    /// Makes quotas from shares of pools of this many blocks. A share of 1 is no quota.
    pub fn of_shares(device: (f64, usize), swap: (f64, usize)) -> Self {
        let blocks = |(share, num_blocks): (f64, usize)| (share < 1.0).then_some((share * num_blocks as f64) as usize);
        Self { device_blocks: blocks(device), swap_blocks: blocks(swap) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bill::{Holding, QuotaTier};
    use crate::scheduler::test_engine::{TestEngine, arrival, config, seqs};
    use crate::scheduler::{EngineRequest, PlannedStep, SchedulerConfig};
    use pagetide_base::ids::{RequestId, SeqId};

    /// One request of each of `tenants`, in their order.
    fn world_of(quota: Quota, tenants: &[u32], prompt: usize) -> TestEngine {
        let mut engine = TestEngine::new(SchedulerConfig { quota, ..config() });
        for (tenant, id) in tenants.iter().zip(1..) {
            let tenant = Tenant(*tenant);
            engine.scheduler.arrive(EngineRequest { tenant, ..arrival(id, prompt, 90) });
        }
        engine
    }

    #[test]
    fn a_tenant_over_its_quota_waits_and_others_go_before_it() {
        let quota = Quota { device_blocks: Some(5), swap_blocks: None };
        // 3 blocks each.
        let mut engine = world_of(quota, &[1, 1, 1, 2, 2], 9);
        let PlannedStep { plan, report } = engine.plan_at(0.0);
        assert_eq!(seqs(&plan), [SeqId(1), SeqId(4)]);
        let refused = [1, 2].map(|tenant| (Tenant(tenant), QuotaTier::Device));
        assert_eq!(report.quota_refusals, refused);
        let holding = |waiting| Holding { sequences: [waiting, 1, 0], blocks: [3, 0] };
        let held = IdMap::from_iter([(Tenant(1), holding(2)), (Tenant(2), holding(1))]);
        assert_eq!(engine.scheduler.holdings(), held);
        engine.commit(&plan);
        let PlannedStep { plan, report } = engine.plan_at(0.0);
        assert_eq!(report.quota_refusals, [], "each is told once");
        assert_eq!(seqs(&plan), [SeqId(1), SeqId(4)]);
        engine.commit(&plan);
        engine.scheduler.cancel(RequestId(1));
        assert_eq!(seqs(&engine.plan()), [SeqId(2), SeqId(4)], "the next of its own, in their order");
    }

    #[test]
    fn a_smaller_request_does_not_overtake_another_of_its_tenant() {
        let quota = Quota { device_blocks: Some(6), swap_blocks: None };
        // 3 blocks, 4, and 2.
        let mut engine = world_of(quota, &[1], 9);
        for (id, prompt) in [(2, 13), (3, 5)] {
            engine.scheduler.arrive(EngineRequest { tenant: Tenant(1), ..arrival(id, prompt, 90) });
        }
        assert_eq!(seqs(&engine.plan()), [SeqId(1)]);
    }

    #[test]
    fn a_tenant_that_holds_nothing_may_start_any_request() {
        let quota = Quota { device_blocks: Some(2), swap_blocks: None };
        let mut engine = world_of(quota, &[1, 1, 2], 9);
        assert_eq!(seqs(&engine.plan()), [SeqId(1), SeqId(3)]);
    }

    #[test]
    fn without_a_quota_or_a_key_nothing_is_counted() {
        let some = Quota { device_blocks: Some(2), swap_blocks: Some(2) };
        for (quota, tenants) in [(Quota::default(), [1; 4]), (some, [0; 4])] {
            assert_eq!(world_size(quota, &tenants), 4);
        }
        assert_eq!(Quota::of_shares((1.0, 16), (0.25, 16)), Quota { device_blocks: None, swap_blocks: Some(4) });
    }

    fn world_size(quota: Quota, tenants: &[u32]) -> usize {
        world_of(quota, tenants, 9).plan().batch.len()
    }

    #[test]
    fn beyond_its_part_of_the_swap_pool_a_tenant_recomputes() {
        for (swap_blocks, swaps) in [(None, [true, true]), (Some(5), [true, false])] {
            let quota = Quota { device_blocks: None, swap_blocks };
            // 5 blocks each, and then one more: the two most junior sequences are preempted.
            let mut engine = world_of(quota, &[2, 1, 1], 20);
            let (mut swapped, mut refused) = (Vec::new(), Vec::new());
            for _ in 0..60 {
                let PlannedStep { plan, report } = engine.plan_at(0.0);
                swapped.extend(std::iter::repeat_n(true, report.stats.preempted_swap));
                swapped.extend(std::iter::repeat_n(false, report.stats.preempted_recompute));
                refused.extend(report.quota_refusals);
                engine.commit(&plan);
                if swapped.len() == 2 {
                    break;
                }
            }
            assert_eq!(refused, vec![(Tenant(1), QuotaTier::Swap); usize::from(!swaps[1])]);
            assert_eq!(swapped, swaps, "{swap_blocks:?}");
        }
    }
}
