//! The actors around a device that does as the test says.

mod device;
mod failure;
mod flushing;
mod intake;
mod keeping;
mod memory;
mod pausing;
mod storm;
mod tuning;
mod watching;

use crate::executor::ModelExecutor;
use crate::intake::IntakeLimits;
use crate::messages::{Accepted, Caller, FailNextStep, FlushCaches, SetPaused, Tune};
use crate::places::Places;
use crate::runtime::{ModelInfo, RuntimeHandle, Started, Wiring};
use crate::scheduler::SchedulerActor;
use crate::workers::Workers;
use actix::{Addr, Recipient, System};
use device::{Controls, FakeDevice};
use futures_executor::block_on;
use futures_util::FutureExt;
use pagetide_api::event::Event;
use pagetide_api::live_server::LiveServer;
use pagetide_api::prompt::Prompt;
use pagetide_api::request::PromptRequest;
use pagetide_base::error::ApiError;
use pagetide_base::ids::TokenId;
use pagetide_base::sampling::params::{FinishReason, Pooling, SamplingDefaults, SamplingParams};
use pagetide_config::{ApiKeyConfig, OnFailure, RecorderConfig, ServerConfig};
use pagetide_engine::bill::{Tenant, Terms};
use pagetide_engine::prefix_cache::EvictionPolicy;
use pagetide_engine::scheduler::{PreemptionMode, SchedulerConfig, Tuning};
use pagetide_text::grammar::sandbox::GrammarLimits;
use pagetide_text::tokenizer::Tokenizer;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::watch;

const MAX_REQUESTS: usize = 4;
const NUM_BLOCKS: usize = 8;
/// Tests of what does not depend on it are of both.
const BOTH_LOOPS: [bool; 2] = [false, true];

struct World {
    handle: RuntimeHandle,
    places: Places,
    tune: Recipient<Tune>,
    fail: Recipient<FailNextStep>,
    flush: Recipient<FlushCaches>,
    pause: Recipient<SetPaused>,
    scheduler: Addr<SchedulerActor>,
    /// As it was started.
    tuning: Tuning,
    device: Arc<Controls>,
    system: System,
    alive: watch::Receiver<()>,
}

#[derive(Clone, Copy)]
struct Settings {
    overlap: bool,
    on_failure: OnFailure,
    step_timeout: Option<Duration>,
    load_time: Duration,
    preemption_mode: PreemptionMode,
}

impl Settings {
    fn new(overlap: bool) -> Self {
        Self {
            overlap,
            on_failure: OnFailure::Restart,
            step_timeout: None,
            load_time: Duration::ZERO,
            preemption_mode: PreemptionMode::Swap,
        }
    }
}

impl World {
    fn start(overlap: bool) -> Self {
        Self::with(Settings::new(overlap))
    }

    fn with(settings: Settings) -> Self {
        Self::recording(settings, RecorderConfig { minutes: 0, ..RecorderConfig::default() })
    }

