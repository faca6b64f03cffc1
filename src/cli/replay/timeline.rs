//! What happened when: for pictures.

use super::observer::ReplayObserver;
use pagetide_base::ids::RequestId;
use pagetide_engine::block_pool::PoolStats;
use pagetide_engine::plan::Delivery;
use pagetide_engine::scheduler::{PlanReport, PlannedStep};
use pagetide_recorder::{RecordedEvent, ReplayOutcome, Replayer};
use std::collections::{BTreeMap, VecDeque};

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimelinePhase {
    Waiting,
    Prompt,
    Decoding,
    /// A sample was preempted, and has not come back.
    Paused,
}

impl TimelinePhase {
    pub const ALL: [TimelinePhase; 4] =
        [TimelinePhase::Waiting, TimelinePhase::Prompt, TimelinePhase::Decoding, TimelinePhase::Paused];

    pub fn name(self) -> &'static str {
        match self {
            TimelinePhase::Waiting => "waiting",
            TimelinePhase::Prompt => "prompt",
            TimelinePhase::Decoding => "decoding",
            TimelinePhase::Paused => "paused",
        }
    }
}

pub struct Span {
    pub phase: TimelinePhase,
    pub from_us: u64,
    pub to_us: u64,
}

/// A step at the executor.
pub struct Step {
    pub from_us: u64,
    pub to_us: u64,
    pub num_seqs: usize,
    pub num_tokens: usize,
    pub swap_out: usize,
    pub swap_in: usize,
}

/// A sequence of a request was preempted.
pub struct PreemptionMark {
    pub at_us: u64,
    pub request: RequestId,
    /// For whom.
    pub cause: Option<RequestId>,
}

/// The pools, after a plan.
pub struct Level {
    pub at_us: u64,
    pub device: PoolStats,
    pub swap: PoolStats,
    pub running: usize,
    pub waiting: usize,
    pub swapped: usize,
}

#[derive(Default)]
pub struct Timeline {
    pub requests: BTreeMap<RequestId, Vec<Span>>,
    pub steps: Vec<Step>,
    pub preemptions: Vec<PreemptionMark>,
    pub levels: Vec<Level>,
    /// When the executor failed.
    pub failures: Vec<u64>,
    pub until_us: u64,
    open: BTreeMap<RequestId, OpenPhase>,
    /// Steps at the executor, oldest first; `None`: one that was planned before the recording begins.
    in_flight: VecDeque<Option<Step>>,
    /// When the last step ended.
    stepped_us: u64,
}

/// A request that is there.
struct OpenPhase {
    phase: TimelinePhase,
    since_us: u64,
    /// Its first token has come.
    has_started: bool,
    /// Samples that were preempted and have not come back.
    num_paused: usize,
}

impl Timeline {
    fn arrive(&mut self, request: RequestId, at_us: u64) {
        let open = OpenPhase { phase: TimelinePhase::Waiting, since_us: at_us, has_started: false, num_paused: 0 };
        self.open.insert(request, open);
    }

    fn change(&mut self, request: RequestId, at_us: u64, change: impl FnOnce(&mut OpenPhase) -> TimelinePhase) {
        let Some(open) = self.open.get_mut(&request) else { return };
        let (before, since_us) = (open.phase, open.since_us);
        let phase = change(open);
        if phase != before {
            (open.phase, open.since_us) = (phase, at_us);
            self.add(request, before, since_us, at_us);
        }
    }

    fn add(&mut self, request: RequestId, phase: TimelinePhase, from_us: u64, to_us: u64) {
        self.requests.entry(request).or_default().push(Span { phase, from_us, to_us });
    }

    fn leave(&mut self, request: RequestId, at_us: u64) {
        if let Some(OpenPhase { phase, since_us, .. }) = self.open.remove(&request) {
            self.add(request, phase, since_us, at_us);
        }
    }

