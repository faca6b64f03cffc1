//! The scheduler and its two pools without actors, device or clock: what plans the steps of simulated loads.

use crate::engine::allocation::{SwapGrant, find, serve, serve_swap};
use crate::engine::block_pool::BlockPool;
use crate::engine::plan::{PlannedSeq, SampledTokens, SeqOutput, StepOutput, StepPlan};
use crate::engine::prefix_cache::EvictionPolicy;
use crate::engine::scheduler::{Scheduler, SchedulerConfig};
use crate::ids::TokenId;
use crate::sampling::params::Sampled;

/// Turns in a row in which nothing happens: blocks that are given back, a waiting beam that has to start over.
pub const MAX_IDLE_TURNS: usize = 1_000;

/// Plans in the simple loop: one step after the other.
pub struct Planner {
    pub scheduler: Scheduler,
    pub device_pool: BlockPool,
    swap_pool: BlockPool,
    block_size: usize,
}

impl Planner {
    pub fn new(config: SchedulerConfig, eviction: EvictionPolicy) -> Self {
        let pool = |num_blocks| BlockPool::with_eviction(num_blocks, config.prefix_caching, eviction);
        Self {
            device_pool: pool(config.num_device_blocks),
            swap_pool: pool(config.num_swap_blocks),
            block_size: config.block_size,
            scheduler: Scheduler::new(config),
        }
    }

    /// The next step; nothing is in flight. Empty where, at most, blocks came back.
    pub fn plan(&mut self) -> StepPlan {
        let mut demand = self.scheduler.demand().expect("the loop is the simple one, and nothing is in flight");
        let finds = self.scheduler.finds(&demand);
        self.scheduler.found(&mut demand, find(&self.swap_pool, &finds));
        let grant = serve(&mut self.device_pool, self.block_size, demand);
        let swap_demand = self.scheduler.reserve(&grant);
        let swap_grant = match swap_demand.is_empty() {
            true => SwapGrant::default(),
            false => serve_swap(&mut self.swap_pool, swap_demand),
        };
        self.scheduler.plan(grant, swap_grant)
    }
}

/// Tokens for all that samples, where there is no model. Outputs of two requests share no block: the token is the
/// sequence's own.
pub fn made_up_output(plan: &StepPlan) -> StepOutput {
    let output = |seq: &PlannedSeq| {
        let num_samples = seq.sample.as_ref()?.num_samples as usize;
        let sampled = Sampled { token: seq.seq.0 as TokenId, logprobs: None };
        Some(SeqOutput { sampled: SampledTokens::from_elem(sampled, num_samples), ..SeqOutput::of(seq.seq) })
    };
    StepOutput { seqs: plan.batch.iter().filter_map(output).collect(), ..StepOutput::default() }
}
