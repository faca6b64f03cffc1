//! Simulates a trace with the real scheduler, pools and cache. A clock advances by the given duration of each step.

use super::super::report::Times;
use super::super::simulated::{MAX_IDLE_TURNS, made_up_output};
use super::device::SimulatedDevice;
use super::spread::Spread;
use super::timing::Timing;
use super::trace::Trace;
use pagetide_base::ids::{IdMap, RequestId, TokenId};
use pagetide_base::sampling::params::SamplingParams;
use pagetide_engine::plan::{Delivery, StepOutput};
use pagetide_engine::prefix_cache::EvictionPolicy;
use pagetide_engine::scheduler::{EngineRequest, PlanReport, PlannedStep, SchedulerConfig};
use pagetide_engine::state::EngineState;
use serde::Serialize;
use std::collections::VecDeque;
use std::sync::Arc;

/// The parameters of a simulation.
pub struct SimulationSetup<'a> {
    pub trace: &'a Trace,
    /// Number of requests. The trace is repeated until there are so many.
    pub num_requests: usize,
    pub scheduler: SchedulerConfig,
    pub eviction: EvictionPolicy,
    pub timing: &'a Timing,
}

/// The result of a simulation.
#[derive(Clone, Debug, Serialize)]
pub struct Simulated {
    /// Tokens.
    pub block_size: usize,
    pub num_device_blocks: usize,
    pub num_swap_blocks: usize,
    /// Number of finished requests.
    pub requests: usize,
    /// Requests of more tokens than the device pool holds: a server answers them with an error.
    pub refused: usize,
    pub prompt_tokens: u64,
    pub output_tokens: u64,
    /// Prompt tokens that the device's cache held when a request was first admitted.
    pub device_hit_tokens: u64,
    /// Those that only the swap pool held, and that were copied back.
    pub swap_hit_tokens: u64,
    /// Of the prompt tokens.
    pub device_hit_rate: f64,
    pub swap_hit_rate: f64,
    /// Tokens that steps computed, of prompts and outputs.
    pub computed_tokens: u64,
    /// How many of them had been computed before, and lost to a preemption.
    pub recomputed_tokens: u64,
    pub preempted_swap: u64,
    pub preempted_recompute: u64,
    pub swapped_out_bytes: u64,
    pub swapped_in_bytes: u64,
    /// Cached device blocks that were given away.
    pub evicted_blocks: u64,
    pub steps: u64,
    /// By the simulated clock, from the first arrival to the last token.
    pub simulated_s: f64,
    pub out_tok_per_s: f64,
    pub req_per_s: f64,
    pub ttft_ms: Option<Times>,
    pub itl_ms: Option<Times>,
}

/// A request that has not ended.
struct OpenRequest {
    arrival_s: f64,
    last_token_s: Option<f64>,
    has_ended: bool,
}

struct Simulation<'a> {
    setup: &'a SimulationSetup<'a>,
    engine: EngineState,
    device: SimulatedDevice<'a>,
    /// Of the trace, repeated.
    next_request: usize,
    next_id: u64,
    /// Of ids in a row, up to `next_id`.
    open: VecDeque<OpenRequest>,
    /// Prompts by length. Only their lengths matter, because the trace gives the block hashes.
    prompts: IdMap<u64, Arc<Vec<TokenId>>>,
    params: IdMap<u64, Arc<SamplingParams>>,
    ttft: Spread,
    itl: Spread,
    result: Simulated,
}

/// Runs all of it; the same setup gives the same result.
pub fn simulate(setup: &SimulationSetup) -> Simulated {
    Simulation::new(setup).run()
}

impl<'a> Simulation<'a> {
    fn new(setup: &'a SimulationSetup<'a>) -> Self {
        let SchedulerConfig { block_size, num_device_blocks, num_swap_blocks, .. } = setup.scheduler;
        let result = Simulated {
            block_size,
            num_device_blocks,
            num_swap_blocks,
            requests: 0,
            refused: 0,
            prompt_tokens: 0,
            output_tokens: 0,
            device_hit_tokens: 0,
            swap_hit_tokens: 0,
            device_hit_rate: 0.0,
            swap_hit_rate: 0.0,
            computed_tokens: 0,
            recomputed_tokens: 0,
            preempted_swap: 0,
            preempted_recompute: 0,
            swapped_out_bytes: 0,
            swapped_in_bytes: 0,
            evicted_blocks: 0,
            steps: 0,
            simulated_s: 0.0,
            out_tok_per_s: 0.0,
            req_per_s: 0.0,
            ttft_ms: None,
            itl_ms: None,
        };
        Self {
            engine: EngineState::new(setup.scheduler.clone(), setup.eviction),
            device: SimulatedDevice::new(setup.timing, block_size),
            next_request: 0,
            next_id: 0,
            open: VecDeque::new(),
            prompts: IdMap::default(),
            params: IdMap::default(),
            ttft: Spread::default(),
            itl: Spread::default(),
            result,
            setup,
        }
    }

