//! Which state a core was in when something was measured, and what follows from it.

use crate::machine::{Probe, probe, processors, stay_on};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// A core's state around a measurement: as of one that has all of its ports to itself, as of one that has not, or
/// neither for all of the time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum State {
    Fast,
    Slow,
    Mixed,
}

impl State {
    pub const ALL: [State; 3] = [State::Fast, State::Slow, State::Mixed];
}

/// One measurement: how long it took, and the additions per cycle of each core that took part, before and after.
pub struct Sample {
    pub ns: f64,
    pub cores: Vec<[f64; 2]>,
}

/// The additions per cycle above which a core is fast and below which it is slow.
pub struct Threshold {
    /// Medians of the slow and of the fast half; the same where there is one state only.
    pub centres: [f64; 2],
}

impl Threshold {
    /// Where two groups are parted best: the cut after which the variance between them is largest.
    pub fn of(mut probes: Vec<f64>) -> Self {
        // Less than so much between the groups is the noise of one.
        const SMALLEST_RATIO: f64 = 1.25;
        probes.sort_by(f64::total_cmp);
        // An interrupt within a probe is neither.
        let margin = probes.len() / 50;
        let probes = &probes[margin..probes.len() - margin];
        if probes.is_empty() {
            return Self { centres: [f64::NAN; 2] };
        }
        let sum: f64 = probes.iter().map(|probe| probe.ln()).sum();
        let (mut left, mut best, mut cut) = (0.0, -1.0, 0);
        for (i, probe) in probes.iter().enumerate().take(probes.len() - 1) {
            left += probe.ln();
            let (n, rest) = ((i + 1) as f64, (probes.len() - i - 1) as f64);
            let between = n * rest * (left / n - (sum - left) / rest).powi(2);
            if between > best {
                (best, cut) = (between, i + 1);
            }
        }
        let (slow, fast) = probes.split_at(cut);
        let centres = if slow.is_empty() { [fast[fast.len() / 2]; 2] } else { [slow, fast].map(|g| g[g.len() / 2]) };
        let is_one = centres[1] < SMALLEST_RATIO * centres[0];
        Self { centres: if is_one { [probes[probes.len() / 2]; 2] } else { centres } }
    }

    /// The state that one probe shows. Between the groups it is mixed; of one group all are fast.
    pub fn of_probe(&self, probe: f64) -> State {
        let [slow, fast] = self.centres;
        let part = (probe / slow).ln() / (fast / slow).ln();
        match part {
            _ if slow == fast => State::Fast,
            part if part > 2.0 / 3.0 => State::Fast,
            part if part < 1.0 / 3.0 => State::Slow,
            _ => State::Mixed,
        }
    }

    pub fn of_core(&self, probes: [f64; 2]) -> State {
        let [before, after] = probes.map(|probe| self.of_probe(probe));
        if before == after { before } else { State::Mixed }
    }

    pub fn of_sample(&self, sample: &Sample) -> State {
        let mut states = sample.cores.iter().map(|core| self.of_core(*core));
        let first = states.next().unwrap_or(State::Mixed);
        if states.all(|state| state == first) { first } else { State::Mixed }
    }
}

/// Medians by state, where there are samples.
pub struct ByState([Vec<f64>; 3]);

impl ByState {
    pub fn new(values: impl Iterator<Item = (State, f64)>) -> Self {
        let mut groups = Self(Default::default());
        values.for_each(|(state, value)| groups.0[state as usize].push(value));
        groups.0.iter_mut().for_each(|group| group.sort_by(f64::total_cmp));
        groups
    }

    pub fn count(&self, state: State) -> usize {
        self.0[state as usize].len()
    }

    /// Fewer than three are none.
    pub fn median(&self, state: State) -> Option<f64> {
        let group = &self.0[state as usize];
        (group.len() >= 3).then(|| group[group.len() / 2])
    }

    /// What a core does in this state. One that changes does the mean of both.
    pub fn expect(&self, state: State) -> Option<f64> {
        match state {
            State::Mixed => Some((self.median(State::Fast)? + self.median(State::Slow)?) / 2.0),
            _ => self.median(state),
        }
    }
}

/// A thread on each core that probes it when asked.
pub struct Cores {
    threads: Vec<(Sender<()>, Receiver<f64>)>,
}

impl Cores {
    pub fn new() -> Self {
        let start = |processor| {
            let ((ask, asked), (answer, answers)) = (channel(), channel());
            thread::spawn(move || {
                stay_on(processor);
                while asked.recv().is_ok() {
                    // The best of some: a core has to wake up first.
                    let probes = (0..4).filter_map(|_| probe()).map(Probe::adds_per_cycle);
                    if answer.send(probes.fold(f64::NAN, f64::max)).is_err() {
                        return;
                    }
                }
            });
            (ask, answers)
        };
        Self { threads: processors().into_iter().map(start).collect() }
    }

    /// All cores at once, when nobody spins on them any more.
    pub fn probe(&self) -> Vec<f64> {
        thread::sleep(Duration::from_micros(200));
        self.threads.iter().for_each(|(ask, _)| ask.send(()).expect("a thread that probes"));
        self.threads.iter().map(|(_, answers)| answers.recv().expect("a thread that probes")).collect()
    }
}

/// This core without a pause for some time.
pub struct Watched {
    pub changes_per_s: f64,
    /// Medians of the probes that showed one of both states, fast and slow.
    pub adds_per_ns: [Option<f64>; 2],
    pub ghz: [Option<f64>; 2],
}

impl Watched {
    pub fn new(threshold: &Threshold) -> Self {
        const TIME: Duration = Duration::from_millis(500);
        let begun = Instant::now();
        let mut probes = Vec::new();
        while begun.elapsed() < TIME {
            probes.extend(probe());
        }
        let states: Vec<_> = probes.iter().map(|probe| threshold.of_probe(probe.adds_per_cycle())).collect();
        let clear: Vec<_> = states.iter().filter(|state| **state != State::Mixed).collect();
        let changes = clear.windows(2).filter(|pair| pair[0] != pair[1]).count();
        let median = |value: fn(&Probe) -> f64| {
            let groups = ByState::new(states.iter().copied().zip(probes.iter().map(value)));
            [groups.median(State::Fast), groups.median(State::Slow)]
        };
        Self {
            changes_per_s: changes as f64 / TIME.as_secs_f64(),
            adds_per_ns: median(|probe| probe.adds_per_ns),
            ghz: median(|probe| probe.ghz),
        }
    }
}
