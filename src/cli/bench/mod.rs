//! `pagetide bench`: how fast the engine, or any OpenAI-compatible server, does a given work.

mod client;
pub mod gpu;
mod memory;
mod planner;
mod replay;
mod report;
mod roofline;
mod workload;

use super::log;
use super::options::ConfigOptions;
use super::progress::{self, RequestProgress};
use crate::actors::runtime::Runtime;
use crate::config::Config;
use crate::config::layers::{Origin, Resolved};
use crate::error::StartError;
use crate::http::server;
use clap::{Args, Subcommand};
use client::{Arrivals, HttpTarget, Target, drive};
use report::{Outcome, PhaseReport, Report};
use roofline::{Roofline, RooflineReport};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use workload::{WorkItem, WorkloadArgs, parse_positive, poisson_arrivals};

#[derive(Subcommand)]
pub enum BenchCommand {
    /// The engine without HTTP, all requests at once: the most it can do
    Throughput {
        #[command(flatten)]
        common: CommonArgs,
    },
    /// The engine without HTTP, one batch after the other: prefill and decoding apart
    Latency {
        /// Requests that run together
        #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
        batch: u32,
        #[command(flatten)]
        common: CommonArgs,
    },
    /// An OpenAI-compatible server over HTTP: its own, or the one at --url
    Serve(ServeArgs),
    /// A GPU: kernels, copies and steps beside what it can do
    ///
    /// The model is Llama 3 8B's shape with random weights. Of the settings, those of the section device count.
    Gpu(gpu::GpuArgs),
    /// Pools, cache and scheduler on a trace, without model and device: what pools of some sizes would have made of it
    ///
    /// Of the settings, those of the sections cache, swap and scheduler count. A step takes what the timing flags say;
    /// their defaults are Llama 3 8B on an H100, from its data sheet.
    Replay(replay::ReplayArgs),
    /// What KV memory is used for, shared and worth: the experiments of the PagedAttention paper, as tables and charts
    ///
    /// Waste by system, blocks saved by sharing, swapping against recomputing, throughput and latency against the size of
    /// the memory, and the swap pool as a second level of the prefix cache. All in this process, one after the other.
    Memory(Box<memory::MemoryArgs>),
}

#[derive(Args)]
pub struct CommonArgs {
    #[command(flatten)]
    workload: WorkloadArgs,
    /// Untimed requests before the benchmark
    #[arg(long, value_name = "N", default_value_t = 2)]
    warmup: usize,
    /// Write the result as JSON too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure what the machine can do, and show how far each phase of the steps is from it (CPU only)
    #[arg(long)]
    roofline: bool,
    #[command(flatten)]
    options: ConfigOptions,
}

#[derive(Args)]
pub struct ServeArgs {
    /// Measure this server instead of starting one; --model is then the model's name there [default: its first], and
    /// --api-key the key to send
    #[arg(long, value_name = "URL", conflicts_with = "roofline")]
    url: Option<String>,
    /// Requests in flight at all times [default: 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: Option<u32>,
    /// Send requests at random, R a second on average (Poisson), whatever is in flight
    #[arg(long, value_name = "R", conflicts_with = "concurrency", value_parser = parse_positive)]
    rate: Option<f64>,
    /// Send requests at the times of the trace
    #[arg(long, requires = "trace", conflicts_with_all = ["concurrency", "rate"])]
    replay_timestamps: bool,
    /// Token ids of prompts are below this [default: the model's own; with --url 30000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    vocab: Option<u32>,
    /// Open a new connection for each request
    #[arg(long)]
    no_keepalive: bool,
    #[command(flatten)]
    common: CommonArgs,
}

/// Exits with 1 if a request failed.
pub fn run(command: BenchCommand) -> Result<ExitCode, StartError> {
    match command {
        BenchCommand::Throughput { common } => throughput(&common),
        BenchCommand::Latency { batch, common } => latency(&common, batch as usize),
        BenchCommand::Serve(args) => serve(&args),
        BenchCommand::Gpu(args) => gpu::run(&args),
        BenchCommand::Replay(args) => replay::run(&args),
        BenchCommand::Memory(args) => memory::run(&args),
    }
}