    fn recording(settings: Settings, recorder: RecorderConfig) -> Self {
        let controls: Arc<Controls> = Arc::default();
        let device = FakeDevice::new(controls.clone());
        let load = move || {
            std::thread::sleep(settings.load_time);
            Ok((device, ()))
        };
        let (executor, ()) = ModelExecutor::start_loading(load).unwrap().finish().unwrap();
        let tokenizer = include_str!("../../models/demo/tokenizer.json");
        let model = Arc::new(ModelInfo {
            chat_format: Default::default(),
            served_name: "fake".into(),
            aliases: Vec::new(),
            created_s: 0,
            max_model_len: 100,
            vocab_size: 1000,
            tokenizer: Arc::new(Tokenizer::from_json(tokenizer, None).unwrap()),
            chat_template: None,
            eos_token_ids: vec![],
            embedding_size: 4,
            pooling: Pooling::Last,
            default_sampling: SamplingDefaults::default(),
            kv_block_bytes: 1,
            max_prompt_bytes: 1 << 20,
            server: LiveServer::new(ServerConfig {
                max_requests: MAX_REQUESTS,
                retry_after_s: 7,
                ..ServerConfig::default()
            }),
        });
        let places = Places::default();
        let scheduler = SchedulerConfig {
            max_num_seqs: 8,
            max_num_batched_tokens: 64,
            max_model_len: 100,
            preemption_mode: settings.preemption_mode,
            write_behind_blocks: 2,
            max_tail_blocks: 1,
            non_preemptible_blocks: NUM_BLOCKS / 2,
            prefix_caching: true,
            overlap: settings.overlap,
            hash_key: [1; 32],
            ..SchedulerConfig::new(4, NUM_BLOCKS, 8)
        };
        let tuning = Tuning::from(&scheduler);
        let workers = Workers::start(1, Duration::from_secs(600)).unwrap();
        let wiring = Wiring {
            scheduler,
            limits: IntakeLimits {
                max_num_seqs: 8,
                block_size: 4,
                num_device_blocks: NUM_BLOCKS,
                non_preemptible_blocks: NUM_BLOCKS / 2,
            },
            grammars: GrammarLimits { cpu: Duration::from_secs(600), memory_bytes: 1 << 30, work_per_token: None },
            workers: workers.clone(),
            eviction: EvictionPolicy::default(),
            block_bytes: 1,
            on_failure: settings.on_failure,
            step_timeout: settings.step_timeout,
            model: model.clone(),
            places: places.clone(),
            recorder,
            executor,
        };
        let Started { system, intake, look, tune, fail, flush, pause, scheduler, alive, .. } = wiring.start().unwrap();
        let handle = RuntimeHandle::new(intake, look, model, workers, Default::default());
        Self { handle, places, tune, tuning, fail, flush, pause, scheduler, device: controls, system, alive }
    }

    fn submit(&self, prompt: Vec<TokenId>, max_tokens: u32) -> Result<Accepted, ApiError> {
        self.submit_with(prompt, SamplingParams { max_tokens, ..SamplingParams::default() })
    }

    fn submit_with(&self, prompt: Vec<TokenId>, params: SamplingParams) -> Result<Accepted, ApiError> {
        block_on(self.handle.submit(request(prompt, params)))
    }

    /// Steps wait from here until the guard is dropped.
    fn hold(&self) -> MutexGuard<'_, ()> {
        self.device.gate.lock().unwrap()
    }

    fn wait_until_idle(&self) {
        wait_until("every request gives its place back", || self.places.num_taken() == 0);
    }

    /// Three clients send requests and check each answer. Until they are done, `disturb` is called again and again,
    /// with the number of calls before it.
    fn while_clients_ask(&self, mut disturb: impl FnMut(usize)) {
        let client = |client: usize| {
            for i in 0..100 {
                let (prompt, max_tokens) = (1 + (client + i) % 11, 1 + (i * 5 + client) % 17);
                let accepted = self.submit(vec![1 + client as TokenId; prompt], max_tokens as u32).unwrap();
                let expected: Vec<_> = (prompt..prompt + max_tokens).map(|token| token as TokenId).collect();
                assert_eq!(tokens(&events(accepted)), expected);
            }
        };
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..3).map(|i| scope.spawn(move || client(i))).collect();
            let mut calls = 0;
            while !clients.iter().all(|client| client.is_finished()) {
                disturb(calls);
                calls += 1;
            }
        });
    }

    /// Until the device has been given as many steps in all.
    fn wait_for_steps(&self, steps: usize) {
        wait_until("the step is submitted", || count(&self.device.submitted) == steps);
    }
}

fn request(prompt: Vec<TokenId>, params: SamplingParams) -> PromptRequest {
    PromptRequest { seed: Some(0), ..PromptRequest::new(prompt, params) }
}

impl Drop for World {
    fn drop(&mut self) {
        self.system.stop();
    }
}

