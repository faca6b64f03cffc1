//! The simulated world: clients, the engine and the device, with the invariants that must hold at any time.

mod checks;

use crate::device::Device;
use crate::model::*;
use crate::settings::{MOST_SWAP_BLOCKS, random_config};
pub use checks::Tails;
use checks::check_prompt_logprobs;
use pagetide_base::ids::{BlockId, RequestId, SeqId, TokenId};
use pagetide_base::rules::ConstraintSource;
use pagetide_base::sampling::extra::{ExtraSamplers, Mirostat, MirostatVersion};
use pagetide_base::sampling::params::*;
use pagetide_engine::beam::num_candidates;
use pagetide_engine::bill::{Tenant, Terms, most_blocks};
use pagetide_engine::plan::{Delivery, StepOutput, StepPlan};
use pagetide_engine::prefix_cache::EvictionPolicy;
use pagetide_engine::scheduler::{EngineRequest, PlanStats, PlannedStep, SchedulerConfig};
use pagetide_engine::state::EngineState;
use pagetide_recorder::Recorder;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// What a client has received of one request.
pub struct Heard {
    pub arrival: EngineRequest,
    pub started: bool,
    pub outputs: Vec<Vec<TokenId>>,
    pub finished: Vec<Option<FinishReason>>,
    pub stopped: Vec<bool>,
    /// For each sample: how many of its sequences are paused. Beams report as sample 0.
    pub paused: Vec<usize>,
}

/// What all plans and commits have reported.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    pub plans: PlanStats,
    pub recomputed_tokens: usize,
}

pub struct World {
    pub random: Random,
    /// The configuration at the start. Only the swap pool may become larger than this.
    pub config: SchedulerConfig,
    pub engine: EngineState,
    pub device: Device,
    pub in_flight: VecDeque<StepPlan>,
    /// Blocks that left the swap pool, for each plan in flight: those that left after it.
    discards: VecDeque<Vec<BlockId>>,
    /// How many of them there have been.
    pub discarded: usize,
    /// Contents of device blocks that came back from a file, for each plan in flight: those that came after it.
    writes: VecDeque<Vec<(BlockId, Vec<u64>)>>,
    /// How many of them there have been.
    pub put_back: usize,
    pub open: HashMap<RequestId, Heard>,
    pub next_request: u64,
    pub prefixes: Vec<Vec<TokenId>>,
    /// Whether there are no cancellations and no failures.
    pub is_calm: bool,
    /// One in this many steps fails.
    pub fails_one_in: u64,
    pub operations: usize,
    pub total: Totals,
    pub hit_tokens: usize,
    pub finished: usize,
    /// Samples that followed rules to their end, requests whose rules failed, results of beam searches.
    pub ruled: usize,
    pub failed: usize,
    pub searched: usize,
    pub embedded: usize,
    /// Failures of the executor, and how many of them with two plans in flight.
    pub failures: [usize; 2],
    /// Pending tokens that were fed.
    pub pending: usize,
    /// Seven of eight requests are such that steps are planned ahead of them.
    pub few_await_results: bool,
    /// Plans made ahead that left out a sequence whose results were not there.
    pub left_out: usize,
    /// Samples that ended while a further plan was in flight.
    pub fed_after_end: usize,
    /// Steps whose prompts were cut to keep the step short.
    pub limited: usize,
    /// Copies between the pools that failed; cached tokens that came from the swap pool.
    pub lost_copies: usize,
    /// Urgent sequences in demands.
    pub urgent: usize,
    pub hit_swapped: usize,
    /// Plans that were not empty.
    pub num_steps: usize,
    /// The number of preemptions of each request.
    pub preemptions: HashMap<RequestId, usize>,
    /// Changes while requests ran; those after which the swap pool had to drain; its blocks that drained.
    pub tuned: usize,
    pub shrunk: usize,
    pub drained: usize,
    /// Preemptions to the swap pool.
    pub tails: Tails,
    /// The tokens that the last plans fed, for as many plans as may have been made since blocks were last copied ahead.
    last_fed: VecDeque<Vec<(SeqId, usize)>>,
    /// Records everything, if set.
    pub recorder: Option<Recorder>,
}

