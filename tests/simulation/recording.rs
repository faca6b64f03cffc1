//! A recording of a random load gives the same decisions again, from any keyframe, and contains no text.

use crate::model::Random;
use crate::setting;
use crate::settings::plain_config;
use crate::world::World;
use ciborium::Value;
use pagetide_base::ids::RequestId;
use pagetide_engine::prefix_cache::EvictionPolicy;
use pagetide_engine::scheduler::SchedulerConfig;
use pagetide_engine::state::EngineState;
use pagetide_recorder::{
    Cause, Keyframe, RecordedEvent, RecordedOutput, RecordedPrompt, Recorder, RecorderLimits, Recording, Replayer,
};
use serde::Serialize;
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// What the recordings of a test contained.
#[derive(Debug, Default)]
struct Seen {
    recordings: usize,
    from_start: usize,
    events: usize,
    in_flight: usize,
    preemptions: usize,
    swapped_in: usize,
    rules: usize,
    searches: usize,
    failures: usize,
    tunes: usize,
}

impl World {
    fn state(&self) -> EngineState {
        self.engine.clone()
    }

    /// Runs with a recorder that gets keyframes and takes recordings at random times.
    fn run_recorded(
        &mut self,
        operations: usize,
        random: &mut Random,
        mut look: impl FnMut(Recording, &HashSet<Vec<u8>>),
    ) {
        // With length 0, each keyframe drops everything before it.
        let length = Duration::from_secs(if random.one_in(3) { 3600 } else { 0 });
        let limits = RecorderLimits { length, max_bytes: 64 << 20 };
        let mut known = HashSet::new();
        self.engine.scheduler.summarise_plans();
        self.recorder = Some(Recorder::new(limits, &self.config, EvictionPolicy::default()));
        let mut done = 0;
        while done < operations {
            done += random.range(1, 400) as usize;
            self.run_for(done);
            let state = self.state();
            known.extend(byte_strings(&state));
            if random.one_in(2) {
                self.record(|recorder| recorder.keyframe(state).unwrap());
            } else {
                let raw = self.recorder.as_ref().unwrap().take().unwrap();
                look(raw.redacted(Cause::Asked, random.one_in(4)).unwrap(), &known);
            }
        }
        self.drain();
        let raw = self.recorder.as_ref().unwrap().take().unwrap();
        look(raw.redacted(Cause::Asked, false).unwrap(), &known);
    }
}

/// Writes, reads and replays a recording.
fn check(recording: &Recording, known: &HashSet<Vec<u8>>, seen: &mut Seen) {
    assert_eq!(recording.header().ends_early, None);
    let mut bytes = Vec::new();
    recording.write(&mut bytes).unwrap();
    let recording = Recording::read(&bytes).unwrap();
    let mut replayer = Replayer::new(recording.keyframe());
    Leaks { has_tokens: recording.header().has_tokens, known }.look_into(recording.keyframe());
    seen.recordings += 1;
    seen.in_flight += usize::from(replayer.scheduler().num_in_flight() > 0);
    seen.from_start += usize::from(recording.header().is_from_start);
    for (place, timed) in recording.events().enumerate() {
        let event = timed.unwrap().event;
        let names = byte_strings(&event);
        assert!(names.iter().all(|name| !known.contains(name)), "a name of the process in {event:?}");
        if let Err(difference) = replayer.apply(&event) {
            panic!("event {place}, {event:?}: {difference}");
        }
        replayer.scheduler().check();
        seen.events += 1;
        match &event {
            RecordedEvent::Plan { plan: Some(plan), .. } => {
                seen.preemptions += plan.preempted.len();
                seen.swapped_in += plan.swap_in.len();
            }
            RecordedEvent::Commit(committed) => {
                seen.rules += committed.rules.len();
                seen.searches += committed.searches.len();
            }
            RecordedEvent::Failed(_) => seen.failures += 1,
            RecordedEvent::Tune(_) => seen.tunes += 1,
            _ => {}
        }
        if !recording.header().has_tokens {
            assert_tells_nothing(&event);
        }
    }
}

