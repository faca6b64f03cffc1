//! The actors around a device that does as the test says.

use crate::actors::executor::ModelExecutor;
use crate::actors::intake::Limits;
use crate::actors::messages::{Accepted, Event, Prompt, Submit};
use crate::actors::runtime::{ModelInfo, RuntimeHandle, Started, Wiring};
use crate::actors::workers::Workers;
use crate::engine::plan::{PlannedSeq, SeqOutput, StepOutput, StepPlan, StepRunner, StepTiming};
use crate::engine::policy::{PreemptionMode, SchedulerConfig, SchedulingPolicy};
use crate::error::{ApiError, StartError};
use crate::ids::TokenId;
use crate::sampling::params::{FinishReason, Sampled, SamplingDefaults, SamplingParams};
use crate::text::tokenizer::Tokenizer;
use actix::System;
use futures_executor::block_on;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::{Semaphore, watch};

/// A prompt that begins with this token makes the device fail.
const POISON: TokenId = 13;
/// A prompt that begins with this token makes the device report nonsense, which the scheduler does not survive.
const NONSENSE: TokenId = 14;
const MAX_REQUESTS: usize = 4;
const NUM_BLOCKS: usize = 8;

/// Runs a step only while it can take the gate; says the number of computed tokens as the next token.
struct FakeDevice {
    gate: Arc<Mutex<()>>,
    resets: Arc<AtomicUsize>,
    outputs: VecDeque<StepOutput>,
}

impl StepRunner for FakeDevice {
    fn submit(&mut self, plan: &StepPlan) {
        drop(self.gate.lock().unwrap());
        assert!(plan.batch.iter().all(|seq| seq.tokens[0] != POISON), "the device choked on token {POISON}");
        let answer = |planned: &PlannedSeq| {
            let end = planned.num_computed + planned.tokens.len();
            let sampled = Sampled { token: end as TokenId, logprobs: None };
            let count = planned.sample.as_ref().map_or(0, |sample| sample.num_samples);
            SeqOutput { sampled: vec![sampled; count as usize], ..SeqOutput::of(planned.seq) }
        };
        let nonsense = plan.batch.iter().any(|seq| seq.tokens[0] == NONSENSE);
        let timing = StepTiming { forward_s: if nonsense { -1.0 } else { 0.0 }, ..StepTiming::default() };
        self.outputs.push_back(StepOutput { seqs: plan.batch.iter().map(answer).collect(), timing });
    }

    fn is_done(&mut self) -> bool {
        true
    }

    fn finish(&mut self) -> StepOutput {
        self.outputs.pop_front().expect("a plan was submitted")
    }

