//! Prefix caches that are dropped while requests come and go.

use super::*;

impl World {
    fn flush(&self) -> bool {
        block_on(self.flush.send(FlushCaches)).unwrap().unwrap()
    }

    /// The prompt tokens of this request that the prefix cache held.
    fn cached_tokens_of(&self, prompt: Vec<TokenId>) -> u32 {
        let all = events(self.submit(prompt, 2).unwrap());
        self.wait_until_idle();
        let cached_tokens = |event: &Event| match event {
            Event::Started { cached_tokens } => Some(*cached_tokens),
            _ => None,
        };
        all.iter().find_map(cached_tokens).expect("it has started")
    }
}

#[test]
fn a_prefix_is_found_until_the_caches_are_dropped() {
    for overlap in BOTH_LOOPS {
        let world = World::start(overlap);
        let prompt = vec![7; 13];
        assert_eq!(world.cached_tokens_of(prompt.clone()), 0);
        assert_eq!(world.cached_tokens_of(prompt.clone()), 12);
        wait_until("no request is there", || world.flush());
        assert_eq!(world.cached_tokens_of(prompt.clone()), 0);
        assert_eq!(world.cached_tokens_of(prompt), 12);
    }
}

#[test]
fn no_request_suffers_from_caches_that_are_dropped() {
    for overlap in BOTH_LOOPS {
        let world = World::start(overlap);
        world.while_clients_ask(|_| {
            world.flush();
        });
        world.wait_until_idle();
    }
}