    fn run(mut self) -> Simulated {
        let mut idle_turns = 0;
        loop {
            self.arrive();
            if !self.engine.scheduler.has_work() {
                if self.next_request == self.setup.num_requests {
                    break;
                }
                self.device.wait_until(self.setup.trace.get(self.next_request).1);
                continue;
            }
            idle_turns = if self.step() || self.await_copies() { 0 } else { idle_turns + 1 };
            assert!(
                idle_turns < MAX_IDLE_TURNS,
                "the scheduler has work and does nothing: {:?}",
                self.engine.scheduler.population()
            );
        }
        self.finish()
    }

    /// All that have come by now.
    fn arrive(&mut self) {
        while self.next_request < self.setup.num_requests {
            let (request, arrival_s, round) = self.setup.trace.get(self.next_request);
            if arrival_s > self.device.now_s() {
                return;
            }
            self.next_request += 1;
            let (len, max_tokens) = (request.prompt_tokens, request.output_tokens);
            if len + max_tokens as usize > self.setup.scheduler.max_model_len {
                self.result.refused += 1;
                continue;
            }
            let prompt = self.prompts.entry(len as u64).or_insert_with(|| Arc::new(vec![0; len])).clone();
            let params = || Arc::new(SamplingParams { max_tokens, ..SamplingParams::default() });
            let params = self.params.entry(u64::from(max_tokens)).or_insert_with(params).clone();
            let id = RequestId(self.next_id);
            self.next_id += 1;
            let names = self.setup.trace.names(request, round, self.setup.scheduler.block_size);
            self.engine.scheduler.arrive_named(EngineRequest { id, ..EngineRequest::new(prompt, params) }, names);
            self.open.push_back(OpenRequest { arrival_s, last_token_s: None, has_ended: false });
        }
    }

    fn await_copies(&mut self) -> bool {
        let has_next = self.next_request < self.setup.num_requests;
        let next_s = if has_next { self.setup.trace.get(self.next_request).1 } else { f64::INFINITY };
        self.device.await_copies(&mut self.engine.scheduler, next_s)
    }

    /// Runs a step. Returns false if there was nothing to compute or to copy; blocks may have come back.
    fn step(&mut self) -> bool {
        let Some(PlannedStep { plan, report }) = self.engine.plan(0.0) else { return false };
        self.count_plan(&report);
        if plan.is_empty() {
            return false;
        }
        self.result.steps += 1;
        self.result.computed_tokens += report.load.num_tokens() as u64;
        let output = self.device.execute(&plan, &report.load, made_up_output(&plan));
        self.commit(output);
        true
    }

    fn count_plan(&mut self, report: &PlanReport) {
        for admission in &report.admissions {
            self.result.prompt_tokens += admission.prompt_tokens as u64;
            self.result.device_hit_tokens += (admission.cached_tokens - admission.swapped_tokens) as u64;
            self.result.swap_hit_tokens += admission.swapped_tokens as u64;
        }
        let stats = report.stats;
        let block_bytes = self.setup.timing.kv_bytes_per_token * self.setup.scheduler.block_size as u64;
        self.result.preempted_swap += stats.preempted_swap as u64;
        self.result.preempted_recompute += stats.preempted_recompute as u64;
        self.result.swapped_out_bytes += stats.blocks_out as u64 * block_bytes;
        self.result.swapped_in_bytes += stats.blocks_in as u64 * block_bytes;
    }

    fn commit(&mut self, output: StepOutput) {
        let now_s = self.device.now_s();
        let first_open = self.next_id - self.open.len() as u64;
        let report = self.engine.scheduler.commit(output);
        self.result.recomputed_tokens += report.recomputed_tokens as u64;
        for (id, delivery) in report.deliveries {
            let open = &mut self.open[(id.0 - first_open) as usize];
            match delivery {
                Delivery::Token { .. } => {
                    self.result.output_tokens += 1;
                    match open.last_token_s.replace(now_s) {
                        Some(last_s) => self.itl.add(now_s - last_s),
                        None => self.ttft.add(now_s - open.arrival_s),
                    }
                }
                Delivery::Finished { .. } => {
                    self.result.requests += 1;
                    open.has_ended = true;
                }
                _ => {}
            }
        }
        while self.open.front().is_some_and(|open| open.has_ended) {
            self.open.pop_front();
        }
    }

