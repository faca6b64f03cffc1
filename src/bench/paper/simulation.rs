//! Sends a load through a system's front and the engine behind it, by a simulated clock.

use super::next_tokens::beam_candidates;
use super::scenarios::{Decoding, Scenario};
use super::systems::{Front, FrontRequest, System};
use crate::memory::beams::search;
use crate::memory::lengths::Lengths;
use crate::replay::device::SimulatedDevice;
use crate::replay::timing::Timing;
use crate::simulated::{MAX_IDLE_TURNS, made_up_output};
use crate::workload::{RandomStream, TokenSource};
use pagetide_actors::engine_config::configured_scheduler;
use pagetide_base::ids::{RequestId, TokenId};
use pagetide_base::sampling::params::SamplingParams;
use pagetide_config::Config;
use pagetide_engine::plan::{Delivery, StepOutput};
use pagetide_engine::prefix_cache::EvictionPolicy;
use pagetide_engine::scheduler::{AdmissionPolicy, EngineRequest, PlanReport, PlannedStep, SchedulerConfig};
use pagetide_engine::state::EngineState;
use pagetide_model::loader::DEFAULT_SWAP_BYTES;
use serde::{Deserialize, Serialize};

/// Sequences and tokens of a step. Memory has to be the limit, so these are above what it holds; the tokens are those
/// of the paper's vLLM.
const MAX_NUM_SEQS: usize = 2_048;
const MAX_BATCHED_TOKENS: usize = 2_560;
/// The size of the vocabulary, for prompts that must differ.
const VOCAB_SIZE: u32 = 32_000;

/// One run of a load on a system.
#[derive(Clone, Copy, Debug)]
pub struct LoadOnSystem<'a> {
    pub scenario: &'a Scenario,
    pub system: System,
    pub requests: &'a [Lengths],
    /// When each arrives, in seconds, in order.
    pub arrivals_s: &'a [f64],
    /// Tokens.
    pub block_size: usize,
    /// Whether the engine shares blocks between requests. Samples and beams of one request always share.
    pub prefix_caching: bool,
    pub timing: &'a Timing,
}

/// What a run was like. Means are over simulated time, while something runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadResult {
    pub requests: usize,
    pub simulated_s: f64,
    pub req_per_s: f64,
    pub out_tok_per_s: f64,
    /// Mean over the requests of their time from arrival to the end, divided by their output's tokens: section 6.1.
    pub normalised_latency_s: f64,
    /// Sequences that run at once.
    pub running: f64,
    /// Requests that run at once.
    pub running_requests: f64,
    /// Part of the KV memory that is given out or reserved, and the part that holds tokens.
    pub allocated: f64,
    pub tokens: f64,
    pub preempted: u64,
    /// Tokens that were computed again, of all computed tokens.
    pub recomputed_share: f64,
    /// Prompt tokens that were cached, of all prompt tokens.
    pub hit_rate: f64,
    /// At some moments: the time in seconds, `allocated`, `tokens`, and running requests.
    pub over_time: Vec<[f64; 4]>,
}

/// Moments of [`LoadResult::over_time`].
const MOMENTS: usize = 160;

struct OpenLoadRequest {
    lengths: Lengths,
    arrival_s: f64,
    /// Tokens that each sample has.
    num_tokens: Vec<u32>,
    /// Tokens to compute for each sample: more than its own in a padded batch.
    to_compute: u32,
}

struct LoadRun<'a> {
    load: &'a LoadOnSystem<'a>,
    engine: EngineState,
    device: SimulatedDevice<'a>,
    front: Front,
    open: Vec<OpenLoadRequest>,
    num_arrived: usize,
    num_entered: usize,
    num_done: usize,
    prefix: Vec<TokenId>,
    random: TokenSource,
    latencies: f64,
    /// Sums over seconds.
    busy_s: f64,
    sums: [f64; 4],
    computed_tokens: u64,
    recomputed_tokens: u64,
    prompt_tokens: u64,
    hit_tokens: u64,
    result: LoadResult,
}

