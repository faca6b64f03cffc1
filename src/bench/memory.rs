//! `pagetide bench memory`: the experiments of the PagedAttention paper (Kwon et al., "Efficient Memory Management for
//! Large Language Model Serving with PagedAttention", SOSP 2023), as tables and charts in a folder.
//!
//! Waste and sharing use the scheduler and the block pool without actors or a clock. The others run the configured
//! model on its device, in this process.

pub mod allocators;
pub mod beams;
pub mod block_meter;
pub mod layout;
pub mod lengths;
pub mod load;
pub mod model;
pub mod model_shape;
pub mod output;
mod pressure;
mod pressure_report;
mod pressure_result;
mod second_level;
pub mod sharing;
pub mod swap;
pub mod waste;

use super::workload::WorkloadArgs;
use clap::{Args, ValueEnum};
use lengths::{ALPACA, Dataset, Lengths, SHAREGPT};
use output::{ResultFolder, Section};
use pagetide_base::error::StartError;
use pagetide_config::Config;
use pagetide_terminal::log;
use pagetide_terminal::options::ConfigOptions;
use pressure::PressureArgs;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Args)]
pub struct MemoryArgs {
    /// Folder for memory.md, memory.json and the charts (SVG); it is created if necessary
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Run only these experiments [default: all, or only layout with --model-config]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_enum)]
    only: Vec<Experiment>,
    /// waste: size of the KV memory in tokens [default: 8 times the maximum length]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    kv_tokens: Option<u64>,
    /// waste and swap: block sizes in tokens
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "8,16,32,64,128,256",
          value_parser = clap::value_parser!(u16).range(1..=256))]
    block_sizes: Vec<u16>,
    /// swap: length of the sequence in tokens
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    swap_length: u32,
    /// second-level: length of the prefix in tokens [default: 4096, or the maximum that fits the model]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    prefix: Option<u32>,
    /// layout: config.json of other models, without weights
    #[arg(long, value_name = "FILE,...", value_delimiter = ',')]
    model_config: Vec<PathBuf>,
    /// layout: memory of the device for those models, in GB
    #[arg(long, value_name = "GB", default_value_t = 40.0, value_parser = super::workload::parse_positive)]
    device_gb: f64,
    #[command(flatten)]
    pressure: PressureArgs,
    /// pressure: number of requests before each run that are not measured
    #[arg(long, value_name = "N", default_value_t = 2)]
    warmup: usize,
    #[command(flatten)]
    workload: WorkloadArgs,
    #[command(flatten)]
    options: ConfigOptions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Experiment {
    /// KV bytes by model, and what a device's memory holds, from configurations alone
    Layout,
    /// KV memory that holds no token, and number of requests that fit, by system
    Waste,
    /// Blocks saved by sharing between parallel samples, beams and prefixes
    Sharing,
    /// Swapping against recomputing, by block size
    Swap,
    /// Throughput and latency by size of the KV memory
    Pressure,
    /// Fetching a prefix from the swap pool against computing it
    SecondLevel,
}

/// Default number of requests of `waste`, unless a trace has fewer.
const WASTE_REQUESTS: usize = 4_000;
/// Default number of requests of `sharing`.
const SHARING_REQUESTS: usize = 400;
/// Maximum number of requests with beam search by a model.
const BEAM_REQUESTS: usize = 32;

pub fn run(args: &MemoryArgs) -> Result<ExitCode, StartError> {
    let config = args.options.resolve()?.config;
    log::init(&config.log)?;
    pagetide_terminal::open_files::ensure(0)?;
    let experiments = match (&args.only[..], args.model_config.is_empty()) {
        ([], true) => Experiment::value_variants(),
        ([], false) => &[Experiment::Layout],
        (only, _) => only,
    };
    let mut folder = ResultFolder::create(&args.out, super::command_line::command_line(std::env::args()))?;
    for experiment in experiments {
        let section = args.measure(*experiment, &config)?;
        pagetide_terminal::output::print(format!("{section}\n"))?;
        folder.add(&section)?;
    }
    Ok(ExitCode::SUCCESS)
}

