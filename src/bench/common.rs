//! What several benchmarks have in common: their flags, the engine in this process, and the warm-up.

use super::client::BenchTarget;
use super::roofline::Roofline;
use super::workload::{WorkItem, WorkloadArgs};
use clap::Args;
use pagetide_actors::runtime::Runtime;
use pagetide_base::error::StartError;
use pagetide_config::Config;
use pagetide_config::layers::Resolved;
use pagetide_terminal::options::ConfigOptions;
use pagetide_terminal::{log, open_files, progress};
use serde_json::{Value, json};
use std::path::PathBuf;

#[derive(Args)]
pub struct CommonArgs {
    #[command(flatten)]
    pub workload: WorkloadArgs,
    /// Number of requests before the benchmark that are not measured
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub warmup: usize,
    /// Also write the result as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Also write a report with charts as one self-contained HTML file
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Also measure the peak performance of the machine and compare each phase of a step with it (CPU only)
    #[arg(long)]
    pub roofline: bool,
    #[command(flatten)]
    pub options: ConfigOptions,
}

/// Starts an engine in this process, which counts the operations of its steps with `--roofline`.
pub fn start(args: &CommonArgs, config: &Config) -> Result<(Runtime, Option<Roofline>), StartError> {
    if args.roofline {
        let (runtime, roofline) = Roofline::start(config, progress::loading())?;
        return Ok((runtime, Some(roofline)));
    }
    Ok((Runtime::start(config, progress::loading())?, None))
}

pub fn resolve(args: &CommonArgs) -> Result<Resolved, StartError> {
    let resolved = args.options.resolve()?;
    log::init(&resolved.config.log)?;
    open_files::ensure(resolved.config.server.num_workers())?;
    Ok(resolved)
}

/// Sends a few short requests, so that the first measured request does not pay for one-time work. Their prompts are
/// reversed, so they share no block with the measured requests.
pub async fn warm_up(target: &BenchTarget, num: usize, work: &[WorkItem]) -> Result<(), StartError> {
    for item in work.iter().cycle().take(num) {
        let prompt = item.prompt.iter().rev().take(16).copied().collect();
        let outcome = target.request(&WorkItem { prompt, output_tokens: 4, ..item.clone() }).await;
        if let Some(error) = outcome.error {
            return Err(StartError::new(format!("the first request failed, so the benchmark was not run: {error}")));
        }
    }
    Ok(())
}

pub fn subject_in_process(runtime: &Runtime) -> Value {
    let loaded = runtime.loaded();
    json!({
        "model": runtime.handle().model().served_name,
        "device": loaded.device,
        "dtype": loaded.dtype.name(),
        "cache_dtype": loaded.pools.layout.dtype.name(),
        "block_size": loaded.pools.layout.block_size,
        "num_device_blocks": loaded.pools.num_device_blocks,
        "num_swap_blocks": loaded.pools.num_swap_blocks,
    })
}