    fn reset(&mut self) -> Result<(), StartError> {
        self.outputs.clear();
        self.resets.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

struct World {
    handle: RuntimeHandle,
    places: Arc<Semaphore>,
    gate: Arc<Mutex<()>>,
    resets: Arc<AtomicUsize>,
    system: System,
    alive: watch::Receiver<()>,
}

impl World {
    fn start() -> Self {
        let (gate, resets) = (Arc::default(), Arc::default());
        let device = FakeDevice { gate: Arc::clone(&gate), resets: Arc::clone(&resets), outputs: VecDeque::new() };
        let (executor, ()) = ModelExecutor::start(move || Ok((device, ()))).unwrap();
        let tokenizer = include_str!("../../models/demo/tokenizer.json");
        let model = Arc::new(ModelInfo {
            served_name: "fake".into(),
            created_s: 0,
            max_model_len: 100,
            vocab_size: 1000,
            tokenizer: Arc::new(Tokenizer::from_json(tokenizer, None).unwrap()),
            chat_template: None,
            eos_token_ids: vec![],
            default_sampling: SamplingDefaults::default(),
        });
        let places = Arc::new(Semaphore::new(MAX_REQUESTS));
        let wiring = Wiring {
            scheduler: SchedulerConfig {
                block_size: 4,
                num_device_blocks: NUM_BLOCKS,
                max_num_seqs: 8,
                max_num_batched_tokens: 64,
                max_model_len: 100,
                policy: SchedulingPolicy::Fcfs,
                preemption_mode: PreemptionMode::Swap,
                watermark_blocks: 0,
                prefix_caching: true,
                hash_key: [1; 32],
            },
            limits: Limits {
                max_requests: MAX_REQUESTS,
                retry_after_s: 7,
                block_size: 4,
                num_device_blocks: NUM_BLOCKS,
            },
            workers: Workers::start(1).unwrap(),
            num_swap_blocks: 8,
            block_bytes: 1,
            model: model.clone(),
            places: places.clone(),
            executor,
        };
        let Started { system, intake, alive, .. } = wiring.start().unwrap();
        let handle = RuntimeHandle::new(intake, model, MAX_REQUESTS, Arc::default());
        Self { handle, places, gate, resets, system, alive }
    }

    fn submit(&self, prompt: Vec<TokenId>, max_tokens: u32) -> Result<Accepted, ApiError> {
        block_on(self.handle.submit(Submit {
            prompt: Prompt::Tokens(prompt),
            prompt_param: "prompt",
            params: SamplingParams { max_tokens, ..SamplingParams::default() },
            ignore_eos: false,
            seed: Some(0),
            n: 1,
            priority: 0,
            cache_salt: None,
        }))
    }

    /// Steps wait from here until the guard is dropped.
    fn hold(&self) -> MutexGuard<'_, ()> {
        self.gate.lock().unwrap()
    }

    fn wait_until_idle(&self) {
        for _ in 0..1000 {
            if self.places.available_permits() == MAX_REQUESTS {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        panic!("a request never gave its place back");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.system.stop();
    }
}

/// All events of a request.
fn events(accepted: Accepted) -> Vec<Event> {
    let mut events = accepted.events;
    block_on(async {
        let mut all = Vec::new();
        while let Some(event) = events.next().await {
            all.push(event);
        }
        all
    })
}

fn tokens(events: &[Event]) -> Vec<TokenId> {
    let token = |event: &Event| match event {
        Event::Token { token, .. } => Some(*token),
        _ => None,
    };
    events.iter().filter_map(token).collect()
}

#[test]
fn a_request_hears_its_tokens_and_its_end() {
    let world = World::start();
    let all = events(world.submit(vec![1, 2, 3], 4).unwrap());
    assert_eq!(all[0], Event::Started { cached_tokens: 0 });
    assert_eq!(tokens(&all), [3, 4, 5, 6]);
    assert_eq!(all.last(), Some(&Event::Finished { index: 0, reason: FinishReason::Length }));
    world.wait_until_idle();
}

#[test]
fn a_failed_step_fails_what_ran_and_nothing_else() {
    let world = World::start();
    let hold = world.hold();
    let victim = world.submit(vec![1, 2], 3).unwrap();
    let poison = world.submit(vec![POISON], 3).unwrap();
    drop(hold);
    let failed = events(poison);
    let Some(Event::Failed(error)) = failed.last() else { panic!("it must fail: {failed:?}") };
    assert_eq!(error.status, 500);
    assert!(error.message.contains("choked on token 13"), "{}", error.message);
    // The other one either ran in the same step and failed with it, or went through.
    let other = events(victim);
    assert!(matches!(other.last(), Some(Event::Failed(_) | Event::Finished { .. })), "{other:?}");
    assert_eq!(world.resets.load(Ordering::SeqCst), 1);
    // All blocks are there again: this one needs every one of them.
    let whole = events(world.submit(vec![5; 30], 3).unwrap());
    assert_eq!(tokens(&whole), [30, 31, 32]);
    world.wait_until_idle();
}

#[test]
fn dropping_the_stream_cancels_and_frees() {
    let world = World::start();
    let hold = world.hold();
    let accepted = world.submit(vec![5; 29], 4).unwrap();
    drop(accepted);
    drop(hold);
    world.wait_until_idle();
    // Would never be admitted if the blocks were not back.
    assert_eq!(tokens(&events(world.submit(vec![6; 31], 2).unwrap())), [31, 32]);
}

#[test]
fn a_full_intake_refuses_and_recovers() {
    let world = World::start();
    let hold = world.hold();
    let held: Vec<_> = (0..MAX_REQUESTS).map(|_| world.submit(vec![1], 2).unwrap()).collect();
    let refused = world.submit(vec![1], 2).unwrap_err();
    assert_eq!((refused.status, refused.retry_after_s), (429, Some(7)));
    assert!(refused.message.contains("4 requests"), "{}", refused.message);
    drop(hold);
    for accepted in held {
        assert_eq!(tokens(&events(accepted)), [1, 2]);
    }
    world.wait_until_idle();
    world.submit(vec![1], 2).unwrap();
}

#[test]
fn what_can_never_fit_is_refused_with_the_numbers() {
    let world = World::start();
    // 8 blocks of 4 tokens: 32 slots, and the last generated token needs none.
    assert_eq!(tokens(&events(world.submit(vec![1; 30], 3).unwrap())).len(), 3);
    for (prompt, max_tokens, param, words) in [
        (30, 4, "prompt", "needs 9 KV blocks of 4 tokens, and this server has 8"),
        (33, 0, "prompt", "the prompt of 33 tokens needs 9 KV blocks"),
        (100, 1, "prompt", "maximum context length is 100 tokens"),
        (20, 81, "max_tokens", "101 were asked for (20 in the prompt, 81 for the output)"),
    ] {
        let error = world.submit(vec![1; prompt], max_tokens).unwrap_err();
        assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{error}");
        assert!(error.message.contains(words), "{error}");
    }
    let error = world.submit(vec![1, 1000], 1).unwrap_err();
    assert!(error.message.contains("token id 1000 is out of range") && error.message.contains("0 to 999"), "{error}");
    assert!(world.submit(vec![], 1).unwrap_err().message.contains("empty"));
    // Not given: as many as fit.
    assert_eq!(tokens(&events(world.submit(vec![1; 30], 0).unwrap())).len(), 3);
    world.wait_until_idle();
}

#[test]
fn an_engine_that_cannot_go_on_ends_instead_of_hanging() {
    let mut world = World::start();
    let accepted = world.submit(vec![NONSENSE], 3).unwrap();
    assert_eq!(events(accepted), [], "the stream closes without an end");
    assert!(block_on(world.alive.changed()).is_err(), "the engine's thread is over");
    assert_eq!(world.submit(vec![1], 1).unwrap_err().status, 500);
}

#[test]
fn a_request_without_samples_is_refused() {
    let world = World::start();
    let submit = Submit {
        prompt: Prompt::Tokens(vec![1]),
        prompt_param: "prompt",
        params: SamplingParams::default(),
        ignore_eos: false,
        seed: None,
        n: 0,
        priority: 0,
        cache_salt: None,
    };
    assert_eq!(block_on(world.handle.submit(submit)).unwrap_err().param.as_deref(), Some("n"));
    world.wait_until_idle();
}
