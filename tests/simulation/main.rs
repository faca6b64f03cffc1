//! Seeded simulation of the engine: random arrivals, forks, cancellations, preemptions, executor failures and changes
//! of settings on tiny pools, in the simple and the overlapped loop. The outputs are compared with a model that
//! generates each sample alone.
//!
//! The simulated device keeps in every slot a fingerprint of all tokens up to this one. The next token is a function of
//! all fingerprints that are read through the block table. So a block that is lost, mixed up, reused too early, copied
//! wrongly or cached under a wrong hash changes the text. The device runs a plan as late as possible: when its results
//! are committed. All invariants are asserted after every plan.
//!
//! `PAGETIDE_SIM_SEED=n` runs one seed, `PAGETIDE_SIM_OPERATIONS=n` sets the number of operations.

mod device;
mod mixed;
mod model;
mod pressure;
mod recording;
mod settings;
mod tenants;
mod world;

use model::{Random, VOCAB};
use pagetide_base::sampling::params::{BeamParams, EarlyStopping, SamplingParams};
use pagetide_engine::beam::num_candidates;
use pagetide_engine::scheduler::{PlanStats, PreemptionMode, SchedulerConfig, SchedulingPolicy};
use settings::plain_config;
use world::{Tails, World, random_tokens};

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name} must be a number")))
}

fn check_random_loads(overlap: bool) {
    let operations = setting("PAGETIDE_SIM_OPERATIONS").unwrap_or(500_000) as usize;
    let seeds: Vec<u64> = match setting("PAGETIDE_SIM_SEED") {
        Some(seed) => vec![seed],
        None => (0..100).collect(),
    };
    let per_seed = operations / seeds.len();
    let (mut total, mut hit_tokens, mut finished, mut failures) = (PlanStats::default(), 0, 0, [0; 2]);
    let (mut pending, mut fed_after_end) = (0, 0);
    let (mut lost_copies, mut hit_swapped, mut urgent) = (0, 0, 0);
    let (mut tuned, mut shrunk, mut drained, mut discarded, mut put_back) = (0, 0, 0, 0, 0);
    let (mut ruled, mut failed, mut searched, mut embedded, mut limited) = (0, 0, 0, 0, 0);
    let mut tails = Tails::default();
    for seed in seeds {
        eprintln!("PAGETIDE_SIM_SEED={seed}");
        let mut world = World::new(seed, overlap);
        world.run(per_seed);
        total += world.total.plans;
        hit_tokens += world.hit_tokens;
        finished += world.finished;
        pending += world.pending;
        fed_after_end += world.fed_after_end;
        ruled += world.ruled;
        failed += world.failed;
        searched += world.searched;
        embedded += world.embedded;
        limited += world.limited;
        lost_copies += world.lost_copies;
        hit_swapped += world.hit_swapped;
        urgent += world.urgent;
        tuned += world.tuned;
        shrunk += world.shrunk;
        drained += world.drained;
        discarded += world.discarded;
        put_back += world.put_back;
        tails += world.tails;
        (failures[0], failures[1]) = (failures[0] + world.failures[0], failures[1] + world.failures[1]);
    }
    eprintln!(
        "{finished} samples finished, {failures:?} executor failures (with two plans in flight), {hit_tokens} cached \
         tokens, {pending} pending tokens, {fed_after_end} ends with a plan behind, {ruled} samples by rules, \
         {failed} rules failed, {searched} results of searches, {embedded} embeddings, {limited} steps kept short, \
         {lost_copies} copies failed, {hit_swapped} tokens from the second level, {urgent} urgent, \
         {tuned} changes of settings ({shrunk} after which {drained} swap blocks drained; \
         {discarded} left the pool), {put_back} blocks put back, {total:?}, {tails:?}"
    );
    if setting("PAGETIDE_SIM_SEED").is_none() {
        // The simulation is useful only if it reaches every case.
        assert!(total.preempted_swap > 1000 && total.preempted_recompute > 1000);
        assert!(hit_tokens > 10_000 && total.blocks_in > 1000 && failures[0] > 50);
        assert!(tails.foreseen > 500 && tails.over > 100 && tails.no_room > 10, "{tails:?}");
        assert!(lost_copies > 100 && hit_swapped > 1000 && urgent > 100);
        assert!(tuned > 500 && shrunk > 100 && drained > 500 && discarded > 2 * drained);
        assert!(put_back > 1000, "{put_back} blocks put back");
        assert!(limited > 1000 && ruled > 1000 && failed > 50 && searched > 1000 && embedded > 1000);
        assert_eq!(failures[1] > 10, overlap);
        assert_eq!(pending > 1000, overlap);
        assert_eq!(fed_after_end > 100, overlap);
    }
}

