//! Seeded simulation of the engine: random arrivals, forks, cancels, preemptions and executor failures on tiny
//! pools, in the simple and in the overlapped loop, against a model that generates each sample alone.
//!
//! The simulated device keeps, in every slot, a fingerprint of all tokens up to its own. The next token is a function
//! of all fingerprints read through the block table, so a block that is lost, mixed up, reused too early, copied
//! wrongly or cached under a wrong name changes the text. It carries a plan out as late as may be: when its results are
//! taken in. After every plan all invariants are asserted.
//!
//! `PAGETIDE_SIM_SEED=n` runs one seed, `PAGETIDE_SIM_OPERATIONS=n` sets how much is done.

use pagetide::engine::allocation::{serve, serve_swap};
use pagetide::engine::beam::{Beam, BeamSearch, Open, num_candidates};
use pagetide::engine::block_pool::BlockPool;
use pagetide::engine::constraint::{Constraint, ConstraintSource, NextToken};
use pagetide::engine::plan::{Delivery, PlannedSeq, SeqOutput, StepOutput, StepPlan};
use pagetide::engine::policy::{Arrival, PreemptionMode, Scheduler, SchedulerConfig, SchedulingPolicy, StepStats};
use pagetide::ids::{BlockId, RequestId, SeqId, TokenId};
use pagetide::sampling::params::{
    BeamParams, EarlyStopping, FinishReason, Pooling, PositionLogprobs, Sampled, SamplingParams, TokenLimits,
    TokenLogprob, TokenMask,
};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

