//! `pagetide serve`

use super::signals::{HangUp, HangUps, StopSignals};
use super::supervisor::Supervisor;
use actix_web::dev::ServerHandle;
use pagetide_actors::live_settings::{LiveSettings, Reloaded};
use pagetide_actors::phase::Phase;
use pagetide_actors::runtime::{ModelInfo, Runtime};
use pagetide_base::error::StartError;
use pagetide_config::{Config, LogFormat, ServerConfig, TracingConfig};
use pagetide_http::server::{self, LAST_WORDS, Listeners};
use pagetide_metrics::{self as metrics, vllm::ServedModel};
use pagetide_model::loader::LoadedModel;
use pagetide_telemetry::trace::{TraceOptions, Tracer};
use pagetide_terminal::options::ConfigOptions;
use pagetide_terminal::{log, open_files, output, progress};
use pagetide_text::chat_output::ChatFormat;
use std::fmt::Write;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

pub fn run(options: &ConfigOptions) -> Result<ExitCode, StartError> {
    let resolved = options.resolve()?;
    let config = &resolved.config;
    let log_level = log::init(&config.log)?;
    open_files::ensure(config.server.num_workers())?;
    if config.metrics.enabled {
        metrics::install();
    }
    let system = actix_web::rt::System::new();
    // Before the model is loaded: otherwise SIGHUP would end the process, and the first process of a container would
    // ignore other signals.
    let (hang_ups, mut signals) =
        system.block_on(async { Ok::<_, StartError>((HangUps::listen()?, StopSignals::listen()?)) })?;
    // An occupied address is reported before a large model is loaded.
    let listeners = server::listen(config)?;
    let Some(runtime) = system.block_on(load(config, &mut signals))? else { return Ok(ExitCode::SUCCESS) };
    let loaded = runtime.loaded();
    let model = runtime.handle().model().served_name.clone();
    metrics::build_info(&model, &loaded.device, loaded.dtype.name());
    loaded.weights.formats().iter().for_each(|(format, counted)| metrics::weights_bytes(format, counted.bytes));
    if config.metrics.enabled && config.metrics.vllm_names {
        metrics::vllm::install(&served_model(&runtime, config));
    }
    if config.metrics.enabled && config.metrics.llama_cpp_names {
        metrics::llama_cpp::install();
    }
    let tracer =
        trace_options(&config.tracing).map(|options| Tracer::start(&options, &model)).transpose()?.map(Arc::new);
    let live_settings = runtime.live_settings(resolved.clone());
    live_settings.on_change(move |config| log_level.set(&config.log.level));
    let supervisor = Supervisor::of_environment();
    let ended = system.block_on(async {
        let reloads = reload_on_hang_up(hang_ups, options.clone(), live_settings.clone(), supervisor.clone());
        let reloads = actix_web::rt::spawn(reloads);
        let serving = Serving { runtime, live_settings, listeners, tracer: tracer.clone(), supervisor, signals };
        serving.serve(config, reloads).await
    });
    if let Some(tracer) = tracer {
        tracer.shut_down();
    }
    ended
}

/// Loads the model. `None` if a signal came first.
async fn load(config: &Config, signals: &mut StopSignals) -> Result<Option<Runtime>, StartError> {
    let (tell, loaded) = tokio::sync::oneshot::channel();
    let config = config.clone();
    // There is no receiver if a signal came first.
    let work = move || drop(tell.send(Runtime::start(&config, progress::loading())));
    let thread = std::thread::Builder::new().name("pagetide-load".into()).spawn(work);
    thread.map_err(|error| StartError::new(format!("cannot start a thread to load the model: {error}")))?;
    tokio::select! {
        loaded = loaded => match loaded {
            Ok(loaded) => loaded.map(Some),
            Err(_) => Err(StartError::new("loading the model failed; the reason is in the log above")),
        },
        _ = signals.next() => {
            tracing::info!("stopped before the model was loaded");
            Ok(None)
        }
    }
}

/// The description of the model for metrics under vLLM's names.
fn served_model(runtime: &Runtime, config: &Config) -> ServedModel {
    let loaded = runtime.loaded();
    let pools = &loaded.pools;
    let num_tokens = pools.num_device_blocks * pools.layout.block_size;
    ServedModel {
        name: runtime.handle().model().served_name.clone(),
        max_model_len: loaded.max_model_len,
        cache_config: vec![
            ("block_size", pools.layout.block_size.to_string()),
            ("num_gpu_blocks", pools.num_device_blocks.to_string()),
            ("num_cpu_blocks", pools.num_swap_blocks.to_string()),
            ("kv_cache_size_tokens", num_tokens.to_string()),
            ("kv_cache_max_concurrency", format!("{:.2}", num_tokens as f64 / loaded.max_model_len.max(1) as f64)),
            ("cache_dtype", pools.layout.dtype.name().to_owned()),
            // As in Python.
            ("enable_prefix_caching", if config.cache.enable_prefix_caching { "True" } else { "False" }.to_owned()),
        ],
    }
}