fn throughput(args: &CommonArgs) -> Result<ExitCode, StartError> {
    in_process(args, 64, async |target, work, progress| {
        let (outcomes, wall) = drive(target, work, &Arrivals::Concurrency(work.len()), progress).await;
        (Report::new(&outcomes, wall), None, json!("all at once"))
    })
}

fn latency(args: &CommonArgs, batch: usize) -> Result<ExitCode, StartError> {
    in_process(args, 8 * batch, async |target, work, progress| {
        let mut batches: Vec<Vec<Outcome>> = Vec::new();
        let mut total = Duration::ZERO;
        for work in work.chunks(batch) {
            let (outcomes, wall) = drive(target, work, &Arrivals::Concurrency(batch), progress).await;
            batches.push(outcomes);
            total += wall;
        }
        (Report::new(&batches.concat(), total), Some(PhaseReport::new(&batches)), json!({ "batch": batch }))
    })
}

/// Runs a benchmark on an engine in this process.
fn in_process(
    args: &CommonArgs,
    default_num: usize,
    measure: impl AsyncFn(&Target, &[WorkItem], &mut RequestProgress) -> (Report, Option<PhaseReport>, Value),
) -> Result<ExitCode, StartError> {
    let mut config = resolve(args)?.config;
    // Nobody is turned away here: all requests are held at once.
    let num = args.workload.num.map_or(default_num, |num| num as usize);
    config.server.max_requests = config.server.max_requests.max(num);
    let (runtime, roofline) = start(args, &config)?;
    let handle = runtime.handle();
    let work = args.workload.build(default_num, handle.model().vocab_size)?;
    let subject = subject_in_process(&runtime);
    let target = Target::InProcess(handle);
    let (report, phases, sending) = actix_web::rt::System::new().block_on(async {
        warm_up(&target, args.warmup, &work).await?;
        roofline.iter().for_each(Roofline::reset);
        Ok::<_, StartError>(measure(&target, &work, &mut RequestProgress::new(work.len() as u64)).await)
    })?;
    drop(runtime);
    let setup = json!({ "subject": subject, "sending": sending });
    let roofline = roofline.map(|roofline| roofline.report(report.wall_s));
    finish(args, &Measured { report, phases, roofline }, &setup)
}

/// An engine in this process, with its steps counted where `--roofline` asks for it.
fn start(args: &CommonArgs, config: &Config) -> Result<(Runtime, Option<Roofline>), StartError> {
    if args.roofline {
        let (runtime, roofline) = Roofline::start(config, progress::loading())?;
        return Ok((runtime, Some(roofline)));
    }
    Ok((Runtime::start(config, progress::loading())?, None))
}

fn serve(args: &ServeArgs) -> Result<ExitCode, StartError> {
    let resolved = resolve(&args.common)?;
    let keep_alive = !args.no_keepalive;
    let api_key = resolved.config.server.api_keys.first().map(|key| key.key.clone());
    match &args.url {
        Some(url) => actix_web::rt::System::new().block_on(async {
            let named = *resolved.origin("model.path") != Origin::Default;
            let model = named.then(|| resolved.config.model.path.clone());
            let target = HttpTarget::connect(url, model, api_key, keep_alive).await?;
            let subject = json!({"model": target.model, "url": target.url});
            measure_server(args, target, args.vocab.unwrap_or(30_000), &subject, None).await
        }),
        None => serve_own(args, resolved.config, api_key, keep_alive),
    }
}

