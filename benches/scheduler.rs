//! A step of the scheduler and its pools, without a device: its plan, and later its commit. 10,000 requests wait.
//!
//! `cargo bench --bench scheduler`. What a device does (it takes the plan, drops it, and says a token for each
//! sequence) and what clients do (new requests keep the queue as long as it is) is not timed.

use criterion::Criterion;
use pagetide_base::ids::{RequestId, TokenId};
use pagetide_base::sampling::params::{Sampled, SamplingParams};
use pagetide_engine::bill::{Quota, Tenant};
use pagetide_engine::block_pool::BlockPool;
use pagetide_engine::plan::{CopyReport, SeqOutput, StepOutput, StepPlan, StepTiming};
use pagetide_engine::prefix_cache::{BlockHash, EvictionPolicy};
use pagetide_engine::scheduler::{AdmissionPolicy, EngineRequest, PlannedStep, SchedulerConfig};
use pagetide_engine::state::EngineState;
use pagetide_recorder::{Recorder, RecorderLimits};
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

/// The program's.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const BLOCK_SIZE: usize = 16;
const WAITING: usize = 10_000;
/// After so many steps a load is made anew, so that contexts stay as long as they are said to be.
const STEPS: u64 = 256;

#[derive(Clone)]
struct Requests {
    prompt_tokens: RangeInclusive<usize>,
    /// Leading tokens that all prompts have in common.
    shared_tokens: usize,
    max_tokens: u32,
}

/// Contexts of conversations, which go on for longer than they are looked at.
const CHAT: Requests = Requests { prompt_tokens: 500..=2_000, shared_tokens: 0, max_tokens: 10_000 };

struct Load {
    engine: EngineState,
    requests: Requests,
    /// Of the requests that arrive.
    tenant: Tenant,
    /// Plans in flight before a commit is waited for.
    depth: usize,
    in_flight: VecDeque<StepOutput>,
    num_arrived: u64,
    preempted: usize,
    cached_tokens: usize,
    recorder: Option<Recorder>,
}

fn config(max_num_seqs: usize, num_device_blocks: usize) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs,
        max_num_batched_tokens: 512.max(max_num_seqs),
        inter_token_target: Some(0.1),
        max_model_len: 1 << 20,
        admission: AdmissionPolicy::Expected,
        write_behind_blocks: num_device_blocks / 5,
        max_tail_blocks: 4,
        prefix_caching: true,
        ..SchedulerConfig::new(BLOCK_SIZE, num_device_blocks, 100_000)
    }
}

impl Load {
    /// `running` requests decode, all in each step, and no other waits.
    fn decoding(config: SchedulerConfig, requests: Requests, running: usize) -> Self {
        let mut load = Self {
            depth: if config.overlap { 2 } else { 1 },
            engine: EngineState::new(config, EvictionPolicy::default()),
            requests,
            tenant: Tenant::default(),
            in_flight: VecDeque::new(),
            num_arrived: 0,
            preempted: 0,
            cached_tokens: 0,
            recorder: None,
        };
        (0..running).for_each(|_| load.arrive());
        while load.step().1 < running {}
        load
    }

    /// With a full queue behind what is there, all of it seen once.
    fn with_queue(mut self) -> Self {
        self.fill_queue();
        // As many steps as it takes for each sequence to fill a block.
        for _ in 0..BLOCK_SIZE {
            self.step();
        }
        self
    }

    fn fill_queue(&mut self) {
        let population = self.engine.scheduler.population();
        (population.waiting + population.swapped..WAITING).for_each(|_| self.arrive());
    }

    fn arrive(&mut self) {
        let arrival = self.next_arrival();
        self.engine.scheduler.arrive(arrival);
    }

