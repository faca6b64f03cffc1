//! `pagetide bench`: measures the engine, or any OpenAI-compatible server, under a given load.

pub mod chart;
pub mod client;
mod command_line;
mod common;
mod compare;
mod comparison;
mod finish;
pub mod gpu;
mod html;
mod levels;
mod memory;
mod paper;
mod replay;
mod report;
mod result;
mod roofline;
mod samples;
mod serve;
mod simulated;
mod workload;

use clap::Subcommand;
use client::{BenchTarget, SendTimes, drive};
use common::{CommonArgs, resolve, start, subject_in_process, warm_up};
use compare::CompareArgs;
use finish::finish;
use levels::LevelInProgress;
use pagetide_base::error::StartError;
use pagetide_terminal::progress::RequestProgress;
use report::{PhaseReport, RequestOutcome};
use result::{BenchSetup, Measured};
use roofline::Roofline;
use serde_json::{Value, json};
use serve::ServeArgs;
use std::process::ExitCode;
use std::time::Duration;
use workload::WorkItem;

#[derive(Subcommand)]
pub enum BenchCommand {
    /// Measure the maximum throughput of the engine: no HTTP, all requests at once
    Throughput {
        #[command(flatten)]
        common: CommonArgs,
    },
    /// Measure prefill and decode times of the engine: no HTTP, one batch after the other
    Latency {
        /// Number of requests in a batch
        #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
        batch: u32,
        #[command(flatten)]
        common: CommonArgs,
    },
    /// Measure an OpenAI-compatible server over HTTP: its own, or the one at --url
    Serve(Box<ServeArgs>),
    /// Compare two results written with --json, and tell differences from noise
    Compare(CompareArgs),
    /// Measure kernels, copies and steps of a GPU against its peak performance
    ///
    /// The model has the shape of Llama 3 8B and random weights. Only settings of the section `device` apply.
    Gpu(gpu::GpuArgs),
    /// Simulate KV pools, prefix cache and scheduler on a trace, without a model or device
    ///
    /// Only settings of the sections `cache`, `swap` and `scheduler` apply. The timing flags give the duration of a
    /// step; their defaults are those of Llama 3 8B on an H100, from its data sheet.
    Replay(replay::BenchReplayArgs),
    /// Run the experiments of the PagedAttention paper on KV memory, with tables and charts
    ///
    /// The experiments: wasted memory by system, blocks saved by sharing, swapping against recomputing, throughput and
    /// latency by memory size, and the swap pool as a second level of the prefix cache. They run in this process, one
    /// after the other.
    Memory(Box<memory::MemoryArgs>),
    /// Compare the claims of the PagedAttention paper with what is found here, as one HTML report
    ///
    /// Static batches, dynamic batches and reservations of three kinds run in front of the same engine as the paged
    /// server: by a simulated clock for the paper's models and GPUs, and with the configured model on this machine. A
    /// run that was cut goes on where it was.
    Paper(Box<paper::PaperArgs>),
}

/// The exit status is 1 if a request failed.
pub fn run(command: BenchCommand) -> Result<ExitCode, StartError> {
    match command {
        BenchCommand::Throughput { common } => throughput(&common),
        BenchCommand::Latency { batch, common } => latency(&common, batch as usize),
        BenchCommand::Serve(args) => serve::run(&args),
        BenchCommand::Compare(args) => compare::run(&args),
        BenchCommand::Gpu(args) => gpu::run(&args),
        BenchCommand::Replay(args) => replay::run(&args),
        BenchCommand::Memory(args) => memory::run(&args),
        BenchCommand::Paper(args) => paper::run(&args),
    }
}

fn throughput(args: &CommonArgs) -> Result<ExitCode, StartError> {
    in_process(args, 64, async |target, work, progress| {
        let (outcomes, wall) = drive(target, work, &SendTimes::Concurrency(work.len()), progress).await;
        (outcomes, wall, None, json!("all at once"))
    })
}

fn latency(args: &CommonArgs, batch: usize) -> Result<ExitCode, StartError> {
    in_process(args, 8 * batch, async |target, work, progress| {
        let mut batches: Vec<Vec<RequestOutcome>> = Vec::new();
        let mut total = Duration::ZERO;
        for work in work.chunks(batch) {
            let (outcomes, wall) = drive(target, work, &SendTimes::Concurrency(batch), progress).await;
            batches.push(outcomes);
            total += wall;
        }
        (batches.concat(), total, Some(PhaseReport::new(&batches)), json!({ "batch": batch }))
    })
}

/// Runs a benchmark on an engine in this process.
fn in_process(
    args: &CommonArgs,
    default_num: usize,
    measure: impl AsyncFn(
        &BenchTarget,
        &[WorkItem],
        &mut RequestProgress,
    ) -> (Vec<RequestOutcome>, Duration, Option<PhaseReport>, Value),
) -> Result<ExitCode, StartError> {
    let mut config = resolve(args)?.config;
    // No request must be refused, so all of them are held at once.
    let num = args.workload.num.map_or(default_num, |num| num as usize);
    config.server.max_requests = config.server.max_requests.max(num);
    let (runtime, roofline) = start(args, &config)?;
    let handle = runtime.handle();
    let work = args.workload.build(default_num, handle.model().vocab_size)?;
    let subject = subject_in_process(&runtime);
    let target = BenchTarget::InProcess(handle);
    let (outcomes, wall, phases, sending) = actix_web::rt::System::new().block_on(async {
        warm_up(&target, args.warmup, &work).await?;
        roofline.iter().for_each(Roofline::reset);
        Ok::<_, StartError>(measure(&target, &work, &mut RequestProgress::new(work.len() as u64)).await)
    })?;
    drop(runtime);
    let roofline = roofline.map(|roofline| roofline.report(wall.as_secs_f64()));
    let mut level = LevelInProgress::new(sending);
    level.add_round(outcomes, wall, Vec::new());
    finish(args, &Measured { levels: vec![level.done()], phases, roofline }, &BenchSetup { subject, is_exact: true })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct BenchLine {
        #[command(subcommand)]
        command: BenchCommand,
    }

    pub fn parse(line: &str) -> Result<BenchCommand, clap::Error> {
        BenchLine::try_parse_from(["bench"].into_iter().chain(line.split_whitespace())).map(|line| line.command)
    }

    #[test]
    fn ways_to_send_exclude_each_other() {
        assert!(parse("serve --rate 3 --concurrency 4").is_err());
        assert!(parse("serve --replay-timestamps").is_err(), "needs a trace");
        assert!(parse("serve --replay-timestamps --trace t.csv").is_ok());
        assert!(parse("serve --replay-timestamps --trace t.csv --rate 1").is_err());
        assert!(parse("throughput --trace t.csv --fixed 1:1").is_err());
        assert!(parse("serve --rate 0").is_err());
        assert!(parse("serve --concurrency 1,4,16").is_ok() && parse("serve --concurrency 1,0").is_err());
        assert!(parse("serve --rate 0.5,2 --rounds 3").is_ok() && parse("serve --rate 1,x").is_err());
        assert!(parse("serve --plain").is_err(), "its own server needs no words");
        assert!(parse("serve --url http://h --chat").is_err() && parse("serve --url http://h --plain --chat").is_ok());
        assert!(parse("serve --url http://h --roofline").is_err(), "another server's steps cannot be counted");
    }
}
