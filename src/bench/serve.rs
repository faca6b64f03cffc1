//! `pagetide bench serve`: measures a server over HTTP, under one or several loads.

use super::client::{BenchTarget, Dialect, HttpTarget, SendTimes, drive};
use super::command_line::without_password;
use super::common::{CommonArgs, resolve, start, subject_in_process, warm_up};
use super::finish::finish;
use super::levels::LevelInProgress;
use super::result::{BenchSetup, Measured};
use super::roofline::Roofline;
use super::samples::MemorySampler;
use super::workload::{WorkItem, WorkloadArgs, parse_positive, poisson_arrivals};
use clap::Args;
use pagetide_api::id::new_id;
use pagetide_base::error::StartError;
use pagetide_config::layers::Origin;
use pagetide_config::{Config, ServerConfig};
use pagetide_http::server;
use pagetide_metrics as metrics;
use pagetide_terminal::progress::RequestProgress;
use serde_json::{Value, json};
use std::process::ExitCode;
use std::time::{Duration, Instant};

#[derive(Args)]
pub struct ServeArgs {
    /// Measure the server at this URL instead of starting one; --model is then the model's name there [default: its
    /// first model], --api-key is the key to send, and server.metrics_key is the key for its metrics
    #[arg(long, value_name = "URL", conflicts_with = "roofline")]
    url: Option<String>,
    /// Number of requests in flight at all times; a list such as 1,4,16 is measured one after the other [default: 16]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: Vec<u32>,
    /// Mean number of requests per second, sent at random times (Poisson) however many are in flight; a list is
    /// measured one after the other
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    #[arg(conflicts_with = "concurrency", value_parser = parse_positive)]
    rate: Vec<f64>,
    /// Send requests at the times in the trace
    #[arg(long, requires = "trace", conflicts_with_all = ["concurrency", "rate"])]
    replay_timestamps: bool,
    /// Measure all loads N times, each time with other prompts of the same lengths, so that bench compare can estimate
    /// the noise
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Use only OpenAI's API: prompts are words instead of token ids, and outputs end when the model ends them. The
    /// result is then approximate
    #[arg(long, requires = "url")]
    plain: bool,
    /// Send chat completions; prompts are then words too
    #[arg(long, requires = "plain")]
    chat: bool,
    /// Use only token ids below N in prompts [default: the size of the model's vocabulary; with --url 30000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    vocab: Option<u32>,
    /// Open a new connection for each request
    #[arg(long)]
    no_keepalive: bool,
    #[command(flatten)]
    pub common: CommonArgs,
}

/// How requests are sent.
#[derive(Clone, Debug, PartialEq)]
enum Load {
    Concurrency(u32),
    Rate(f64),
    Timestamps,
}

impl Load {
    fn describe(&self) -> Value {
        match self {
            Load::Concurrency(concurrency) => json!({ "concurrency": concurrency }),
            Load::Rate(rate) => json!({ "rate_per_s": rate }),
            Load::Timestamps => json!("timestamps"),
        }
    }

    fn arrivals(&self, work: &[WorkItem], seed: u64) -> SendTimes {
        match self {
            Load::Concurrency(concurrency) => SendTimes::Concurrency(*concurrency as usize),
            Load::Rate(rate) => SendTimes::At(poisson_arrivals(work.len(), *rate, seed)),
            Load::Timestamps => SendTimes::At(work.iter().map(|item| item.timestamp).collect()),
        }
    }
}

impl ServeArgs {
    fn loads(&self) -> Vec<Load> {
        match (&self.concurrency[..], &self.rate[..]) {
            _ if self.replay_timestamps => vec![Load::Timestamps],
            ([], []) => vec![Load::Concurrency(16)],
            ([], rates) => rates.iter().copied().map(Load::Rate).collect(),
            (concurrencies, _) => concurrencies.iter().copied().map(Load::Concurrency).collect(),
        }
    }
}

pub fn run(args: &ServeArgs) -> Result<ExitCode, StartError> {
    let resolved = resolve(&args.common)?;
    let keep_alive = !args.no_keepalive;
    let api_key = resolved.config.server.api_keys.first().map(|key| key.key.clone());
    let ServerConfig { metrics_key, admin_key, .. } = &resolved.config.server;
    let metrics_key = [metrics_key, admin_key].into_iter().find(|key| !key.is_empty()).cloned();
    match &args.url {
        Some(url) => actix_web::rt::System::new().block_on(async {
            let named = *resolved.origin("model.path") != Origin::Default;
            let model = named.then(|| resolved.config.model.path.clone());
            let dialect = Dialect { plain: args.plain, chat: args.chat };
            let target = HttpTarget::connect(url, model, api_key, keep_alive).await?;
            let target = HttpTarget { dialect, metrics_key, ..target };
            let subject = json!({"model": target.model, "url": without_password(&target.url)});
            measure_server(args, target, args.vocab.unwrap_or(30_000), subject, None).await
        }),
        None => serve_own(args, resolved.config, (api_key, metrics_key), keep_alive),
    }
}

