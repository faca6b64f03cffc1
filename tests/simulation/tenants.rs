//! A greedy tenant beside a modest one, with default settings.

use crate::settings::plain_config;
use crate::world::World;
use pagetide_base::ids::RequestId;
use pagetide_base::sampling::params::SamplingParams;
use pagetide_engine::bill::{Tenant, Terms};
use pagetide_engine::scheduler::{AdmissionPolicy, EngineRequest, SchedulerConfig};

const GREEDY: Tenant = Tenant(1);
const MODEST: Tenant = Tenant(2);

/// The requests of the greedy tenant.
#[derive(Clone, Copy, Debug)]
struct Greed {
    num_requests: usize,
    prompt: usize,
    max_tokens: u32,
    n: u32,
}

const GREEDS: [Greed; 4] = [
    Greed { num_requests: 500, prompt: 60, max_tokens: 40, n: 1 },
    // Many seats, and hardly any blocks.
    Greed { num_requests: 500, prompt: 2, max_tokens: 30, n: 1 },
    Greed { num_requests: 200, prompt: 30, max_tokens: 30, n: 4 },
    // Prompts that end with their first step: they hold nothing from one step to the next.
    Greed { num_requests: 500, prompt: 100, max_tokens: 1, n: 1 },
];

impl World {
    fn ask_as(&mut self, tenant: Tenant, prompt: usize, max_tokens: u32, n: u32) -> RequestId {
        let id = self.next_request;
        let prompt = (0..prompt).map(|i| 1 + (id * 7 + i as u64) as u32 % 20).collect();
        let params = SamplingParams { max_tokens, min_tokens: max_tokens, ..SamplingParams::default() };
        let arrival = self.arrival(prompt, params, 0, Terms::default());
        self.submit(EngineRequest { tenant, n, ..arrival });
        RequestId(id)
    }

    /// Steps until this request has ended.
    fn steps_until_end(&mut self, request: RequestId) -> usize {
        let before = self.num_steps;
        let mut turns = 0;
        while self.open.contains_key(&request) {
            self.step();
            turns += 1;
            assert!(turns < 100_000, "{request} never ends");
        }
        self.num_steps - before
    }
}

/// For each of ten requests that the modest one makes, one after the other, the steps that it takes.
fn modest_steps(greed: Greed, key_turns: bool, overlap: bool) -> Vec<usize> {
    let config = SchedulerConfig {
        key_turns,
        overlap,
        num_swap_blocks: 200,
        max_num_seqs: 16,
        admission: AdmissionPolicy::Expected,
        prefix_caching: true,
        ..plain_config(8, 128)
    };
    let mut world = World::calm(config);
    let Greed { num_requests, prompt, max_tokens, n } = greed;
    (0..num_requests).for_each(|_| _ = world.ask_as(GREEDY, prompt, max_tokens, n));
    (0..20).for_each(|_| world.step());
    let steps = (0..10).map(|_| {
        let request = world.ask_as(MODEST, 24, 8, 1);
        world.steps_until_end(request)
    });
    let steps = steps.collect();
    assert!(!key_turns || world.engine.scheduler.num_requests() > 0, "the greedy one has more");
    world.drain();
    steps
}

/// The modest tenant waits until a seat or blocks are free, and not behind all requests of the greedy one.
#[test]
fn a_modest_tenant_is_served_beside_a_greedy_one() {
    for overlap in [false, true] {
        for greed in GREEDS {
            let steps = modest_steps(greed, true, overlap);
            // Running requests go on to their end, and paused ones come back first: some prompts in pieces and three
            // outputs. Then come its own 8 tokens. All requests of the greedy tenant take more than 1,000 steps.
            let bound = 8 + 3 * greed.max_tokens as usize + 16 * greed.prompt.div_ceil(64) + 16;
            eprintln!("{greed:?}, {overlap}: {steps:?} steps, bound {bound}");
            assert!(steps.iter().all(|steps| *steps <= bound), "{greed:?}, {overlap}: {steps:?}, bound {bound}");
        }
    }
}

/// Without turns, the modest tenant waits behind all requests of the greedy one.
#[test]
fn without_turns_it_waits_for_all_that_came_before() {
    let steps = modest_steps(GREEDS[0], false, false);
    assert!(steps[0] > 1_000, "{steps:?}");
}

/// Both tenants are served at the same pace, even if one has many more requests.
#[test]
fn two_greedy_tenants_get_equal_parts() {
    for overlap in [false, true] {
        let config = SchedulerConfig { key_turns: true, overlap, max_num_seqs: 16, ..plain_config(8, 128) };
        let mut world = World::calm(config);
        (0..400).for_each(|_| _ = world.ask_as(GREEDY, 30, 20, 1));
        let few: Vec<RequestId> = (0..100).map(|_| world.ask_as(MODEST, 30, 20, 1)).collect();
        while few.iter().any(|request| world.open.contains_key(request)) {
            world.step();
        }
        let served = 500 - world.engine.scheduler.num_requests();
        eprintln!("{served} served when the 100 are");
        assert!((180..=240).contains(&served), "{served} requests were served with the 100");
        world.drain();
    }
}
