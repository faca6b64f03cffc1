//! Normalised latency against the rate of requests, and the rate that a system sustains: figures 12, 14, 16 and 17.

use super::scenarios::{Decoding, Scenario};
use super::simulation::{self, LoadOnSystem, LoadResult};
use super::systems::{Front, System};
use crate::memory::lengths::Lengths;
use crate::workload::poisson_arrivals;
use serde::{Deserialize, Serialize};

/// How much is simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadEffort {
    /// Requests of a run in which all are there from the start.
    pub num_requests: usize,
    /// A run at a rate lasts so long that it crosses the limit if the rate is this many per cent above what is served.
    pub overload_percent: usize,
    /// Halvings of the interval that holds the sustained rate.
    pub halvings: usize,
    /// Tokens.
    pub block_size: usize,
    pub seed: u64,
}

/// A rate is sustained if the mean normalised latency of a run is at most this many times that of requests which are
/// alone on the paged system.
pub const LIMIT: f64 = 20.0;
/// Other limits, to show how much depends on the choice.
pub const OTHER_LIMITS: [f64; 2] = [10.0, 40.0];

/// One run at a rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CurvePoint {
    /// Requests a second.
    pub rate: f64,
    pub normalised_latency_s: f64,
    /// Requests that run at once.
    pub running_requests: f64,
}

/// A system with a load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RateCurve {
    pub system: System,
    /// Requests a second if all are there from the start; `None` if the system runs out of memory with one request.
    pub all_at_once: Option<LoadResult>,
    /// In order of their rates.
    pub points: Vec<CurvePoint>,
    /// The rates that are sustained within [`LIMIT`] and [`OTHER_LIMITS`]; 0 if none of the measured ones is.
    pub sustained: f64,
    pub sustained_others: [f64; 2],
}

/// All systems with one load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Curves {
    pub scenario: String,
    pub title: String,
    /// Of the paper.
    pub figure: String,
    pub effort: LoadEffort,
    /// Tokens of prompts and outputs, on average.
    pub mean_prompt: f64,
    pub mean_output: f64,
    /// Seconds a token of requests that are alone on the paged system.
    pub alone_s: f64,
    pub curves: Vec<RateCurve>,
}

impl Curves {
    pub fn of(&self, system: System) -> Option<&RateCurve> {
        self.curves.iter().find(|curve| curve.system == system)
    }

    /// The rate that `system` sustains, over that of `other`; `None` if `other` sustains none.
    pub fn rate_ratio(&self, system: System, other: System) -> Option<f64> {
        let (rate, base) = (self.of(system)?.sustained, self.of(other)?.sustained);
        (base > 0.0).then(|| rate / base)
    }

    /// The same of throughput if all requests are there from the start.
    pub fn throughput_ratio(&self, system: System, other: System) -> Option<f64> {
        let throughput = |system| Some(self.of(system)?.all_at_once.as_ref()?.req_per_s);
        Some(throughput(system)? / throughput(other)?)
    }
}

/// Requests that are alone: so far apart that none meets another.
const NUM_ALONE: usize = 24;
const ALONE_GAP_S: f64 = 1e5;
/// First rates, as parts of the throughput if all requests are there from the start.
const FIRST_RATES: [f64; 6] = [0.15, 0.4, 0.65, 0.85, 1.0, 1.15];
/// Factor of further rates until one is not sustained, and the most of them.
const RAISE: f64 = 1.15;
const MOST_RAISED: usize = 8;
/// How often the lowest rate is halved if it is too high.
const MOST_LOWERED: usize = 3;
/// The fewest requests of a run.
const FEWEST_REQUESTS: usize = 100;

pub fn curves(scenario: &Scenario, effort: &LoadEffort, systems: &[System], mut done: impl FnMut(System)) -> Curves {
    let requests = scenario.requests(effort.num_requests, effort.seed);
    let timing = scenario.deployment.timing();
    let load = LoadOnSystem {
        scenario,
        system: System::Paged,
        requests: &requests,
        arrivals_s: &[],
        block_size: effort.block_size,
        prefix_caching: scenario.shared_prefix > 0,
        timing: &timing,
    };
    let apart: Vec<f64> = (0..NUM_ALONE.min(requests.len())).map(|index| index as f64 * ALONE_GAP_S).collect();
    let alone = simulation::run(&LoadOnSystem { requests: &requests[..apart.len()], arrivals_s: &apart, ..load });
    let alone_s = alone.normalised_latency_s;
    let mean = |sum: usize| sum as f64 / requests.len() as f64;
    let mut found = Vec::new();
    for system in systems {
        let load = LoadOnSystem { system: *system, ..load };
        found.push(
            Search { load, effort, alone_s, seconds: run_seconds(&requests, alone_s, effort), points: Vec::new() }
                .run(),
        );
        done(*system);
    }
    Curves {
        scenario: scenario.key.clone(),
        title: scenario.title(),
        figure: scenario.figure.into(),
        effort: *effort,
        mean_prompt: mean(requests.iter().map(|lengths| lengths.prompt).sum()),
        mean_output: mean(requests.iter().map(|lengths| lengths.output as usize).sum()),
        alone_s,
        curves: found,
    }
}

/// How long requests arrive in a run at a rate. If the rate is `x` times what is served, the mean request waits for
/// `(x - 1) / 2` of this time, and its normalised latency is that times the mean of `1 / output`.
fn run_seconds(requests: &[Lengths], alone_s: f64, effort: &LoadEffort) -> f64 {
    let inverse = requests.iter().map(|lengths| 1.0 / f64::from(lengths.output)).sum::<f64>() / requests.len() as f64;
    2.0 * LIMIT * alone_s / (inverse * effort.overload_percent as f64 / 100.0)
}

