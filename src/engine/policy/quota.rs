//! What one tenant may hold of the pools.

use super::Scheduler;
use crate::engine::bill::{Quota, Tenant};
use crate::engine::sequence::{SeqState, Sequence};
use crate::ids::IdMap;

/// What each tenant holds of a pool, as far as it has a quota there.
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

    /// Gives a tenant more, if it may have it. Who holds nothing may have whatever it asks for.
    pub(super) fn take(&mut self, tenant: Tenant, num_blocks: usize) -> bool {
        let Some(most) = self.most.filter(|_| tenant != Tenant::default()) else { return true };
        let held = self.held.entry(tenant).or_default();
        let may = *held == 0 || *held + num_blocks <= most;
        *held += if may { num_blocks } else { 0 };
        may
    }
}

impl Scheduler {
    /// Of the device pool: what running sequences hold, and what they were promised.
    pub(super) fn device_holdings(&self) -> Holdings {
        let block_size = self.config.block_size;
        let running = self.running.iter().map(|seq| (seq, seq.table.len() + seq.promised_blocks(block_size)));
        Holdings::new(self.config.quota.device_blocks, running)
    }

    /// Of the swap pool.
    pub(super) fn swap_holdings(&self) -> Holdings {
        let swapped = self.waiting.values().filter_map(|seq| match &seq.state {
            SeqState::Swapped(blocks) => Some((&**seq, blocks.len())),
            _ => None,
        });
        Holdings::new(self.config.quota.swap_blocks, swapped)
    }
}

impl Quota {
    /// Shares of pools of this many blocks; 1 is no quota.
    pub fn of_shares(device: (f64, usize), swap: (f64, usize)) -> Self {
        let blocks = |(share, num_blocks): (f64, usize)| (share < 1.0).then_some((share * num_blocks as f64) as usize);
        Self { device_blocks: blocks(device), swap_blocks: blocks(swap) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::allocation::{serve, serve_swap};
    use crate::engine::bill::Terms;
    use crate::engine::block_pool::BlockPool;
    use crate::engine::plan::{SeqOutput, StepOutput, StepPlan};
    use crate::engine::policy::{AdmissionPolicy, Arrival, PreemptionMode, SchedulerConfig, SchedulingPolicy};
    use crate::ids::{RequestId, SeqId};
    use crate::sampling::params::{Sampled, SamplingParams};
    use smallvec::smallvec;
    use std::sync::Arc;

    struct World {
        scheduler: Scheduler,
        device: BlockPool,
        swap: BlockPool,
    }

    impl World {
        /// 16 blocks of 4 tokens on the device and as many beside it.
        fn new(quota: Quota) -> Self {
            let config = SchedulerConfig {
                block_size: 4,
                num_device_blocks: 16,
                num_swap_blocks: 16,
                max_num_seqs: 8,
                max_num_batched_tokens: 100,
                inter_token_target: None,
                max_model_len: 100,
                policy: SchedulingPolicy::Fcfs,
                preemption_mode: PreemptionMode::Swap,
                admission: AdmissionPolicy::Prompt,
                watermark_blocks: 0,
                write_behind_blocks: 0,
                max_tail_blocks: 0,
                non_preemptible_blocks: 0,
                quota,
                prefix_caching: false,
                overlap: false,
                hash_key: [0; 32],
            };
            let (device, swap) = (BlockPool::new(16, false), BlockPool::new(16, false));
            Self { scheduler: Scheduler::new(config), device, swap }
        }

        /// One request of each of `tenants`, in their order.
        fn with_requests(quota: Quota, tenants: &[u32], prompt: usize) -> Self {
            let mut world = Self::new(quota);
            for (tenant, id) in tenants.iter().zip(1..) {
                world.scheduler.arrive(Arrival {
                    id: RequestId(id),
                    prompt: Arc::new(vec![1; prompt]),
                    params: Arc::new(SamplingParams { max_tokens: 90, ..SamplingParams::default() }),
                    n: 1,
                    priority: 0,
                    cache_salt: None,
                    terms: Terms::default(),
                    tenant: Tenant(*tenant),
                    constraint: None,
                });
            }
            world
        }

        fn plan(&mut self) -> StepPlan {
            let demand = self.scheduler.demand().unwrap();
            let grant = serve(&mut self.device, 4, demand);
            let swap = self.scheduler.reserve(&grant);
            let swap = serve_swap(&mut self.swap, swap);
            self.scheduler.plan(grant, swap)
        }

        fn commit(&mut self, plan: &StepPlan) {
            let sampled = |_| smallvec![Sampled { token: 1, logprobs: None }];
            let seqs = plan.batch.iter().map(|seq| SeqOutput { sampled: sampled(seq), ..SeqOutput::of(seq.seq) });
            self.scheduler.commit(StepOutput { seqs: seqs.collect(), ..StepOutput::default() });
        }
    }

    fn seqs(plan: &StepPlan) -> Vec<SeqId> {
        plan.batch.iter().map(|seq| seq.seq).collect()
    }

    #[test]
    fn a_tenant_over_its_quota_waits_and_others_go_before_it() {
        let quota = Quota { device_blocks: Some(5), swap_blocks: None };
        // 3 blocks each.
        let mut world = World::with_requests(quota, &[1, 1, 1, 2, 2], 9);
        let plan = world.plan();
        assert_eq!(seqs(&plan), [SeqId(1), SeqId(4)]);
        world.commit(&plan);
        let plan = world.plan();
        assert_eq!(seqs(&plan), [SeqId(1), SeqId(4)]);
        world.commit(&plan);
        world.scheduler.cancel(RequestId(1));
        assert_eq!(seqs(&world.plan()), [SeqId(2), SeqId(4)], "the next of its own, in their order");
    }

    #[test]
    fn who_holds_nothing_may_start_whatever_it_needs() {
        let quota = Quota { device_blocks: Some(2), swap_blocks: None };
        let mut world = World::with_requests(quota, &[1, 1, 2], 9);
        assert_eq!(seqs(&world.plan()), [SeqId(1), SeqId(3)]);
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
        World::with_requests(quota, tenants, 9).plan().batch.len()
    }

    #[test]
    fn beyond_its_part_of_the_swap_pool_a_tenant_recomputes() {
        for (swap_blocks, swaps) in [(None, [true, true]), (Some(5), [true, false])] {
            let quota = Quota { device_blocks: None, swap_blocks };
            // 5 blocks each, and then one more: the two most junior yield.
            let mut world = World::with_requests(quota, &[2, 1, 1], 20);
            let mut swapped = Vec::new();
            for _ in 0..60 {
                let plan = world.plan();
                let stats = world.scheduler.take_stats();
                swapped.extend(std::iter::repeat_n(true, stats.preempted_swap));
                swapped.extend(std::iter::repeat_n(false, stats.preempted_recompute));
                world.commit(&plan);
                if swapped.len() == 2 {
                    break;
                }
            }
            assert_eq!(swapped, swaps, "{swap_blocks:?}");
        }
    }
}
