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
        let client = |client: usize| {
            for i in 0..100 {
                let (prompt, max_tokens) = (1 + (client + i) % 11, 1 + (i * 5 + client) % 17);
                let accepted = world.submit(vec![1 + client as TokenId; prompt], max_tokens as u32).unwrap();
                let expected: Vec<_> = (prompt..prompt + max_tokens).map(|token| token as TokenId).collect();
                assert_eq!(tokens(&events(accepted)), expected);
            }
        };
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..3).map(|i| scope.spawn(move || client(i))).collect();
            while !clients.iter().all(|client| client.is_finished()) {
                world.flush();
            }
        });
        world.wait_until_idle();
    }
}