    fn next_arrival(&mut self) -> EngineRequest {
        self.num_arrived += 1;
        let Requests { prompt_tokens, shared_tokens, max_tokens } = self.requests.clone();
        let spread = prompt_tokens.end() - prompt_tokens.start() + 1;
        let len = prompt_tokens.start() + self.num_arrived as usize * 7919 % spread;
        let own = self.num_arrived as usize * 31;
        let token = |i: usize| if i < shared_tokens { i } else { own + i } as TokenId;
        let prompt: Vec<TokenId> = (0..len).map(token).collect();
        let params = SamplingParams { max_tokens, ..SamplingParams::default() };
        EngineRequest { id: RequestId(self.num_arrived), tenant: self.tenant, ..EngineRequest::new(prompt, params) }
    }

    fn plan(&mut self) -> Option<PlannedStep> {
        let mut planned = self.engine.plan(0.0);
        if let Some(recorder) = &mut self.recorder {
            match &mut planned {
                Some(planned) => recorder.plan(0.0, planned),
                None => recorder.awaits_results(0.0),
            }
        }
        planned
    }

    /// A plan, and the commit of the oldest where as many are in flight as may be. Returns the scheduler's time, and
    /// how many sequences got a token.
    fn step(&mut self) -> (Duration, usize) {
        let started = Instant::now();
        let planned = self.plan();
        let mut time = started.elapsed();
        if let Some(PlannedStep { report, .. }) = &planned {
            self.preempted += report.stats.preempted_swap;
            self.cached_tokens += report.admissions.iter().map(|it| it.cached_tokens).sum::<usize>();
        }
        if let Some(PlannedStep { plan, .. }) = planned.filter(|planned| !planned.plan.is_empty()) {
            self.in_flight.push_back(execute(plan));
            if self.in_flight.len() < self.depth {
                return (time, 0);
            }
        }
        let Some(output) = self.in_flight.pop_front() else { return (time, 0) };
        let num_sampled = output.seqs.iter().filter(|seq| !seq.sampled.is_empty()).count();
        let started = Instant::now();
        let results = self.recorder.as_mut().map(|recorder| recorder.results(&output));
        let mut report = self.engine.scheduler.commit(output);
        if let (Some(recorder), Some(results)) = (&mut self.recorder, results) {
            recorder.commit(results, &mut report);
        }
        time += started.elapsed();
        drop(report);
        (time, num_sampled)
    }
}

/// What a device says.
fn execute(plan: StepPlan) -> StepOutput {
    let seqs = plan.batch.iter().map(|planned| {
        let mut output = SeqOutput::of(planned.seq);
        output.sampled.extend(planned.sample.iter().map(|_| Sampled::of(7)));
        output
    });
    let forward_s = 0.01 + plan.num_tokens() as f64 * 1e-4;
    let timing = StepTiming { forward_s, ..StepTiming::default() };
    // Copies have ended by then.
    let arrived = plan.swap_in.iter().map(|swap_in| (swap_in.id, true)).collect();
    StepOutput { seqs: seqs.collect(), timing, copies: CopyReport { arrived, ..CopyReport::default() } }
}

/// Times the steps of loads from `make`. `is_right` looks at each after its last step.
fn bench(criterion: &mut Criterion, name: &str, make: impl Fn() -> Load, is_right: impl Fn(&Load) -> bool) {
    let (mut load, mut num_steps) = (make(), 0);
    criterion.benchmark_group("step").bench_function(name, |bencher| {
        bencher.iter_custom(|steps| {
            let mut time = Duration::ZERO;
            for _ in 0..steps {
                if num_steps == STEPS {
                    assert!(is_right(&load), "{name}: {:?}", load.engine.scheduler.population());
                    (load, num_steps) = (make(), 0);
                }
                time += load.step().0;
                load.fill_queue();
                num_steps += 1;
            }
            time
        });
    });
}