/// Looks for the rate that a system sustains.
struct Search<'a> {
    load: LoadOnSystem<'a>,
    effort: &'a LoadEffort,
    alone_s: f64,
    /// See [`run_seconds`].
    seconds: f64,
    points: Vec<CurvePoint>,
}

impl Search<'_> {
    fn run(mut self) -> RateCurve {
        let LoadOnSystem { system, scenario, requests, block_size, .. } = self.load;
        let memory = scenario.deployment.memory(block_size);
        let width = scenario.decoding.width() as usize;
        let longest = requests.iter().copied().max_by_key(|lengths| lengths.total()).expect("a load has requests");
        if !Front::can_serve(system, memory, longest, width) {
            return RateCurve {
                system,
                all_at_once: None,
                points: Vec::new(),
                sustained: 0.0,
                sustained_others: [0.0; 2],
            };
        }
        let mut at_once = simulation::run(&LoadOnSystem { arrivals_s: &vec![0.0; requests.len()], ..self.load });
        at_once.over_time.clear();
        let limit = LIMIT * self.alone_s;
        for part in FIRST_RATES {
            self.measure(part * at_once.req_per_s);
        }
        for _ in 0..MOST_RAISED {
            let highest = self.points[self.points.len() - 1];
            if highest.normalised_latency_s > limit {
                break;
            }
            self.measure(highest.rate * RAISE);
        }
        for _ in 0..MOST_LOWERED {
            let lowest = self.points[0];
            if lowest.normalised_latency_s <= limit {
                break;
            }
            self.measure(lowest.rate / 2.0);
        }
        for _ in 0..self.effort.halvings {
            let Some((below, above)) = bracket(&self.points, limit) else { break };
            self.measure((below.rate * above.rate).sqrt());
        }
        RateCurve {
            system,
            sustained: sustained(&self.points, limit),
            sustained_others: OTHER_LIMITS.map(|limit| sustained(&self.points, limit * self.alone_s)),
            all_at_once: Some(at_once),
            points: self.points,
        }
    }

    fn measure(&mut self, rate: f64) {
        let num = ((rate * self.seconds) as usize).max(FEWEST_REQUESTS);
        let requests = self.load.scenario.requests(num, self.effort.seed);
        let arrivals_s = poisson(num, rate, self.effort.seed);
        let result = simulation::run(&LoadOnSystem { requests: &requests, arrivals_s: &arrivals_s, ..self.load });
        let LoadResult { normalised_latency_s, running_requests, .. } = result;
        let place = self.points.partition_point(|point| point.rate < rate);
        self.points.insert(place, CurvePoint { rate, normalised_latency_s, running_requests });
    }
}

/// Arrival times in seconds.
pub fn poisson(num: usize, rate: f64, seed: u64) -> Vec<f64> {
    poisson_arrivals(num, rate, seed).iter().map(|at| at.as_secs_f64()).collect()
}

/// The last rate before the first one above the limit, and that one.
fn bracket(points: &[CurvePoint], limit: f64) -> Option<(CurvePoint, CurvePoint)> {
    let above = points.iter().position(|point| point.normalised_latency_s > limit)?;
    Some((*points.get(above.checked_sub(1)?)?, points[above]))
}

/// The rate at which the curve crosses the limit for the first time, between two points on a straight line. If it never
/// does, the highest rate; if it is above from the start, 0.
fn sustained(points: &[CurvePoint], limit: f64) -> f64 {
    match bracket(points, limit) {
        Some((below, above)) => {
            let part = (limit - below.normalised_latency_s) / (above.normalised_latency_s - below.normalised_latency_s);
            below.rate + part * (above.rate - below.rate)
        }
        None => points.last().filter(|last| last.normalised_latency_s <= limit).map_or(0.0, |last| last.rate),
    }
}

/// Systems to compare with a load: the batched ones take part where each request has one sequence.
pub fn systems(scenario: &Scenario) -> Vec<System> {
    let is_single = scenario.decoding == Decoding::Samples(1);
    let takes_part = |system: &System| is_single || *system != System::StaticBatches;
    System::ALL.into_iter().filter(takes_part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_long_enough_to_show_an_overload() {
        // 20 times 10 ms a token of 100: 20 s of waiting, which is half of what 10 % too many add in 400 s.
        let effort = LoadEffort { num_requests: 1, overload_percent: 10, halvings: 0, block_size: 16, seed: 1 };
        let seconds = run_seconds(&[Lengths { prompt: 5, output: 100 }; 3], 0.01, &effort);
        assert!((seconds - 400.0).abs() < 1e-9, "{seconds}");
    }

    fn point(rate: f64, normalised_latency_s: f64) -> CurvePoint {
        CurvePoint { rate, normalised_latency_s, running_requests: 0.0 }
    }

    #[test]
    fn the_sustained_rate_is_where_the_curve_crosses_the_limit() {
        let points = [point(1.0, 0.1), point(2.0, 0.2), point(4.0, 1.0)];
        assert!((sustained(&points, 0.6) - 3.0).abs() < 1e-9);
        assert_eq!(sustained(&points, 2.0), 4.0, "all are");
        assert_eq!(sustained(&points, 0.05), 0.0, "none is");
        // A curve that comes down again is not sustained behind its first crossing.
        assert!(sustained(&[point(1.0, 0.1), point(2.0, 1.0), point(3.0, 0.1)], 0.55) < 2.0);
    }
}