fn count(counter: &AtomicUsize) -> usize {
    counter.load(Ordering::SeqCst)
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..5000 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("not in time: {what}");
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
    for overlap in BOTH_LOOPS {
        let world = World::start(overlap);
        let all = events(world.submit(vec![1, 2, 3], 4).unwrap());
        assert_eq!(all[0], Event::Started { cached_tokens: 0 });
        assert_eq!(tokens(&all), [3, 4, 5, 6]);
        assert_eq!(all.last(), Some(&Event::Finished { index: 0, reason: FinishReason::Length }));
        world.wait_until_idle();
        assert_eq!(count(&world.device.submitted), 4);
    }
}

#[test]
fn a_step_is_planned_while_another_runs_only_in_the_overlapped_loop() {
    for overlap in BOTH_LOOPS {
        let world = World::start(overlap);
        let hold = world.hold();
        let accepted = world.submit(vec![1, 2, 3], 6).unwrap();
        world.wait_for_steps(1 + usize::from(overlap));
        drop(hold);
        assert_eq!(tokens(&events(accepted)), [3, 4, 5, 6, 7, 8]);
        // The last token is known to be the last: none is fed after it.
        assert_eq!(count(&world.device.submitted), 6);
        assert!(overlap || count(&world.device.pending) == 0);
        assert!(!overlap || count(&world.device.pending) >= 1);
    }
}

#[test]
fn what_follows_a_stop_token_that_was_pending_is_dropped() {
    for overlap in BOTH_LOOPS {
        let world = World::start(overlap);
        let params = SamplingParams { max_tokens: 20, stop_token_ids: vec![5], ..SamplingParams::default() };
        let hold = world.hold();
        let accepted = world.submit_with(vec![1, 2, 3], params).unwrap();
        world.wait_for_steps(1 + usize::from(overlap));
        drop(hold);
        let all = events(accepted);
        assert_eq!(tokens(&all), [3, 4, 5]);
        assert_eq!(all.last(), Some(&Event::Finished { index: 0, reason: FinishReason::StopToken(5) }));
        world.wait_until_idle();
        assert_eq!(tokens(&events(world.submit(vec![6; 31], 2).unwrap())), [31, 32], "all blocks are back");
    }
}

#[test]
fn dropping_the_stream_cancels_and_frees() {
    for overlap in BOTH_LOOPS {
        let world = World::start(overlap);
        let hold = world.hold();
        let accepted = world.submit(vec![5; 25], 8).unwrap();
        world.wait_for_steps(1 + usize::from(overlap));
        drop(accepted);
        drop(hold);
        world.wait_until_idle();
        // Would never be admitted if the blocks were not back.
        assert_eq!(tokens(&events(world.submit(vec![6; 31], 2).unwrap())), [31, 32]);
    }
}

#[test]
fn a_sample_that_is_stopped_in_flight_says_no_more() {
    for overlap in BOTH_LOOPS {
        let world = World::start(overlap);
        let hold = world.hold();
        let accepted = world.submit(vec![1, 2, 3], 20).unwrap();
        world.wait_for_steps(1 + usize::from(overlap));
        accepted.events.stop_sample(0);
        world.wait_until_idle();
        drop(hold);
        assert_eq!(events(accepted), []);
        assert_eq!(tokens(&events(world.submit(vec![6; 31], 2).unwrap())), [31, 32]);
    }
}

#[test]
fn requests_come_and_go_while_steps_run() {
    for overlap in BOTH_LOOPS {
        let world = World::start(overlap);
        let client = |client: usize| {
            for i in 0..200 {
                let (prompt, max_tokens) = (1 + (client + i) % 7, 1 + (i * 5 + client) % 9);
                let accepted = world.submit(vec![1; prompt], max_tokens as u32).unwrap();
                match (i + client) % 3 {
                    0 => drop(accepted),
                    1 => {
                        accepted.events.stop_sample(0);
                        assert!(tokens(&events(accepted)).len() <= max_tokens);
                    }
                    _ => {
                        let expected: Vec<_> = (prompt..prompt + max_tokens).map(|token| token as TokenId).collect();
                        assert_eq!(tokens(&events(accepted)), expected);
                    }
                }
                // A place comes back when the cancellation has arrived.
                wait_until("a place is free", || world.places.num_taken() < 2);
            }
        };
        std::thread::scope(|scope| (0..2).for_each(|i| drop(scope.spawn(move || client(i)))));
        world.wait_until_idle();
        assert_eq!(tokens(&events(world.submit(vec![6; 31], 2).unwrap())), [31, 32], "all blocks are back");
    }
}

