//! What limits the matrix products: the core, its tiles, its caches, or what we make of them.
//!
//! `cargo bench --bench limits` measures, in turn, for half a minute: scalar additions, which show the state that a
//! core is in; AMX tile products and loads by themselves, and the loop of two by two tiles with its operands in L1, in
//! L2 and farther away; and the CPU backend's own products at the shapes of a 1B Llama, on one thread and on all. Each
//! sample is sorted by the state that its cores were in before and after it. A core may share its ports and its clock
//! with a hardware thread that belongs to somebody else, and a median over both states is one of neither.
//!
//! `-- FILTER` leaves only cases with that in their names, and the peak. Environment: `PAGETIDE_BENCH_SECONDS`,
//! `PAGETIDE_BENCH_THREADS` (default: all), `PAGETIDE_BENCH_ISA` (default: the best). Without AMX there are no rows for
//! tiles, and the peak is what the backend measures for `--roofline`.

mod machine;
mod products;
mod samples;
#[cfg(target_arch = "x86_64")]
mod tiles;

use machine::{Probe, probe};
use pagetide_backend::DType;
use pagetide_backend::cpu::{CpuBackend, CpuOptions, Isa};
use samples::{ByState, Cores, Sample, State, Threshold, Watched};
use std::time::{Duration, Instant};

/// What a call of a case does.
#[derive(Clone, Copy)]
pub enum Work {
    Flops(f64),
    Tiles(f64),
    Calls(f64),
}

/// Something to measure.
pub struct Case {
    name: String,
    work: Work,
    /// Also on the team: the name of the same on one thread.
    on_team: bool,
    /// Not timed, before each sample.
    prepare: Option<Box<dyn FnMut()>>,
    run: Box<dyn FnMut()>,
    samples: Vec<Sample>,
}

impl Case {
    /// On this thread, after an untimed run of the same.
    pub fn alone(name: impl Into<String>, work: Work, run: impl FnMut() + 'static) -> Self {
        Self { name: name.into(), work, on_team: false, prepare: None, run: Box::new(run), samples: Vec::new() }
    }

    /// The state of the cores that take part.
    fn probe(&self, cores: &Cores) -> Vec<f64> {
        if self.on_team { cores.probe() } else { probe().into_iter().map(Probe::adds_per_cycle).collect() }
    }

    fn sample(&mut self, cores: &Cores, wake: &mut dyn FnMut()) {
        match &mut self.prepare {
            Some(prepare) => prepare(),
            None => (self.run)(),
        }
        let before = self.probe(cores);
        if self.on_team {
            wake();
        }
        let started = Instant::now();
        (self.run)();
        let ns = started.elapsed().as_nanos().max(1) as f64;
        let after = self.probe(cores);
        self.samples.push(Sample { ns, cores: before.into_iter().zip(after).map(|(a, b)| [a, b]).collect() });
    }

    /// In the unit of the table: GFLOP/s are operations a nanosecond.
    fn value(&self, sample: &Sample) -> f64 {
        match self.work {
            Work::Flops(flops) => flops / sample.ns,
            Work::Tiles(tiles) => sample.ns / tiles,
            Work::Calls(calls) => sample.ns / 1e3 / calls,
        }
    }

    fn by_state(&self, threshold: &Threshold) -> ByState {
        ByState::new(self.samples.iter().map(|sample| (threshold.of_sample(sample), self.value(sample))))
    }
}

/// The number that a variable of the environment holds.
fn variable<T: std::str::FromStr>(name: &str) -> Option<T> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}='{text}': a number, or an instruction set, is wanted")))
}

fn main() {
    // `cargo test` runs benchmarks too, and without this flag.
    let is_test = !std::env::args().any(|argument| argument == "--bench");
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let seconds = if is_test { 0.0 } else { variable("PAGETIDE_BENCH_SECONDS").unwrap_or(30.0) };
    let isa = variable::<Isa>("PAGETIDE_BENCH_ISA");
    let backend = |threads| CpuBackend::new(CpuOptions { threads, isa }).unwrap_or_else(|error| panic!("{error}"));
    let (alone, team) = (backend(Some(1)), backend(variable("PAGETIDE_BENCH_THREADS")));
    let (isa, threads) = (team.isa(), team.num_threads());

    let mut cases = Vec::new();
    // Of a core: where tiles have none, the backend's own.
    let mut limit = None;
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => cases.extend(tiles::cases()),
        _ if is_test => {}
        _ => {
            println!("No AMX here, or another instruction set was asked for: nothing is measured of tiles.");
            limit = Some(alone.measure_limits(DType::BF16).unwrap_or_else(|error| panic!("{error}")).flops_per_s / 1e9);
        }
    }
    let (products, mut wake) = products::cases(alone, team);
    cases.extend(products);
    // The first one is the peak, unless that is known.
    let mut index = usize::from(limit.is_some());
    cases.retain(|case| {
        index += 1;
        index == 1 || filter.as_ref().is_none_or(|filter| case.name.contains(filter))
    });

    let cores = Cores::new();
    let begun = Instant::now();
    loop {
        for case in &mut cases {
            let started = Instant::now();
            case.sample(&cores, &mut wake);
            // Short ones more often.
            for _ in 0..(Duration::from_millis(2).as_nanos() / started.elapsed().as_nanos().max(1)).min(10) {
                case.sample(&cores, &mut wake);
            }
        }
        if begun.elapsed().as_secs_f64() >= seconds {
            break;
        }
    }
    if !is_test {
        print(&cases, limit, isa, threads);
    }
}