    fn finish(self) -> Simulated {
        let (mut result, now_s) = (self.result, self.device.now_s());
        let per_s = |count: f64| if now_s > 0.0 { count / now_s } else { 0.0 };
        result.evicted_blocks = self.engine.device.stats().evicted;
        result.simulated_s = now_s;
        let of_prompts = |tokens: u64| tokens as f64 / result.prompt_tokens.max(1) as f64;
        result.device_hit_rate = of_prompts(result.device_hit_tokens);
        result.swap_hit_rate = of_prompts(result.swap_hit_tokens);
        result.out_tok_per_s = per_s(result.output_tokens as f64);
        result.req_per_s = per_s(result.requests as f64);
        result.ttft_ms = self.ttft.times();
        result.itl_ms = self.itl.times();
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::trace::tests::trace_of;

    use pagetide_engine::scheduler::PreemptionMode;

    const TIMING: Timing = Timing {
        step_ms: 10.0,
        decode_us: 100.0,
        decode_context_ns: 0.0,
        prompt_token_us: 50.0,
        prompt_context_ns: 0.0,
        kv_bytes_per_token: 1_000,
        copy_gb_per_s: 1.0,
    };

    fn scheduler(num_device_blocks: usize, preemption_mode: PreemptionMode) -> SchedulerConfig {
        SchedulerConfig {
            max_num_seqs: 8,
            max_num_batched_tokens: 1_024,
            preemption_mode,
            max_tail_blocks: 1,
            prefix_caching: true,
            ..SchedulerConfig::new(128, num_device_blocks, 100)
        }
    }

    fn run(trace: &Trace, num_requests: usize, scheduler: SchedulerConfig) -> Simulated {
        let eviction = EvictionPolicy::default();
        simulate(&SimulationSetup { trace, num_requests, scheduler, eviction, timing: &TIMING })
    }

    #[test]
    fn times_and_hits_are_those_of_the_trace() {
        // A second apart: each is alone.
        let trace = trace_of(&[&[1, 2], &[1, 2, 3]]);
        let result = run(&trace, 2, scheduler(40, PreemptionMode::Auto));
        assert_eq!((result.requests, result.refused, result.output_tokens), (2, 0, 6));
        assert_eq!((result.prompt_tokens, result.device_hit_tokens), (2_560, 1_024));
        // Each prompt's new tokens in one step, and two steps after it.
        assert_eq!(result.computed_tokens, 1_024 + 512 + 2 * 2);
        assert_eq!(result.steps, 6);
        let [first, second] = [0.010 + 1_024.0 * 50e-6, 0.010 + 512.0 * 50e-6];
        let ttft = result.ttft_ms.unwrap();
        assert!((ttft.max - 1e3 * first).abs() < 1e-6 && (ttft.mean - 500.0 * (first + second)).abs() < 1e-6);
        assert!((result.itl_ms.unwrap().max - 10.1).abs() < 1e-6);
        assert!((result.simulated_s - (1.0 + second + 2.0 * 0.0101)).abs() < 1e-9);
    }

    #[test]
    fn rounds_hit_only_within_themselves() {
        let trace = trace_of(&[&[1, 2], &[1, 2, 3]]);
        let result = run(&trace, 200, scheduler(40, PreemptionMode::Auto));
        assert_eq!((result.requests, result.device_hit_tokens), (200, 100 * 1_024));
    }

    #[test]
    fn pressure_shows_and_every_request_ends() {
        let ids: Vec<Vec<u64>> = (0..60).map(|request| vec![request; 1 + request as usize % 3]).collect();
        let ids: Vec<&[u64]> = ids.iter().map(|ids| &ids[..]).collect();
        let mut trace = trace_of(&ids);
        for request in &mut trace.requests {
            (request.arrival_s, request.output_tokens) = (0.0, 400);
        }
        let few = |mode| run(&trace, 60, scheduler(24, mode));
        let swap = few(PreemptionMode::Swap);
        assert_eq!((swap.requests, swap.output_tokens), (60, 24_000));
        assert!(swap.preempted_swap > 0 && swap.recomputed_tokens == 0, "{swap:?}");
        assert!(swap.swapped_in_bytes > 0 && swap.swapped_in_bytes <= swap.swapped_out_bytes);
        let recompute = few(PreemptionMode::Recompute);
        assert!(recompute.preempted_recompute > 0 && recompute.recomputed_tokens > 0, "{recompute:?}");
        let many = run(&trace, 60, scheduler(1_000, PreemptionMode::Swap));
        assert_eq!(many.preempted_swap + many.preempted_recompute, 0);
        assert!(many.out_tok_per_s > swap.out_tok_per_s);
        assert_eq!(run(&trace, 60, scheduler(12, PreemptionMode::Swap)).refused, 20, "too long for the pool");
    }
}