/// Starts a server on a free port, measures it, and stops it.
fn serve_own(
    args: &ServeArgs,
    mut config: Config,
    api_key: Option<String>,
    keep_alive: bool,
) -> Result<ExitCode, StartError> {
    config.server.host = "127.0.0.1".into();
    config.server.port = 0;
    let (runtime, roofline) = start(&args.common, &config)?;
    let handle = runtime.handle();
    let (vocab_size, model) = (handle.model().vocab_size, handle.model().served_name.clone());
    let subject = subject_in_process(&runtime);
    let code = actix_web::rt::System::new().block_on(async {
        let listeners = server::listen(&config)?;
        let url = listeners.url()?;
        let server = server::serve(handle, runtime.tuner(config.clone().into()), &config, listeners, None)?;
        let stopper = server.handle();
        let running = actix_web::rt::spawn(server);
        let target = HttpTarget::connect(&url, Some(model), api_key, keep_alive).await?;
        let vocab_size = args.vocab.unwrap_or(vocab_size);
        let code = measure_server(args, target, vocab_size, &subject, roofline.as_ref()).await;
        stopper.stop(false).await;
        running.abort();
        code
    });
    drop(runtime);
    code
}

async fn measure_server(
    args: &ServeArgs,
    target: HttpTarget,
    vocab_size: u32,
    subject: &Value,
    roofline: Option<&Roofline>,
) -> Result<ExitCode, StartError> {
    let workload = &args.common.workload;
    let work = workload.build(64, vocab_size)?;
    let concurrency = args.concurrency.unwrap_or(16);
    let (arrivals, sending) = match (args.rate, args.replay_timestamps) {
        (Some(rate), _) => {
            (Arrivals::At(poisson_arrivals(work.len(), rate, workload.seed)), json!({ "rate_per_s": rate }))
        }
        (None, true) => (Arrivals::At(work.iter().map(|item| item.timestamp).collect()), json!("timestamps")),
        (None, false) => (Arrivals::Concurrency(concurrency as usize), json!({ "concurrency": concurrency })),
    };
    let target = Target::Http(target);
    warm_up(&target, args.common.warmup, &work).await?;
    roofline.into_iter().for_each(Roofline::reset);
    let (outcomes, wall) = drive(&target, &work, &arrivals, &mut RequestProgress::new(work.len() as u64)).await;
    let setup = json!({ "subject": subject, "sending": sending });
    let report = Report::new(&outcomes, wall);
    let roofline = roofline.map(|roofline| roofline.report(report.wall_s));
    finish(&args.common, &Measured { report, phases: None, roofline }, &setup)
}

fn resolve(args: &CommonArgs) -> Result<Resolved, StartError> {
    let resolved = args.options.resolve()?;
    log::init(&resolved.config.log)?;
    Ok(resolved)
}

/// A few short requests, so that the first measured one does not pay for first times. They share no block of tokens
/// with the work: reversed prompts.
async fn warm_up(target: &Target, num: usize, work: &[WorkItem]) -> Result<(), StartError> {
    for item in work.iter().cycle().take(num) {
        let prompt = item.prompt.iter().rev().take(16).copied().collect();
        let outcome = target.request(&WorkItem { prompt, output_tokens: 4, ..item.clone() }).await;
        if let Some(error) = outcome.error {
            return Err(StartError::new(format!("the first request failed, so the benchmark was not run: {error}")));
        }
    }
    Ok(())
}

fn subject_in_process(runtime: &Runtime) -> Value {
    let loaded = runtime.loaded();
    json!({
        "model": runtime.handle().model().served_name,
        "device": loaded.device,
        "dtype": loaded.dtype.name(),
        "block_size": loaded.pools.layout.block_size,
        "num_device_blocks": loaded.pools.num_device_blocks,
        "num_swap_blocks": loaded.pools.num_swap_blocks,
    })
}

/// What a benchmark has to say.
struct Measured {
    report: Report,
    phases: Option<PhaseReport>,
    roofline: Option<RooflineReport>,
}

