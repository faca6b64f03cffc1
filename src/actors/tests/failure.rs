//! Devices that fail and devices that hang: requests hear of it, and the engine goes on or ends, but never waits for
//! ever.

use super::device::{Controls, FakeDevice, LATE_POISON, NONSENSE, POISON, QUICKSAND};
use super::{BOTH_LOOPS, Settings, World, count, events, tokens, wait_until};
use crate::executor::ModelExecutor;
use crate::messages::{Execute, Executed, ExecutorFailed, FailNextStep};
use actix::{Actor, System};
use futures_executor::block_on;
use pagetide_api::event::Event;
use pagetide_base::error::ApiError;
use pagetide_base::ids::{SeqId, TokenId};
use pagetide_config::{OnFailure, RecorderConfig};
use pagetide_engine::plan::{PlannedSeq, StepPlan};
use pagetide_recorder::{Cause, Header, RecordedEvent as Recorded, Recording, Replayer};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The one error that a failed request hears, after its tokens.
fn failure(all: &[Event]) -> &ApiError {
    let failures = all.iter().filter(|event| matches!(event, Event::Failed(_))).count();
    match all.last() {
        Some(Event::Failed(error)) if failures == 1 => error,
        _ => panic!("it must fail once and last: {all:?}"),
    }
}

fn assert_ended(world: &mut World) {
    assert!(block_on(world.alive.changed()).is_err(), "the engine's thread is over");
    // The intake, on a thread of its own, may still be there for a moment.
    match world.submit(vec![1], 1) {
        Ok(accepted) => assert_eq!(events(accepted), [], "nobody runs it: its stream closes"),
        Err(error) => assert_eq!(error.status, 500),
    }
}

#[test]
fn a_failed_step_fails_what_ran_and_nothing_else() {
    for (overlap, poison) in [(false, POISON), (false, LATE_POISON), (true, POISON), (true, LATE_POISON)] {
        let world = World::start(overlap);
        let hold = world.hold();
        let first = world.submit(vec![1, 2], 3).unwrap();
        world.wait_for_steps(1 + usize::from(overlap));
        let poison = world.submit(vec![poison], 3).unwrap();
        drop(hold);
        let failed = events(poison);
        assert_eq!(failure(&failed).status, 500);
        assert!(failure(&failed).message.contains("choked"), "{}", failure(&failed).message);
        // The other one either ran in the same step and failed with it, or went through.
        let other = events(first);
        assert!(matches!(other.last(), Some(Event::Failed(_) | Event::Finished { .. })), "{other:?}");
        assert_eq!(count(&world.device.resets), 1);
        // All blocks are there again: this one needs every one of them.
        let whole = events(world.submit(vec![5; 30], 3).unwrap());
        assert_eq!(tokens(&whole), [30, 31, 32]);
        world.wait_until_idle();
    }
}

/// Applies all that a file in `folder` holds, the only one there is.
fn replay_only_file(folder: &Path) -> (Header, Vec<Recorded>) {
    let files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    let [file] = &files[..] else { panic!("one recording, and nothing half done: {files:?}") };
    let recording = Recording::read(&std::fs::read(file).unwrap()).unwrap();
    let mut replayer = Replayer::new(recording.keyframe());
    let events: Vec<Recorded> = recording.events().map(|timed| timed.unwrap().event).collect();
    for (place, event) in events.iter().enumerate() {
        if let Err(difference) = replayer.apply(event) {
            panic!("event {place}, {event:?}: {difference}");
        }
    }
    (recording.header().clone(), events)
}