const EOS: TokenId = 0;
const VOCAB: u64 = 40;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn range(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }

    fn one_in(&mut self, chance: u64) -> bool {
        self.below(chance) == 0
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The fingerprint of a prefix that ends with `token`.
fn fingerprint(previous: u64, token: TokenId) -> u64 {
    mix(previous.wrapping_mul(31).wrapping_add(u64::from(token) + 1))
}

/// What the simulated model says after a context: sample 0's and the others' tokens differ.
fn next_token(slots: impl Iterator<Item = u64>, sample: u32) -> TokenId {
    let all = slots.fold(u64::from(sample) + 1, |acc, slot| mix(acc ^ slot));
    (all % VOCAB) as TokenId
}

/// What the simulated model says where a search or rules want to know more: all tokens, best first.
fn ranking(slots: impl Iterator<Item = u64>) -> Vec<TokenLogprob> {
    let all = slots.fold(7, |acc, slot| mix(acc ^ slot));
    let logprob = |token: u64| -((mix(all ^ token) % 10_000) as f32) / 1000.0;
    let mut ranking: Vec<TokenLogprob> =
        (0..VOCAB).map(|token| TokenLogprob { token: token as TokenId, logprob: logprob(token), rank: 0 }).collect();
    ranking.sort_by(|a, b| b.logprob.total_cmp(&a.logprob));
    ranking
}

/// The next token of a sample, and what a search wants to know.
fn sample(context: &[u64], sample: u32, limits: &TokenLimits, num_top: Option<u32>) -> Sampled {
    let is_left = |token: &TokenId| {
        limits.allowed.as_ref().is_none_or(|allowed| allowed.contains(*token)) && !limits.banned.contains(token)
    };
    let first = next_token(context.iter().copied(), sample);
    let token = (first..first + VOCAB as TokenId).map(|token| token % VOCAB as TokenId).find(is_left);
    let token = token.expect("something is left");
    let logprobs = num_top.map(|num_top| {
        let mut top = ranking(context.iter().copied());
        top.truncate(num_top as usize);
        Box::new(PositionLogprobs { chosen: top[0], top })
    });
    Sampled { token, logprobs }
}

/// Rules that depend on everything before: sometimes none, sometimes a choice, often a single token; the end is
/// allowed now and then. Some fail.
#[derive(Debug)]
struct Rules {
    key: u64,
    fails_at: Option<usize>,
    seen: Vec<TokenId>,
}

#[derive(Debug)]
struct RulesSource {
    key: u64,
    fails_at: Option<usize>,
}

impl ConstraintSource for RulesSource {
    fn start(&self) -> Box<dyn Constraint> {
        Box::new(Rules { key: self.key, fails_at: self.fails_at, seen: Vec::new() })
    }
}

impl Constraint for Rules {
    fn allowed(&mut self) -> Result<Option<TokenMask>, String> {
        if self.fails_at == Some(self.seen.len()) {
            return Err("these rules lead nowhere".into());
        }
        let state = self.seen.iter().fold(self.key, |state, token| mix(state ^ u64::from(*token)));
        let any = |i| 1 + (mix(state ^ i) % (VOCAB - 1)) as TokenId;
        Ok(match state % 8 {
            0 => None,
            1 => Some(TokenMask::new([EOS])),
            2 | 3 => Some(TokenMask::new([EOS, any(1), any(2), any(3)])),
            _ => Some(TokenMask::new([any(1)])),
        })
    }

    fn advance(&mut self, token: TokenId) -> Result<(), String> {
        self.seen.push(token);
        Ok(())
    }
}

/// A hidden state of one number.
fn state_of(fingerprint: u64) -> f32 {
    (fingerprint % 1_000_000) as f32
}

fn logprob_of(fingerprint: u64, target: TokenId) -> PositionLogprobs {
    let chosen = TokenLogprob { token: target, logprob: (fingerprint % 1000) as f32, rank: 1 };
    PositionLogprobs { chosen, top: Vec::new() }
}

/// The pools' memory.
struct Device {
    block_size: usize,
    blocks: Vec<Vec<u64>>,
    swap: Vec<Vec<u64>>,
    /// The tokens that the last plan sampled.
    last_samples: HashMap<SeqId, TokenId>,
}

impl Device {
    fn new(config: &SchedulerConfig, swap_blocks: usize) -> Self {
        let empty = vec![u64::MAX; config.block_size];
        Self {
            block_size: config.block_size,
            blocks: vec![empty.clone(); config.num_device_blocks],
            swap: vec![empty; swap_blocks],
            last_samples: HashMap::new(),
        }
    }

    fn execute(&mut self, plan: &StepPlan) -> StepOutput {
        for (device, swap) in &plan.swap_out {
            self.swap[swap.index()] = self.blocks[device.index()].clone();
        }
        for (from, to) in &plan.copy {
            self.blocks[to.index()] = self.blocks[from.index()].clone();
        }
        for (swap, device) in &plan.swap_in {
            self.blocks[device.index()] = self.swap[swap.index()].clone();
        }
        let seqs: Vec<SeqOutput> = plan.batch.iter().map(|seq| self.run(seq)).collect();
        let sampled = seqs.iter().filter_map(|seq| Some((seq.seq, seq.sampled.first()?.token)));
        self.last_samples = sampled.collect();
        StepOutput { seqs, ..StepOutput::default() }
    }

    fn slot(&mut self, table: &[BlockId], position: usize) -> &mut u64 {
        &mut self.blocks[table[position / self.block_size].index()][position % self.block_size]
    }

    fn run(&mut self, planned: &PlannedSeq) -> SeqOutput {
        let mut prompt_logprobs = Vec::new();
        let mut tokens = planned.tokens.clone();
        if planned.pending {
            *tokens.last_mut().expect("it feeds a token") = self.last_samples[&planned.seq];
        }
        for (row, token) in tokens.iter().enumerate() {
            let position = planned.num_computed + row;
            let previous = if position == 0 { 0 } else { *self.slot(&planned.table, position - 1) };
            let value = fingerprint(previous, *token);
            *self.slot(&planned.table, position) = value;
            if let Some(plan) = &planned.prompt_logprobs
                && let Some(target) = row.checked_sub(plan.first_row).and_then(|i| plan.targets.get(i))
            {
                prompt_logprobs.push(logprob_of(value, *target));
            }
        }
        let end = planned.num_computed + planned.tokens.len();
        let context: Vec<u64> = (0..end).map(|position| *self.slot(&planned.table, position)).collect();
        let sampled = planned.sample.iter().flat_map(|plan| {
            let limits = match plan.next.as_deref().map(NextToken::get) {
                Some(Ok(next)) => next.limits.clone(),
                _ => plan.params.limits(plan.position as usize),
            };
            let samples = plan.first_sample..plan.first_sample + plan.num_samples;
            let context = &context;
            samples.map(move |index| sample(context, index, &limits, plan.params.logprobs))
        });
        let hidden = planned.hidden_rows.clone().map(|row| state_of(context[planned.num_computed + row]));
        SeqOutput { seq: planned.seq, sampled: sampled.collect(), prompt_logprobs, hidden: hidden.collect() }
    }
}

/// The fingerprints of a sequence.
fn context(prompt: &[TokenId], output: &[TokenId]) -> Vec<u64> {
    let mut slots: Vec<u64> = Vec::new();
    for token in prompt.iter().chain(output) {
        slots.push(fingerprint(slots.last().copied().unwrap_or(0), *token));
    }
    slots
}

/// Where its rules end a request.
const FAILED: &str = "the rules failed";

/// One sample generated alone: the truth.
fn alone(
    arrival: &Arrival,
    sample_index: u32,
    max_model_len: usize,
) -> Result<(Vec<TokenId>, FinishReason), &'static str> {
    let mut slots = context(&arrival.prompt, &[]);
    let params = &arrival.params;
    let mut rules = arrival.constraint.as_ref().map(|source| source.start());
    let mut output = Vec::new();
    loop {
        let mut limits = params.limits(output.len());
        if let Some(rules) = &mut rules
            && let Some(allowed) = rules.allowed().map_err(|_| FAILED)?
        {
            if limits.banned.iter().any(|banned| allowed.iter().eq([*banned])) {
                limits.banned.clear();
            }
            limits.allowed = Some(Arc::new(allowed));
        }
        for word in &params.bad_words {
            let is_only = limits.allowed.as_ref().is_some_and(|allowed| {
                allowed.iter().all(|token| {
                    limits.banned.contains(&token)
                        || params.bad_words.iter().any(|word| word[1] == token && output.last() == Some(&word[0]))
                })
            });
            if output.last() == Some(&word[0]) && !is_only {
                limits.banned.push(word[1]);
            }
        }
        let token = sample(&slots, sample_index, &limits, None).token;
        output.push(token);
        if let Some(rules) = &mut rules {
            rules.advance(token).map_err(|_| FAILED)?;
        }
        if params.eos_token_ids.contains(&token) {
            return Ok((output, FinishReason::Eos));
        }
        if output.len() == params.max_tokens as usize || slots.len() + 1 == max_model_len {
            return Ok((output, FinishReason::Length));
        }
        slots.push(fingerprint(slots[slots.len() - 1], token));
    }
}