/// Reads the configuration again at each SIGHUP and applies the settings that can change. Returns when a SIGHUP means
/// that the terminal is gone.
async fn reload_on_hang_up(
    mut hang_ups: HangUps,
    options: ConfigOptions,
    live_settings: LiveSettings,
    supervisor: Supervisor,
) {
    while hang_ups.next().await == HangUp::ReadConfig {
        supervisor.reloading();
        reload(&options, &live_settings).await;
        supervisor.ready();
    }
}

async fn reload(options: &ConfigOptions, live_settings: &LiveSettings) {
    let read = match options.resolve() {
        Ok(read) => read,
        Err(StartError(problems)) => {
            metrics::config_changed(false);
            return tracing::error!("SIGHUP: the configuration has mistakes, so nothing has changed: {problems}");
        }
    };
    match live_settings.reload(&read).await {
        Ok(Reloaded { changed, refused }) => {
            for (key, why) in &refused {
                tracing::warn!("SIGHUP: {key} needs a restart: {why}");
            }
            tracing::info!("SIGHUP: the configuration was read again, {} settings have changed", changed.len());
        }
        Err(why) => tracing::error!("SIGHUP: nothing has changed: {why}"),
    }
}

/// `None` if no collector is configured.
fn trace_options(config: &TracingConfig) -> Option<TraceOptions> {
    let TracingConfig { otlp_endpoint, sample_ratio, service_name } = config.clone();
    (!otlp_endpoint.is_empty()).then_some(TraceOptions { otlp_endpoint, sample_ratio, service_name })
}

/// The parts of a running server.
struct Serving {
    runtime: Runtime,
    live_settings: LiveSettings,
    listeners: Listeners,
    tracer: Option<Arc<Tracer>>,
    supervisor: Supervisor,
    signals: StopSignals,
}

impl Serving {
    /// Serves until a signal arrives, or until `reloads` ends because the terminal is gone. Then it drains.
    async fn serve(self, config: &Config, mut reloads: JoinHandle<()>) -> Result<ExitCode, StartError> {
        let Self { runtime, live_settings, listeners, tracer, supervisor, mut signals } = self;
        let (url, admin) = (listeners.url()?, listeners.admin_addr()?);
        let server = server::serve(runtime.handle(), live_settings.clone(), config, listeners, tracer)?;
        let stopper = server.handle();
        let mut server = actix_web::rt::spawn(server);
        announce(runtime.handle().model(), runtime.loaded(), &url, admin, config);
        supervisor.ready();
        let watched = actix_web::rt::spawn(supervisor.clone().prove_alive(live_settings));

        tokio::select! {
            ended = &mut server => {
                let why = match ended {
                    Ok(Ok(())) => "it stopped by itself".into(),
                    Ok(Err(error)) => error.to_string(),
                    Err(error) => error.to_string(),
                };
                return Err(StartError::new(format!("the HTTP server ended: {why}")));
            }
            () = runtime.ended() => {
                end_for_certain();
                // The errors of the requests are being sent to the clients.
                let _ = actix_web::rt::time::timeout(LAST_WORDS, stopper.stop(true)).await;
                return Err(StartError::new("the engine has stopped; the reason is in the log above"));
            }
            _ = signals.next() => {}
            _ = &mut reloads => {}
        }
        // From now on a SIGHUP would tell the supervisor that the server is ready.
        reloads.abort();
        supervisor.stopping();
        tokio::select! {
            // The server keeps answering while the engine drains.
            () = drain(&runtime, &stopper, server) => {}
            signal = signals.next() => {
                tracing::warn!("second signal: ending at once");
                log::finish();
                std::process::exit(128 + signal);
            }
        }
        watched.abort();
        drop(runtime);
        tracing::info!("stopped");
        Ok(ExitCode::SUCCESS)
    }
}

/// Stops in order: first only `/ready` changes, then new requests are refused, then the requests that still run end
/// with an error.
async fn drain(runtime: &Runtime, stopper: &ServerHandle, server: JoinHandle<std::io::Result<()>>) {
    let handle = runtime.handle();
    let ServerConfig { drain_delay_s, drain_timeout_s, .. } = *handle.model().server.get();
    // Without a delay, /ready says no in the same moment as new requests are refused.
    if drain_delay_s > 0 {
        handle.phase().advance(Phase::Leaving);
        tracing::info!("stopping: /ready returns 503, and requests are still accepted for {drain_delay_s} s");
        actix_web::rt::time::sleep(Duration::from_secs(drain_delay_s)).await;
    }
    tracing::info!(
        "stopping: new requests are refused; running requests have {drain_timeout_s} s; a second signal ends the \
         server at once"
    );
    let deadline = Instant::now() + Duration::from_secs(drain_timeout_s);
    if !runtime.drain(Duration::from_secs(drain_timeout_s)).await {
        tracing::warn!("requests still ran after server.drain_timeout_s = {drain_timeout_s} s and were ended");
        handle.phase().advance(Phase::Over);
    }
    // Clients may still read what is ready for them. The server does not wait for those that do not.
    let rest = deadline.saturating_duration_since(Instant::now()).max(LAST_WORDS);
    if actix_web::rt::time::timeout(rest, stopper.stop(true)).await.is_ok() {
        // The admin port has answered until now and also stops.
        let _ = actix_web::rt::time::timeout(LAST_WORDS, server).await;
    }
}