#[test]
fn a_failure_leaves_a_recording_that_replays() {
    for (overlap, on_failure) in [(false, OnFailure::Restart), (true, OnFailure::Restart), (true, OnFailure::Exit)] {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("recordings");
        let recorder = RecorderConfig { dir: dir.to_str().unwrap().into(), ..RecorderConfig::default() };
        let mut world = World::recording(Settings { on_failure, ..Settings::new(overlap) }, recorder);
        // Together they need 9 blocks and there are 8, so one is preempted before the step fails.
        let hold = world.hold();
        let streams: Vec<_> = (0..3).map(|_| world.submit(vec![1, 2], 11).unwrap()).collect();
        drop(hold);
        streams.into_iter().for_each(|stream| drop(events(stream)));
        assert!(failure(&events(world.submit(vec![LATE_POISON], 8).unwrap())).message.contains("choked late"));
        if on_failure == OnFailure::Exit {
            assert_ended(&mut world);
        }
        wait_until("the recording is there", || {
            let mut files = std::fs::read_dir(&dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
            files.any(|name| name.to_string_lossy().ends_with(".recording"))
        });
        wait_until("nothing half done is left", || std::fs::read_dir(&dir).unwrap().count() == 1);
        let (header, all) = replay_only_file(&dir);
        assert_eq!((header.cause, header.num_requests, header.ends_early), (Cause::Failure, 4, None));
        let preempts =
            |event: &&Recorded| matches!(event, Recorded::Plan { plan: Some(plan), .. } if !plan.preempted.is_empty());
        assert!(all.iter().filter(preempts).count() > 0, "no sequence was preempted");
        let failed = |event: &Recorded| matches!(event, Recorded::Failed(failed) if failed.len() == 1);
        // If the engine ends, it ends before the requests fail.
        assert_eq!(all.last().is_some_and(failed), on_failure == OnFailure::Restart, "{all:?}");
        if on_failure == OnFailure::Restart {
            // What fails again and again fills no disk.
            assert!(failure(&events(world.submit(vec![POISON], 8).unwrap())).message.contains("choked"));
            assert_eq!(tokens(&events(world.submit(vec![1, 2], 2).unwrap())), [2, 3]);
            assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
        }
    }
}

#[test]
fn two_steps_in_flight_fail_as_one_and_what_waits_goes_on() {
    let world = World::start(true);
    let hold = world.hold();
    let poison = world.submit(vec![LATE_POISON], 8).unwrap();
    world.wait_for_steps(2);
    let waiting = world.submit(vec![5; 30], 3).unwrap();
    drop(hold);
    assert!(failure(&events(poison)).message.contains("choked late on token 15"));
    assert_eq!(tokens(&events(waiting)), [30, 31, 32]);
    assert_eq!(count(&world.device.resets), 1);
    world.wait_until_idle();
}

#[test]
fn a_step_fails_when_somebody_wants_to_see_it() {
    for overlap in BOTH_LOOPS {
        let world = World::start(overlap);
        assert_eq!(tokens(&events(world.submit(vec![1, 2], 3).unwrap())), [2, 3, 4]);
        block_on(world.fail.send(FailNextStep)).unwrap();
        let failed = events(world.submit(vec![1, 2], 3).unwrap());
        assert!(failure(&failed).message.contains("POST /admin/debug/fail_step"), "{failed:?}");
        // Once.
        assert_eq!(tokens(&events(world.submit(vec![1, 2], 3).unwrap())), [2, 3, 4]);
        assert_eq!(count(&world.device.resets), 1);
        world.wait_until_idle();
    }
}

#[test]
fn a_failure_may_end_the_engine() {
    for overlap in BOTH_LOOPS {
        let mut world = World::with(Settings { on_failure: OnFailure::Exit, ..Settings::new(overlap) });
        let hold = world.hold();
        let poison = world.submit(vec![LATE_POISON], 8).unwrap();
        world.wait_for_steps(1 + usize::from(overlap));
        let waiting = world.submit(vec![5; 30], 3).unwrap();
        drop(hold);
        for accepted in [poison, waiting] {
            assert!(failure(&events(accepted)).message.contains("choked late on token 15"));
        }
        assert_ended(&mut world);
    }
}

#[test]
fn a_device_that_cannot_be_restarted_ends_the_engine() {
    let mut world = World::start(true);
    world.device.reset_fails.store(true, Ordering::SeqCst);
    let failed = events(world.submit(vec![POISON], 8).unwrap());
    assert!(failure(&failed).message.ends_with("the restart failed: the device is lost"), "{failed:?}");
    assert_ended(&mut world);
}

#[test]
fn a_step_that_hangs_fails_its_requests_and_ends_the_engine() {
    let timeout = Duration::from_millis(500);
    for overlap in BOTH_LOOPS {
        for prompt in [vec![1, 2], vec![QUICKSAND]] {
            let mut world = World::with(Settings { step_timeout: Some(timeout), ..Settings::new(overlap) });
            let device = Arc::clone(&world.device);
            let hold = device.gate.lock().unwrap();
            let hung = world.submit(prompt, 8).unwrap();
            let failed = events(hung);
            let message = &failure(&failed).message;
            assert!(message.contains("has not finished a step for 0.5 s (device.step_timeout_s)"), "{message}");
            assert_ended(&mut world);
            drop(hold);
        }
    }
}

#[test]
fn a_restart_may_take_as_long_as_loading_did() {
    for load_ms in [0, 2000] {
        let (timeout, load_time) = (Duration::from_millis(1000), Duration::from_millis(load_ms));
        let mut world = World::with(Settings { step_timeout: Some(timeout), load_time, ..Settings::new(true) });
        world.device.reset_ms.store(2000, Ordering::SeqCst);
        let failed = events(world.submit(vec![POISON], 8).unwrap());
        if load_ms == 0 {
            assert!(failure(&failed).message.ends_with("the executor does not come back"), "{failed:?}");
            assert_ended(&mut world);
        } else {
            assert!(failure(&failed).message.contains("choked"), "{failed:?}");
            assert_eq!(tokens(&events(world.submit(vec![1, 2], 2).unwrap())), [2, 3]);
        }
    }
}

#[test]
fn neither_slow_steps_nor_idleness_are_a_hang() {
    let timeout = Duration::from_millis(600);
    let world = World::with(Settings { step_timeout: Some(timeout), ..Settings::new(true) });
    for _ in 0..3 {
        let hold = world.hold();
        let slow = world.submit(vec![1, 2], 2).unwrap();
        std::thread::sleep(timeout / 2);
        drop(hold);
        assert_eq!(tokens(&events(slow)), [2, 3]);
    }
    std::thread::sleep(timeout * 3 / 2);
    assert_eq!(tokens(&events(world.submit(vec![1, 2], 2).unwrap())), [2, 3]);
}

#[test]
fn an_engine_that_cannot_go_on_ends_instead_of_hanging() {
    for overlap in BOTH_LOOPS {
        let mut world = World::start(overlap);
        let accepted = world.submit(vec![NONSENSE], 3).unwrap();
        assert_eq!(events(accepted), [], "the stream closes without an end");
        assert_ended(&mut world);
    }
}

/// A step of one sequence that computes one token.
fn execute(token: TokenId, failures: u64) -> Execute {
    let seq = PlannedSeq {
        hidden_rows: 0..0,
        seq: SeqId(1),
        num_computed: 0,
        tokens: [token].into_iter().collect(),
        pending: false,
        table: Arc::default(),
        sample: None,
        prompt_logprobs: None,
    };
    Execute { plan: StepPlan { batch: vec![seq], ..StepPlan::default() }, failures }
}

#[test]
fn the_executor_refuses_plans_from_before_a_failure() {
    let controls: Arc<Controls> = Arc::default();
    let device = FakeDevice::new(controls.clone());
    System::new().block_on(async move {
        let (executor, ()) = ModelExecutor::start_loading(move || Ok((device, ()))).unwrap().finish().unwrap();
        let executor = executor.start();
        let answers = [1, POISON, 2].map(|token| executor.send(execute(token, 0)));
        let [first, poison, after] = futures_util::future::join_all(answers).await.try_into().unwrap();
        if let Err(failed) = first.unwrap() {
            assert!(failed.message.contains("choked"), "in flight with the poison: {failed:?}");
        }
        assert!(poison.unwrap().unwrap_err().message.contains("choked"));
        let refused =
            ExecutorFailed { message: "the plan was made before the executor failed".into(), restarted: true };
        assert_eq!(after.unwrap().unwrap_err(), refused);
        assert_eq!(executor.send(execute(3, 0)).await.unwrap().unwrap_err(), refused);
        assert!(executor.send(execute(4, 1)).await.unwrap().is_ok());
        assert_eq!(count(&controls.resets), 1);
    });
}

#[test]
fn the_executor_answers_in_order_and_sees_no_gap_between_steps_in_flight() {
    let controls: Arc<Controls> = Arc::default();
    let device = FakeDevice::new(controls.clone());
    let (executor, ()) = ModelExecutor::start_loading(move || Ok((device, ()))).unwrap().finish().unwrap();
    let system = System::new();
    let executor = system.block_on(async { executor.start() });
    let hold = controls.gate.lock().unwrap();
    let answers = [1, 2, 3].map(|token| executor.send(execute(token, 0)));
    system.block_on(async {
        while count(&controls.submitted) < 2 {
            actix::clock::sleep(Duration::from_millis(1)).await;
        }
        actix::clock::sleep(Duration::from_millis(20)).await;
    });
    assert_eq!(count(&controls.submitted), 2, "the third waits");
    drop(hold);
    system.block_on(async {
        let [first, second, third] = futures_util::future::join_all(answers).await.try_into().unwrap();
        let gap = |answer: Result<Result<Executed, _>, _>| answer.unwrap().unwrap().gap;
        assert_eq!((gap(first), gap(second)), (Duration::ZERO, Duration::ZERO));
        assert!(third.unwrap().is_ok());
        actix::clock::sleep(Duration::from_millis(5)).await;
        assert!(gap(executor.send(execute(4, 0)).await) >= Duration::from_millis(5));
    });
}