impl World {
    pub fn new(seed: u64, overlap: bool) -> Self {
        let mut random = Random(seed);
        let config = random_config(&mut random, seed, overlap);
        let mut world = Self::of(config, random);
        world.device.failing = (!world.random.one_in(3)).then_some(50);
        world
    }

    /// A world whose steps are planned ahead, mostly with room to do so, in which few requests await results.
    pub fn mixed(seed: u64) -> Self {
        let mut random = Random(seed);
        let mut config = random_config(&mut random, seed, true);
        config.num_device_blocks *= 3;
        config.max_num_seqs += 6;
        config.max_num_batched_tokens += 6;
        let mut world = Self::of(config, random);
        world.few_await_results = true;
        world
    }

    pub fn of(config: SchedulerConfig, mut random: Random) -> Self {
        let prefixes = (0..3).map(|_| random_tokens(&mut random, 30)).collect();
        Self {
            engine: EngineState::new(config.clone(), EvictionPolicy::default()),
            device: Device::new(&config, config.num_swap_blocks.max(MOST_SWAP_BLOCKS as usize)),
            in_flight: VecDeque::new(),
            discards: VecDeque::new(),
            discarded: 0,
            writes: VecDeque::new(),
            put_back: 0,
            open: HashMap::new(),
            next_request: 0,
            prefixes,
            is_calm: false,
            fails_one_in: 400,
            operations: 0,
            total: Totals::default(),
            hit_tokens: 0,
            finished: 0,
            ruled: 0,
            failed: 0,
            searched: 0,
            embedded: 0,
            failures: [0; 2],
            pending: 0,
            few_await_results: false,
            left_out: 0,
            fed_after_end: 0,
            limited: 0,
            lost_copies: 0,
            urgent: 0,
            hit_swapped: 0,
            num_steps: 0,
            preemptions: HashMap::new(),
            tuned: 0,
            shrunk: 0,
            drained: 0,
            tails: Tails::default(),
            last_fed: VecDeque::new(),
            recorder: None,
            random,
            config,
        }
    }

    pub fn record(&mut self, tell: impl FnOnce(&mut Recorder)) {
        if let Some(recorder) = &mut self.recorder {
            tell(recorder);
        }
    }

    /// Submits a request that could run alone, often with a known prefix.
    pub fn arrive(&mut self) {
        let random = &mut self.random;
        let limit = self.config.max_model_len as u64;
        let mut prompt = Vec::new();
        if random.one_in(2) {
            let prefix = &self.prefixes[random.below(3) as usize];
            prompt.extend_from_slice(&prefix[..random.range(1, prefix.len() as u64) as usize]);
        }
        let more = random.range(1, 12) as usize;
        prompt.extend(random_tokens(random, more));
        prompt.truncate(limit as usize - 1);
        let most = (limit - prompt.len() as u64).min(if random.one_in(8) { limit } else { 20 });
        let max_tokens = random.range(1, most) as u32;
        let is_plain = self.few_await_results && !random.one_in(8);
        let is_search = !is_plain && random.one_in(5) && self.config.max_num_seqs > 1;
        let bad_word = |random: &mut Random| random_tokens(random, 2);
        let bad_words = match !is_plain && !is_search && random.one_in(4) {
            true => (0..20).map(|_| bad_word(random)).collect(),
            false => Vec::new(),
        };
        let mut params = SamplingParams {
            max_tokens,
            bad_words,
            min_tokens: if random.one_in(3) { random.below(u64::from(max_tokens) + 1) as u32 } else { 0 },
            eos_token_ids: if random.one_in(3) { vec![] } else { vec![EOS] },
            prompt_logprobs: (!is_search && random.one_in(6)).then_some(0),
            // This changes no fingerprint, but makes plans carry the history.
            logit_bias: vec![(3, 0.0)],
            seed: 1 + self.next_request,
            presence_penalty: if max_tokens.is_multiple_of(3) { 0.5 } else { 0.0 },
            ..SamplingParams::default()
        };
        if !is_plain && !is_search && self.next_request.is_multiple_of(8) {
            let mirostat = Some(Mirostat { version: MirostatVersion::Two, tau: 2.0, eta: 0.1 });
            params.extra = Some(Box::new(ExtraSamplers { mirostat, ..ExtraSamplers::default() }));
        }
        let n = if random.one_in(3) { random.range(2, 5) as u32 } else { 1 };
        if !is_search && params.prompt_logprobs.is_none() && random.one_in(5) {
            params.pooling = Some([Pooling::Last, Pooling::Mean][random.below(2) as usize]);
            (params.max_tokens, params.min_tokens) = (1, 0);
            params.bad_words.clear();
        }
        let n = if params.pooling.is_some() { 1 } else { n };
        let n = if is_search { self.make_search(&mut params, prompt.len()) } else { n };
        let random = &mut self.random;
        let has_rules = !is_plain && params.beam.is_none() && params.pooling.is_none() && random.one_in(4);
        let rules = has_rules.then(|| {
            let fails_at = random.one_in(10).then(|| random.below(8) as usize);
            Arc::new(RulesSource { key: random.next(), fails_at }) as Arc<dyn ConstraintSource>
        });
        let num_seqs = params.beam.as_ref().map_or(n, |beam| beam.width) as usize;
        let num_tokens = prompt.len() + (params.max_tokens as usize).min(limit as usize - prompt.len()) - 1;
        let most = most_blocks(self.config.block_size, prompt.len(), num_tokens, num_seqs);
        let terms = Terms {
            preemptible: most > self.config.non_preemptible_blocks || !random.one_in(4),
            max_pause: random.one_in(6).then(|| Duration::from_millis(random.below(400))),
        };
        let arrival = EngineRequest {
            id: RequestId(self.next_request),
            n,
            priority: random.below(4) as i32,
            cache_salt: random.one_in(5).then(|| "salt".to_string()),
            terms,
            tenant: Tenant(random.below(3) as u32),
            constraint: rules,
            ..EngineRequest::new(prompt, params)
        };
        self.submit(arrival);
    }

