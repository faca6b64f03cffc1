//! `pagetide serve`

use super::options::ConfigOptions;
use super::seam::{HttpServer, Runtime, RuntimeSummary};
use super::signals::StopSignals;
use super::{log, progress};
use crate::config::{Config, LogFormat};
use crate::error::StartError;
use crate::metrics;
use std::fmt::Write;
use std::net::{SocketAddr, TcpListener};
use std::process::ExitCode;
use std::time::Duration;

pub fn run(options: &ConfigOptions) -> Result<ExitCode, StartError> {
    let config = options.resolve()?.config;
    log::init(&config.log)?;
    if config.metrics.enabled {
        metrics::install();
    }
    // Better said before a large model is loaded than after.
    check_address(&config)?;
    let runtime = Runtime::start(config.clone(), progress::loading())?;
    actix_web::rt::System::new().block_on(serve(runtime, &config))
}

fn check_address(config: &Config) -> Result<(), StartError> {
    let (host, port) = (config.server.host.as_str(), config.server.port);
    match TcpListener::bind((host, port)) {
        Ok(_) => Ok(()),
        Err(error) => Err(StartError::new(format!(
            "cannot listen on {host}:{port}: {error} (set server.host and server.port, or --host and --port)"
        ))),
    }
}

/// Serves until a signal, then finishes what runs.
async fn serve(runtime: Runtime, config: &Config) -> Result<ExitCode, StartError> {
    let mut signals = StopSignals::listen()?;
    let server = HttpServer::bind(runtime.handle(), config)?;
    announce(&runtime.handle().model().served_name, &runtime.summary(), &server.addrs(), config);
    let stopper = server.stopper();
    let running = server.run();
    tokio::pin!(running);

    tokio::select! {
        ended = &mut running => {
            let why = ended.map_or_else(|error| error.to_string(), |()| "it stopped by itself".into());
            return Err(StartError::new(format!("the HTTP server ended: {why}")));
        }
        _ = signals.next() => {}
    }
    let timeout_s = config.server.drain_timeout_s;
    tracing::info!(
        "stopping: nothing new is admitted; running requests have {timeout_s} s; a second signal ends at once"
    );
    let drain = async {
        if !runtime.drain(Duration::from_secs(timeout_s)).await {
            tracing::warn!("requests were still running after server.drain_timeout_s = {timeout_s} s: they are ended");
        }
        stopper.stop(true).await;
    };
    tokio::select! {
        // The server answers on while the engine drains.
        _ = async { tokio::join!(drain, &mut running) } => {}
        signal = signals.next() => {
            tracing::warn!("a second signal: ending at once");
            std::process::exit(128 + signal);
        }
    }
    runtime.shutdown();
    tracing::info!("stopped");
    Ok(ExitCode::SUCCESS)
}

/// Says what is served, where and with what: people get a block of text, log collectors an event.
fn announce(model: &str, summary: &RuntimeSummary, addrs: &[SocketAddr], config: &Config) {
    match config.log.format {
        LogFormat::Human => println!("{}", start_block(model, summary, addrs)),
        LogFormat::Json => tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            model,
            device = summary.device,
            isa = summary.isa,
            threads = summary.threads,
            dtype = summary.dtype,
            block_size = summary.block_size,
            num_device_blocks = summary.num_device_blocks,
            num_swap_blocks = summary.num_swap_blocks,
            url = urls(addrs),
            "serving"
        ),
    }
}

fn start_block(model: &str, summary: &RuntimeSummary, addrs: &[SocketAddr]) -> String {
    let pool = |num_blocks: usize| {
        let gib = (num_blocks * summary.block_bytes) as f64 / f64::from(1 << 30);
        format!(
            "{num_blocks} blocks of {}, {} tokens, {gib:.2} GiB",
            summary.block_size,
            num_blocks * summary.block_size
        )
    };
    let swap = if summary.num_swap_blocks == 0 { "none".into() } else { pool(summary.num_swap_blocks) };
    let threads = if summary.threads == 1 { "1 thread".into() } else { format!("{} threads", summary.threads) };
    let rows = [
        ("model", format!("{model} ({})", summary.dtype)),
        ("device", format!("{}, {}, {threads}", summary.device, summary.isa)),
        ("KV cache", pool(summary.num_device_blocks)),
        ("swap", swap),
        ("listening", urls(addrs)),
    ];
    let mut block = format!("Pagetide {}", env!("CARGO_PKG_VERSION"));
    for (name, value) in rows {
        write!(block, "\n  {name:<10} {value}").expect("writing to a String");
    }
    block
}

fn urls(addrs: &[SocketAddr]) -> String {
    addrs.iter().map(|addr| format!("http://{addr}")).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_block_gives_the_pools_in_blocks_tokens_and_gib() {
        let summary = RuntimeSummary {
            device: "cpu".into(),
            isa: "avx512".into(),
            threads: 4,
            dtype: "bfloat16",
            block_size: 16,
            block_bytes: 1 << 20,
            num_device_blocks: 2048,
            num_swap_blocks: 0,
        };
        let block = start_block("demo", &summary, &["127.0.0.1:8000".parse().unwrap()]);
        let lines: Vec<&str> = block.lines().skip(1).collect();
        assert_eq!(
            lines,
            [
                "  model      demo (bfloat16)",
                "  device     cpu, avx512, 4 threads",
                "  KV cache   2048 blocks of 16, 32768 tokens, 2.00 GiB",
                "  swap       none",
                "  listening  http://127.0.0.1:8000",
            ]
        );
    }

    #[test]
    fn a_taken_port_is_reported_with_what_to_change() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut config = Config::default();
        config.server.port = taken.local_addr().unwrap().port();
        let error = check_address(&config).unwrap_err().to_string();
        assert!(error.contains("--port") && error.contains(&config.server.port.to_string()), "{error}");
    }
}
