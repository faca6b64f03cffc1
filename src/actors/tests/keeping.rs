//! Prefixes that are read out of the pools, put back and erased while requests come and go.

use super::*;
use crate::messages::{CountPrefix, ErasePrefix, NamePrefix, PutBackPrefix, ReadPrefix};
use pagetide_engine::prefix_cache::BlockHash;

impl World {
    fn names(&self, tokens: Vec<TokenId>) -> Vec<BlockHash> {
        block_on(self.scheduler.send(NamePrefix { salt: None, tokens: Arc::new(tokens) })).unwrap()
    }

    fn num_held(&self, names: &[BlockHash]) -> usize {
        block_on(self.scheduler.send(CountPrefix(names.to_vec()))).unwrap().unwrap()
    }

    fn read(&self, names: &[BlockHash]) -> Result<Vec<u8>, ApiError> {
        block_on(self.scheduler.send(ReadPrefix(names.to_vec()))).unwrap()
    }

    fn put_back(&self, names: &[BlockHash], content: Vec<u8>) -> Result<(), ApiError> {
        block_on(self.scheduler.send(PutBackPrefix { names: names.to_vec(), content })).unwrap()
    }

    fn erase(&self, names: &[BlockHash]) -> usize {
        block_on(self.scheduler.send(ErasePrefix(names.to_vec()))).unwrap().unwrap()
    }
}

#[test]
fn what_is_put_back_is_found_and_read_until_it_is_erased() {
    for overlap in BOTH_LOOPS {
        let world = World::start(overlap);
        let prompt: Vec<TokenId> = (1..14).collect();
        let names = world.names(prompt.clone());
        assert_eq!((names.len(), world.num_held(&names)), (3, 0), "of full blocks");
        world.put_back(&names[1..], vec![20, 30]).unwrap();
        assert_eq!(world.num_held(&names), 0, "its head is missing");
        world.put_back(&names, vec![10, 21, 31]).unwrap();
        assert_eq!(world.read(&names).unwrap(), [10, 20, 30], "what was there is not written again");
        let all = events(world.submit(prompt.clone(), 2).unwrap());
        assert!(all.contains(&Event::Started { cached_tokens: 12 }), "{all:?}");
        world.wait_until_idle();
        wait_until("no request holds it", || world.erase(&names) == 3 || world.num_held(&names) == 0);
        assert!(world.read(&names).unwrap().is_empty());
        let all = events(world.submit(prompt, 2).unwrap());
        assert!(all.contains(&Event::Started { cached_tokens: 0 }), "{all:?}");
    }
}

#[test]
fn no_request_suffers_from_prefixes_that_come_and_go() {
    for overlap in BOTH_LOOPS {
        let world = World::start(overlap);
        // What the clients ask, and a prefix of the size of the pool.
        let prefixes: Vec<_> = [vec![1; 12], vec![2; 8], vec![3; 12], vec![9; 32]].map(|of| world.names(of)).into();
        world.while_clients_ask(|calls| {
            let names = &prefixes[calls % prefixes.len()];
            match calls % 3 {
                0 => world.put_back(names, vec![0; names.len()]).unwrap(),
                1 => drop(world.read(names).unwrap()),
                _ => drop(world.erase(names)),
            }
        });
        world.wait_until_idle();
        wait_until("nothing is held", || block_on(world.flush.send(FlushCaches)).unwrap().unwrap());
    }
}

#[test]
fn a_device_that_fails_meanwhile_is_told_once_and_goes_on() {
    for overlap in BOTH_LOOPS {
        let world = World::start(overlap);
        let names = world.names(vec![5; 8]);
        for writes in [false, true, false] {
            world.put_back(&names, vec![1, 2]).unwrap();
            world.device.copies_fail.store(true, Ordering::SeqCst);
            let failed = match writes {
                true => world.put_back(&world.names(vec![6; 8]), vec![3, 4]),
                false => world.read(&names).map(drop),
            };
            assert_eq!(failed.unwrap_err().status, 500);
            world.device.copies_fail.store(false, Ordering::SeqCst);
            wait_until("the pools are new", || world.num_held(&names) == 0);
            assert_eq!(tokens(&events(world.submit(vec![5; 8], 2).unwrap())), [8, 9]);
            world.wait_until_idle();
            assert_eq!(world.read(&names).unwrap().len(), 2);
        }
        assert_eq!(count(&world.device.resets), 3);
        wait_until("nothing is held", || block_on(world.flush.send(FlushCaches)).unwrap().unwrap());
    }
}

#[test]
fn the_request_of_a_step_in_flight_fails_with_the_device() {
    // The executor looks for nothing else while two steps are in flight.
    let world = World::start(false);
    let hold = world.hold();
    let accepted = world.submit(vec![1, 2, 3], 8).unwrap();
    world.wait_for_steps(1);
    world.device.copies_fail.store(true, Ordering::SeqCst);
    assert_eq!(world.put_back(&world.names(vec![5; 8]), vec![1, 2]).unwrap_err().status, 500);
    world.device.copies_fail.store(false, Ordering::SeqCst);
    drop(hold);
    assert!(matches!(events(accepted).last(), Some(Event::Failed(_))));
    world.wait_until_idle();
    assert_eq!(tokens(&events(world.submit(vec![1, 2, 3], 2).unwrap())), [3, 4], "no failure was counted twice");
    assert_eq!(count(&world.device.resets), 1);
}
