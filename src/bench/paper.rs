//! `pagetide bench paper`: the claims of the PagedAttention paper (Kwon et al., "Efficient Memory Management for Large
//! Language Model Serving with PagedAttention", SOSP 2023) beside what is found here, as one HTML report.
//!
//! Each system that the paper compares with is a policy in front of this engine ([`systems`]). Loads on the paper's
//! models and GPUs go through the real scheduler and block pool by a simulated clock ([`simulation`]); the configured
//! model runs on its device ([`measured`]).

mod ablations;
mod accelerators;
mod claims;
mod curves;
mod kernels;
mod measured;
mod next_tokens;
mod page;
mod results;
mod scenarios;
mod sections;
mod shared;
mod simulation;
mod systems;
mod transformers;

use super::memory::lengths::{ALPACA, SHAREGPT};
use super::memory::{layout, swap, waste};
use super::result::{write_file, write_json};
use super::workload::{WorkloadArgs, parse_positive, read_trace};
use accelerators::{MAX_MODEL_LEN, OPT_13B, OPT_66B};
use clap::{Args, ValueEnum};
use curves::{LoadEffort, poisson};
use measured::MeasuredBench;
use page::ReportHead;
use pagetide_base::error::StartError;
use pagetide_config::Config;
use pagetide_terminal::options::ConfigOptions;
use pagetide_terminal::{log, output};
use results::{MeasuredResults, PaperResults, PieceFile};
use scenarios::{LengthSource, Scenario};
use serde_json::json;
use simulation::LoadOnSystem;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use systems::System;

#[derive(Args)]
pub struct PaperArgs {
    /// Folder for paper.html, paper.json, the charts (SVG) and what a later run goes on with; it is created if
    /// necessary
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Run only these parts [default: all]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_enum)]
    only: Vec<PaperPart>,
    /// Run fewer loads with fewer requests: about two minutes
    #[arg(long)]
    quick: bool,
    /// Run only what needs no model: the loads on OPT-13B, 66B, 175B and LLaMA-13B by a simulated clock, memory,
    /// sharing
    #[arg(long)]
    simulate: bool,
    /// Do not go on with what an earlier run has left in --out
    #[arg(long)]
    fresh: bool,
    /// Also run generate of Hugging Face transformers on the same requests, with this Python; the model must be a
    /// folder
    #[arg(long, value_name = "PYTHON", conflicts_with = "simulate")]
    transformers: Option<PathBuf>,
    /// Traces whose lengths are simulated too, cut to 2,048 tokens
    #[arg(long, value_name = "FILE,...", value_delimiter = ',')]
    traces: Vec<PathBuf>,
    /// Multiply the lengths of --traces by F
    #[arg(long, value_name = "F", default_value_t = 1.0, value_parser = parse_positive)]
    traces_scale: f64,
    /// memory: config.json of other models, without weights
    #[arg(long, value_name = "FILE,...", value_delimiter = ',')]
    model_config: Vec<PathBuf>,
    /// memory: memory of the device for those models, in GB
    #[arg(long, value_name = "GB", default_value_t = 40.0, value_parser = parse_positive)]
    device_gb: f64,
    /// measured: size of the KV memory in tokens [default: 8 times the maximum length]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    kv_tokens: Option<u64>,
    #[command(flatten)]
    workload: WorkloadArgs,
    #[command(flatten)]
    options: ConfigOptions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PaperPart {
    /// Throughput and latency of all systems, simulated (sections 6.2 to 6.5)
    Serving,
    /// KV bytes by model, waste by system, use over time (sections 1 to 3)
    Memory,
    /// Blocks that samples and beams save (section 6.3)
    Sharing,
    /// Block sizes, swapping against recomputing, sharing on and off (section 7)
    Ablations,
    /// All systems with the configured model on this machine
    Measured,
}