/// Aborts the process if it has not ended some seconds after the last answers. A hung device can block the clean-up of
/// its driver.
fn end_for_certain() {
    let end = || {
        std::thread::sleep(2 * LAST_WORDS);
        std::process::abort();
    };
    if let Err(error) = std::thread::Builder::new().name("pagetide-end".into()).spawn(end) {
        tracing::warn!("ending at once, because no thread can be started to wait: {error}");
        std::process::abort();
    }
}

/// Announces the server: as text for people, as an event for log collectors.
fn announce(model: &ModelInfo, loaded: &LoadedModel, url: &str, admin: Option<SocketAddr>, config: &Config) {
    match config.log.format {
        LogFormat::Human => {
            output::print_aside(start_block(&model.served_name, model.chat_format, loaded, url, admin));
        }
        LogFormat::Json => tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            model = model.served_name,
            chat = model.chat_format.describe(),
            device = loaded.device,
            dtype = loaded.dtype.name(),
            weights = %loaded.weights,
            cache_dtype = loaded.pools.layout.dtype.name(),
            block_size = loaded.pools.layout.block_size,
            num_device_blocks = loaded.pools.num_device_blocks,
            num_swap_blocks = loaded.pools.num_swap_blocks,
            url,
            admin = admin.map(tracing::field::display),
            "serving"
        ),
    }
}

fn start_block(model: &str, chat: ChatFormat, loaded: &LoadedModel, url: &str, admin: Option<SocketAddr>) -> String {
    let layout = &loaded.pools.layout;
    let pool = |num_blocks: usize| {
        let gib = (num_blocks * layout.block_bytes()) as f64 / f64::from(1 << 30);
        format!("{num_blocks} blocks, {} tokens, {gib:.2} GiB", num_blocks * layout.block_size)
    };
    let swap = match loaded.pools.num_swap_blocks {
        0 => "none".into(),
        blocks => pool(blocks),
    };
    let millions = loaded.num_parameters as f64 / 1e6;
    let rows = [
        ("model", format!("{model}, {millions:.1} M parameters, up to {} tokens", loaded.max_model_len)),
        ("chat", chat.describe()),
        ("device", loaded.device.clone()),
        ("dtype", loaded.dtype.name().into()),
        ("weights", if loaded.weights.is_empty() { "none".into() } else { loaded.weights.to_string() }),
        (
            "KV cache",
            format!(
                "{}, {} tokens a block, {}",
                pool(loaded.pools.num_device_blocks),
                layout.block_size,
                layout.dtype.name()
            ),
        ),
        ("swap", swap),
        ("listening", url.to_owned()),
    ];
    let admin = admin.map(|addr| ("admin", format!("http://{addr}")));
    let mut block = format!("Pagetide {}", env!("CARGO_PKG_VERSION"));
    for (name, value) in rows.into_iter().chain(admin) {
        write!(block, "\n  {name:<10} {value}").expect("writing to a String");
    }
    block
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_backend::{DType, KvLayout};
    use pagetide_model::runner::PoolSizes;
    use pagetide_model::spec::Family;
    use pagetide_model::tally::WeightTally;
    use pagetide_text::chat_output::ToolFormat;

    #[test]
    fn the_start_block_gives_the_pools_in_blocks_tokens_and_gib() {
        // A block of 1 MiB.
        let layout =
            KvLayout { num_layers: 16, num_kv_heads: 8, head_dim: 128, block_size: 16, dtype: DType::BF16.into() };
        assert_eq!(layout.block_bytes(), 1 << 20);
        let loaded = LoadedModel {
            device: "cpu (avx512, 4 threads)".into(),
            is_gpu: false,
            arithmetic: "avx512".into(),
            family: Family::Llama,
            dtype: DType::BF16,
            max_model_len: 8192,
            max_num_batched_tokens: 512,
            max_num_seqs: 256,
            num_parameters: 1_234_567_890,
            weights_bytes: 1,
            weights: WeightTally::default(),
            pools: PoolSizes { layout, num_device_blocks: 2048, num_swap_blocks: 0, max_swap_blocks: 0 },
        };
        let chat = ChatFormat { tools: Some(ToolFormat::Llama3Json), reasoning: None };
        let block = start_block("llama", chat, &loaded, "http://127.0.0.1:8000", "127.0.0.1:9000".parse().ok());
        let lines: Vec<&str> = block.lines().skip(1).collect();
        assert_eq!(
            lines,
            [
                "  model      llama, 1234.6 M parameters, up to 8192 tokens",
                "  chat       tool calls llama3_json, reasoning none",
                "  device     cpu (avx512, 4 threads)",
                "  dtype      bfloat16",
                "  weights    none",
                "  KV cache   2048 blocks, 32768 tokens, 2.00 GiB, 16 tokens a block, bfloat16",
                "  swap       none",
                "  listening  http://127.0.0.1:8000",
                "  admin      http://127.0.0.1:9000",
            ]
        );
    }
}