fn print(cases: &[Case], limit: Option<f64>, isa: Isa, threads: usize) {
    let probes = cases.iter().flat_map(|case| &case.samples).flat_map(|sample| sample.cores.iter().flatten()).copied();
    let threshold = Threshold::of(probes.clone().collect());
    let [slow, fast] = threshold.centres;
    let states: Vec<_> = probes.map(|probe| threshold.of_probe(probe)).collect();
    let share = |wanted| 100.0 * states.iter().filter(|s| **s == wanted).count() as f64 / states.len().max(1) as f64;
    println!("{threads} threads, {isa}");
    match states.len() {
        0 => println!("The state of a core is not known on this architecture: all samples are called mixed."),
        n => {
            println!(
                "Scalar additions a cycle: fast {fast:.2}, slow {slow:.2}; of {n} probes {:.0} % fast, {:.0} % slow, {:.0} % \
                 between.",
                share(State::Fast),
                share(State::Slow),
                share(State::Mixed)
            );
            let Watched { changes_per_s, adds_per_ns, ghz } = Watched::new(&threshold);
            println!("One core, watched without a pause, changed {changes_per_s:.0} times a second.");
            for (name, adds, ghz) in [("Fast", adds_per_ns[0], ghz[0]), ("Slow", adds_per_ns[1], ghz[1])] {
                if let (Some(adds), Some(ghz)) = (adds, ghz) {
                    println!("{name}, it made {adds:.1} additions a nanosecond, at {ghz:.2} GHz.");
                }
            }
        }
    }
    // Tile products from registers come first where there are tiles.
    let peaks = match limit {
        Some(limit) => ByState::new(State::ALL.into_iter().flat_map(|state| [(state, limit); 3])),
        None => cases[0].by_state(&threshold),
    };
    println!(
        "\n{:56}{:>20}{:>20}{:>20}",
        "median, of the cores' peak in their states, samples", "fast", "slow", "mixed"
    );
    for case in cases {
        let values = case.by_state(&threshold);
        let of_peak = ByState::new(case.samples.iter().filter_map(|sample| {
            let peak: Option<f64> = match sample.cores.len() {
                0 => peaks.expect(State::Mixed).map(|peak| if case.on_team { threads as f64 * peak } else { peak }),
                _ => sample.cores.iter().map(|core| peaks.expect(threshold.of_core(*core))).sum(),
            };
            Some((threshold.of_sample(sample), 100.0 * case.value(sample) / peak?))
        }));
        let unit = match case.work {
            Work::Flops(_) => "GFLOP/s",
            Work::Tiles(_) => "ns a tile",
            Work::Calls(_) => "µs a call",
        };
        let cells = State::ALL.map(|state| {
            let count = values.count(state);
            let Some(value) = values.median(state) else { return format!("– {count:>5}") };
            let value = if value < 100.0 { format!("{value:.2}") } else { format!("{value:.0}") };
            match (case.work, of_peak.median(state)) {
                (Work::Flops(_), Some(percent)) => format!("{value} {percent:>3.0} % {count:>5}"),
                _ => format!("{value}       {count:>5}"),
            }
        });
        let name = if case.on_team { format!("{}, team", case.name) } else { case.name.clone() };
        println!("{name:46}{unit:>10}{:>20}{:>20}{:>20}", cells[0], cells[1], cells[2]);
    }
    print_team(cases, &threshold, threads);
}

/// What the team does beside the sum of what its cores do alone in the states that they were in: the rest is the gate,
/// cores that wait for the last one, and what they share.
fn print_team(cases: &[Case], threshold: &Threshold, threads: usize) {
    println!("\n{:56}{:>20}{:>20}", "the team", "GFLOP/s", "of the sum alone");
    for case in cases.iter().filter(|case| case.on_team && matches!(case.work, Work::Flops(_))) {
        let Some(same) = cases.iter().find(|other| !other.on_team && other.name == case.name) else { continue };
        let alone = same.by_state(threshold);
        let mut pairs: Vec<(f64, f64)> = Vec::new();
        for sample in &case.samples {
            let sum: Option<f64> = match sample.cores.len() {
                0 => alone.median(State::Mixed).map(|one| one * threads as f64),
                _ => sample.cores.iter().map(|core| alone.expect(threshold.of_core(*core))).sum(),
            };
            let Some(sum) = sum else { continue };
            pairs.push((case.value(sample), 100.0 * case.value(sample) / sum));
        }
        let Some(middle) = (!pairs.is_empty()).then_some(pairs.len() / 2) else { continue };
        pairs.sort_by(|a, b| a.0.total_cmp(&b.0));
        let value = pairs[middle].0;
        pairs.sort_by(|a, b| a.1.total_cmp(&b.1));
        println!("{:56}{value:>20.0}{:>18.0} %", case.name, pairs[middle].1);
    }
}
