//! A load through the real scheduler, block pool and prefix cache, step by step, with a measurement of the blocks.

use super::super::simulated::MAX_IDLE_TURNS;
use pagetide_base::ids::{RequestId, TokenId};
use pagetide_base::sampling::params::SamplingParams;
use pagetide_engine::plan::{Delivery, StepOutput};
use pagetide_engine::prefix_cache::EvictionPolicy;
use pagetide_engine::scheduler::{AdmissionPolicy, EngineRequest, PlannedStep, PreemptionMode, SchedulerConfig};
use pagetide_engine::state::EngineState;
use pagetide_terminal::progress::RequestProgress;
use std::sync::Arc;

/// A request.
#[derive(Clone, Debug)]
pub struct LoadJob {
    pub prompt: Arc<Vec<TokenId>>,
    pub params: Arc<SamplingParams>,
    /// Samples; beams are in `params`.
    pub n: u32,
}

/// An engine with a pool of `num_device_blocks` blocks and no swap tier. The tokens of a step are not limited, so
/// every prompt takes one step.
pub fn engine(
    block_size: usize,
    num_device_blocks: usize,
    prefix_caching: bool,
    max_num_batched_tokens: Option<usize>,
) -> EngineState {
    let num_slots = block_size * num_device_blocks;
    let max_num_batched_tokens = max_num_batched_tokens.unwrap_or(num_slots);
    let config = SchedulerConfig {
        max_num_seqs: max_num_batched_tokens,
        max_num_batched_tokens,
        preemption_mode: PreemptionMode::Recompute,
        // As in the paper: a request starts if its prompt fits.
        admission: AdmissionPolicy::Prompt,
        prefix_caching,
        ..SchedulerConfig::new(block_size, num_device_blocks, 0)
    };
    EngineState::new(config, EvictionPolicy::default())
}

/// When requests come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadArrivals {
    AllAtOnce,
    /// One with each step, while fewer than these run.
    UpTo(usize),
}

/// Runs all of `jobs`, and returns what each one's first sample (or best beam) generated. `execute` is the device; it
/// sees the engine between a step's plan and its results.
pub fn run(
    engine: &mut EngineState,
    jobs: &[LoadJob],
    arrivals: LoadArrivals,
    execute: &mut dyn FnMut(&EngineState, &PlannedStep) -> StepOutput,
) -> Vec<Vec<TokenId>> {
    let mut progress = RequestProgress::new(jobs.len() as u64);
    let mut outputs = vec![Vec::new(); jobs.len()];
    let mut has_ended = vec![false; jobs.len()];
    let (mut coming, mut idle_turns) = (jobs.iter().enumerate(), 0);
    while coming.len() > 0 || engine.scheduler.has_work() {
        let num_arriving = match arrivals {
            LoadArrivals::AllAtOnce => coming.len(),
            LoadArrivals::UpTo(most) => usize::from(engine.scheduler.num_requests() < most),
        };
        for (index, job) in coming.by_ref().take(num_arriving) {
            engine.scheduler.arrive(arrival(index, job));
        }
        let planned = engine.plan(0.0).expect("the loop is the simple one, and there is work");
        if planned.plan.is_empty() {
            idle_turns += 1;
            assert!(idle_turns < MAX_IDLE_TURNS, "nothing happens: {:?}", engine.scheduler.population());
            continue;
        }
        idle_turns = 0;
        let output = execute(engine, &planned);
        for (request, delivery) in engine.scheduler.commit(output).deliveries {
            let index = request.0 as usize;
            match delivery {
                Delivery::Token { sample: 0, sampled } => outputs[index].push(sampled.token),
                // Its samples may all end in this step.
                Delivery::Finished { .. } if !engine.scheduler.has_request(request) && !has_ended[index] => {
                    has_ended[index] = true;
                    let job = &jobs[index];
                    progress.request_done(u64::from(job.n * job.params.max_tokens));
                }
                _ => {}
            }
        }
    }
    outputs
}

fn arrival(index: usize, job: &LoadJob) -> EngineRequest {
    EngineRequest {
        id: RequestId(index as u64),
        n: job.n,
        ..EngineRequest::new(job.prompt.clone(), job.params.clone())
    }
}