/// A beam search alone: every beam's context is made anew from its tokens.
fn beams_alone(arrival: &Arrival, max_model_len: usize) -> Vec<(Vec<TokenId>, FinishReason)> {
    let params = &arrival.params;
    let room = (params.max_tokens as usize).min(max_model_len - arrival.prompt.len());
    let mut search = BeamSearch::new(params.clone(), room);
    let mut open: Vec<(Beam, Vec<TokenId>)> = vec![Default::default()];
    while !open.is_empty() {
        let next: Vec<PositionLogprobs> = open
            .iter()
            .map(|(_, output)| sample(&context(&arrival.prompt, output), 0, &TokenLimits::default(), params.logprobs))
            .map(|sampled| *sampled.logprobs.expect("a search asks for them"))
            .collect();
        let beams: Vec<Open<'_>> =
            open.iter().zip(&next).map(|((beam, output), next)| Open { beam, output, next }).collect();
        let children = search.step(&beams);
        open = children
            .into_iter()
            .map(|child| {
                let mut output = open[child.parent].1.clone();
                output.push(child.token);
                (child.beam, output)
            })
            .collect();
    }
    search.results().into_iter().map(|result| (result.output, result.reason)).collect()
}

/// What a client has heard of one request.
struct Heard {
    arrival: Arrival,
    started: bool,
    outputs: Vec<Vec<TokenId>>,
    finished: Vec<Option<FinishReason>>,
    stopped: Vec<bool>,
}

