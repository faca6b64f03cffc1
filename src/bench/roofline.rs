//! `--roofline`: the time of each phase of a step, compared with the limits of memory and arithmetic.

use pagetide_actors::runtime::{LoadProgress, Runtime};
use pagetide_backend::cpu::MachineLimits;
use pagetide_backend::profile::{PhaseTotals, Profile, StepKind, StepPhase, StepTotals};
use pagetide_base::error::StartError;
use pagetide_config::Config;
use pagetide_model::loader;
use serde::Serialize;
use std::fmt;
use std::time::Duration;

/// A profile under way.
pub struct Roofline {
    profile: Profile,
    machine: Machine,
}

/// What the machine can do, as measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Machine {
    pub isa: &'static str,
    pub threads: usize,
    /// With all threads.
    pub read_gb_per_s: f64,
    /// With all threads, in products of the weights' type.
    pub tflop_per_s: f64,
}

impl Roofline {
    /// Starts an engine whose steps are counted. The machine is measured first, for some seconds.
    pub fn start(config: &Config, progress: LoadProgress) -> Result<(Runtime, Self), StartError> {
        let profile = Profile::default();
        let runtime = Runtime::start_profiled(config, profile.clone(), progress)?;
        let backend = loader::cpu_backend(&config.load_options())?;
        let MachineLimits { read_bytes_per_s, flops_per_s } = backend.measure_limits(runtime.loaded().dtype)?;
        let machine = Machine {
            isa: backend.isa().name(),
            threads: backend.num_threads(),
            read_gb_per_s: read_bytes_per_s / 1e9,
            tflop_per_s: flops_per_s / 1e12,
        };
        Ok((runtime, Self { profile, machine }))
    }

    /// Forgets the steps so far.
    pub fn reset(&self) {
        self.profile.reset();
    }

    /// Of the steps since [`Roofline::reset`], in a benchmark that took `wall_s`.
    pub fn report(&self, wall_s: f64) -> RooflineReport {
        let steps = StepKind::ALL.map(|kind| (kind, self.profile.steps(kind)));
        RooflineReport::new(self.machine.clone(), &steps, wall_s)
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RooflineReport {
    pub machine: Machine,
    pub wall_s: f64,
    /// In which some step was under way.
    pub steps_s: f64,
    /// Kinds that had no step are left out.
    pub kinds: Vec<KindReport>,
}

/// The steps of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KindReport {
    pub kind: &'static str,
    pub steps: u64,
    pub rows: u64,
    pub seconds: f64,
    /// Of all phases.
    pub floor_s: f64,
    /// Without phases that had no call.
    pub phases: Vec<PhaseLine>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PhaseLine {
    pub phase: &'static str,
    pub calls: u64,
    pub seconds: f64,
    /// Of the steps' time.
    pub share: f64,
    /// Of weights and the KV cache.
    pub memory_bytes: u64,
    pub activation_bytes: u64,
    pub flops: u64,
    /// All bytes.
    pub gb_per_s: f64,
    pub share_of_reads: f64,
    pub tflop_per_s: f64,
    pub share_of_peak: f64,
    /// The time that weights and KV cache need at the machine's bandwidth, or the arithmetic at its peak: the longer.
    pub floor_s: f64,
}

impl RooflineReport {
    fn new(machine: Machine, steps: &[(StepKind, StepTotals)], wall_s: f64) -> Self {
        let happened = steps.iter().filter(|(_, totals)| totals.steps > 0);
        let kinds: Vec<_> = happened.map(|(kind, totals)| KindReport::new(&machine, *kind, totals)).collect();
        let steps_s = kinds.iter().map(|kind| kind.seconds).sum();
        Self { machine, wall_s, steps_s, kinds }
    }
}

impl KindReport {
    fn new(machine: &Machine, kind: StepKind, totals: &StepTotals) -> Self {
        let called = StepPhase::ALL.into_iter().filter(|phase| totals.phase(*phase).calls > 0);
        let line = |phase| PhaseLine::new(machine, phase, totals.phase(phase), totals.time);
        let phases: Vec<_> = called.map(line).collect();
        Self {
            kind: kind.name(),
            steps: totals.steps,
            rows: totals.rows,
            seconds: totals.time.as_secs_f64(),
            floor_s: phases.iter().map(|phase| phase.floor_s).sum(),
            phases,
        }
    }
}

impl PhaseLine {
    fn new(machine: &Machine, phase: StepPhase, totals: &PhaseTotals, of: Duration) -> Self {
        let PhaseTotals { calls, time, work } = *totals;
        let seconds = time.as_secs_f64();
        let per_s = |amount: f64| if seconds > 0.0 { amount / seconds } else { 0.0 };
        let gb_per_s = per_s((work.memory_bytes + work.activation_bytes) as f64 / 1e9);
        let tflop_per_s = per_s(work.flops as f64 / 1e12);
        let memory_s = work.memory_bytes as f64 / 1e9 / machine.read_gb_per_s;
        let arithmetic_s = work.flops as f64 / 1e12 / machine.tflop_per_s;
        Self {
            phase: phase.name(),
            calls,
            seconds,
            share: seconds / of.as_secs_f64().max(f64::MIN_POSITIVE),
            memory_bytes: work.memory_bytes,
            activation_bytes: work.activation_bytes,
            flops: work.flops,
            gb_per_s,
            share_of_reads: gb_per_s / machine.read_gb_per_s,
            tflop_per_s,
            share_of_peak: tflop_per_s / machine.tflop_per_s,
            floor_s: memory_s.max(arithmetic_s),
        }
    }
}

impl fmt::Display for RooflineReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { isa, threads, read_gb_per_s, tflop_per_s } = &self.machine;
        writeln!(f, "{threads} threads, {isa}: reads {read_gb_per_s:.1} GB/s, multiplies {tflop_per_s:.3} TFLOP/s")?;
        let outside = 100.0 * (1.0 - self.steps_s / self.wall_s.max(f64::MIN_POSITIVE));
        writeln!(f, "steps {:.3} s of {:.3} s, {outside:.1} % outside of steps", self.steps_s, self.wall_s)?;
        self.kinds.iter().try_for_each(|kind| write!(f, "\n{kind}"))
    }
}

