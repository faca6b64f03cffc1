//! An engine that is paused while requests come, run and go.

use super::*;

impl World {
    fn set_paused(&self, is_paused: bool) {
        block_on(self.pause.send(SetPaused(is_paused))).unwrap();
    }
}

#[test]
fn no_step_is_planned_while_the_engine_is_paused() {
    for overlap in BOTH_LOOPS {
        let world = World::start(overlap);
        let hold = world.hold();
        let running = world.submit(vec![1, 2, 3], 8).unwrap();
        let submitted = 1 + usize::from(overlap);
        world.wait_for_steps(submitted);
        world.set_paused(true);
        drop(hold);
        let waiting = world.submit(vec![1, 2, 3, 4], 2).unwrap();
        // What the executor had is completed, and its tokens are told.
        wait_until("tokens are told", || running.events.num_unread() >= submitted);
        assert_eq!(count(&world.device.submitted), submitted);
        assert_eq!(waiting.events.num_unread(), 0);
        // Twice is the same as once.
        world.set_paused(true);
        assert_eq!(count(&world.device.submitted), submitted);
        world.set_paused(false);
        assert_eq!(tokens(&events(running)), [3, 4, 5, 6, 7, 8, 9, 10]);
        assert_eq!(tokens(&events(waiting)), [4, 5]);
    }
}

#[test]
fn what_requests_held_comes_back_when_they_leave_a_paused_engine() {
    for overlap in BOTH_LOOPS {
        let world = World::start(overlap);
        let hold = world.hold();
        let running = world.submit(vec![5; 25], 8).unwrap();
        world.wait_for_steps(1 + usize::from(overlap));
        world.set_paused(true);
        drop(hold);
        drop(running);
        world.wait_until_idle();
        wait_until("the pools are empty", || block_on(world.flush.send(FlushCaches)).unwrap().unwrap());
        world.set_paused(false);
        assert_eq!(tokens(&events(world.submit(vec![6; 31], 2).unwrap())), [31, 32]);
    }
}