struct World {
    random: Random,
    config: SchedulerConfig,
    scheduler: Scheduler,
    device_pool: BlockPool,
    swap_pool: BlockPool,
    device: Device,
    in_flight: VecDeque<StepPlan>,
    open: HashMap<RequestId, Heard>,
    next_request: u64,
    prefixes: Vec<Vec<TokenId>>,
    /// Nobody cancels, nothing fails.
    is_calm: bool,
    operations: usize,
    total: StepStats,
    hit_tokens: usize,
    finished: usize,
    /// Samples that followed rules to their end, requests whose rules failed, results of beam searches.
    ruled: usize,
    failed: usize,
    searched: usize,
    embedded: usize,
    /// Failures of the executor, and how many of them with two plans in flight.
    failures: [usize; 2],
    /// Pending tokens that were fed.
    pending: usize,
    /// Samples that ended with a plan behind.
    fed_after_end: usize,
    /// Steps with prompts that could have had more, had they not had to be short.
    limited: usize,
}

impl World {
    fn new(seed: u64, overlap: bool) -> Self {
        let mut random = Random(seed);
        let block_size = random.range(1, 7) as usize;
        let num_device_blocks = random.range(8, 40) as usize;
        let max_num_seqs = random.range(1, 12) as usize;
        let config = SchedulerConfig {
            block_size,
            num_device_blocks,
            max_num_seqs,
            max_num_batched_tokens: max_num_seqs + random.below(100) as usize,
            inter_token_target: (!random.one_in(3)).then(|| random.range(1, 50) as f64 / 1e3),
            max_model_len: block_size * num_device_blocks,
            policy: [SchedulingPolicy::Fcfs, SchedulingPolicy::Priority][random.below(2) as usize],
            preemption_mode: [PreemptionMode::Auto, PreemptionMode::Swap, PreemptionMode::Recompute]
                [random.below(3) as usize],
            watermark_blocks: random.below(3) as usize,
            prefix_caching: !random.one_in(4),
            overlap,
            hash_key: [seed as u8; 32],
        };
        let swap_blocks = if random.one_in(5) { 0 } else { random.range(1, 60) as usize };
        Self::of(config, swap_blocks, random)
    }

    fn of(config: SchedulerConfig, swap_blocks: usize, mut random: Random) -> Self {
        let num_device_blocks = config.num_device_blocks;
        let prefixes = (0..3).map(|_| random_tokens(&mut random, 30)).collect();
        Self {
            scheduler: Scheduler::new(config.clone()),
            device_pool: BlockPool::new(num_device_blocks, config.prefix_caching),
            swap_pool: BlockPool::new(swap_blocks, false),
            device: Device::new(&config, swap_blocks),
            in_flight: VecDeque::new(),
            open: HashMap::new(),
            next_request: 0,
            prefixes,
            is_calm: false,
            operations: 0,
            total: StepStats::default(),
            hit_tokens: 0,
            finished: 0,
            ruled: 0,
            failed: 0,
            searched: 0,
            embedded: 0,
            failures: [0; 2],
            pending: 0,
            fed_after_end: 0,
            limited: 0,
            random,
            config,
        }
    }

    /// A request that could run alone, often with a known prefix.
    fn arrive(&mut self) {
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
        let is_search = random.one_in(5) && self.config.max_num_seqs > 1;
        let bad_word = |random: &mut Random| random_tokens(random, 2);
        let bad_words = match !is_search && random.one_in(4) {
            true => (0..20).map(|_| bad_word(random)).collect(),
            false => Vec::new(),
        };
        let mut params = SamplingParams {
            max_tokens,
            bad_words,
            min_tokens: if random.one_in(3) { random.below(u64::from(max_tokens) + 1) as u32 } else { 0 },
            eos_token_ids: if random.one_in(3) { vec![] } else { vec![EOS] },
            prompt_logprobs: (!is_search && random.one_in(6)).then_some(0),
            // Changes no fingerprint, but plans then carry the tokens before.
            presence_penalty: if max_tokens.is_multiple_of(3) { 0.5 } else { 0.0 },
            ..SamplingParams::default()
        };
        let n = if random.one_in(3) { random.range(2, 5) as u32 } else { 1 };
        if !is_search && params.prompt_logprobs.is_none() && random.one_in(5) {
            params.pooling = Some([Pooling::Last, Pooling::Mean][random.below(2) as usize]);
            (params.max_tokens, params.min_tokens) = (1, 0);
            params.bad_words.clear();
        }
        let n = if params.pooling.is_some() { 1 } else { n };
        let n = if is_search { self.make_search(&mut params, prompt.len()) } else { n };
        let random = &mut self.random;
        let has_rules = params.beam.is_none() && params.pooling.is_none() && random.one_in(4);
        let rules = has_rules.then(|| {
            let fails_at = random.one_in(10).then(|| random.below(8) as usize);
            Arc::new(RulesSource { key: random.next(), fails_at }) as Arc<dyn ConstraintSource>
        });
        let arrival = Arrival {
            id: RequestId(self.next_request),
            prompt: Arc::new(prompt),
            params: Arc::new(params),
            n,
            priority: random.below(4) as i32,
            cache_salt: random.one_in(5).then(|| "salt".to_string()),
            constraint: rules,
        };
        self.submit(arrival);
    }