    fn see_plan(&mut self, at_us: u64, planned: &PlannedStep, replayer: &Replayer) {
        let PlannedStep { plan, report } = planned;
        let PlanReport { preempted, admissions, pauses, .. } = report;
        let scheduler = replayer.scheduler();
        for admission in admissions {
            self.change(admission.request, at_us, |_| TimelinePhase::Prompt);
        }
        for (seq, cause) in preempted {
            let cause = scheduler.request_of(*cause);
            self.preemptions.extend(scheduler.request_of(*seq).map(|request| PreemptionMark { at_us, request, cause }));
        }
        for (request, delivery) in pauses {
            self.change(*request, at_us, |open| {
                match delivery {
                    Delivery::Paused { .. } => open.num_paused += 1,
                    _ => open.num_paused = open.num_paused.saturating_sub(1),
                }
                open.running()
            });
        }
        let (population, [device, swap]) = (scheduler.population(), replayer.pools());
        let (running, waiting, swapped) = (population.running, population.waiting, population.swapped);
        self.levels.push(Level { at_us, device, swap, running, waiting, swapped });
        if !plan.is_empty() {
            self.in_flight.push_back(Some(Step {
                from_us: at_us,
                to_us: at_us,
                num_seqs: plan.batch.len(),
                num_tokens: plan.num_tokens(),
                swap_out: plan.swap_out.len(),
                swap_in: plan.swap_in.iter().map(|swap_in| swap_in.pairs.len()).sum(),
            }));
        }
    }
}

impl OpenPhase {
    /// What it does now that it has run.
    fn running(&self) -> TimelinePhase {
        match self.num_paused {
            0 if self.has_started => TimelinePhase::Decoding,
            0 => TimelinePhase::Prompt,
            _ => TimelinePhase::Paused,
        }
    }
}

impl ReplayObserver for Timeline {
    fn begin(&mut self, replayer: &Replayer) {
        let scheduler = replayer.scheduler();
        self.in_flight.extend((0..scheduler.num_in_flight()).map(|_| None));
        for seq in scheduler.snapshot(usize::MAX).seqs {
            let waiting = OpenPhase { phase: TimelinePhase::Waiting, since_us: 0, has_started: false, num_paused: 0 };
            let open = self.open.entry(seq.rank.request).or_insert(waiting);
            open.has_started |= seq.num_output > 0;
            open.num_paused += usize::from(seq.paused);
            // It has been admitted.
            if seq.cached_tokens.is_some() {
                open.phase = open.running();
            }
        }
    }

    fn see(&mut self, at_us: u64, event: &RecordedEvent, outcome: &ReplayOutcome, replayer: &Replayer) {
        match outcome {
            ReplayOutcome::Planned(planned) => self.see_plan(at_us, planned, replayer),
            ReplayOutcome::Committed(deliveries) => {
                // It began when the one before it had ended, or when it was planned.
                let ended_us = std::mem::replace(&mut self.stepped_us, at_us);
                if let Some(step) = self.in_flight.pop_front().flatten() {
                    self.steps.push(Step { from_us: ended_us.max(step.from_us), to_us: at_us, ..step });
                }
                for (request, delivery) in deliveries {
                    if matches!(delivery, Delivery::Started { .. }) {
                        self.change(*request, at_us, |open| {
                            open.has_started = true;
                            open.running()
                        });
                    }
                    if matches!(delivery, Delivery::Finished { .. } | Delivery::Failed { .. })
                        && !replayer.scheduler().has_request(*request)
                    {
                        self.leave(*request, at_us);
                    }
                }
            }
            ReplayOutcome::Done => {}
        }
        match event {
            RecordedEvent::Arrive(arrived) => self.arrive(arrived.id, at_us),
            RecordedEvent::Cancel(request) => self.leave(*request, at_us),
            RecordedEvent::StopSample(request, _) if !replayer.scheduler().has_request(*request) => {
                self.leave(*request, at_us);
            }
            RecordedEvent::Failed(failed) => {
                self.failures.push(at_us);
                self.in_flight.clear();
                failed.iter().for_each(|request| self.leave(*request, at_us));
            }
            _ => {}
        }
    }

    fn end(&mut self, at_us: u64) {
        self.until_us = at_us;
        let open: Vec<RequestId> = self.open.keys().copied().collect();
        open.into_iter().for_each(|request| self.leave(request, at_us));
    }
}
