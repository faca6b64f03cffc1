//! Recordings that begin in the middle of things.

use super::longest_waits;
use super::observer::ReplayObserver;
use super::story::Story;
use super::timeline::{Timeline, TimelinePhase};
use pagetide_base::ids::RequestId;
use pagetide_base::sampling::params::{Sampled, SamplingParams};
use pagetide_engine::plan::{CopyReport, SeqOutput, StepOutput, StepPlan};
use pagetide_engine::prefix_cache::EvictionPolicy;
use pagetide_engine::request::EngineRequest;
use pagetide_engine::scheduler::{PlannedStep, PreemptionMode, SchedulerConfig};
use pagetide_engine::state::EngineState;
use pagetide_recorder::{Arrived, Committed, DeliverySummary, Keyframe, RecordedEvent, Replayer};
use smallvec::smallvec;
use std::collections::VecDeque;

/// An engine, and what was recorded of it since its state was noted.
struct RecordedEngine {
    state: EngineState,
    in_flight: VecDeque<StepPlan>,
    noted: Keyframe,
    events: Vec<RecordedEvent>,
}

/// 16 blocks of 4 tokens on the device and as many in the swap pool.
fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 100,
        max_model_len: 100,
        ..SchedulerConfig::new(4, 16, 16)
    }
}

/// Between two events.
const TICK_US: u64 = 1000;

impl RecordedEngine {
    fn new(config: SchedulerConfig) -> Self {
        let noted = Keyframe::Start { config, eviction: EvictionPolicy::default() };
        let mut state = noted.state();
        state.scheduler.summarise_plans();
        Self { state, in_flight: VecDeque::new(), noted, events: Vec::new() }
    }

    /// The recording begins now.
    fn note(&mut self) {
        // As a file has it.
        let mut bytes = Vec::new();
        ciborium::into_writer(&Keyframe::State(Box::new(self.state.clone())), &mut bytes).unwrap();
        self.noted = ciborium::from_reader(&bytes[..]).unwrap();
        self.events.clear();
    }

    /// 4 blocks hold 16 tokens.
    fn arrive(&mut self, id: u64, prompt: usize, max_tokens: u32) {
        let params = SamplingParams { max_tokens, ..SamplingParams::default() };
        let arrival = EngineRequest { id: RequestId(id), ..EngineRequest::new(vec![1; prompt], params) };
        self.events.push(RecordedEvent::Arrive(Box::new(Arrived::new(&arrival))));
        self.state.scheduler.arrive(arrival);
    }

    /// False where results are wanted first.
    fn plan(&mut self) -> bool {
        let planned = self.state.plan(0.0);
        let plan = planned.map(|PlannedStep { plan, mut report }| {
            if !plan.is_empty() {
                self.in_flight.push_back(plan);
            }
            report.summary.take().expect("plans are summarised")
        });
        let has_planned = plan.is_some();
        self.events.push(RecordedEvent::Plan { now: 0.0, plan });
        has_planned
    }

    fn commit(&mut self) {
        let plan = self.in_flight.pop_front().unwrap();
        let sampled = || smallvec![Sampled::of(1)];
        let seqs = plan.batch.iter().filter(|seq| seq.sample.is_some());
        let seqs = seqs.map(|seq| SeqOutput { sampled: sampled(), ..SeqOutput::of(seq.seq) });
        let arrived = plan.swap_in.iter().map(|swap_in| (swap_in.id, true)).collect();
        let copies = CopyReport { arrived, ..CopyReport::default() };
        let output = StepOutput { seqs: seqs.collect(), copies, ..StepOutput::default() };
        let committed = Committed::new(&output, Vec::new());
        let deliveries = DeliverySummary::new(&self.state.scheduler.commit(output).deliveries);
        self.events.push(RecordedEvent::Commit(Box::new(Committed { deliveries, ..committed })));
    }

    fn step(&mut self) {
        self.plan();
        self.commit();
    }

    fn show(&self, observer: &mut dyn ReplayObserver) {
        let mut replayer = Replayer::new(&self.noted);
        observer.begin(&replayer);
        let mut at_us = 0;
        for event in &self.events {
            at_us += TICK_US;
            let outcome = replayer.apply(event).unwrap();
            observer.see(at_us, event, &outcome, &replayer);
        }
        observer.end(at_us + TICK_US);
    }

    fn timeline(&self) -> Timeline {
        let mut timeline = Timeline::default();
        self.show(&mut timeline);
        timeline
    }

    fn story(&self, request: u64) -> String {
        let mut story = Story::new(RequestId(request));
        self.show(&mut story);
        story.to_string()
    }
}

/// What a request did, in order.
fn phases(timeline: &Timeline, request: u64) -> Vec<TimelinePhase> {
    timeline.requests[&RequestId(request)].iter().map(|span| span.phase).collect()
}

#[test]
fn steps_that_were_under_way_when_a_recording_begins_are_not_mistaken_for_later_ones() {
    let mut engine = RecordedEngine::new(SchedulerConfig { overlap: true, ..config() });
    engine.arrive(1, 4, 20);
    assert!(engine.plan() && engine.plan(), "two at once");
    engine.note();
    engine.arrive(2, 9, 20);
    engine.commit();
    engine.plan();
    engine.commit();
    engine.commit();
    let timeline = engine.timeline();
    let [step] = &timeline.steps[..] else { panic!("one step was planned in the recording") };
    assert_eq!((step.num_seqs, step.num_tokens), (2, 1 + 9));
    // Planned third, and the one before it ended fourth.
    assert_eq!((step.from_us, step.to_us), (4 * TICK_US, 5 * TICK_US));
}

#[test]
fn what_requests_do_when_a_recording_begins_is_known() {
    let preemption_mode = PreemptionMode::Recompute;
    let mut engine = RecordedEngine::new(SchedulerConfig { preemption_mode, max_num_batched_tokens: 40, ..config() });
    // They need 19 blocks at their ends, and there are 16.
    engine.arrive(1, 16, 20);
    engine.arrive(2, 16, 24);
    engine.step();
    while engine.state.scheduler.population().waiting == 0 {
        engine.step();
    }
    engine.arrive(3, 40, 4);
    engine.note();
    while engine.state.scheduler.num_requests() > 0 {
        engine.step();
    }
    let timeline = engine.timeline();
    use TimelinePhase::{Decoding, Paused, Prompt, Waiting};
    assert_eq!(phases(&timeline, 1), [Decoding]);
    assert_eq!(phases(&timeline, 2), [Paused, Decoding]);
    assert_eq!(phases(&timeline, 3), [Waiting, Prompt, Decoding]);
    assert!(longest_waits(&timeline).starts_with("waited longest: r3 "), "{}", longest_waits(&timeline));
}

#[test]
fn why_requests_wait_when_a_recording_begins_is_known() {
    let mut engine = RecordedEngine::new(config());
    engine.arrive(1, 40, 20);
    engine.arrive(2, 40, 20);
    engine.arrive(3, 4, 20);
    (0..3).for_each(|_| engine.step());
    engine.note();
    engine.step();
    let (second, third) = (engine.story(2), engine.story(3));
    assert!(second.contains("0.000000 s  waits 0.003000 s for device blocks: "), "{second}");
    assert!(third.contains("0.000000 s  waits 0.003000 s in the queue behind r2"), "{third}");
}