/// Runs all of it; the same load gives the same result. Every request must be one that the system can serve.
pub fn run(load: &LoadOnSystem) -> LoadResult {
    let scheduler = scheduler(load);
    let memory = load.scenario.deployment.memory(load.block_size);
    let open = load.requests.iter().zip(load.arrivals_s);
    let run = LoadRun {
        engine: EngineState::new(scheduler, EvictionPolicy::default()),
        device: SimulatedDevice::new(load.timing, load.block_size),
        front: Front::new(load.system, memory),
        open: open
            .map(|(lengths, arrival_s)| OpenLoadRequest {
                lengths: *lengths,
                arrival_s: *arrival_s,
                num_tokens: vec![0; load.scenario.decoding.width() as usize],
                to_compute: lengths.output,
            })
            .collect(),
        num_arrived: 0,
        num_entered: 0,
        num_done: 0,
        prefix: TokenSource::new(1, RandomStream::SharedPrefix, VOCAB_SIZE).take(load.scenario.shared_prefix),
        random: TokenSource::new(1, RandomStream::Prompts, VOCAB_SIZE),
        latencies: 0.0,
        busy_s: 0.0,
        sums: [0.0; 4],
        computed_tokens: 0,
        recomputed_tokens: 0,
        prompt_tokens: 0,
        hit_tokens: 0,
        result: LoadResult::default(),
        load,
    };
    run.drain()
}

/// A server's own configuration on a GPU, but with the limits above; without the target for the time between tokens,
/// which the compared systems do not have; and as in the paper, a request starts if its prompt fits. Where memory is
/// reserved, it always does.
fn scheduler(load: &LoadOnSystem) -> SchedulerConfig {
    let config = Config::default();
    let memory = load.scenario.deployment.memory(load.block_size);
    let block_bytes = load.timing.kv_bytes_per_token as usize * load.block_size;
    let num_swap_blocks = config.swap.space_bytes().unwrap_or(DEFAULT_SWAP_BYTES) / block_bytes;
    let configured = configured_scheduler(&config, memory.num_blocks, num_swap_blocks, true);
    let reserves = load.system != System::Paged;
    SchedulerConfig {
        block_size: load.block_size,
        max_num_seqs: MAX_NUM_SEQS,
        max_num_batched_tokens: MAX_BATCHED_TOKENS,
        inter_token_target: None,
        max_model_len: memory.num_blocks * load.block_size,
        overlap: false,
        prefix_caching: load.prefix_caching && !reserves,
        admission: AdmissionPolicy::Prompt,
        watermark_blocks: if reserves { 0 } else { configured.watermark_blocks },
        ..configured
    }
}