impl MemoryArgs {
    fn measure(&self, experiment: Experiment, config: &Config) -> Result<Section, StartError> {
        let seed = self.workload.seed;
        let num = |default| self.workload.num.map_or(default, |num| num as usize);
        match experiment {
            Experiment::Layout => Ok(layout::section(&layout::layouts(&self.model_config, self.device_gb)?)),
            Experiment::Waste => self.waste(config),
            Experiment::Sharing => {
                let num_requests = num(SHARING_REQUESTS);
                let num_beam_requests = num_requests.min(BEAM_REQUESTS);
                sharing::measure(&sharing::SharingSetup { config, num_requests, num_beam_requests, seed })
            }
            Experiment::Swap => {
                let length = self.swap_length as usize;
                swap::measure(&swap::SwapSetup { config, block_sizes: &self.block_sizes(), length, seed })
            }
            Experiment::Pressure => {
                let mut workload = self.workload.clone();
                if workload.trace.is_none() {
                    workload.fixed = workload.fixed.or(Some((128, 256)));
                }
                let (args, warmup) = (&self.pressure, self.warmup);
                pressure::measure(&pressure::PressureSetup { config, args, workload: &workload, warmup })
            }
            Experiment::SecondLevel => {
                let prefix = self.prefix.map(|prefix| prefix as usize);
                let rounds = self.pressure.rounds(5);
                second_level::measure(&second_level::SecondLevelSetup { config, prefix, rounds, seed })
            }
        }
    }

    /// Of the given work, or of both data sets.
    fn waste(&self, config: &Config) -> Result<Section, StartError> {
        let max_len = config.model.max_model_len.map(|len| len as usize);
        let num = self.workload.num.map_or(WASTE_REQUESTS, |num| num as usize);
        if self.workload.trace.is_none() && self.workload.fixed.is_none() {
            let max_len = max_len.unwrap_or(sharing::MAX_LEN);
            let of = |dataset: Dataset, slug| {
                self.waste_setup(dataset.name.into(), slug, dataset.sample(num, self.workload.seed, max_len), max_len)
            };
            return waste::measure(&[of(SHAREGPT, "sharegpt")?, of(ALPACA, "alpaca")?]);
        }
        let lengths = self.workload.lengths(num)?;
        let requests: Vec<Lengths> = lengths.into_iter().map(|(prompt, output)| Lengths { prompt, output }).collect();
        let longest = requests.iter().map(Lengths::total).max().unwrap_or(1);
        let max_len = max_len.unwrap_or(longest.next_power_of_two());
        if longest > max_len {
            return Err(StartError::new(format!(
                "model.max_model_len: {max_len} is too short for the longest request, of {longest} tokens"
            )));
        }
        let name = |path: &PathBuf| path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let source = self.workload.trace.as_ref().map_or("fixed lengths".into(), name);
        waste::measure(&[self.waste_setup(source, "workload", requests, max_len)?])
    }

    fn waste_setup(
        &self,
        source: String,
        slug: &'static str,
        requests: Vec<Lengths>,
        max_model_len: usize,
    ) -> Result<waste::WasteSetup, StartError> {
        let block_sizes = self.block_sizes();
        let num_slots = self.kv_tokens.map_or(8 * max_model_len, |tokens| tokens as usize);
        let least = max_model_len + block_sizes.iter().max().unwrap_or(&0);
        if num_slots < least {
            return Err(StartError::new(format!(
                "--kv-tokens: {num_slots} is out of range: at least {least}, a request of the maximum length and a block"
            )));
        }
        Ok(waste::WasteSetup { requests, source, slug, max_model_len, num_slots, block_sizes })
    }

    fn block_sizes(&self) -> Vec<usize> {
        self.block_sizes.iter().copied().map(usize::from).collect()
    }
}