    fn submit(&mut self, arrival: Arrival) {
        self.next_request += 1;
        let n = arrival.n as usize;
        let heard = Heard {
            arrival: arrival.clone(),
            started: false,
            outputs: vec![vec![]; n],
            finished: vec![None; n],
            stopped: vec![false; n],
        };
        self.open.insert(arrival.id, heard);
        self.scheduler.arrive(arrival);
    }

    /// Makes `params` those of a search that could run alone, if there is room for two beams; the results wanted of it.
    fn make_search(&mut self, params: &mut SamplingParams, prompt_len: usize) -> u32 {
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

    fn some_request(&mut self) -> Option<RequestId> {
        let mut ids: Vec<_> = self.open.keys().copied().collect();
        ids.sort_unstable();
        (!ids.is_empty()).then(|| ids[self.random.below(ids.len() as u64) as usize])
    }

    fn cancel(&mut self) {
        let Some(id) = self.some_request() else { return };
        if self.random.one_in(2) {
            self.scheduler.cancel(id);
            self.open.remove(&id);
            return;
        }
        let heard = self.open.get_mut(&id).expect("chosen from the open ones");
        let sample = self.random.below(u64::from(heard.arrival.n)) as usize;
        if !heard.outputs[sample].is_empty() && heard.finished[sample].is_none() {
            heard.stopped[sample] = true;
            self.scheduler.stop_sample(id, sample as u32);
            self.close_if_done(id);
        }
    }

    /// Mostly plans where that is possible, else ends the oldest plan.
    fn step(&mut self) {
        let waits = !self.in_flight.is_empty() && self.random.one_in(4);
        if (waits || !self.plan()) && !self.in_flight.is_empty() {
            self.finish();
        }
    }

    /// A step, and the end of the oldest where no more may be in flight.
    fn plan_and_finish(&mut self) -> Option<StepPlan> {
        let before = self.in_flight.len();
        self.plan();
        let plan = self.in_flight.get(before).cloned();
        if plan.is_none() || self.in_flight.len() > usize::from(self.config.overlap) {
            self.finish();
        }
        plan
    }

    /// False where the scheduler wants to see results first.
    fn plan(&mut self) -> bool {
        let Some(demand) = self.scheduler.demand() else { return false };
        let is_ahead = !self.in_flight.is_empty();
        let grant = serve(&mut self.device_pool, self.config.block_size, demand);
        let swap_demand = self.scheduler.reserve(&grant);
        let swap_grant = serve_swap(&mut self.swap_pool, swap_demand);
        assert!(!is_ahead || grant.preempted.is_empty(), "a plan made ahead preempts");
        let stats = grant.stats;
        let plan = self.scheduler.plan(grant, swap_grant);
        self.scheduler.check();
        self.scheduler.check_against(stats);
        let (device_tables, swap_tables) = self.scheduler.tables();
        self.device_pool.check(device_tables.into_iter());
        // What this step copies in is released with the next demand.
        self.swap_pool.check(swap_tables.into_iter());
        self.check_plan(&plan);
        let is_empty = plan.is_empty();
        if !is_empty {
            self.in_flight.push_back(plan);
        }
        assert_eq!(self.in_flight.len(), self.scheduler.num_in_flight());
        !(is_ahead && is_empty)
    }

    fn check_plan(&mut self, plan: &StepPlan) {
        let num_decodes = plan.batch.iter().filter(|seq| seq.tokens.len() == 1).count();
        let num_prompt_tokens = plan.num_tokens() - num_decodes;
        assert!(plan.num_tokens() <= self.config.max_num_batched_tokens);
        let has_budget = self.config.max_num_batched_tokens - num_decodes > self.scheduler.forecast().prompt_limit;
        self.limited += usize::from(has_budget && num_prompt_tokens > 0);
        let mut written: Vec<BlockId> = plan.swap_in.iter().chain(&plan.copy).map(|pair| pair.1).collect();
        for seq in &plan.batch {
            let end = seq.num_computed + seq.tokens.len();
            let places = seq.num_computed / self.config.block_size..end.div_ceil(self.config.block_size);
            written.extend(&seq.table[places]);
            if let Some(sample) = &seq.sample {
                assert_eq!(sample.history.is_some(), sample.params.has_penalties());
                if let Some(history) = &sample.history {
                    let pending = usize::from(seq.pending);
                    assert_eq!(
                        history.prompt.len() + history.output.len() + pending,
                        end,
                        "the history ends before it"
                    );
                    assert_eq!(history.output.len() + pending, sample.position as usize);
                }
            }
            if seq.pending {
                self.pending += 1;
                let sample = seq.sample.as_ref().expect("a pending token is the last");
                let may_go_on = end < self.config.max_model_len && sample.position < sample.params.max_tokens;
                assert!(may_go_on, "a token is fed that is the last");
            }
        }
        assert!(written.into_iter().all(|block| !self.device_pool.is_shared(block)), "a shared block is written");
    }

    fn finish(&mut self) {
        if !self.is_calm && self.random.one_in(400) {
            return self.fail();
        }
        let plan = self.in_flight.pop_front().expect("a plan is in flight");
        let mut output = self.device.execute(&plan);
        output.timing.forward_s = self.seconds(&plan);
        if !self.is_calm && self.random.one_in(10) {
            self.cancel(); // while the step runs
        }
        self.hear(output);
        self.scheduler.check();
    }

    /// What a step takes: as long as its tokens say, or, where it is not calm, sometimes anything.
    fn seconds(&mut self, plan: &StepPlan) -> f64 {
        match self.random.below(10) {
            0 if !self.is_calm => 0.0,
            1 if !self.is_calm => self.random.below(1_000_000) as f64 / 1e4,
            _ => 2e-3 + plan.num_tokens() as f64 * 5e-4,
        }
    }

    fn fail(&mut self) {
        self.failures[0] += 1;
        self.failures[1] += usize::from(self.in_flight.len() > 1);
        for id in self.scheduler.fail_running() {
            assert!(self.open.remove(&id).is_some());
        }
        let swap_blocks = self.swap_pool.num_blocks();
        self.device_pool = BlockPool::new(self.config.num_device_blocks, self.config.prefix_caching);
        self.swap_pool = BlockPool::new(swap_blocks, false);
        self.device = Device::new(&self.config, swap_blocks);
        self.in_flight.clear();
    }

    fn hear(&mut self, output: StepOutput) {
        for (id, delivery) in self.scheduler.commit(output) {
            let heard = self.open.get_mut(&id).expect("only open requests hear anything");
            match delivery {
                Delivery::Started { cached_tokens } => {
                    assert!(!std::mem::replace(&mut heard.started, true));
                    assert!(cached_tokens < heard.arrival.prompt.len());
                }
                Delivery::PromptLogprobs(logprobs) => check_prompt_logprobs(&heard.arrival, &logprobs),
                Delivery::Token { sample, sampled } => {
                    assert!(heard.started && heard.finished[sample as usize].is_none());
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
        let stats = self.scheduler.take_stats();
        self.total.preempted_swap += stats.preempted_swap;
        self.total.preempted_recompute += stats.preempted_recompute;
        self.hit_tokens += self.scheduler.take_admissions().iter().map(|it| it.cached_tokens).sum::<usize>();
        self.total.blocks_in += stats.blocks_in;
    }

    fn close_if_done(&mut self, id: RequestId) {
        let heard = &self.open[&id];
        if heard.finished.iter().zip(&heard.stopped).all(|(reason, stopped)| reason.is_some() || *stopped) {
            self.open.remove(&id);
        }
    }

    fn run(&mut self, operations: usize) {
        while self.operations < operations {
            match self.random.below(10) {
                0..3 if self.open.len() < 30 => self.arrive(),
                3 if self.random.one_in(4) => self.cancel(),
                _ => self.step(),
            }
            self.operations += 1;
        }
        self.drain();
    }

    /// Every request ends, and every block comes back.
    fn drain(&mut self) {
        let most = self.scheduler.num_requests() * 5 * (self.config.max_model_len + 2) * 4 + 100;
        let mut steps = 0;
        while self.scheduler.has_work() || !self.in_flight.is_empty() {
            self.step();
            steps += 1;
            assert!(steps < most, "no progress: {:?}", self.scheduler.population());
        }
        assert!(self.open.is_empty(), "a request never ended");
        assert_eq!(self.device_pool.stats().used, 0);
        assert_eq!(self.swap_pool.stats().free, self.swap_pool.num_blocks());
    }
}

fn random_tokens(random: &mut Random, count: usize) -> Vec<TokenId> {
    (0..count).map(|_| random.range(1, VOCAB - 1) as TokenId).collect()
}

fn check_prompt_logprobs(arrival: &Arrival, logprobs: &[PositionLogprobs]) {
    let mut value = 0;
    let expected = arrival.prompt.windows(2).map(|pair| {
        value = fingerprint(value, pair[0]);
        logprob_of(value, pair[1])
    });
    assert_eq!(logprobs, expected.collect::<Vec<_>>());
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name} must be a number")))
}

fn check_random_loads(overlap: bool) {
    let operations = setting("PAGETIDE_SIM_OPERATIONS").unwrap_or(250_000) as usize;
    let seeds: Vec<u64> = match setting("PAGETIDE_SIM_SEED") {
        Some(seed) => vec![seed],
        None => (0..100).collect(),
    };
    let per_seed = operations / seeds.len();
    let (mut total, mut hit_tokens, mut finished, mut failures) = (StepStats::default(), 0, 0, [0; 2]);
    let (mut pending, mut fed_after_end) = (0, 0);
    let (mut ruled, mut failed, mut searched, mut embedded, mut limited) = (0, 0, 0, 0, 0);
    for seed in seeds {
        eprintln!("PAGETIDE_SIM_SEED={seed}");
        let mut world = World::new(seed, overlap);
        world.run(per_seed);
        total.preempted_swap += world.total.preempted_swap;
        total.preempted_recompute += world.total.preempted_recompute;
        hit_tokens += world.hit_tokens;
        total.blocks_in += world.total.blocks_in;
        finished += world.finished;
        pending += world.pending;
        fed_after_end += world.fed_after_end;
        ruled += world.ruled;
        failed += world.failed;
        searched += world.searched;
        embedded += world.embedded;
        limited += world.limited;
        (failures[0], failures[1]) = (failures[0] + world.failures[0], failures[1] + world.failures[1]);
    }
    eprintln!(
        "{finished} samples finished, {failures:?} executor failures (with two plans in flight), {hit_tokens} cached \
         tokens, {pending} pending tokens, {fed_after_end} ends with a plan behind, {ruled} samples by rules, \
         {failed} rules failed, {searched} results of searches, {embedded} embeddings, {limited} steps kept short, {total:?}"
    );
    if setting("PAGETIDE_SIM_SEED").is_none() {
        // The simulation is worth something only while it reaches everything.
        assert!(total.preempted_swap > 1000 && total.preempted_recompute > 1000);
        assert!(hit_tokens > 10_000 && total.blocks_in > 1000 && failures[0] > 50);
        assert!(limited > 1000 && ruled > 1000 && failed > 50 && searched > 1000 && embedded > 1000);
        assert_eq!(failures[1] > 10, overlap);
        assert_eq!(pending > 1000, overlap);
        assert_eq!(fed_after_end > 100, overlap);
    }
}

/// Beams that had to yield need no more memory when they come back: they share what they shared before.
#[test]
fn beams_come_back_to_the_blocks_they_shared() {
    for overlap in [false, true] {
        let config = SchedulerConfig {
            block_size: 4,
            num_device_blocks: 6 + 3 * 2,
            max_num_seqs: 8,
            max_num_batched_tokens: 16,
            inter_token_target: None,
            max_model_len: 48,
            policy: SchedulingPolicy::Priority,
            preemption_mode: PreemptionMode::Swap,
            watermark_blocks: 0,
            prefix_caching: false,
            overlap,
            hash_key: [0; 32],
        };
        let mut world = World::of(config, 100, Random(1));
        world.is_calm = true;
        let beam = BeamParams { width: 3, length_penalty: 1.0, early_stopping: EarlyStopping::Never, logprobs: None };
        let mut search = SamplingParams { max_tokens: 9, beam: Some(beam), ..SamplingParams::default() };
        search.logprobs = Some(num_candidates(&search));
        let urgent = SamplingParams { max_tokens: 36, ..SamplingParams::default() };
        let mut random = Random(2);
        let mut arrive = |world: &mut World, prompt_len, params, priority| {
            let prompt = Arc::new(random_tokens(&mut random, prompt_len));
            world.submit(Arrival {
                id: RequestId(world.next_request),
                prompt,
                params: Arc::new(params),
                n: 1,
                priority,
                cache_salt: None,
                constraint: None,
            });
        };
        arrive(&mut world, 24, search, 1);
        (0..6).for_each(|_| world.step());
        // Comes while there is room, and then grows into that of the beams.
        arrive(&mut world, 11, urgent, 0);
        world.drain();
        assert!(world.total.preempted_swap >= 2, "the beams had to yield: {:?}", world.total);
        assert_eq!(world.total.preempted_recompute, 0, "and could go on from where they were");
        assert_eq!(world.searched, 1);
    }
}

/// Prompts take what is left of the time that a step should take. Alone, a prompt takes what a step has.
#[test]
fn prompts_come_in_pieces_that_keep_steps_short() {
    for overlap in [false, true] {
        let config = SchedulerConfig {
            block_size: 16,
            num_device_blocks: 400,
            max_num_seqs: 8,
            max_num_batched_tokens: 500,
            inter_token_target: Some(0.05),
            max_model_len: 4_000,
            policy: SchedulingPolicy::Fcfs,
            preemption_mode: PreemptionMode::Auto,
            watermark_blocks: 0,
            prefix_caching: false,
            overlap,
            hash_key: [0; 32],
        };
        let mut world = World::of(config, 0, Random(1));
        world.is_calm = true;
        let arrive = |world: &mut World, prompt_len, max_tokens| {
            let prompt = (0..prompt_len).map(|i| i % (VOCAB - 1) as u32 + 1).collect();
            let params = SamplingParams { max_tokens, ..SamplingParams::default() };
            world.submit(Arrival {
                id: RequestId(world.next_request),
                prompt: Arc::new(prompt),
                params: Arc::new(params),
                n: 1,
                priority: 0,
                cache_salt: None,
                constraint: None,
            });
        };
        // Decoding begins with what a prompt alone has taught.
        (0..4).for_each(|_| arrive(&mut world, 700, 200));
        let mut pieces = Vec::new();
        for step in 0..200 {
            if step == 50 {
                arrive(&mut world, 2_000, 10);
            }
            let Some(plan) = world.plan_and_finish() else { continue };
            let prompt_tokens = plan.batch.iter().map(|seq| seq.tokens.len()).filter(|len| *len > 1).sum::<usize>();
            pieces.push((plan.num_tokens(), prompt_tokens));
        }
        assert_eq!(pieces[0], (500, 500), "nobody waits");
        let late = &pieces[45..];
        let longest = late.iter().map(|(tokens, _)| *tokens).max().unwrap();
        // 50 ms are 96 tokens.
        assert!((86..=101).contains(&longest), "{longest} tokens in a step: {late:?}");
        let of_prompt = late.iter().filter(|(_, prompt_tokens)| *prompt_tokens > 80).count();
        assert!((18..=25).contains(&of_prompt), "2,000 tokens in {of_prompt} pieces: {late:?}");
        world.drain();
    }
}

#[test]
fn random_loads_give_the_text_of_each_sample_alone() {
    check_random_loads(false);
}

#[test]
fn so_they_do_where_steps_are_planned_ahead() {
    check_random_loads(true);
}
