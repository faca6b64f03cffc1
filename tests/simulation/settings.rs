//! Random settings, at the start and while requests run.

use crate::model::Random;
use crate::world::World;
use pagetide_base::ids::{RequestId, TokenId};
use pagetide_base::sampling::params::{BeamParams, EarlyStopping, SamplingParams};
use pagetide_engine::beam::num_candidates;
use pagetide_engine::bill::{Quota, Terms};
use pagetide_engine::scheduler::{
    AdmissionPolicy, EngineRequest, PreemptionMode, SchedulerConfig, SchedulingPolicy, Tuning,
};

/// The most blocks of the swap pool.
pub const MOST_SWAP_BLOCKS: u64 = 60;

fn quota(random: &mut Random) -> Quota {
    let mut blocks = || (!random.one_in(3)).then(|| random.below(20) as usize);
    Quota { device_blocks: blocks(), swap_blocks: blocks() }
}

fn num_swap_blocks(random: &mut Random) -> usize {
    if random.one_in(5) { 0 } else { random.range(1, MOST_SWAP_BLOCKS) as usize }
}

fn inter_token_target(random: &mut Random) -> Option<f64> {
    (!random.one_in(3)).then(|| random.range(1, 50) as f64 / 1e3)
}

fn scheduling_policy(random: &mut Random) -> SchedulingPolicy {
    [SchedulingPolicy::Fcfs, SchedulingPolicy::Priority][random.below(2) as usize]
}

fn preemption_mode(random: &mut Random) -> PreemptionMode {
    [PreemptionMode::Auto, PreemptionMode::Swap, PreemptionMode::Recompute][random.below(3) as usize]
}

fn admission_policy(random: &mut Random) -> AdmissionPolicy {
    // Mostly admission by prompt, because that causes preemptions.
    match random.below(8) {
        0 => AdmissionPolicy::MaxTokens,
        1 | 2 => AdmissionPolicy::Expected,
        _ => AdmissionPolicy::Prompt,
    }
}

pub fn random_config(random: &mut Random, seed: u64, overlap: bool) -> SchedulerConfig {
    let block_size = random.range(1, 7) as usize;
    let num_device_blocks = random.range(8, 40) as usize;
    let max_num_seqs = random.range(1, 12) as usize;
    SchedulerConfig {
        block_size,
        num_device_blocks,
        num_swap_blocks: num_swap_blocks(random),
        max_num_seqs,
        max_num_batched_tokens: max_num_seqs + random.below(100) as usize,
        inter_token_target: inter_token_target(random),
        max_model_len: block_size * num_device_blocks,
        policy: scheduling_policy(random),
        preemption_mode: preemption_mode(random),
        admission: admission_policy(random),
        watermark_blocks: random.below(3) as usize,
        write_behind_blocks: random.below(num_device_blocks as u64) as usize,
        max_tail_blocks: random.below(3) as usize,
        non_preemptible_blocks: random.below(num_device_blocks as u64) as usize,
        quota: if random.one_in(3) { quota(random) } else { Quota::default() },
        key_turns: random.one_in(2),
        prefix_caching: !random.one_in(4),
        overlap,
        hash_key: [seed as u8; 32],
    }
}

impl World {
    /// Changes settings. Requests are drawn as before, because requests that were accepted under the first settings
    /// must not get stuck.
    pub fn tune(&mut self) {
        let SchedulerConfig { num_device_blocks, max_num_seqs, max_num_batched_tokens, .. } = self.config;
        let random = &mut self.random;
        let below_blocks = |random: &mut Random| random.below(num_device_blocks as u64) as usize;
        let max_num_seqs = random.range(1, max_num_seqs as u64) as usize;
        let mut tuning = Tuning {
            num_swap_blocks: num_swap_blocks(random),
            max_num_seqs,
            max_num_batched_tokens: random.range(max_num_seqs as u64, max_num_batched_tokens as u64) as usize,
            inter_token_target: inter_token_target(random),
            policy: scheduling_policy(random),
            preemption_mode: preemption_mode(random),
            admission: admission_policy(random),
            watermark_blocks: random.below(3) as usize,
            write_behind_blocks: below_blocks(random),
            max_tail_blocks: random.below(3) as usize,
            non_preemptible_blocks: below_blocks(random),
            quota: if random.one_in(3) { quota(random) } else { Quota::default() },
        };
        if random.one_in(2) {
            // The pool alone, often by little.
            let blocks = self.engine.swap.num_blocks() + random.below(9) as usize;
            let num_swap_blocks = blocks.saturating_sub(4).min(MOST_SWAP_BLOCKS as usize);
            tuning = Tuning { num_swap_blocks, ..Tuning::from(self.engine.scheduler.config()) };
        }
        let stats = self.engine.tune(&tuning);
        self.discard_retired();
        self.record(|recorder| recorder.tune(&tuning));
        if !self.engine.scheduler.has_work() {
            self.engine.drop_cached();
            self.record(|recorder| recorder.drop_cached());
        }
        self.tuned += 1;
        self.shrunk += usize::from(stats.draining > 0);
        self.engine.scheduler.check();
    }
}