    pub fn submit(&mut self, arrival: EngineRequest) {
        self.next_request += 1;
        let n = arrival.n as usize;
        let heard = Heard {
            arrival: arrival.clone(),
            started: false,
            outputs: vec![vec![]; n],
            finished: vec![None; n],
            stopped: vec![false; n],
            paused: vec![0; n],
        };
        self.open.insert(arrival.id, heard);
        self.record(|recorder| recorder.arrive(&arrival));
        self.engine.scheduler.arrive(arrival);
    }

    /// Turns `params` into those of a search that could run alone, if there is room for two beams. Returns the number
    /// of results.
    pub fn make_search(&mut self, params: &mut SamplingParams, prompt_len: usize) -> u32 {
        let Self { random, config, .. } = self;
        let width = random.range(2, 5).min(config.max_num_seqs as u64) as usize;
        let shared = prompt_len / config.block_size;
        if random.one_in(3) {
            // As long as it can be.
            let own = config.num_device_blocks.saturating_sub(shared) / width;
            let room = ((shared + own) * config.block_size + 1).min(config.max_model_len).saturating_sub(prompt_len);
            params.max_tokens = room.clamp(1, 50) as u32;
            params.min_tokens = params.min_tokens.min(params.max_tokens);
        }
        let own = (prompt_len + params.max_tokens as usize - 1).div_ceil(config.block_size) - shared;
        if shared + width * own > config.num_device_blocks {
            return 1;
        }
        params.beam = Some(BeamParams {
            width: width as u32,
            length_penalty: [0.0, 1.0, -0.5][random.below(3) as usize],
            early_stopping: [EarlyStopping::Yes, EarlyStopping::No, EarlyStopping::Never][random.below(3) as usize],
            logprobs: None,
        });
        params.logprobs = Some(num_candidates(params));
        random.range(1, width as u64) as u32
    }

    pub fn some_request(&mut self) -> Option<RequestId> {
        let mut ids: Vec<_> = self.open.keys().copied().collect();
        ids.sort_unstable();
        (!ids.is_empty()).then(|| ids[self.random.below(ids.len() as u64) as usize])
    }