fn value(of: &impl Serialize) -> Value {
    Value::serialized(of).unwrap()
}

/// All byte strings, such as block hashes.
fn byte_strings(of: &impl Serialize) -> Vec<Vec<u8>> {
    fn add(value: Value, to: &mut Vec<Vec<u8>>) {
        match value {
            Value::Bytes(bytes) => to.push(bytes),
            Value::Array(all) => all.into_iter().for_each(|value| add(value, to)),
            Value::Map(all) => all.into_iter().for_each(|(key, value)| {
                add(key, to);
                add(value, to);
            }),
            _ => {}
        }
    }
    let mut all = Vec::new();
    add(value(of), &mut all);
    all
}

/// Searches for data that must not be in a file.
struct Leaks<'a> {
    has_tokens: bool,
    /// The block hashes of the process.
    known: &'a HashSet<Vec<u8>>,
}

impl Leaks<'_> {
    fn look_into(&self, keyframe: &Keyframe) {
        self.look("", &value(keyframe));
    }

    /// Checks the value under `key`.
    fn look(&self, key: &str, value: &Value) {
        let is_empty = match value {
            Value::Null => true,
            Value::Array(all) => all.is_empty(),
            Value::Integer(number) => *number == 0.into(),
            _ => false,
        };
        match key {
            "bad_words" | "logit_bias" | "allowed_tokens" | "seed" => assert!(is_empty, "{key}: {value:?}"),
            "prompt" | "output" if !self.has_tokens => assert_at_most_1(key, value),
            _ => {}
        }
        match value {
            Value::Bytes(bytes) => assert!(!self.known.contains(bytes), "{key} has a name of the process"),
            Value::Array(all) => all.iter().for_each(|value| self.look(key, value)),
            Value::Map(all) => {
                for (key, value) in all {
                    self.look(key.as_text().unwrap_or_default(), value);
                    self.look("", key);
                }
            }
            _ => {}
        }
    }
}

/// Tokens of the simulation go up to 40. In a recording there is at most token 1, the one that ends an output.
fn assert_at_most_1(key: &str, value: &Value) {
    match value {
        Value::Integer(number) => assert!((0..=1).contains(&i128::from(*number)), "{key}: {number:?}"),
        Value::Array(all) => all.iter().for_each(|value| assert_at_most_1(key, value)),
        Value::Map(all) => all.iter().for_each(|(_, value)| assert_at_most_1(key, value)),
        _ => {}
    }
}

/// Tokens of the simulation go up to 40. In a recording there is at most token 1, the one that ends an output.
fn assert_tells_nothing(event: &RecordedEvent) {
    match event {
        RecordedEvent::Arrive(arrived) => {
            assert!(matches!(arrived.prompt, RecordedPrompt::Length(_)) && arrived.salt.is_none());
            assert!(arrived.ends.concat().iter().all(|end| *end == 1), "{:?}", arrived.ends);
        }
        RecordedEvent::Commit(committed) => {
            for output in &committed.outputs {
                match output {
                    RecordedOutput::Token(_, token) => assert!(*token <= 1),
                    RecordedOutput::Other { tokens, .. } => assert!(tokens.iter().all(|token| *token <= 1)),
                }
            }
            let forced = committed.rules.iter().flat_map(|(_, forced)| forced.iter().flatten());
            let beams = committed.searches.iter().flat_map(|step| step.beams.iter().map(|(_, token)| token));
            assert!(forced.chain(beams).all(|token| *token <= 1));
        }
        _ => {}
    }
}