fn roomy() -> World {
    World::calm(SchedulerConfig { max_num_seqs: 8, non_preemptible_blocks: 100, ..plain_config(4, 200) })
}

/// Defaults for tests with a few requests: first come, first served, no swap pool, the simple loop.
pub fn plain_config(block_size: usize, num_device_blocks: usize) -> SchedulerConfig {
    SchedulerConfig {
        block_size,
        num_device_blocks,
        num_swap_blocks: 0,
        max_num_seqs: 64,
        max_num_batched_tokens: 64,
        inter_token_target: None,
        max_model_len: block_size * num_device_blocks,
        policy: SchedulingPolicy::Fcfs,
        preemption_mode: PreemptionMode::Auto,
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

impl World {
    /// A world without cancellations and failures.
    pub fn calm(config: SchedulerConfig) -> Self {
        let mut world = Self::of(config, Random(1));
        world.is_calm = true;
        world
    }

    /// A request for one sample.
    pub fn ask(&mut self, prompt: Vec<TokenId>, params: SamplingParams, priority: i32) {
        self.ask_on(prompt, params, priority, Terms::default());
    }

    /// A request for several.
    pub fn ask_for(&mut self, n: u32, prompt: Vec<TokenId>, max_tokens: u32) {
        let arrival = self.arrival(prompt, tokens(max_tokens), 0, Terms::default());
        self.submit(EngineRequest { n, ..arrival });
    }

    fn ask_on(&mut self, prompt: Vec<TokenId>, params: SamplingParams, priority: i32, terms: Terms) {
        let arrival = self.arrival(prompt, params, priority, terms);
        self.submit(arrival);
    }

    pub fn arrival(&self, prompt: Vec<TokenId>, params: SamplingParams, priority: i32, terms: Terms) -> EngineRequest {
        EngineRequest { id: RequestId(self.next_request), priority, terms, ..EngineRequest::new(prompt, params) }
    }

    fn arrive_with(&mut self, params: SamplingParams, terms: Terms) {
        self.ask_on(vec![1; 5], params, 0, terms);
    }

    /// Changes to steps of at most two sequences, and no blocks for non-preemptible requests.
    fn make_small(&mut self) {
        let (max_num_seqs, max_num_batched_tokens, non_preemptible_blocks) = (2, 4, 0);
        let now = Tuning::from(self.engine.scheduler.config());
        let tuning = Tuning { max_num_seqs, max_num_batched_tokens, non_preemptible_blocks, ..now };
        self.engine.tune(&tuning);
    }

    fn step_size(&self) -> (usize, usize) {
        (self.engine.scheduler.config().max_num_seqs, self.engine.scheduler.config().max_num_batched_tokens)
    }
}

fn tokens(max_tokens: u32) -> SamplingParams {
    SamplingParams { max_tokens, ..SamplingParams::default() }
}

#[test]
fn steps_become_smaller_as_those_that_run_end() {
    let mut world = roomy();
    (1..7).for_each(|i| world.arrive_with(tokens(10 * i), Terms::default()));
    (0..6).for_each(|_| world.step());
    let mut running = world.engine.scheduler.population().running;
    assert_eq!(running, 6);
    world.make_small();
    assert_eq!(world.step_size(), (6, 6), "nobody has to leave");
    (0..3).for_each(|_| world.arrive_with(tokens(5), Terms::default()));
    while world.engine.scheduler.num_requests() > 0 {
        world.step();
        let now = world.engine.scheduler.population().running;
        assert!(now <= running.max(2), "{now} run, and {running} did before");
        running = now;
    }
    world.drain();
    assert_eq!((world.step_size(), world.finished), ((2, 4), 9));
}

/// Requests that were accepted before a change of settings always end.
#[test]
fn what_was_accepted_before_is_not_stuck() {
    let mut world = roomy();
    world.make_small();
    let beam = BeamParams { width: 4, length_penalty: 1.0, early_stopping: EarlyStopping::Never, logprobs: None };
    let mut search = SamplingParams { beam: Some(beam), ..tokens(9) };
    search.logprobs = Some(num_candidates(&search));
    world.arrive_with(search, Terms::default());
    assert_eq!(world.step_size(), (4, 4), "its beams go on together");
    let kept = Terms { preemptible: false, max_pause: None };
    (0..2).for_each(|_| world.arrive_with(tokens(9), kept));
    world.drain();
    assert_eq!((world.searched, world.finished), (1, 2));
    world.arrive_with(tokens(2), Terms::default());
    world.drain();
    assert_eq!(world.step_size(), (2, 4));
}