impl fmt::Display for KindReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, steps, rows, seconds, floor_s, phases } = self;
        let (rows_per_step, ms) = (*rows as f64 / *steps as f64, 1e3 * seconds / *steps as f64);
        writeln!(f, "{kind}: {steps} steps of {rows_per_step:.1} rows and {ms:.3} ms on average")?;
        writeln!(
            f,
            "{:<16}{:>8}{:>10}{:>8}{:>9}{:>9}{:>9}{:>9}{:>10}{:>9}",
            "phase", "calls", "s", "of step", "GB/s", "of reads", "TFLOP/s", "of peak", "floor s", "x floor"
        )?;
        for line in phases {
            let PhaseLine { phase, calls, seconds, floor_s, .. } = line;
            write!(f, "{phase:<16}{calls:>8}{seconds:>10.3}{:>6.1} %", 100.0 * line.share)?;
            write!(f, "{:>9.1}{:>7.0} %", line.gb_per_s, 100.0 * line.share_of_reads)?;
            write!(f, "{:>9.3}{:>7.0} %", line.tflop_per_s, 100.0 * line.share_of_peak)?;
            writeln!(f, "{floor_s:>10.3}{:>9}", times_floor(*seconds, *floor_s))?;
        }
        let total = times_floor(*seconds, *floor_s);
        writeln!(f, "{:<16}{:>8}{seconds:>10.3}{:>44}{floor_s:>10.3}{total:>9}", "all", "", "")
    }
}

/// Phases that need neither memory nor arithmetic have no floor.
fn times_floor(seconds: f64, floor_s: f64) -> String {
    if floor_s > 0.0 { format!("{:.2}", seconds / floor_s) } else { "-".into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_backend::profile::OperationWork;

    #[test]
    fn the_floor_is_the_longer_of_memory_and_arithmetic() {
        let machine = Machine { isa: "avx2", threads: 2, read_gb_per_s: 50.0, tflop_per_s: 0.5 };
        let line = |memory_bytes, activation_bytes, flops| {
            let work = OperationWork { memory_bytes, activation_bytes, flops };
            let totals = PhaseTotals { calls: 3, time: Duration::from_millis(100), work };
            PhaseLine::new(&machine, StepPhase::Up, &totals, Duration::from_millis(400))
        };
        let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-9;
        let decoding = line(1_000_000_000, 0, 1_000_000_000);
        assert!(near(decoding.floor_s, 0.02) && near(decoding.gb_per_s, 10.0) && near(decoding.share_of_reads, 0.2));
        assert!(near(decoding.share, 0.25) && near(decoding.tflop_per_s, 0.01), "{decoding:?}");
        let prefill = line(1_000_000_000, 0, 25_000_000_000);
        assert!(near(prefill.floor_s, 0.05) && near(prefill.share_of_peak, 0.5), "{prefill:?}");
        let cached = line(0, 4_000_000_000, 0);
        assert!(
            cached.floor_s == 0.0 && near(cached.gb_per_s, 40.0),
            "activations need not leave the caches: {cached:?}"
        );
    }
}