/// Checks recordings of worlds by their seed. `None` if one seed was asked for, which need not reach every case.
fn check_recordings(world: impl Fn(u64) -> World) -> Option<Seen> {
    let operations = setting("PAGETIDE_SIM_OPERATIONS").unwrap_or(40_000) as usize;
    let seeds: Vec<u64> = match setting("PAGETIDE_SIM_SEED") {
        Some(seed) => vec![seed],
        None => (0..40).collect(),
    };
    let per_seed = operations / seeds.len();
    let mut seen = Seen::default();
    for seed in seeds {
        eprintln!("PAGETIDE_SIM_SEED={seed}");
        let mut random = Random(seed ^ 0x5eed);
        let mut world = world(seed);
        world.run_recorded(per_seed, &mut random, |recording, known| check(&recording, known, &mut seen));
    }
    eprintln!("{seen:?}");
    setting("PAGETIDE_SIM_SEED").is_none().then_some(seen)
}

fn check_random_recordings(overlap: bool) {
    if let Some(seen) = check_recordings(|seed| World::new(seed, overlap)) {
        let Seen { recordings, from_start, in_flight, preemptions, swapped_in, .. } = seen;
        assert!(recordings > 100 && (10..recordings - 50).contains(&from_start) && in_flight > 20);
        assert!(preemptions > 1000 && swapped_in > 100 && seen.rules > 1000 && seen.searches > 1000);
        assert!(seen.failures > 10 && seen.tunes > 100);
    }
}

#[test]
fn recordings_give_the_same_decisions() {
    check_random_recordings(false);
}

#[test]
fn so_do_those_of_steps_planned_ahead() {
    check_random_recordings(true);
}

#[test]
fn so_do_those_of_steps_that_leave_out_sequences() {
    if let Some(seen) = check_recordings(World::mixed) {
        assert!(seen.recordings > 100 && seen.in_flight > 20 && seen.rules > 100 && seen.searches > 100);
    }
}

/// A recording of a world with preemptions.
fn recorded(seed: u64) -> Recording {
    let mut last = None;
    World::new(seed, false).run_recorded(600, &mut Random(seed), |recording, _| last = Some(recording));
    last.unwrap()
}

fn first_difference(keyframe: &Keyframe, recording: &Recording) -> Option<String> {
    let mut replayer = Replayer::new(keyframe);
    recording.events().find_map(|timed| replayer.apply(&timed.unwrap().event).err())
}

#[test]
fn another_decision_is_seen() {
    let (mut from_start, mut other_admission) = (0, 0);
    for recording in (0..20).map(recorded).filter(|recording| recording.header().is_from_start) {
        let Keyframe::Start { config, eviction } = recording.keyframe() else { unreachable!("they were looked for") };
        assert_eq!(first_difference(recording.keyframe(), &recording), None);
        let with = |config| first_difference(&Keyframe::Start { config, eviction: *eviction }, &recording);
        let smaller = SchedulerConfig { num_device_blocks: config.num_device_blocks - 1, ..config.clone() };
        assert!(with(smaller).is_some());
        let greedy = SchedulerConfig { watermark_blocks: config.watermark_blocks + 3, ..config.clone() };
        other_admission += usize::from(with(greedy).is_some_and(|difference| difference.contains("it admits")));
        from_start += 1;
    }
    assert!(from_start >= 4 && other_admission >= 2, "{from_start} recordings, {other_admission} with others admitted");
}

#[test]
fn foreign_and_truncated_files_are_refused() {
    let mut bytes = Vec::new();
    recorded(3).write(&mut bytes).unwrap();
    let error = |bytes: &[u8]| Recording::read(bytes).unwrap_err().to_string();
    assert_eq!(error(b"{}"), "it is not a recording of Pagetide");
    assert_eq!(error(b""), "it is not a recording of Pagetide");
    for len in (20..bytes.len()).step_by(bytes.len() / 37) {
        let error = error(&bytes[..len]);
        assert!(error.contains("it is cut off"), "{len} bytes: {error}");
    }
    let mut other = bytes.clone();
    other[19] = 99;
    let by = format!("its format is 99, written by pagetide {}, and this program", env!("CARGO_PKG_VERSION"));
    assert!(error(&other).contains(&by), "{}", error(&other));
    let header_len = u32::from_le_bytes(bytes[23..27].try_into().unwrap()) as usize;
    let mut endless = bytes.clone();
    endless[27 + header_len..][..8].fill(0xff);
    assert!(error(&endless).contains("it is cut off"), "{}", error(&endless));
    let mut damaged = bytes.clone();
    let last = damaged.len() - 9;
    damaged[last] ^= 1;
    assert_eq!(error(&damaged), "it is damaged: its content is not what was written");
}