/// Starts a server on a free port, measures it, and stops it.
fn serve_own(
    args: &ServeArgs,
    mut config: Config,
    (api_key, metrics_key): (Option<String>, Option<String>),
    keep_alive: bool,
) -> Result<ExitCode, StartError> {
    config.server.host = "127.0.0.1".into();
    config.server.port = 0;
    config.server.unix_socket.clear();
    // The own server has no host name, so no certificate fits it, and TLS is not what is measured.
    (config.server.tls_cert, config.server.tls_key) = Default::default();
    // The benchmark reads the metrics of its own server in any case.
    let metrics_key = metrics_key.unwrap_or_else(|| {
        config.server.metrics_key = new_id("metrics");
        config.server.metrics_key.clone()
    });
    if config.metrics.enabled {
        metrics::install();
    }
    let (runtime, roofline) = start(&args.common, &config)?;
    let handle = runtime.handle();
    let (vocab_size, model) = (handle.model().vocab_size, handle.model().served_name.clone());
    let subject = subject_in_process(&runtime);
    let code = actix_web::rt::System::new().block_on(async {
        let listeners = server::listen(&config)?;
        let url = listeners.url()?;
        let server = server::serve(handle, runtime.live_settings(config.clone().into()), &config, listeners, None)?;
        let stopper = server.handle();
        let running = actix_web::rt::spawn(server);
        let target = HttpTarget::connect(&url, Some(model), api_key, keep_alive).await?;
        let target = HttpTarget { metrics_key: Some(metrics_key), ..target };
        let vocab_size = args.vocab.unwrap_or(vocab_size);
        let code = measure_server(args, target, vocab_size, subject, roofline.as_ref()).await;
        stopper.stop(false).await;
        running.abort();
        code
    });
    drop(runtime);
    code
}

/// Of a run. Those of a benchmark with another seed nearby are others: a server may still cache what it was sent.
fn seed_of(seed: u64, run: usize) -> u64 {
    seed.wrapping_add((run as u64) << 32)
}

async fn measure_server(
    args: &ServeArgs,
    target: HttpTarget,
    vocab_size: u32,
    subject: Value,
    roofline: Option<&Roofline>,
) -> Result<ExitCode, StartError> {
    let setup = BenchSetup { subject, is_exact: !args.plain };
    let loads = args.loads();
    let mut levels: Vec<LevelInProgress> = loads.iter().map(|load| LevelInProgress::new(load.describe())).collect();
    // Each run has its own prompts. Otherwise the prefix cache would hold those of another run.
    let work_of = |run: usize| {
        let seed = seed_of(args.common.workload.seed, run);
        let workload = WorkloadArgs { seed, ..args.common.workload.clone() };
        Ok::<_, StartError>((workload.build(64, vocab_size)?, seed))
    };
    let target = BenchTarget::Http(target);
    let BenchTarget::Http(server) = &target else { unreachable!("it was made here") };
    warm_up(&target, args.common.warmup, &work_of(0)?.0).await?;
    roofline.into_iter().for_each(Roofline::reset);
    let (began, mut wall) = (Instant::now(), Duration::ZERO);
    for run in 0..args.rounds as usize * loads.len() {
        let (work, seed) = work_of(run)?;
        let load = &loads[run % loads.len()];
        let sampler = MemorySampler::start(server, began);
        let mut progress = RequestProgress::new(work.len() as u64);
        let (outcomes, took) = drive(&target, &work, &load.arrivals(&work, seed), &mut progress).await;
        levels[run % loads.len()].add_round(outcomes, took, sampler.stop().await);
        wall += took;
    }
    let levels = levels.into_iter().map(LevelInProgress::done).collect();
    let roofline = roofline.map(|roofline| roofline.report(wall.as_secs_f64()));
    finish(&args.common, &Measured { levels, phases: None, roofline }, &setup)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_run_of_another_seed_has_the_same_prompts() {
        let seeds: HashSet<u64> = (0..100).flat_map(|seed| (0..100).map(move |run| seed_of(seed, run))).collect();
        assert_eq!(seeds.len(), 100 * 100);
        assert_eq!(seed_of(7, 0), 7, "one run is what --seed says");
    }
}