pub fn run(args: &PaperArgs) -> Result<ExitCode, StartError> {
    let config = args.options.resolve()?.config;
    log::init(&config.log)?;
    pagetide_terminal::open_files::ensure(0)?;
    std::fs::create_dir_all(&args.out)
        .map_err(|error| StartError::new(format!("--out {}: {error}", args.out.display())))?;
    let mut report = PaperReport {
        args,
        config: &config,
        pieces: PieceFile::open(&args.out.join("pieces.json"), args.fresh)?,
        results: PaperResults::default(),
    };
    for part in PaperPart::value_variants() {
        let is_asked = args.only.is_empty() || args.only.contains(part);
        if is_asked && !(args.simulate && *part == PaperPart::Measured) {
            report.part(*part)?;
            report.write()?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

struct PaperReport<'a> {
    args: &'a PaperArgs,
    config: &'a Config,
    pieces: PieceFile,
    results: PaperResults,
}

/// Requests of `waste`, and of `sharing`.
const WASTE_REQUESTS: [usize; 2] = [4_000, 600];
const SHARING_REQUESTS: usize = 400;
/// Requests of each measured run, and those of the runs by block size.
const MEASURED_REQUESTS: [usize; 2] = [96, 24];
/// Seconds after which a batch size of transformers is not continued.
const TRANSFORMERS_S: f64 = 300.0;

impl PaperReport<'_> {
    /// The first of two numbers in a full run, the second in a short one.
    fn pick<T: Copy>(&self, of: [T; 2]) -> T {
        of[usize::from(self.args.quick)]
    }

    fn effort(&self) -> LoadEffort {
        LoadEffort {
            num_requests: self.pick([2_000, 500]),
            overload_percent: self.pick([10, 40]),
            halvings: self.pick([4, 2]),
            block_size: 16,
            seed: self.args.workload.seed,
        }
    }

    fn part(&mut self, part: PaperPart) -> Result<(), StartError> {
        match part {
            PaperPart::Serving => self.serving(),
            PaperPart::Memory => self.memory(),
            PaperPart::Sharing => self.sharing(),
            PaperPart::Ablations => self.ablations(),
            PaperPart::Measured => self.measured(),
        }
    }

    fn scenarios(&self) -> Result<Vec<Scenario>, StartError> {
        let mut traces = Vec::new();
        for path in &self.args.traces {
            let shapes =
                read_trace(path).map_err(|error| StartError::new(format!("--traces {}: {error}", path.display())))?;
            let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
            let scale = self.args.traces_scale;
            traces.push(LengthSource::trace(format!("{name} x {scale}"), &shapes, scale, MAX_MODEL_LEN));
        }
        Ok(Scenario::all(&traces, self.args.quick))
    }

    fn serving(&mut self) -> Result<(), StartError> {
        let (scenarios, effort) = (self.scenarios()?, self.effort());
        let num = scenarios.len();
        for (index, scenario) in scenarios.iter().enumerate() {
            let name = format!("serving {} of {num}: {} {effort:?}", index + 1, scenario.title());
            let systems = curves::systems(scenario);
            let found = self.pieces.piece(&name, || {
                Ok(curves::curves(scenario, &effort, &systems, |system| tracing::info!("paper:   {}", system.name())))
            })?;
            self.results.curves.push(found);
            self.write()?;
        }
        Ok(())
    }

    fn memory(&mut self) -> Result<(), StartError> {
        self.results.layouts = layout::layouts(&self.args.model_config, self.args.device_gb)?;
        let (num, seed) = (self.pick(WASTE_REQUESTS), self.args.workload.seed);
        for dataset in [SHAREGPT, ALPACA] {
            let name = format!("memory: waste, {} requests of {}, seed {seed}", num, dataset.name);
            let rows = self.pieces.piece(&name, || {
                let setup = waste::WasteSetup {
                    requests: dataset.sample(num, seed, MAX_MODEL_LEN),
                    source: dataset.name.into(),
                    slug: "paper",
                    max_model_len: MAX_MODEL_LEN,
                    num_slots: 8 * MAX_MODEL_LEN,
                    block_sizes: vec![8, 16, 32, 64, 128, 256],
                };
                Ok(setup.rows())
            })?;
            self.results.waste.push((dataset.name.into(), rows));
        }
        let effort = self.effort();
        let name = format!("memory: over time at {OVER_TIME_RATE} requests/s {effort:?}");
        self.results.over_time = self.pieces.piece(&name, || Ok(over_time(&effort)))?;
        Ok(())
    }

    fn sharing(&mut self) -> Result<(), StartError> {
        let (num, effort) = (SHARING_REQUESTS, self.effort());
        let name = format!("sharing: {num} requests, seed {}", effort.seed);
        let memory = OPT_66B.memory(effort.block_size);
        let found = self.pieces.piece(&name, || Ok(shared::measure(num, effort.block_size, memory, effort.seed)))?;
        self.results.shared = Some(found);
        Ok(())
    }

    fn ablations(&mut self) -> Result<(), StartError> {
        let effort = self.effort();
        let all = Scenario::all(&[], false);
        let scenario = |key: &str| all.iter().find(|scenario| scenario.key == key).expect("it is one of all");
        let prefix = scenario("prefix-341");
        for key in ["sharegpt-13b", "alpaca-13b"] {
            let name = format!("ablations: block sizes, {key} {effort:?}");
            let rows = self.pieces.piece(&name, || Ok(ablations::block_sizes(scenario(key), prefix, &effort)))?;
            self.results.block_sizes.extend(rows);
        }
        self.results.links = ablations::links(&OPT_13B.timing(), OPT_13B.num_layers);
        let name = format!("ablations: sharing on and off {effort:?}");
        self.results.sharing =
            self.pieces.piece(&name, || Ok(ablations::sharing(prefix, scenario("samples-4"), &effort)))?;
        Ok(())
    }

    fn measured(&mut self) -> Result<(), StartError> {
        let (args, config) = (self.args, self.config);
        let num = args.workload.num.map_or(self.pick(MEASURED_REQUESTS), |num| num as usize);
        let kv_tokens = args.kv_tokens.map(|tokens| tokens as usize);
        let mut workload = args.workload.clone();
        if args.quick && workload.scale == 1.0 && workload.trace.is_none() && workload.fixed.is_none() {
            workload.scale = QUICK_SCALE;
        }
        let bench = MeasuredBench::new(config, &workload, num, kv_tokens)?;
        let model = config.model.source();
        let subject = format!("{model:?}, {workload:?}, {:?}, {num} requests", bench.memory);
        let (mut runs, mut setup) = (Vec::new(), None);
        for system in System::ALL {
            let name = format!("measured: {}, {subject}", system.name());
            let (run, of) = self.pieces.piece(&name, || bench.run(system, None, bench.memory.block_size))?;
            runs.push(run);
            setup = Some(of);
        }
        // Rates as parts of what paged serves.
        let most = runs.iter().find(|run| run.system == System::Paged).map_or(1.0, |run| run.req_per_s);
        let parts: &[f64] = if args.quick { &[0.5] } else { &[0.1, 0.25, 0.5, 0.8] };
        for (system, part) in System::ALL.into_iter().flat_map(|system| parts.iter().map(move |part| (system, *part))) {
            let rate = part * most;
            let name = format!("measured: {} at {part} of what paged serves, {subject}", system.name());
            runs.push(self.pieces.piece(&name, || bench.run(system, Some(rate), bench.memory.block_size))?.0);
        }
        let mut block_sizes = Vec::new();
        for block_size in self.pick([&[1usize, 2, 4, 8, 16, 32, 64, 128, 256][..], &[8, 16, 64][..]]) {
            let name = format!("measured: blocks of {block_size}, {subject}");
            block_sizes.push(self.pieces.piece(&name, || bench.run(System::Paged, None, *block_size))?.0);
        }
        let contexts = self.pick([&[64usize, 128, 256, 512, 1_024][..], &[64, 256][..]]);
        let kernels =
            self.pieces.piece(&format!("measured: kernels, {model:?}"), || kernels::measure(config, contexts))?;
        let sizes = self.pick([&[1usize, 4, 16, 64, 256][..], &[16][..]]);
        let (length, seed) = (self.pick([512, 256]), workload.seed);
        let swap = self.pieces.piece(&format!("measured: swap, {model:?}, {length} tokens"), || {
            Ok(swap::rows(&swap::SwapSetup { config, block_sizes: sizes, length, seed })?.1)
        })?;
        let transformers = match &args.transformers {
            None => Vec::new(),
            Some(python) => {
                let folder = config.model.path.as_str();
                if !Path::new(folder).is_dir() {
                    return Err(StartError::new(format!("--transformers: the model '{folder}' is not a folder")));
                }
                let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
                let name = format!("measured: transformers, {subject}");
                self.pieces.piece(&name, || {
                    transformers::generate(python, Path::new(folder), &bench.lengths(), threads, TRANSFORMERS_S)
                })?
            }
        };
        let setup = setup.expect("there are systems");
        self.results.measured = Some(MeasuredResults { setup, runs, block_sizes, kernels, swap, transformers });
        Ok(())
    }

    /// Writes what is there: paper.html, paper.json, and a file for each chart.
    fn write(&self) -> Result<(), StartError> {
        let claims = claims::rows(&self.results);
        let sections = sections::sections(&self.results);
        let command = super::command_line::command_line(std::env::args());
        let now = time::OffsetDateTime::now_utc();
        let date = now.format(&time::format_description::well_known::Rfc3339).expect("the year has four digits");
        let head = ReportHead {
            command: command.clone(),
            made: format!("Pagetide {}, {} UTC", env!("CARGO_PKG_VERSION"), &date[..19].replace('T', " ")),
            machine: machine(),
            quick: self.args.quick,
        };
        let path = |name: &str| self.args.out.join(name);
        write_file("--out", &path("paper.html"), &page::page(&head, &claims, &sections))?;
        for section in &sections {
            for part in &section.parts {
                if let sections::ReportPart::Plot(name, plot) = part {
                    write_file("--out", &path(&format!("{name}.svg")), &plot.svg())?;
                }
            }
        }
        let results = &self.results;
        let measured = results.measured.as_ref().map(|measured| {
            json!({ "setup": measured.setup, "runs": measured.runs, "block_sizes": measured.block_sizes,
                    "kernels": measured.kernels, "swap": measured.swap, "transformers": measured.transformers })
        });
        write_json(
            &path("paper.json"),
            &json!({
                "command": command, "version": env!("CARGO_PKG_VERSION"), "date": date, "machine": head.machine,
                "quick": self.args.quick, "claims": claims, "serving": results.curves, "layouts": results.layouts,
                "waste": results.waste, "over_time": results.over_time, "sharing": results.shared,
                "block_sizes": results.block_sizes, "links": results.links, "sharing_on_and_off": results.sharing,
                "measured": measured,
            }),
        )?;
        output::complain(&summary(&claims));
        Ok(())
    }
}

/// Factor on lengths in a short run.
const QUICK_SCALE: f64 = 0.125;

/// Requests a second of [`over_time`]: more than Oracle serves, and what paged serves.
const OVER_TIME_RATE: f64 = 2.2;

/// Max, Oracle and paged on OPT-13B.
fn over_time(effort: &LoadEffort) -> Vec<(System, Vec<[f64; 4]>)> {
    let scenarios = Scenario::all(&[], true);
    let scenario = scenarios.iter().find(|scenario| scenario.key == "sharegpt-13b").expect("it is one of all");
    let requests = scenario.requests(effort.num_requests.min(600), effort.seed);
    let arrivals_s = poisson(requests.len(), OVER_TIME_RATE, effort.seed);
    let timing = scenario.deployment.timing();
    let of = |system| {
        let load = LoadOnSystem {
            scenario,
            system,
            requests: &requests,
            arrivals_s: &arrivals_s,
            block_size: effort.block_size,
            prefix_caching: false,
            timing: &timing,
        };
        (system, simulation::run(&load).over_time)
    };
    [System::ReserveMax, System::ReserveOracle, System::Paged].map(of).to_vec()
}

fn summary(claims: &[claims::ClaimRow]) -> String {
    let num = |verdict| claims.iter().filter(|row| row.verdict == verdict).count();
    format!(
        "{} claims: {} agree, {} differ, {} not run",
        claims.len(),
        num(claims::ClaimVerdict::Agrees),
        num(claims::ClaimVerdict::Differs),
        num(claims::ClaimVerdict::NotRun)
    )
}

/// Processor, cores, memory and operating system, as far as the system says.
fn machine() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let processor = field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| std::env::consts::ARCH.into());
    let memory = field(&read("/proc/meminfo"), "MemTotal")
        .and_then(|total| total.split(' ').next()?.parse::<f64>().ok())
        .map_or(String::new(), |kib| format!(", {:.0} GiB of memory", kib / f64::from(1 << 20)));
    format!("{processor}, {cores} cores{memory}, {}", std::env::consts::OS)
}