fn decode(criterion: &mut Criterion) {
    let all_decode = |load: &Load| load.engine.scheduler.population().running == 256 && load.preempted == 0;
    let make = || Load::decoding(config(256, 60_000), CHAT, 256).with_queue();
    bench(criterion, "256 decode", make, all_decode);
    let make = || Load::decoding(SchedulerConfig { overlap: true, ..config(256, 60_000) }, CHAT, 256).with_queue();
    bench(criterion, "256 decode, overlapped loop", make, all_decode);
    let make = || {
        let mut load = Load::decoding(config(256, 60_000), CHAT, 256).with_queue();
        load.engine.scheduler.summarise_plans();
        Load { recorder: Some(recorder()), ..load }
    };
    bench(criterion, "256 decode, with the flight recorder", make, all_decode);
    // There are seats, but not the blocks for the first in the queue.
    let make = || {
        let mut load = Load::decoding(config(1024, 60_000), CHAT, 256);
        load.requests.prompt_tokens = 800_000..=800_000;
        load.arrive();
        load.requests = CHAT;
        load.with_queue()
    };
    bench(criterion, "256 decode, the next waits for blocks", make, all_decode);
    // There are seats and blocks, but not for the one tenant that all who wait are of.
    let make = || {
        let quota = Quota { device_blocks: Some(10), swap_blocks: None };
        let mut load = Load::decoding(SchedulerConfig { quota, ..config(1024, 60_000) }, CHAT, 255);
        load.tenant = Tenant(1);
        load.arrive();
        while load.step().1 < 256 {}
        load.with_queue()
    };
    bench(criterion, "256 decode, a tenant's queue waits for its quota", make, all_decode);
}

fn mixed(criterion: &mut Criterion) {
    let make = || {
        let mut load = Load::decoding(config(64, 60_000), CHAT, 63);
        load.requests.prompt_tokens = 200_000..=200_000;
        load.arrive();
        load.requests = CHAT;
        load.with_queue()
    };
    bench(criterion, "63 decode, a prompt in chunks", make, |load| load.engine.scheduler.population().running == 64);
    let short = Requests { prompt_tokens: 1_050..=1_150, shared_tokens: 1_024, max_tokens: 32 };
    let make = || Load::decoding(config(64, 60_000), short.clone(), 0).with_queue();
    bench(criterion, "64 running, two come from the cache", make, |load| load.cached_tokens > 300 * 1024);
    let growing = Requests { prompt_tokens: 100..=300, shared_tokens: 0, max_tokens: 128 };
    // An admission that looks ahead would avoid these preemptions.
    let greedy = || SchedulerConfig { admission: AdmissionPolicy::Prompt, ..config(64, 1_000) };
    let make = || Load::decoding(greedy(), growing.clone(), 0).with_queue();
    bench(criterion, "64 running, preemption by swap", make, |load| load.preempted > 30);
}

fn queue(criterion: &mut Criterion) {
    let mut load = Load::decoding(config(256, 60_000), CHAT, 256).with_queue();
    let arrival = load.next_arrival();
    criterion.benchmark_group("queue").bench_function("a request comes and goes", |bencher| {
        bencher.iter(|| {
            load.engine.scheduler.arrive(arrival.clone());
            load.engine.scheduler.cancel(arrival.id);
        });
    });
}

fn recorder() -> Recorder {
    let limits = RecorderLimits { length: Duration::from_secs(300), max_bytes: 1 << 30 };
    Recorder::new(limits, &config(256, 60_000), EvictionPolicy::default())
}

/// What the flight recorder's keyframes cost: the states, with nothing in them that is not.
fn keyframe(criterion: &mut Criterion) {
    let load = Load::decoding(config(256, 60_000), CHAT, 256).with_queue();
    let mut group = criterion.benchmark_group("keyframe");
    group.bench_function("scheduler, 256 run and 10,000 wait", |bencher| {
        bencher.iter_with_large_drop(|| load.engine.scheduler.clone());
    });
    // All blocks cached, and as many remembered as may be.
    let mut pool = BlockPool::new(100_000, true);
    for name in 0..600_000 {
        let block = pool.allocate().expect("nobody holds a block");
        pool.publish(block, BlockHash::of_number(name));
        pool.release(block);
    }
    pool.take_evicted();
    group.bench_function("pool of 100,000 blocks", |bencher| bencher.iter_with_large_drop(|| pool.clone()));
}

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(500))
        .configure_from_args();
    decode(&mut criterion);
    mixed(&mut criterion);
    queue(&mut criterion);
    keyframe(&mut criterion);
    criterion.final_summary();
}
