//! Batches in which some sequences await the results of a step before their next one can be planned: outputs that
//! follow rules, beams, and tokens that the host draws. The others are planned ahead.

use crate::model::VOCAB;
use crate::settings::plain_config;
use crate::world::World;
use pagetide_base::ids::TokenId;
use pagetide_base::rules::{Constraint, ConstraintSource};
use pagetide_base::sampling::extra::{ExtraSamplers, Mirostat, MirostatVersion};
use pagetide_base::sampling::params::{BeamParams, EarlyStopping, SamplingParams, TokenMask};
use pagetide_engine::beam::num_candidates;
use pagetide_engine::bill::Terms;
use pagetide_engine::plan::StepPlan;
use pagetide_engine::scheduler::{EngineRequest, SchedulerConfig};
use std::sync::Arc;

/// Tokens of each output.
const MAX_TOKENS: u32 = 60;

/// Rules that allow each token but the end.
#[derive(Debug)]
struct AnyToken;

impl ConstraintSource for AnyToken {
    fn start(&self) -> Box<dyn Constraint> {
        Box::new(AnyToken)
    }
}

impl Constraint for AnyToken {
    fn allowed(&mut self) -> Result<Option<TokenMask>, String> {
        Ok(Some(TokenMask::new(1..VOCAB as TokenId)))
    }

    fn advance(&mut self, _: TokenId) -> Result<(), String> {
        Ok(())
    }
}

/// The seed of the requests that await results, by which plans show them.
const SEED: u64 = 99;

fn plain() -> SamplingParams {
    SamplingParams { max_tokens: MAX_TOKENS, ..SamplingParams::default() }
}

fn mirostat() -> Option<Box<ExtraSamplers>> {
    let mirostat = Mirostat { version: MirostatVersion::Two, tau: 2.0, eta: 0.1 };
    Some(Box::new(ExtraSamplers { mirostat: Some(mirostat), ..ExtraSamplers::default() }))
}

/// A request that awaits results.
#[derive(Clone)]
struct AwaitingRequest {
    name: &'static str,
    params: SamplingParams,
    constraint: Option<Arc<dyn ConstraintSource>>,
    num_seqs: usize,
}

/// One of each kind.
fn kinds() -> [AwaitingRequest; 4] {
    let params = SamplingParams { seed: SEED, ..plain() };
    let bad_words = SamplingParams { bad_words: vec![vec![3, 4]], ..params.clone() };
    let beam = BeamParams { width: 3, length_penalty: 1.0, early_stopping: EarlyStopping::Never, logprobs: None };
    let mut search = SamplingParams { beam: Some(beam), ..params.clone() };
    search.logprobs = Some(num_candidates(&search));
    let on_host = SamplingParams { extra: mirostat(), ..params.clone() };
    let of = |name, params| AwaitingRequest { name, params, constraint: None, num_seqs: 1 };
    [
        AwaitingRequest { constraint: Some(Arc::new(AnyToken)), ..of("rules", params) },
        of("bad words", bad_words),
        AwaitingRequest { num_seqs: 3, ..of("beams", search) },
        of("draws of the host", on_host),
    ]
}

/// `num_plain` other requests, and this one. One step is in flight, and all of its sequences decode.
fn decoding(num_plain: usize, request: &AwaitingRequest) -> World {
    let mut world = World::calm(SchedulerConfig { overlap: true, ..plain_config(4, 400) });
    (0..num_plain as TokenId).for_each(|i| world.ask(vec![5, 6, i], plain(), 0));
    let arrival = world.arrival(vec![8, 9], request.params.clone(), 0, Terms::default());
    world.submit(EngineRequest { constraint: request.constraint.clone(), ..arrival });
    let num_seqs = num_plain + request.num_seqs;
    while world.in_flight.front().is_none_or(|plan| plan.num_tokens() < num_seqs || has_prompt(plan)) {
        world.plan_and_finish();
    }
    while world.in_flight.len() > 1 {
        world.finish();
    }
    world
}

fn has_prompt(plan: &StepPlan) -> bool {
    plan.batch.iter().any(|seq| seq.tokens.len() > 1)
}

/// The sequences in a plan that await results, and the others.
fn split(plan: &StepPlan) -> (usize, usize) {
    let seeds = plan.batch.iter().filter_map(|seq| Some(seq.sample.as_ref()?.params.seed));
    let num_waiting = seeds.filter(|seed| *seed == SEED).count();
    (num_waiting, plan.batch.len() - num_waiting)
}

#[test]
fn sequences_that_await_results_sit_out_alone_and_are_in_every_second_step() {
    const NUM_PLAIN: usize = 12;
    for request in kinds() {
        let mut world = decoding(NUM_PLAIN, &request);
        let AwaitingRequest { name, num_seqs, .. } = request;
        let mut plans = Vec::new();
        for _ in 0..20 {
            assert!(world.plan(), "{name}: a step is planned while another one is in flight");
            assert_eq!(world.in_flight.len(), 2, "{name}");
            plans.push(split(&world.in_flight[1]));
            world.finish();
        }
        for pair in plans.windows(2) {
            let (with, without) = (pair[0].max(pair[1]), pair[0].min(pair[1]));
            assert_eq!((with, without), ((num_seqs, NUM_PLAIN), (0, NUM_PLAIN)), "{name}");
        }
        world.drain();
        assert_eq!(world.finished + world.searched, NUM_PLAIN + 1);
    }
}

/// If they are many, to leave them out costs more than to wait.
#[test]
fn no_step_leaves_out_more_than_a_quarter_of_the_sequences() {
    for request in kinds() {
        let AwaitingRequest { name, num_seqs, .. } = request;
        for (num_plain, is_ahead) in [(3 * num_seqs - 1, false), (3 * num_seqs, true)] {
            let mut world = decoding(num_plain, &request);
            for _ in 0..10 {
                let (num_waiting, _) = split(world.in_flight.back().expect("a step is in flight"));
                let planned = world.plan();
                assert_eq!(planned, is_ahead || num_waiting == 0, "{name} with {num_plain} others");
                world.finish();
                if world.in_flight.is_empty() {
                    assert!(world.plan());
                    assert_eq!(split(&world.in_flight[0]), (num_seqs, num_plain), "{name}: all are in the step");
                }
            }
            world.drain();
        }
    }
}

/// Under memory pressure, with failures, cancellations and changes of settings: the texts are those of each alone.
#[test]
fn loads_with_few_that_await_results_give_the_text_of_each_sample_alone() {
    let (mut left_out, mut finished, mut ruled, mut searched) = (0, 0, 0, 0);
    for seed in 0..40 {
        eprintln!("PAGETIDE_SIM_SEED={seed}");
        let mut world = World::mixed(seed);
        world.run(2_500);
        left_out += world.left_out;
        finished += world.finished;
        ruled += world.ruled;
        searched += world.searched;
    }
    eprintln!("{left_out} plans left out sequences; {finished} samples, {ruled} with rules, {searched} of searches");
    assert!(left_out > 1_000 && finished > 5_000 && ruled > 100 && searched > 50);
}