/// If steps fail again and again, running requests fail with them, and no others, then or later.
#[test]
fn hundreds_of_failed_steps_leave_nothing_behind() {
    for overlap in [false, true] {
        let (mut failures, mut finished) = (0, 0);
        for seed in 0..20 {
            let mut world = World::new(1_000 + seed, overlap);
            world.fails_one_in = 20;
            world.run(2_000);
            failures += world.failures[0];
            finished += world.finished;
        }
        eprintln!("{failures} failed steps, {finished} samples finished");
        assert!(failures > 500 && finished > 500, "{failures} failed steps, {finished} samples finished");
    }
}

/// Preempted beams need no more memory when they come back, because they share the same blocks as before.
#[test]
fn beams_come_back_to_the_blocks_they_shared() {
    for overlap in [false, true] {
        let config = SchedulerConfig {
            num_swap_blocks: 100,
            max_num_seqs: 8,
            max_num_batched_tokens: 16,
            policy: SchedulingPolicy::Priority,
            preemption_mode: PreemptionMode::Swap,
            overlap,
            ..plain_config(4, 6 + 3 * 2)
        };
        let mut world = World::calm(config);
        let beam = BeamParams { width: 3, length_penalty: 1.0, early_stopping: EarlyStopping::Never, logprobs: None };
        let mut search = SamplingParams { max_tokens: 9, beam: Some(beam), ..SamplingParams::default() };
        search.logprobs = Some(num_candidates(&search));
        let urgent = SamplingParams { max_tokens: 36, ..SamplingParams::default() };
        let mut random = Random(2);
        let mut arrive = |world: &mut World, prompt_len, params, priority| {
            world.ask(random_tokens(&mut random, prompt_len), params, priority);
        };
        arrive(&mut world, 24, search, 1);
        (0..6).for_each(|_| world.step());
        // It arrives while there is room, and then grows into the beams' room.
        arrive(&mut world, 11, urgent, 0);
        world.drain();
        assert!(world.total.plans.preempted_swap >= 2, "the beams were preempted: {:?}", world.total);
        assert_eq!(world.total.plans.preempted_recompute, 0, "and could go on from where they were");
        assert_eq!(world.searched, 1);
    }
}

/// Prompts take the rest of a step's target time. Without decodes a prompt takes a whole step.
#[test]
fn prompts_come_in_pieces_that_keep_steps_short() {
    for overlap in [false, true] {
        let config = SchedulerConfig {
            max_num_seqs: 8,
            max_num_batched_tokens: 500,
            inter_token_target: Some(0.05),
            max_model_len: 4_000,
            overlap,
            ..plain_config(16, 400)
        };
        let mut world = World::calm(config);
        let arrive = |world: &mut World, prompt_len, max_tokens| {
            let prompt = (0..prompt_len).map(|i| i % (VOCAB - 1) as u32 + 1).collect();
            world.ask(prompt, SamplingParams { max_tokens, ..SamplingParams::default() }, 0);
        };
        // When decoding begins, only steps with a prompt have been measured.
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

/// Prompts that wait for other prompts make steps longer, up to three times the target.
#[test]
fn steps_last_longer_while_prompts_wait_for_prompts() {
    let config = SchedulerConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 500,
        inter_token_target: Some(0.05),
        max_model_len: 4_000,
        ..plain_config(16, 400)
    };
    let mut world = World::calm(config);
    let arrive = |world: &mut World, first, prompt_len, max_tokens| {
        let prompt = (first..first + prompt_len).map(|i| i % (VOCAB - 1) as u32 + 1).collect();
        world.ask(prompt, SamplingParams { max_tokens, ..SamplingParams::default() }, 0);
    };
    (0..4).for_each(|i| arrive(&mut world, i, 700, 200));
    let mut longest = 0;
    let mut steps = 0;
    for step in 0..200 {
        if step == 50 {
            (4..8).for_each(|i| arrive(&mut world, i, 900, 10));
        }
        let Some(plan) = world.plan_and_finish() else { continue };
        let has_prompts = plan.batch.iter().any(|seq| seq.tokens.len() > 1);
        if step >= 50 && has_prompts {
            longest = longest.max(plan.num_tokens());
            steps += 1;
        }
    }
    // 150 ms are 296 tokens, and 3,600 tokens in steps of 96 would take 38 of them.
    assert!((270..=310).contains(&longest), "{longest} tokens in a step");
    assert!((12..=25).contains(&steps), "{steps} steps with prompts");
    world.drain();
}

#[test]
fn random_loads_give_the_text_of_each_sample_alone() {
    check_random_loads(false);
}

#[test]
fn overlapped_loads_give_the_text_of_each_sample_alone() {
    check_random_loads(true);
}
