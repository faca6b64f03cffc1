//! Steps that fail by the hundred, while requests come, go and stop as they like.

use super::device::{LATE_POISON, POISON};
use super::*;
use crate::messages::EventStream;
use pagetide_engine::block_pool::BlockState;
use std::sync::atomic::{AtomicBool, Ordering};

const FAILURES: usize = 200;

/// A sequence of numbers from a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }
}

/// What clients have come to.
#[derive(Default)]
struct Ends {
    finished: AtomicUsize,
    failed: AtomicUsize,
    stopped: AtomicUsize,
    dropped: AtomicUsize,
    refused: AtomicUsize,
}

/// Requests until `is_over`, each heard to its end, stopped, or dropped in the middle.
fn client(world: &World, seed: u64, ends: &Ends, is_over: &AtomicBool) {
    let mut random = Random(seed);
    while !is_over.load(Ordering::SeqCst) {
        let (len, max_tokens) = (1 + random.below(12), 1 + random.below(9));
        let n = 1 + random.below(2) as u32;
        let params = SamplingParams { max_tokens: max_tokens as u32, ..SamplingParams::default() };
        let prompt = vec![1 + random.below(5) as TokenId; len as usize];
        let request = request(prompt, params).with(|request| request.core.n = n);
        let Ok(accepted) = block_on(world.handle.submit(request)) else {
            ends.refused.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        let mut stream = accepted.events;
        match random.below(4) {
            0 => {
                let heard = random.below(6);
                let hear = async {
                    for _ in 0..heard {
                        if stream.next().await.is_none() {
                            break;
                        }
                    }
                };
                block_on(hear);
                ends.dropped.fetch_add(1, Ordering::SeqCst);
            }
            way => {
                let stops = way == 1;
                if stops {
                    (0..n).for_each(|sample| stream.stop_sample(sample));
                }
                hear_to_the_end(&mut stream, [len, max_tokens], n, stops, ends);
            }
        }
    }
}

/// Its tokens are right as far as they come, it ends once, and nothing follows.
fn hear_to_the_end(stream: &mut EventStream, [len, max_tokens]: [u64; 2], n: u32, stops: bool, ends: &Ends) {
    let mut outputs = vec![Vec::new(); n as usize];
    let (mut num_finished, mut has_failed) = (0, false);
    block_on(async {
        while let Some(event) = stream.next().await {
            assert!(!has_failed, "{event:?} after a failure");
            match event {
                Event::Token { index, token, .. } => outputs[index as usize].push(u64::from(token)),
                Event::Finished { .. } => num_finished += 1,
                Event::Failed(error) => {
                    assert_eq!(error.status, 500, "{error:?}");
                    has_failed = true;
                }
                _ => {}
            }
        }
    });
    for output in &outputs {
        let expected: Vec<u64> = (len..len + max_tokens).take(output.len()).collect();
        assert_eq!(output, &expected);
    }
    match (has_failed, stops) {
        (true, _) => drop(ends.failed.fetch_add(1, Ordering::SeqCst)),
        (false, true) => drop(ends.stopped.fetch_add(1, Ordering::SeqCst)),
        (false, false) => {
            assert_eq!(num_finished, n, "it has neither ended nor failed");
            assert!(outputs.iter().all(|output| output.len() == max_tokens as usize), "{outputs:?}");
            ends.finished.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// What some requests say, one after the other: the last needs every block.
fn answers(world: &World) -> Vec<Vec<Event>> {
    let answer = |(len, max_tokens): (usize, u32)| {
        let all = events(world.submit(vec![9; len], max_tokens).unwrap());
        world.wait_until_idle();
        all.into_iter().filter(|event| !matches!(event, Event::Started { .. })).collect()
    };
    [(3, 4), (9, 8), (17, 3), (31, 2)].map(answer).into()
}

#[test]
fn hundreds_of_failed_steps_lose_no_request_and_leak_no_block() {
    for overlap in BOTH_LOOPS {
        let world = World::start(overlap);
        let before = answers(&world);
        let (ends, is_over) = (Ends::default(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for seed in 0..3 {
                let (world, ends, is_over) = (&world, &ends, &is_over);
                scope.spawn(move || client(world, seed, ends, is_over));
            }
            // In the middle of a step, at its end, and on request.
            let ways = [Some(POISON), Some(LATE_POISON), None];
            for way in ways.iter().cycle() {
                if count(&world.device.resets) >= FAILURES {
                    break;
                }
                match way {
                    Some(poison) => drop(world.submit(vec![*poison], 3).map(events)),
                    None => block_on(world.fail.send(FailNextStep)).unwrap(),
                }
                // A requested failure happens with the next step, so a request has to arrive.
                std::thread::sleep(Duration::from_millis(2));
            }
            is_over.store(true, Ordering::SeqCst);
        });
        world.wait_until_idle();
        let [finished, failed, stopped, dropped, refused] =
            [&ends.finished, &ends.failed, &ends.stopped, &ends.dropped, &ends.refused].map(count);
        eprintln!("{finished} finished, {failed} failed, {stopped} stopped, {dropped} dropped, {refused} refused");
        assert!(finished > 0 && failed > 0 && stopped > 0 && dropped > 0);
        wait_until("both pools are empty", || {
            let snapshot = block_on(world.handle.look(100)).unwrap();
            let is_used = |state: &BlockState| matches!(state, BlockState::Used(_));
            let states = snapshot.device.states().into_iter().chain(snapshot.swap.states());
            snapshot.seqs.is_empty() && states.filter(is_used).count() == 0
        });
        // A failure that was requested last may still come. It hits the first request.
        drop(events(world.submit(vec![9; 3], 1).unwrap()));
        world.wait_until_idle();
        assert_eq!(answers(&world), before, "the same bytes as before");
    }
}
