//! `pagetide bench gpu`: measures kernels, copies and whole steps against the GPU's peak performance.
//!
//! Everything is measured twice over or more and the median kept, on random numbers that are larger than the caches.
//! What reads or writes memory is held against the bandwidth of a plain copy, measured in the same run.

mod figures;
mod kernels;
mod sampling;
mod steps;

use clap::Args;
pub use figures::{DeviceOpener, Figure, Goal, Sizes};
use pagetide_backend::cuda::driver;
use pagetide_base::error::StartError;
use pagetide_terminal::log;
use pagetide_terminal::options::ConfigOptions;
use pagetide_terminal::output;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Args)]
pub struct GpuArgs {
    /// Measure only kernels and copies, no whole model
    #[arg(long)]
    quick: bool,
    /// Block sizes to measure
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [16, 8, 32, 64, 128])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=256))]
    block_sizes: Vec<u32>,
    /// Also write the figures as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure nothing, but run one decode step of N sequences between cuProfilerStart and cuProfilerStop, for a
    /// profiler that waits for these: `ncu --profile-from-start off`, `nsys profile --capture-range cudaProfilerApi`
    #[arg(long, value_name = "N", conflicts_with_all = ["quick", "json"])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1024))]
    profile_step: Option<u32>,
    #[command(flatten)]
    options: ConfigOptions,
}

const HEADER: &str = "| measure | block size | value | at most | share | goal |\n|---|---|---|---|---|---|";

pub fn run(args: &GpuArgs) -> Result<ExitCode, StartError> {
    let config = args.options.resolve()?.config;
    log::init(&config.log)?;
    let gpu = driver::find(&config.device.driver_options())?;
    let block_sizes = args.block_sizes.iter().map(|size| *size as usize).collect();
    let mut sizes = Sizes { block_sizes, ..Sizes::full() };
    if let Some(batch) = args.profile_step {
        profile_step(&gpu.opener(), &sizes, batch as usize)?;
        let told = format!("profiled a decode step of {batch} sequences after {} tokens each\n", sizes.context);
        return output::print(told);
    }
    if args.quick {
        sizes.model = None;
    }
    let mut figures = Vec::new();
    let mut printed = output::print(format!("{HEADER}\n"));
    measure(&gpu.opener(), &sizes, &mut |figure| {
        if printed.is_ok() {
            printed = output::print(format!("{figure}\n"));
        }
        figures.push(figure);
    })?;
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&figures).expect("figures can be written") + "\n";
        std::fs::write(path, text).map_err(|error| StartError::new(format!("--json {}: {error}", path.display())))?;
    }
    printed
}

/// Runs one decode step of `batch` sequences, with the first of the block sizes, where a profiler sees it alone.
pub fn profile_step(open: &DeviceOpener, sizes: &Sizes, batch: usize) -> Result<(), StartError> {
    let model = sizes.model.expect("there is a model to run a step of");
    steps::profile(open, model, sizes, batch)
}

/// Measures everything; `report` hears each figure when it is there.
pub fn measure(open: &DeviceOpener, sizes: &Sizes, report: &mut dyn FnMut(Figure)) -> Result<(), StartError> {
    let bandwidths = kernels::copies(&open()?, sizes, report)?;
    kernels::products(&open()?, sizes, &bandwidths, report)?;
    kernels::fp8_products(&open()?, sizes, report)?;
    kernels::experts(&open()?, sizes, report)?;
    sampling::measure(&open()?, sizes, &bandwidths, report)?;
    for block_size in &sizes.block_sizes {
        kernels::attention(&open()?, sizes, *block_size, &bandwidths, report)?;
        kernels::swap(&open()?, sizes, *block_size, &bandwidths, report)?;
        if let Some(model) = sizes.model {
            steps::measure(open, model, sizes, *block_size, &bandwidths, report)?;
        }
    }
    Ok(())
}