impl LoadRun<'_> {
    fn drain(mut self) -> LoadResult {
        let mut idle_turns = 0;
        loop {
            self.arrive();
            if !self.engine.scheduler.has_work() {
                let Some(next_s) = self.load.arrivals_s.get(self.num_arrived) else { break };
                self.device.wait_until(*next_s);
                continue;
            }
            let next_s = self.load.arrivals_s.get(self.num_arrived).copied().unwrap_or(f64::INFINITY);
            let advanced = self.step() || self.device.await_copies(&mut self.engine.scheduler, next_s);
            idle_turns = if advanced { 0 } else { idle_turns + 1 };
            assert!(idle_turns < MAX_IDLE_TURNS, "nothing happens: {:?}", self.engine.scheduler.population());
        }
        self.finish()
    }

    fn arrive(&mut self) {
        while self.num_arrived < self.open.len() && self.load.arrivals_s[self.num_arrived] <= self.device.now_s() {
            let id = self.num_arrived;
            let width = self.load.scenario.decoding.width() as usize;
            self.front.arrive(FrontRequest { id, lengths: self.open[id].lengths, width });
            self.num_arrived += 1;
        }
        for entered in self.front.enter(self.num_arrived == self.open.len()) {
            self.enter(&entered);
        }
    }

    fn enter(&mut self, entered: &FrontRequest) {
        let Lengths { prompt, output } = entered.lengths;
        self.open[entered.id].to_compute = output;
        let mut tokens = self.prefix.clone();
        tokens.extend(self.random.take(prompt - tokens.len()));
        // A paged server does not know how long an output becomes.
        let is_told = self.load.system != System::Paged;
        let room = (self.load.scenario.deployment.memory(self.load.block_size).max_model_len - prompt) as u32;
        let (n, params) = match self.load.scenario.decoding {
            Decoding::Samples(n) => {
                let max_tokens = if is_told { output } else { room.max(output) };
                (n, SamplingParams { max_tokens, ..SamplingParams::default() })
            }
            Decoding::Beams(width) => (1, search(width, output)),
        };
        // Ids grow in the order in which requests enter, which is the order of their arrival.
        let id = RequestId(entered.id as u64);
        self.num_entered += 1;
        self.engine.scheduler.arrive(EngineRequest { id, n, ..EngineRequest::new(tokens, params) });
    }

    /// Returns false if there was nothing to compute or to copy.
    fn step(&mut self) -> bool {
        let Some(PlannedStep { plan, report }) = self.engine.plan(self.device.now_s()) else { return false };
        for admission in &report.admissions {
            self.prompt_tokens += admission.prompt_tokens as u64;
            self.hit_tokens += admission.cached_tokens as u64;
        }
        self.result.preempted += (report.stats.preempted_swap + report.stats.preempted_recompute) as u64;
        if plan.is_empty() {
            return false;
        }
        let before_s = self.device.now_s();
        let mut output = made_up_output(&plan);
        if let Decoding::Beams(_) = self.load.scenario.decoding {
            beam_candidates(&plan, &mut output);
        }
        let output = self.device.execute(&plan, &report.load, output);
        self.computed_tokens += report.load.num_tokens() as u64;
        self.look(&report, self.device.now_s() - before_s);
        self.commit(output);
        true
    }

    fn look(&mut self, report: &PlanReport, seconds: f64) {
        let memory = self.load.scenario.deployment.memory(self.load.block_size);
        let used = self.engine.device.stats().used;
        let num_slots = (memory.num_blocks * self.load.block_size) as f64;
        let (tables, _) = self.engine.scheduler.tables();
        let held: usize = tables.iter().map(|table| table.len()).sum();
        // Tables that share blocks also share their empty slots, or the tokens in them.
        let filled = 1.0 - report.empty_slots as f64 / (held.max(1) * self.load.block_size) as f64;
        let population = self.engine.scheduler.population();
        let requests = (self.num_entered - self.num_done) as f64;
        let running = population.running as f64;
        let now = [
            self.front.reserved_blocks().unwrap_or(used) as f64 / memory.num_blocks as f64,
            used as f64 * self.load.block_size as f64 * filled / num_slots,
            running,
            if self.load.system == System::Paged {
                running / self.load.scenario.decoding.width() as f64
            } else {
                requests
            },
        ];
        self.busy_s += seconds;
        self.sums.iter_mut().zip(now).for_each(|(sum, value)| *sum += value * seconds);
        self.result.over_time.push([self.device.now_s(), now[0], now[1], now[3]]);
    }

    fn commit(&mut self, output: StepOutput) {
        let report = self.engine.scheduler.commit(output);
        self.recomputed_tokens += report.recomputed_tokens as u64;
        let is_search = matches!(self.load.scenario.decoding, Decoding::Beams(_));
        for (request, delivery) in report.deliveries {
            let id = request.0 as usize;
            if let Delivery::Token { sample, .. } = &delivery
                && !is_search
            {
                let open = &mut self.open[id];
                open.num_tokens[*sample as usize] += 1;
                if open.num_tokens[*sample as usize] == open.to_compute {
                    let is_last = open.num_tokens.iter().all(|tokens| *tokens >= open.to_compute);
                    self.end_sample(request, *sample, is_last);
                }
            }
            let has_ended = is_search && matches!(delivery, Delivery::Finished { .. });
            if has_ended && !self.engine.scheduler.has_request(request) && self.open[id].num_tokens[0] == 0 {
                self.open[id].num_tokens[0] = self.open[id].to_compute;
                self.end(id);
            }
        }
    }

    /// A sample has its last token. A client that waited for it goes away.
    fn end_sample(&mut self, request: RequestId, sample: u32, is_last: bool) {
        if is_last {
            self.engine.scheduler.cancel(request);
            self.end(request.0 as usize);
        } else {
            self.engine.scheduler.stop_sample(request, sample);
        }
    }

    /// A request has computed all that it computes.
    fn end(&mut self, id: usize) {
        self.num_done += 1;
        for done in self.front.computed(id) {
            let OpenLoadRequest { lengths, arrival_s, .. } = &self.open[done];
            self.latencies += (self.device.now_s() - arrival_s) / f64::from(lengths.output);
            self.result.requests += 1;
        }
    }

    fn finish(self) -> LoadResult {
        let mut result = self.result;
        let seconds = self.device.now_s();
        let num_output: u64 = self.open.iter().map(|open| u64::from(open.lengths.output)).sum();
        let width = u64::from(self.load.scenario.decoding.width());
        result.simulated_s = seconds;
        result.req_per_s = result.requests as f64 / seconds;
        result.out_tok_per_s = (num_output * width) as f64 / seconds;
        result.normalised_latency_s = self.latencies / result.requests.max(1) as f64;
        let mean = |index: usize| self.sums[index] / self.busy_s.max(f64::MIN_POSITIVE);
        (result.allocated, result.tokens) = (mean(0), mean(1));
        (result.running, result.running_requests) = (mean(2), mean(3));
        result.recomputed_share = self.recomputed_tokens as f64 / self.computed_tokens.max(1) as f64;
        result.hit_rate = self.hit_tokens as f64 / self.prompt_tokens.max(1) as f64;
        let every = result.over_time.len().div_ceil(MOMENTS).max(1);
        result.over_time = result.over_time.into_iter().step_by(every).collect();
        result
    }
}