#[test]
fn memory_is_bounded() {
    let config = plain_config(4, 1_000);
    let limits = RecorderLimits { length: Duration::from_secs(3600), max_bytes: 1 << 20 };
    let new = || Recorder::new(limits, &config, EvictionPolicy::default());
    let state = |num_blocks| EngineState::new(plain_config(4, num_blocks), EvictionPolicy::default());
    let fill = |recorder: &mut Recorder, bytes: usize| {
        // A thousand bytes each.
        for _ in 0..bytes / 1_000 + 1 {
            recorder.fail(&[RequestId(u64::MAX); 100]);
            assert!(recorder.num_bytes() <= limits.max_bytes);
        }
    };
    // With regular keyframes, the oldest part is dropped. Without them, everything is dropped until the next one.
    let mut recorder = new();
    for _ in 0..20 {
        assert!(!recorder.wants_keyframe(), "there is one, and little after it");
        fill(&mut recorder, limits.max_bytes / 4 + 1);
        assert!(recorder.wants_keyframe() && recorder.take().is_some());
        recorder.keyframe(state(1_000)).unwrap();
    }
    assert!(recorder.num_bytes() > limits.max_bytes / 2);
    fill(&mut recorder, limits.max_bytes);
    assert!(recorder.take().is_none() && recorder.num_bytes() == 0 && recorder.wants_keyframe());
    recorder.keyframe(state(1_000)).unwrap();
    recorder.cancel(RequestId(1));
    assert!(recorder.take().is_some());
    // If a state alone is too large, that is reported once, and not tried again at each step.
    let mut recorder = new();
    let too_large = recorder.keyframe(state(100_000)).unwrap_err();
    assert!(too_large.keyframe_bytes > limits.max_bytes / 3 && too_large.is_first);
    assert!(!recorder.keyframe(state(100_000)).unwrap_err().is_first);
    fill(&mut recorder, limits.max_bytes + 1);
    assert!(recorder.take().is_none() && !recorder.wants_keyframe());
}

/// How large a state is depends on the load.
#[test]
fn a_state_that_was_too_large_is_looked_at_again() {
    let limits = RecorderLimits { length: Duration::from_millis(40), max_bytes: 1 << 20 };
    let state = |num_blocks| EngineState::new(plain_config(4, num_blocks), EvictionPolicy::default());
    let mut recorder = Recorder::new(limits, &plain_config(4, 1_000), EvictionPolicy::default());
    for _ in 0..2 {
        assert!(recorder.keyframe(state(100_000)).unwrap_err().is_first);
        while recorder.take().is_some() {
            recorder.fail(&[RequestId(u64::MAX); 100]);
        }
        let begin = Instant::now();
        while !recorder.wants_keyframe() {
            assert!(begin.elapsed() < Duration::from_secs(300), "it has given up");
            std::thread::sleep(Duration::from_millis(1));
        }
        recorder.keyframe(state(1_000)).unwrap();
        recorder.cancel(RequestId(1));
        assert!(recorder.take().is_some());
    }
}

/// Samples of one prompt hold it together.
#[test]
fn what_samples_share_counts_once() {
    let num_bytes = |n| {
        let config = SchedulerConfig { max_num_batched_tokens: 4_000, ..plain_config(4, 2_000) };
        let mut world = World::calm(config);
        world.ask_for(n, vec![1; 4_000], 20);
        (0..3).for_each(|_| world.step());
        assert_eq!(world.engine.scheduler.population().running, n as usize);
        world.engine.scheduler.num_bytes()
    };
    let more = num_bytes(5) - num_bytes(1);
    // A table has 1000 blocks of 4 bytes.
    assert!((4 * 4_000..4 * 8_000).contains(&more), "{more} bytes for four more samples");
}
