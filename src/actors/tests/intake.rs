//! What the intake fills in, and what owners hear of their prompts.

use super::*;
use pagetide_base::sampling::extra::{Dry, DryBreakers, ExtraSamplers};

/// How far the prompt was: the cached tokens and those that were there.
fn progress(events: &[Event]) -> Vec<(u32, u32)> {
    let told = events.iter().filter_map(|event| match event {
        Event::Prefilled { cached_tokens, computed } => Some((*cached_tokens, *computed)),
        _ => None,
    });
    told.collect()
}

#[test]
fn a_request_hears_how_far_its_prompt_is_if_it_asks() {
    for overlap in BOTH_LOOPS {
        let world = World::start(overlap);
        let ask = |reports_progress: bool| {
            let params = SamplingParams { max_tokens: 2, ..SamplingParams::default() };
            let request = request(vec![7; 30], params);
            let request = request.with(|request| request.core.reports_progress = reports_progress);
            let events = events(block_on(world.handle.submit(request)).unwrap());
            world.wait_until_idle();
            events
        };
        let first = ask(true);
        assert_eq!(progress(&first), [(0, 0), (0, 30)], "{first:?}");
        let started = first.iter().position(|event| matches!(event, Event::Started { .. })).unwrap();
        assert!(started > 1, "the prompt is there before it says so: {first:?}");
        assert_eq!(progress(&ask(true)), [(28, 28), (28, 30)], "its full blocks are cached");
        assert_eq!(progress(&ask(false)), []);
    }
}

#[test]
fn a_long_prompt_is_told_step_by_step() {
    let world = World::start(false);
    let tuning = Tuning { max_num_batched_tokens: 8, ..world.tuning.clone() };
    block_on(world.tune.send(Tune(tuning))).unwrap().unwrap();
    let params = SamplingParams { max_tokens: 1, ..SamplingParams::default() };
    let request = request((0..20).collect(), params).with(|request| request.core.reports_progress = true);
    let events = events(block_on(world.handle.submit(request)).unwrap());
    assert_eq!(progress(&events), [(0, 0), (0, 8), (0, 16), (0, 20)]);
}

#[test]
fn requests_without_a_seed_have_that_of_the_server() {
    let world = World::start(false);
    let seed = |seed: Option<u64>| {
        let request = request(vec![1], SamplingParams { max_tokens: 1, ..SamplingParams::default() });
        block_on(world.handle.submit(request.with(|request| request.seed = seed))).unwrap().params.seed
    };
    assert_ne!(seed(None), seed(None));
    let server = &world.handle.model().server;
    server.set(ServerConfig { default_seed: Some(42), ..(*server.get()).clone() });
    assert_eq!((seed(None), seed(Some(7))), (42, 7));
}

#[test]
fn breakers_become_tokens_at_the_intake() {
    let world = World::start(false);
    let tokenizer = world.handle.model().tokenizer.clone();
    let breakers = |text: &str| {
        let breakers = Arc::new(DryBreakers { texts: vec![text.to_owned()], ..DryBreakers::default() });
        let dry = Dry { multiplier: 1.0, base: 1.75, allowed_length: 2, last_n: None, breakers };
        let extra = Some(Box::new(ExtraSamplers { dry: Some(dry), ..ExtraSamplers::default() }));
        let params = SamplingParams { max_tokens: 1, extra, ..SamplingParams::default() };
        let accepted = world.submit_with(vec![1], params).unwrap();
        accepted.params.dry().unwrap().breakers.clone()
    };
    let newline = breakers("\n");
    assert!(newline.texts.is_empty() && !newline.single.is_empty());
    for token in &newline.single {
        assert!(tokenizer.token_bytes(*token).contains(&b'\n'), "{token}");
    }
    assert!(Arc::ptr_eq(&newline, &breakers("\n")), "what is known is not looked for again");
    assert_ne!(newline, breakers(":"));
}