#[test]
fn a_full_intake_refuses_and_recovers() {
    let world = World::start(true);
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
fn one_key_leaves_places_for_others() {
    let world = World::start(true);
    let submit_as = |tenant| {
        let handle = world.handle.on_behalf_of(Caller { tenant: Tenant(tenant), salt: None });
        let params = SamplingParams { max_tokens: 2, ..SamplingParams::default() };
        block_on(handle.submit(request(vec![1], params)))
    };
    let hold = world.hold();
    let server = &world.handle.model().server;
    let keys = |keys: &[&str]| keys.iter().copied().map(ApiKeyConfig::from).collect();
    server.set(ServerConfig { api_keys: keys(&["a", "b"]), ..(*server.get()).clone() });
    let mut held: Vec<_> = (0..3).map(|_| submit_as(1).unwrap()).collect();
    let refused = submit_as(1).unwrap_err();
    assert_eq!((refused.status, refused.retry_after_s), (429, Some(7)));
    let words = "3 requests in the server, its part of 4 (server.max_share_per_key)";
    assert!(refused.message.contains(words), "{}", refused.message);
    // The rest is for others; and alone a key may have all.
    server.set(ServerConfig { api_keys: keys(&["a"]), ..(*server.get()).clone() });
    held.push(submit_as(1).unwrap());
    drop(held.pop());
    wait_until("its place is back", || world.places.num_taken() == 3);
    server.set(ServerConfig { api_keys: keys(&["a", "b"]), ..(*server.get()).clone() });
    held.push(submit_as(2).unwrap());
    drop(hold);
    for accepted in held {
        assert_eq!(tokens(&events(accepted)), [1, 2]);
    }
    world.wait_until_idle();
}

#[test]
fn what_can_never_fit_is_refused_with_the_numbers() {
    let world = World::start(true);
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
    // A wish is cut to what fits, of the memory and of the model.
    for max_tokens in [2, 3, 4, 81] {
        let params = SamplingParams { max_tokens, ..SamplingParams::default() };
        let wish = PromptRequest { shortens_output: true, ..request(vec![1; 30], params) };
        let accepted = block_on(world.handle.submit(wish)).unwrap();
        assert_eq!(accepted.params.max_tokens, max_tokens.min(3));
        assert_eq!(tokens(&events(accepted)).len(), max_tokens.min(3) as usize);
    }
    world.wait_until_idle();
}

/// A text thread that does not come back holds no place for a client that has gone.
#[test]
fn a_request_that_is_given_up_while_its_text_waits_leaves_its_place() {
    let world = World::start(false);
    let (release, held) = std::sync::mpsc::channel::<()>();
    let held = Arc::new(std::sync::Mutex::new(held));
    for _ in 0..2 {
        let held = held.clone();
        // Ends with an error when it is released.
        world.handle.text().spawn(move || _ = held.lock().unwrap().recv());
    }
    let prompt = Prompt::Text { text: "a".into(), add_special_tokens: false };
    let mut waiting = Box::pin(world.handle.submit(PromptRequest::new(prompt, SamplingParams::default())));
    assert!((&mut waiting).now_or_never().is_none());
    wait_until("it holds a place", || world.places.num_taken() == 1);
    drop(waiting);
    world.wait_until_idle();
    drop(release);
    events(world.submit(vec![1], 1).unwrap());
}

#[test]
fn a_request_without_samples_is_refused() {
    let world = World::start(true);
    let none = request(vec![1], SamplingParams::default()).with(|request| request.core.n = 0);
    assert_eq!(block_on(world.handle.submit(none)).unwrap_err().param.as_deref(), Some("n"));
    world.wait_until_idle();
}
