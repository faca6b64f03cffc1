//! The stages of a request, from the events that its owner received.
//!
//! A prompt is queued until its first step is planned. Then it is computed (prefill) until its first token, and decodes
//! until its last. In both stages it can be paused: a preempted sample waits to come back. A prompt with several
//! samples counts as paused while any of them is.

use pagetide_base::ids::RequestId;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    Queue,
    Prefill,
    Decode,
    Paused,
}

impl Stage {
    pub fn name(self) -> &'static str {
        match self {
            Stage::Queue => "queue",
            Stage::Prefill => "prefill",
            Stage::Decode => "decode",
            Stage::Paused => "paused",
        }
    }
}

/// A stage of a prompt. Pauses lie within the prefill or the decode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Interval {
    pub stage: Stage,
    pub begin: Instant,
    pub end: Instant,
}

/// The durations of the stages, which add up to the whole time.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Stages {
    pub queue: Duration,
    /// Without pauses, as in `decode`.
    pub prefill: Duration,
    pub decode: Duration,
    pub paused: Duration,
}

/// One prompt of a request.
#[derive(Clone, Debug)]
pub struct Run {
    pub request: RequestId,
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    pub output_tokens: usize,
    /// `stop` or `length` of the sample that ended last, or `failed`.
    pub finish: Option<&'static str>,
    pub preemptions: usize,
    started: Option<Instant>,
    first_token: Option<Instant>,
    ended: Option<Instant>,
    num_paused: usize,
    paused_since: Option<Instant>,
    pauses: Vec<(Instant, Instant)>,
}

impl Run {
    pub fn new(request: RequestId) -> Self {
        Self {
            request,
            prompt_tokens: 0,
            cached_tokens: 0,
            output_tokens: 0,
            finish: None,
            preemptions: 0,
            started: None,
            first_token: None,
            ended: None,
            num_paused: 0,
            paused_since: None,
            pauses: Vec::new(),
        }
    }

    pub fn start(&mut self, now: Instant) {
        self.started.get_or_insert(now);
    }

    /// The prompt has been computed.
    pub fn first_token(&mut self, now: Instant) {
        self.first_token.get_or_insert(now);
    }

    /// A sample is paused.
    pub fn pause(&mut self, now: Instant) {
        self.num_paused += 1;
        self.paused_since.get_or_insert(now);
    }

    /// A sample continues.
    pub fn resume(&mut self, now: Instant) {
        self.num_paused = self.num_paused.saturating_sub(1);
        if let Some(since) = self.paused_since.take_if(|_| self.num_paused == 0) {
            self.pauses.push((since, now));
        }
    }

    pub fn end(&mut self, now: Instant) {
        self.pauses.extend(self.paused_since.take().map(|since| (since, now)));
        self.ended.get_or_insert(now);
    }

    /// Whether a step has worked on the prompt.
    pub fn has_started(&self) -> bool {
        self.started.is_some()
    }

    /// The prompt has ended, or its client has disconnected.
    pub fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// The end of the prompt, or `now`.
    pub fn ended(&self, now: Instant) -> Instant {
        self.ended.unwrap_or(now)
    }

    /// The time of the first token.
    pub fn first_token_at(&self) -> Option<Instant> {
        self.first_token
    }

    /// The stages that the prompt has reached, in order, from `arrived` to its end or `now`.
    pub fn intervals(&self, arrived: Instant, now: Instant) -> Vec<Interval> {
        let end = self.ended(now);
        let started = self.started.unwrap_or(end).min(end);
        let first_token = self.first_token.unwrap_or(end).clamp(started, end);
        let mut intervals = vec![Interval { stage: Stage::Queue, begin: arrived, end: started }];
        if self.started.is_some() {
            intervals.push(Interval { stage: Stage::Prefill, begin: started, end: first_token });
        }
        if self.first_token.is_some() {
            intervals.push(Interval { stage: Stage::Decode, begin: first_token, end });
        }
        let pauses = self.pauses.iter().copied().chain(self.paused_since.map(|since| (since, end)));
        intervals.extend(pauses.map(|(begin, end)| Interval { stage: Stage::Paused, begin, end }));
        intervals
    }

    pub fn stages(&self, arrived: Instant, now: Instant) -> Stages {
        let mut stages = Stages::default();
        let intervals = self.intervals(arrived, now);
        let pauses = || intervals.iter().filter(|interval| interval.stage == Stage::Paused);
        for interval in &intervals {
            let whole = interval.end.saturating_duration_since(interval.begin);
            let paused = || {
                pauses().map(|pause| {
                    let (begin, end) = (pause.begin.max(interval.begin), pause.end.min(interval.end));
                    end.saturating_duration_since(begin)
                })
            };
            match interval.stage {
                Stage::Queue => stages.queue = whole,
                Stage::Prefill => stages.prefill = whole.saturating_sub(paused().sum()),
                Stage::Decode => stages.decode = whole.saturating_sub(paused().sum()),
                Stage::Paused => stages.paused += whole,
            }
        }
        stages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stages_of_an_unfinished_request_add_up() {
        let arrived = Instant::now();
        let at = |ms| arrived + Duration::from_millis(ms);
        let ms = |stages: Stages| {
            [stages.queue, stages.prefill, stages.decode, stages.paused].map(|stage| stage.as_millis())
        };
        let mut run = Run::new(RequestId(1));
        assert_eq!(ms(run.stages(arrived, at(10))), [10, 0, 0, 0]);
        run.start(at(20));
        assert_eq!(ms(run.stages(arrived, at(30))), [20, 10, 0, 0]);
        run.pause(at(30));
        assert_eq!(ms(run.stages(arrived, at(35))), [20, 10, 0, 5]);
        run.resume(at(40));
        run.start(at(40));
        run.first_token(at(50));
        // Two samples, whose pauses overlap.
        run.pause(at(60));
        run.pause(at(70));
        run.resume(at(80));
        run.resume(at(100));
        assert_eq!(ms(run.stages(arrived, at(120))), [20, 20, 30, 50]);
        run.pause(at(130));
        run.end(at(140));
        assert_eq!(ms(run.stages(arrived, at(999))), [20, 20, 40, 60]);
        let names: Vec<_> = run.intervals(arrived, at(999)).iter().map(|interval| interval.stage.name()).collect();
        assert_eq!(names, ["queue", "prefill", "decode", "paused", "paused", "paused"]);
    }
}