    pub fn cancel(&mut self) {
        let Some(id) = self.some_request() else { return };
        if self.random.one_in(2) {
            self.record(|recorder| recorder.cancel(id));
            self.engine.scheduler.cancel(id);
            self.open.remove(&id);
            return;
        }
        let heard = self.open.get_mut(&id).expect("chosen from the open ones");
        let sample = self.random.below(u64::from(heard.arrival.n)) as usize;
        if !heard.outputs[sample].is_empty() && heard.finished[sample].is_none() {
            heard.stopped[sample] = true;
            self.record(|recorder| recorder.stop_sample(id, sample as u32));
            self.engine.scheduler.stop_sample(id, sample as u32);
            self.close_if_done(id);
        }
    }

    /// Makes a plan if possible, in most cases; otherwise finishes the oldest plan.
    pub fn step(&mut self) {
        if self.engine.scheduler.waits_for_copies() && self.random.one_in(3) {
            let report = self.device.copy_some();
            self.lost_copies += report.lost.len() + report.arrived.iter().filter(|(_, is_there)| !is_there).count();
            self.record(|recorder| recorder.copied(&report));
            self.engine.scheduler.copied(&report);
        }
        let waits = !self.in_flight.is_empty() && self.random.one_in(4);
        if (waits || !self.plan()) && !self.in_flight.is_empty() {
            self.finish();
        }
    }

    /// Makes a plan, and finishes the oldest one if no more may be in flight.
    pub fn plan_and_finish(&mut self) -> Option<StepPlan> {
        let before = self.in_flight.len();
        self.plan();
        let plan = self.in_flight.get(before).cloned();
        if plan.is_none() || self.in_flight.len() > usize::from(self.config.overlap) {
            self.finish();
        }
        plan
    }

    /// False where no step can be planned before results are taken in.
    pub fn plan(&mut self) -> bool {
        let now = self.operations as f64 / 100.0;
        let is_ahead = !self.in_flight.is_empty();
        let draining = self.engine.swap.stats().draining;
        let has_work = self.engine.scheduler.has_work();
        let mut num_urgent = 0;
        let Some(mut planned) = self.engine.plan_seen(now, |demand| num_urgent = demand.urgent.len()) else {
            if has_work {
                self.record(|recorder| recorder.awaits_results(now));
            }
            return false;
        };
        self.urgent += num_urgent;
        self.drained += draining - self.engine.swap.stats().draining;
        self.discard_retired();
        self.record(|recorder| recorder.plan(now, &mut planned));
        let PlannedStep { plan, report } = planned;
        assert!(!is_ahead || report.preempted.is_empty(), "a plan made ahead preempts");
        self.total.plans += report.stats;
        for admission in &report.admissions {
            self.hit_tokens += admission.cached_tokens;
            self.hit_swapped += admission.swapped_tokens;
        }
        self.check_tails(&plan, report.preemption_copies);
        for (request, delivery) in report.pauses {
            let Some(Heard { arrival, paused, .. }) = self.open.get_mut(&request) else { continue };
            match delivery {
                Delivery::Paused { sample } => {
                    assert!(arrival.terms.preemptible, "{request} was preempted: {arrival:?}");
                    paused[sample as usize] += 1;
                    let most = if arrival.params.beam.is_some() { usize::MAX } else { 1 };
                    assert!(paused[sample as usize] <= most, "{request} was told twice that it is paused");
                }
                Delivery::Resumed { sample } => {
                    let goes_on = paused[sample as usize].checked_sub(1);
                    paused[sample as usize] = goes_on.expect("only what was paused goes on");
                }
                other => panic!("{other:?} is no pause"),
            }
        }
        self.engine.scheduler.check();
        self.engine.scheduler.check_against(self.engine.device.stats());
        let (device_tables, swap_tables) = self.engine.scheduler.tables();
        self.engine.device.check(device_tables.into_iter());
        // Swap blocks that this step copies in are released with the next demand.
        self.engine.swap.check(swap_tables.into_iter());
        self.check_plan(&plan, &report.forecast);
        let is_empty = plan.is_empty();
        if !is_empty {
            self.num_steps += 1;
            self.in_flight.push_back(plan);
            self.discards.push_back(Vec::new());
            self.writes.push_back(Vec::new());
        }
        assert_eq!(self.in_flight.len(), self.engine.scheduler.num_in_flight());
        !(is_ahead && is_empty)
    }

