//! What became of one request, and why it waited.

use super::observer::ReplayObserver;
use pagetide_base::ids::{RequestId, SeqId};
use pagetide_engine::allocation::Lack;
use pagetide_engine::arbiter::{Choice, Decision};
use pagetide_engine::plan::{Deliveries, Delivery};
use pagetide_engine::scheduler::PlannedStep;
use pagetide_engine::scheduler::{Scheduler, WaitReason};
use pagetide_recorder::{RecordedEvent, ReplayOutcome, Replayer};
use std::collections::BTreeMap;
use std::fmt;
use std::mem::{Discriminant, discriminant};

/// Follows one request.
pub struct Story {
    request: RequestId,
    lines: Vec<Line>,
    /// What it waits for, and since when.
    waiting: Option<(WaitReason, u64)>,
    /// µs for each kind of wait.
    waited: BTreeMap<&'static str, u64>,
    /// Since when it has been there.
    since_us: Option<u64>,
    until_us: Option<u64>,
    prompt: PromptStory,
    has_first_token: bool,
}

/// How its prompt came in.
#[derive(Default)]
struct PromptStory {
    tokens: usize,
    steps: usize,
    /// Steps in which it ran and had no part.
    steps_without: usize,
}

struct Line {
    at_us: u64,
    text: String,
}

impl Story {
    pub fn new(request: RequestId) -> Self {
        Self {
            request,
            lines: Vec::new(),
            waiting: None,
            waited: BTreeMap::new(),
            since_us: None,
            until_us: None,
            prompt: PromptStory::default(),
            has_first_token: false,
        }
    }

    /// The request is in the recording.
    pub fn is_known(&self) -> bool {
        self.since_us.is_some()
    }

    fn say(&mut self, at_us: u64, text: impl Into<String>) {
        self.lines.push(Line { at_us, text: text.into() });
    }

    /// What it waits for from now on.
    fn wait(&mut self, at_us: u64, wait: Option<WaitReason>) {
        let is_same = |a: &WaitReason, b: &WaitReason| kind(a) == kind(b);
        match (&self.waiting, &wait) {
            (Some((before, _)), Some(now)) if is_same(before, now) => return,
            _ => {}
        }
        if let Some((wait, since)) = self.waiting.take()
            && at_us > since
        {
            self.say(since, format!("waits {} {wait}", seconds(at_us - since)));
            *self.waited.entry(name(&wait)).or_default() += at_us - since;
        }
        self.waiting = wait.map(|wait| (wait, at_us));
    }

    fn end_at(&mut self, at_us: u64, text: &str) {
        self.wait(at_us, None);
        self.say(at_us, text);
        self.until_us = Some(at_us);
    }

    fn see_plan(&mut self, at_us: u64, planned: &PlannedStep, scheduler: &Scheduler) {
        let own = self.request;
        let is_its = |seq: &SeqId| scheduler.request_of(*seq) == Some(own);
        let preempted: Vec<(SeqId, SeqId)> =
            planned.report.preempted.iter().copied().filter(|(seq, _)| is_its(seq)).collect();
        for (seq, cause) in preempted {
            self.wait(at_us, None);
            let cause = match scheduler.request_of(cause) {
                _ if cause == seq => "itself: it needs a block, and is the first victim".to_owned(),
                Some(request) => format!("{request}, which needs blocks or a place"),
                None => cause.to_string(),
            };
            let decision = planned.report.decisions.iter().find(|decision| decision.request == self.request);
            let decision =
                decision.map_or(String::new(), |decision| format!("; the arbiter: {}", DecisionText(decision)));
            self.say(at_us, format!("is preempted for {cause}{decision}"));
        }
        if let Some(admission) = planned.report.admissions.iter().find(|admission| admission.request == self.request) {
            self.wait(at_us, None);
            let (cached, swapped) = (admission.cached_tokens, admission.swapped_tokens);
            self.say(at_us, format!("starts; {cached} prompt tokens are cached, {swapped} of them in the swap pool"));
        }
        if !planned.plan.is_empty() && !self.has_first_token && scheduler.wait_of(self.request).is_none() {
            let batch = planned.plan.batch.iter().filter(|seq| is_its(&seq.seq));
            let tokens: usize = batch.map(|seq| seq.tokens.len()).sum();
            self.prompt.tokens += tokens;
            self.prompt.steps += usize::from(tokens > 0);
            self.prompt.steps_without += usize::from(tokens == 0 && self.prompt.steps > 0);
        }
        self.see_pauses(at_us, &planned.report.pauses);
    }

    fn see_pauses(&mut self, at_us: u64, pauses: &Deliveries) {
        let own = self.request;
        for (_, delivery) in pauses.iter().filter(|(request, _)| *request == own) {
            if let Delivery::Resumed { sample } = delivery {
                self.wait(at_us, None);
                self.say(at_us, format!("sample {sample} goes on"));
            }
        }
    }

