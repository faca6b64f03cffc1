//! The scheduler and two pools, for tests of what it decides.

use super::{AdmissionPolicy, Arrival, PreemptionMode, Scheduler, SchedulerConfig, SchedulingPolicy};
use crate::engine::allocation::{Demand, serve, serve_swap};
use crate::engine::bill::{Quota, Tenant, Terms};
use crate::engine::block_pool::BlockPool;
use crate::engine::plan::{CopyReport, Deliveries, SeqOutput, StepOutput, StepPlan};
use crate::ids::{RequestId, SeqId};
use crate::sampling::params::{Sampled, SamplingParams};
use smallvec::smallvec;
use std::sync::Arc;

pub struct World {
    pub scheduler: Scheduler,
    device: BlockPool,
    swap: BlockPool,
}

/// 16 blocks of 4 tokens on the device and as many beside it.
pub fn config() -> SchedulerConfig {
    SchedulerConfig {
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
        quota: Quota::default(),
        key_turns: false,
        prefix_caching: false,
        overlap: false,
        hash_key: [0; 32],
    }
}

/// Nobody's, on no terms.
pub fn arrival(id: u64, prompt: usize, max_tokens: u32) -> Arrival {
    Arrival {
        id: RequestId(id),
        prompt: Arc::new(vec![1; prompt]),
        params: Arc::new(SamplingParams { max_tokens, ..SamplingParams::default() }),
        n: 1,
        priority: 0,
        cache_salt: None,
        terms: Terms::default(),
        tenant: Tenant::default(),
        constraint: None,
    }
}

impl World {
    pub fn new(config: SchedulerConfig) -> Self {
        let device = BlockPool::new(config.num_device_blocks, config.prefix_caching);
        let swap = BlockPool::new(config.num_swap_blocks, config.prefix_caching);
        Self { scheduler: Scheduler::new(config), device, swap }
    }

    pub fn plan(&mut self) -> StepPlan {
        let demand = self.scheduler.demand().unwrap();
        self.plan_on(demand)
    }

    /// The rest of planning a step.
    pub fn plan_on(&mut self, demand: Demand) -> StepPlan {
        let grant = serve(&mut self.device, 4, demand);
        let swap = self.scheduler.reserve(&grant);
        let swap = serve_swap(&mut self.swap, swap);
        let plan = self.scheduler.plan(grant, swap);
        self.scheduler.check();
        plan
    }

    /// A token for each sequence, and the end of each copy.
    pub fn commit(&mut self, plan: &StepPlan) -> Deliveries {
        let sampled = || smallvec![Sampled { token: 1, logprobs: None }];
        let seqs = plan.batch.iter().filter(|seq| seq.sample.is_some());
        let seqs = seqs.map(|seq| SeqOutput { sampled: sampled(), ..SeqOutput::of(seq.seq) });
        let arrived = plan.swap_in.iter().map(|swap_in| (swap_in.id, true)).collect();
        let copies = CopyReport { arrived, ..CopyReport::default() };
        self.scheduler.commit(StepOutput { seqs: seqs.collect(), copies, ..StepOutput::default() })
    }
}

pub fn seqs(plan: &StepPlan) -> Vec<SeqId> {
    plan.batch.iter().map(|seq| seq.seq).collect()
}