    /// Blocks are discarded on the device only after the plans made before.
    pub fn discard_retired(&mut self) {
        let retired = self.engine.swap.take_retired();
        self.discarded += retired.len();
        match self.discards.back_mut() {
            Some(discards) => discards.extend(retired),
            None => self.device.discard(&retired),
        }
    }

    /// Puts a part of a known prefix into the cache, as from a file, or erases it.
    fn keep_prefix(&mut self) {
        if !self.config.prefix_caching {
            return;
        }
        let prefix = &self.prefixes[self.random.below(3) as usize];
        let names = self.engine.scheduler.names_of("", prefix);
        let first = self.random.below(names.len() as u64 + 1) as usize;
        let names = &names[first..first + self.random.below((names.len() - first) as u64 + 1) as usize];
        let available = self.engine.device.available();
        if self.random.one_in(3) {
            self.engine.erase(names);
            self.record(|recorder| recorder.erase(names));
        } else {
            let content = context(prefix, &[]);
            let of =
                |place: usize| content[(first + place) * self.config.block_size..][..self.config.block_size].to_vec();
            let written = self.engine.put_back(names);
            let written: Vec<_> = written.into_iter().map(|(place, block)| (block, of(place))).collect();
            self.put_back += written.len();
            // The device writes them behind the plans that were made before.
            match self.writes.back_mut() {
                Some(writes) => writes.extend(written),
                None => self.device.write(written),
            }
            self.record(|recorder| recorder.put_back(names));
        }
        // The scheduler is not told.
        assert_eq!(self.engine.device.available(), available);
    }

    pub fn finish(&mut self) {
        if !self.is_calm && self.random.one_in(self.fails_one_in) {
            return self.fail();
        }
        let plan = self.in_flight.pop_front().expect("a plan is in flight");
        let mut output = self.device.execute(&plan);
        self.device.discard(&self.discards.pop_front().expect("there is an entry for each plan"));
        self.device.write(self.writes.pop_front().expect("there is an entry for each plan"));
        output.timing.forward_s = self.seconds(&plan);
        if !self.is_calm && self.random.one_in(10) {
            self.cancel(); // while the step runs
        }
        self.hear(output);
        self.engine.scheduler.check();
    }

    /// The time of a step: given by its tokens, or, unless the world is calm, sometimes random.
    pub fn seconds(&mut self, plan: &StepPlan) -> f64 {
        match self.random.below(10) {
            0 if !self.is_calm => 0.0,
            1 if !self.is_calm => self.random.below(1_000_000) as f64 / 1e4,
            _ => 2e-3 + plan.num_tokens() as f64 * 5e-4,
        }
    }

    pub fn fail(&mut self) {
        self.failures[0] += 1;
        self.failures[1] += usize::from(self.in_flight.len() > 1);
        let failed = self.engine.fail_running();
        self.record(|recorder| recorder.fail(&failed));
        for id in failed {
            assert!(self.open.remove(&id).is_some());
        }
        let failing = self.device.failing;
        self.device = Device::new(&self.config, self.device.swap.len());
        self.device.failing = failing;
        self.in_flight.clear();
        self.discards.clear();
        self.writes.clear();
    }

