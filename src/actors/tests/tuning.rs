//! Settings that change while requests run.

use super::*;
use pagetide_engine::block_pool::PoolStats;

impl World {
    fn tune(&self, tuning: Tuning) -> PoolStats {
        block_on(self.tune.send(Tune(tuning))).unwrap().unwrap()
    }
}

#[test]
fn no_request_suffers_from_settings_that_change() {
    for overlap in BOTH_LOOPS {
        let world = World::start(overlap);
        world.while_clients_ask(|turn| {
            let preemption_mode = [PreemptionMode::Swap, PreemptionMode::Recompute, PreemptionMode::Auto][turn % 3];
            let (num_swap_blocks, max_num_seqs) = (turn * 5 % 9, 1 + turn % 8);
            let tuning = Tuning { preemption_mode, num_swap_blocks, max_num_seqs, ..world.tuning.clone() };
            let stats = world.tune(tuning);
            assert_eq!(stats.used + stats.cached + stats.free, num_swap_blocks + stats.draining);
        });
        world.wait_until_idle();
        let stats = world.tune(world.tuning.clone());
        assert_eq!((stats.used, stats.draining), (0, 0));
    }
}

#[test]
fn the_swap_pool_drains_as_sequences_come_back() {
    for overlap in BOTH_LOOPS {
        let world = World::start(overlap);
        let drains = |_| {
            let hold = world.hold();
            let senior = world.submit(vec![1; 9], 16).unwrap();
            let mut junior = world.submit(vec![2; 10], 14).unwrap();
            drop(hold);
            let mut heard = Vec::new();
            while !matches!(heard.last(), Some(Event::Paused { .. })) {
                heard.push(block_on(junior.events.next()).expect("they have not room for both"));
            }
            let hold = world.hold();
            let stats = world.tune(Tuning { num_swap_blocks: 0, ..world.tuning.clone() });
            drop(hold);
            assert_eq!((stats.used, stats.cached + stats.free), (stats.draining, 0));
            assert_eq!(tokens(&events(senior)), (9..25).collect::<Vec<_>>());
            heard.extend(events(junior));
            assert_eq!(tokens(&heard), (10..24).collect::<Vec<_>>());
            world.wait_until_idle();
            wait_until("all have come back", || {
                world.tune(Tuning { num_swap_blocks: 0, ..world.tuning.clone() })
                    == PoolStats { evicted: stats.evicted, ..PoolStats::default() }
            });
            let num_blocks = world.tuning.num_swap_blocks;
            wait_until("nothing of it is kept", || world.device.discarded.lock().unwrap().len() == num_blocks);
            assert_eq!(world.tune(world.tuning.clone()).free, num_blocks);
            stats.draining > 0
        };
        // The junior may have come back by the time that it is heard of.
        assert!((0..200).any(drains), "nobody was swapped out");
    }
}

#[test]
fn fewer_requests_may_be_held_from_now_on() {
    let world = World::start(false);
    let hold = world.hold();
    let held: Vec<_> = (0..3).map(|_| world.submit(vec![1], 2).unwrap()).collect();
    let server = &world.handle.model().server;
    server.set(ServerConfig { max_requests: 3, retry_after_s: 9, ..(*server.get()).clone() });
    let refused = world.submit(vec![1], 2).unwrap_err();
    assert_eq!((refused.status, refused.retry_after_s), (429, Some(9)));
    drop(hold);
    held.into_iter().for_each(|accepted| assert_eq!(tokens(&events(accepted)), [1, 2]));
    world.wait_until_idle();
    assert!(world.submit(vec![1], 2).is_ok());
}

#[test]
fn what_a_request_may_ask_for_changes_at_once() {
    let world = World::start(false);
    let terms = Terms { preemptible: false, max_pause: None };
    let kept = || request(vec![1; 8], params(4)).with(|request| request.core.terms = terms);
    assert!(block_on(world.handle.submit(kept())).is_ok());
    world.tune(Tuning { non_preemptible_blocks: 1, ..world.tuning.clone() });
    let refused = block_on(world.handle.submit(kept())).unwrap_err();
    assert!(refused.message.contains("such requests may hold 1 of this server's 8 blocks"), "{refused}");
}

fn params(max_tokens: u32) -> SamplingParams {
    SamplingParams { max_tokens, ..SamplingParams::default() }
}