    fn see_deliveries(&mut self, at_us: u64, deliveries: &Deliveries) {
        let own = self.request;
        for (_, delivery) in deliveries.iter().filter(|(request, _)| *request == own) {
            match delivery {
                Delivery::Started { .. } => {
                    self.has_first_token = true;
                    let PromptStory { tokens, steps, steps_without } = self.prompt;
                    let without = match steps_without {
                        0 => String::new(),
                        steps => format!("; {steps} more had no tokens left for it"),
                    };
                    self.say(
                        at_us,
                        format!("its prompt is there: {tokens} tokens were computed in {steps} steps{without}"),
                    );
                }
                Delivery::Finished { sample, .. } => self.say(at_us, format!("sample {sample} ends")),
                Delivery::Failed { .. } => self.say(at_us, "fails by its rules"),
                _ => {}
            }
        }
    }
}

impl ReplayObserver for Story {
    fn begin(&mut self, replayer: &Replayer) {
        if replayer.scheduler().has_request(self.request) {
            self.since_us = Some(0);
            self.say(0, "is there when the recording begins");
            self.wait(0, replayer.scheduler().wait_of(self.request));
        }
    }

    fn see(&mut self, at_us: u64, event: &RecordedEvent, outcome: &ReplayOutcome, replayer: &Replayer) {
        let scheduler = replayer.scheduler();
        if let RecordedEvent::Arrive(arrived) = event
            && arrived.id == self.request
        {
            self.since_us = Some(at_us);
            let (len, most, n) = (arrived.num_prompt_tokens(), arrived.max_tokens, arrived.n);
            self.say(at_us, format!("arrives: {len} prompt tokens, at most {most} more, {n} samples"));
            self.wait(at_us, scheduler.wait_of(self.request));
        }
        if self.since_us.is_none() || self.until_us.is_some() {
            return;
        }
        match outcome {
            ReplayOutcome::Planned(planned) => self.see_plan(at_us, planned, scheduler),
            ReplayOutcome::Committed(deliveries) => self.see_deliveries(at_us, deliveries),
            ReplayOutcome::Done => {}
        }
        match event {
            RecordedEvent::Cancel(request) if *request == self.request => return self.end_at(at_us, "is cancelled"),
            RecordedEvent::Failed(failed) if failed.contains(&self.request) => {
                return self.end_at(at_us, "fails with the executor");
            }
            _ if !scheduler.has_request(self.request) => return self.end_at(at_us, "is done"),
            _ => {}
        }
        self.wait(at_us, scheduler.wait_of(self.request));
    }

    fn end(&mut self, at_us: u64) {
        if self.is_known() && self.until_us.is_none() {
            self.end_at(at_us, "is still there when the recording ends");
        }
    }
}

impl fmt::Display for Story {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Some(since), Some(until)) = (self.since_us, self.until_us) else { return Ok(()) };
        let mut lines: Vec<&Line> = self.lines.iter().collect();
        lines.sort_by_key(|line| line.at_us);
        writeln!(f, "{}", self.request)?;
        for line in lines {
            writeln!(f, "{:>12.6} s  {}", line.at_us as f64 / 1e6, line.text)?;
        }
        let waited: u64 = self.waited.values().sum();
        writeln!(f, "waited {} of {}", seconds(waited), seconds(until - since))?;
        for (what, us) in &self.waited {
            writeln!(f, "  {:>10}  {what}", seconds(*us))?;
        }
        Ok(())
    }
}

/// Three times that were weighed.
struct DecisionText<'a>(&'a Decision);

impl fmt::Display for DecisionText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Decision { choice, num_tokens, swap_s, swap_full_s, recompute_s, .. } = self.0;
        let choice = match choice {
            Choice::Swap => "all blocks to the swap pool",
            Choice::SwapFull => "full blocks to the swap pool",
            Choice::Recompute => "compute again",
        };
        let ms = [swap_s, swap_full_s, recompute_s].map(|seconds| 1e3 * seconds);
        let [swap, full, recompute] = ms;
        write!(
            f,
            "{choice}, for {num_tokens} tokens ({swap:.2} ms to swap all, {full:.2} full ones, {recompute:.2} to compute)"
        )
    }
}

/// Waits of one kind follow each other as one: how many blocks there are changes with each step.
fn kind(wait: &WaitReason) -> (Discriminant<WaitReason>, Option<Discriminant<Lack>>, Option<RequestId>) {
    match wait {
        WaitReason::Lack(lack) => (discriminant(wait), Some(discriminant(lack)), None),
        WaitReason::Behind(request) => (discriminant(wait), None, Some(*request)),
        _ => (discriminant(wait), None, None),
    }
}

fn name(wait: &WaitReason) -> &'static str {
    match wait {
        WaitReason::NotAsked => "for the next step to be planned",
        WaitReason::Behind(_) => "in the queue behind others",
        WaitReason::Quota => "quota of its tenant",
        WaitReason::NonPreemptible => "share of non-preemptible requests",
        WaitReason::Beams => "other beams of its search",
        WaitReason::Lack(Lack::Seats { .. }) => "places in a step",
        WaitReason::Lack(Lack::Blocks { .. }) => "device blocks",
        WaitReason::Lack(Lack::Expected { .. }) => "device blocks that others are expected to need",
        WaitReason::Lack(Lack::Tokens) => "prompt tokens of a step",
        WaitReason::Lack(Lack::Preemption) => "steps that preempt others",
        WaitReason::SwapIn { .. } => "copies from the swap pool",
    }
}

fn seconds(us: u64) -> String {
    format!("{:.6} s", us as f64 / 1e6)
}