    pub fn hear(&mut self, output: StepOutput) {
        let results = self.recorder.as_mut().map(|recorder| recorder.results(&output));
        let mut report = self.engine.scheduler.commit(output);
        if let (Some(recorder), Some(results)) = (&mut self.recorder, results) {
            recorder.commit(results, &mut report);
        }
        self.total.recomputed_tokens += report.recomputed_tokens;
        for (id, delivery) in report.deliveries {
            let heard = self.open.get_mut(&id).expect("only open requests hear anything");
            match delivery {
                Delivery::Started { cached_tokens } => {
                    assert!(!std::mem::replace(&mut heard.started, true));
                    assert!(cached_tokens < heard.arrival.prompt.len());
                }
                Delivery::Bill(bill) if bill.preemptions > 0 => {
                    self.preemptions.insert(id, bill.preemptions);
                }
                Delivery::Bill(_) => {}
                Delivery::Paused { .. } | Delivery::Resumed { .. } => panic!("pauses are told with the plan"),
                Delivery::PromptLogprobs(logprobs) => check_prompt_logprobs(&heard.arrival, &logprobs),
                Delivery::Token { sample, sampled } => {
                    assert!(heard.started && heard.finished[sample as usize].is_none());
                    assert_eq!(heard.paused[sample as usize], 0, "{id} goes on, and is said to be paused");
                    heard.outputs[sample as usize].push(sampled.token);
                }
                Delivery::Failed { message } => {
                    assert_eq!(message, "these rules lead nowhere");
                    let n = heard.arrival.n;
                    let fails = |sample| alone(&heard.arrival, sample, self.config.max_model_len) == Err(FAILED);
                    assert!((0..n).any(fails), "{id} failed and should not have");
                    self.failed += 1;
                    self.open.remove(&id);
                }
                Delivery::Embedding(values) => {
                    let states: Vec<f64> =
                        context(&heard.arrival.prompt, &[]).into_iter().map(|it| state_of(it).into()).collect();
                    let expected = match heard.arrival.params.pooling {
                        Some(Pooling::Last) => states[states.len() - 1],
                        _ => states.iter().sum::<f64>() / states.len() as f64,
                    };
                    assert_eq!(values, [expected as f32], "{id}");
                    self.embedded += 1;
                }
                Delivery::Finished { .. } if heard.arrival.params.pooling.is_some() => {
                    heard.finished[0] = Some(FinishReason::Eos);
                    self.close_if_done(id);
                }
                Delivery::Finished { sample, reason } if heard.arrival.params.beam.is_some() => {
                    let expected = &beams_alone(&heard.arrival, self.config.max_model_len)[sample as usize];
                    let output = heard.outputs[sample as usize].clone();
                    assert_eq!(&(output, reason), expected, "{id} result {sample}");
                    self.searched += 1;
                    heard.finished[sample as usize] = Some(reason);
                    self.close_if_done(id);
                }
                Delivery::Finished { sample, reason } => {
                    self.finished += 1;
                    self.fed_after_end += usize::from(reason == FinishReason::Eos && !self.in_flight.is_empty());
                    let expected = alone(&heard.arrival, sample, self.config.max_model_len);
                    self.ruled += usize::from(heard.arrival.constraint.is_some());
                    assert_eq!(Ok((heard.outputs[sample as usize].clone(), reason)), expected, "{id} sample {sample}");
                    heard.finished[sample as usize] = Some(reason);
                    self.close_if_done(id);
                }
            }
        }
        for id in report.ended {
            assert!(!self.open.contains_key(&id), "{id} has ended, and a sample of it has not");
        }
    }

    pub fn close_if_done(&mut self, id: RequestId) {
        let heard = &self.open[&id];
        if heard.finished.iter().zip(&heard.stopped).all(|(reason, stopped)| reason.is_some() || *stopped) {
            self.open.remove(&id);
        }
    }

    pub fn run(&mut self, operations: usize) {
        self.run_for(operations);
        self.drain();
    }

    /// Runs until `operations` operations are done.
    pub fn run_for(&mut self, operations: usize) {
        while self.operations < operations {
            match self.random.below(10) {
                0 if self.random.one_in(10) => self.tune(),
                0..3 if self.open.len() < 30 => self.arrive(),
                3 if self.random.one_in(4) => self.cancel(),
                3 if self.random.one_in(4) => self.keep_prefix(),
                _ => self.step(),
            }
            self.operations += 1;
        }
    }

    /// Runs until every request has ended, and checks that every block is released.
    pub fn drain(&mut self) {
        let most = self.engine.scheduler.num_requests() * 5 * (self.config.max_model_len + 2) * 4 + 100;
        let mut steps = 0;
        while self.engine.scheduler.has_work() || !self.in_flight.is_empty() {
            self.step();
            steps += 1;
            assert!(steps < most, "no progress: {:?}", self.engine.scheduler.population());
        }
        assert!(self.open.is_empty(), "a request never ended");
        assert_eq!(self.engine.device.stats().used, 0);
        let swap = self.engine.swap.stats();
        assert_eq!((swap.used, swap.draining), (0, 0));
        assert_eq!(swap.cached + swap.free, self.engine.scheduler.config().num_swap_blocks);
    }
}

pub fn random_tokens(random: &mut Random, count: usize) -> Vec<TokenId> {
    (0..count).map(|_| random.range(1, VOCAB - 1) as TokenId).collect()
}