/// Prints the result, and writes it where `--json` says.
fn finish(args: &CommonArgs, measured: &Measured, setup: &Value) -> Result<ExitCode, StartError> {
    let Measured { report, phases, roofline } = measured;
    print!("{report}");
    if let Some(phases) = phases {
        print!("\n{phases}");
    }
    if let Some(roofline) = roofline {
        print!("\n{roofline}");
    }
    if let Some(path) = &args.json {
        write_json(path, &to_json(args, measured, setup, command_line(std::env::args())))?;
    }
    Ok(if report.failed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Where `--json` says.
fn write_json(path: &Path, result: &Value) -> Result<(), StartError> {
    let text = serde_json::to_string_pretty(result).expect("a Value can be written") + "\n";
    std::fs::write(path, text).map_err(|error| StartError::new(format!("--json {}: {error}", path.display())))
}

fn to_json(args: &CommonArgs, measured: &Measured, setup: &Value, command: String) -> Value {
    let now = time::OffsetDateTime::now_utc();
    json!({
        "command": command,
        "version": env!("CARGO_PKG_VERSION"),
        "date": now.format(&time::format_description::well_known::Rfc3339).expect("the year has four digits"),
        "subject": setup["subject"],
        "workload": args.workload,
        "sending": setup["sending"],
        "result": measured.report,
        "phases": measured.phases,
        "roofline": measured.roofline,
    })
}

/// The command as it was given, without keys.
fn command_line(args: impl Iterator<Item = String>) -> String {
    let mut secret_follows = false;
    let shown = args.map(|arg| {
        let secret = std::mem::replace(&mut secret_follows, arg == "--api-key");
        let with_key = arg.starts_with("--api-key=") || arg.starts_with("server.api_keys=");
        match arg.split_once('=') {
            _ if secret => "(secret)".into(),
            Some((flag, _)) if with_key || arg.starts_with("--set=server.api_keys") => format!("{flag}=(secret)"),
            _ => arg,
        }
    });
    shown.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(subcommand)]
        command: BenchCommand,
    }

    fn parse(line: &str) -> Result<BenchCommand, clap::Error> {
        Line::try_parse_from(["bench"].into_iter().chain(line.split_whitespace())).map(|line| line.command)
    }

    #[test]
    fn ways_to_send_exclude_each_other() {
        assert!(parse("serve --rate 3 --concurrency 4").is_err());
        assert!(parse("serve --replay-timestamps").is_err(), "needs a trace");
        assert!(parse("serve --replay-timestamps --trace t.csv").is_ok());
        assert!(parse("serve --replay-timestamps --trace t.csv --rate 1").is_err());
        assert!(parse("throughput --trace t.csv --fixed 1:1").is_err());
        assert!(parse("serve --rate 0").is_err());
        assert!(parse("serve --url http://h --roofline").is_err(), "another server's steps cannot be counted");
    }

    #[test]
    fn the_json_says_what_was_run_and_keeps_no_key() {
        let Ok(BenchCommand::Throughput { common }) = parse("throughput --fixed 8:2 --num 3") else { panic!() };
        let report = Report::new(&[Outcome { output_tokens: 2, ..Outcome::default() }], Duration::from_secs(1));
        let line = "pagetide bench serve --api-key k1 --api-key=k2 --set server.api_keys=k3 --port 1";
        let command = command_line(line.split(' ').map(str::to_owned));
        let measured = Measured { report, phases: None, roofline: None };
        let setup = json!({"subject": {"model": "m"}, "sending": {"batch": 1}});
        let result = to_json(&common, &measured, &setup, command);
        assert_eq!(
            result["command"],
            "pagetide bench serve --api-key (secret) --api-key=(secret) --set server.api_keys=(secret) --port 1"
        );
        assert_eq!(result["workload"]["fixed"], json!([8, 2]));
        assert_eq!((&result["result"]["out_tok_per_s"], &result["subject"]["model"]), (&json!(2.0), &json!("m")));
        assert_eq!(result["sending"]["batch"], 1);
        let date = result["date"].as_str().unwrap();
        assert!(date.starts_with("20") && date.ends_with('Z'), "{date}");
        assert_eq!(result["version"], env!("CARGO_PKG_VERSION"));
    }
}
