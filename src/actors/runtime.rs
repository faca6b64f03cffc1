//! The running engine: the wiring of the actors, and the handle for all callers.

use crate::block_allocator::BlockAllocator;
use crate::engine_config::{eviction_policy, scheduler_config};
use crate::executor::ModelExecutor;
use crate::intake::{IntakeLimits, RequestIntake};
use crate::live_settings::{LiveSettings, SettingsUsers};
use crate::messages::{
    Accepted, AskSwapPool, Caller, FailNextStep, FlushCaches, Look, SetPaused, Submit, TakeRecording, Tune,
};
use crate::observer::RequestObserver;
use crate::phase::{LivePhase, Phase};
use crate::places::Places;
use crate::recordings::{self, Recordings};
use crate::scheduler::{self, SchedulerActor};
use crate::slots::file::KvFormat;
use crate::slots::{self, SlotKeeper, SlotSettings};
use crate::snapshot::Snapshot;
use crate::swap_pool::SwapPool;
use crate::text_files::Text;
use crate::under_way::RequestsUnderWay;
use crate::workers::Workers;
use actix::{Actor, Addr, Arbiter, Recipient, System};
use pagetide_api::live_server::LiveServer;
pub use pagetide_api::model_info::ModelInfo;
use pagetide_api::request::{ApiRequest, PromptRequest, SlotChoice};
use pagetide_backend::profile::Profile;
use pagetide_base::error::{ApiError, StartError};
use pagetide_config::layers::Resolved;
use pagetide_config::{self as config, Config, OnFailure, RecorderConfig};
use pagetide_engine::bill::Tenant;
use pagetide_engine::prefix_cache::EvictionPolicy;
use pagetide_engine::scheduler::{Scheduler, SchedulerConfig};
use pagetide_metrics::{self as metrics, Rejection};
use pagetide_model::files::ModelFiles;
use pagetide_model::kv_identity::kv_identity;
use pagetide_model::loader::{self, LoadedModel};
use pagetide_model::spec::ModelSpec;
use pagetide_recorder::Recorder;
use pagetide_text::grammar::sandbox::GrammarLimits;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{oneshot, watch};

/// A cheap clone that submits requests to the engine from any thread, for one [`Caller`].
#[derive(Clone)]
pub struct RuntimeHandle {
    intake: Recipient<Submit>,
    scheduler: Recipient<Look>,
    model: Arc<ModelInfo>,
    text: Workers,
    phase: LivePhase,
    caller: Caller,
    observer: Option<Arc<dyn RequestObserver>>,
    requests: RequestsUnderWay,
    slots: Option<Arc<SlotKeeper>>,
}

impl RuntimeHandle {
    /// `text`: the threads that the intake uses too.
    pub fn new(
        intake: Recipient<Submit>,
        scheduler: Recipient<Look>,
        model: Arc<ModelInfo>,
        text: Workers,
        phase: LivePhase,
    ) -> Self {
        let (caller, requests) = (Caller::default(), RequestsUnderWay::default());
        Self { intake, scheduler, model, text, phase, caller, observer: None, requests, slots: None }
    }

    /// The text threads, for work on a request that would delay others.
    pub fn text(&self) -> &Workers {
        &self.text
    }

    /// A handle to the same engine, for requests of `caller`.
    pub fn on_behalf_of(&self, caller: Caller) -> Self {
        Self { caller, ..self.clone() }
    }

    /// A handle to the same engine, for requests that `observer` observes.
    pub fn observed_by(self, observer: Arc<dyn RequestObserver>) -> Self {
        Self { observer: Some(observer), ..self }
    }

    /// The most requests of its caller that the engine holds at once (`server.max_requests`, and a key's part of it).
    /// One more is refused until another ends.
    pub fn max_requests(&self) -> usize {
        let server = self.model.server.get();
        if self.caller.tenant == Tenant::default() { server.max_requests } else { server.max_requests_of_key() }
    }

    pub fn model(&self) -> &Arc<ModelInfo> {
        &self.model
    }

    /// The tenant that its requests belong to.
    pub fn tenant(&self) -> Tenant {
        self.caller.tenant
    }

    /// Validates, tokenises and queues a request. Dropping the future cancels it and releases its place.
    pub async fn submit(&self, mut request: PromptRequest) -> Result<Accepted, ApiError> {
        if self.is_draining() {
            metrics::request_rejected(Rejection::Draining, self.caller.tenant);
            return Err(ApiError::draining());
        }
        request.core.tenant = self.caller.tenant;
        request.core.cache_salt = self.caller.cache_salt(request.core.cache_salt);
        let (_waiting, abandoned) = oneshot::channel();
        match self.intake.send(Submit { request, observer: self.observer.clone(), abandoned }).await {
            Ok(answer) => answer,
            Err(_) => Err(ApiError::engine("the engine has stopped")),
        }
    }

    /// The requests under way, of all handles to the same engine.
    pub fn requests(&self) -> &RequestsUnderWay {
        &self.requests
    }

    /// The slots, of all handles to the same engine; `None` where none are kept (`server.slot_folder`).
    pub fn slots(&self) -> Option<&Arc<SlotKeeper>> {
        self.slots.as_ref()
    }

    /// The number of the slot that a request gets, which is its choice from now on. `None`: it gets none.
    ///
    /// # Errors
    /// There is no slot of the number that it gives.
    pub fn choose_slot(&self, request: &mut ApiRequest) -> Result<Option<u32>, ApiError> {
        let (Some(slots), Some(choice)) = (&self.slots, request.slot) else { return Ok(None) };
        let slot = match choice {
            SlotChoice::Number(slot) => Some(slots.check("id_slot", slot)?),
            SlotChoice::Any => slots.first_idle(&self.caller),
        };
        request.slot = slot.map(|slot| SlotChoice::Number(slot.into()));
        Ok(slot)
    }

    /// The client that its requests are for.
    pub fn caller(&self) -> &Caller {
        &self.caller
    }

    /// The observer of its requests.
    pub fn observer(&self) -> Option<&Arc<dyn RequestObserver>> {
        self.observer.as_ref()
    }

    /// The phase of the server's shutdown.
    pub fn phase(&self) -> &LivePhase {
        &self.phase
    }

    /// A snapshot of the engine, with all requests that hold blocks and the first `most_waiting` of those that wait
    /// without.
    pub async fn look(&self, most_waiting: usize) -> Result<Snapshot, ApiError> {
        let stopped = |_| ApiError::engine("the engine has stopped");
        self.scheduler.send(Look { most_waiting }).await.map_err(stopped)?
    }

    /// Whether new requests are refused.
    pub fn is_draining(&self) -> bool {
        self.phase.get() >= Phase::Draining
    }
}

/// The engine with its threads: one for the actors, one for the executor (and its team), and a few for text.
pub struct Runtime {
    handle: RuntimeHandle,
    loaded: Arc<LoadedModel>,
    /// No place is taken when no request is left.
    places: Places,
    tune: Recipient<Tune>,
    swap_pool: Recipient<AskSwapPool>,
    recording: Recipient<TakeRecording>,
    fail: Recipient<FailNextStep>,
    flush: Recipient<FlushCaches>,
    pause: Recipient<SetPaused>,
    recorder: RecorderConfig,
    system: System,
    /// Closed when the engine's thread ends.
    alive: watch::Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

/// The slow phases of a start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LoadPhase {
    /// From the hub.
    Download,
    /// Onto the device.
    Load,
}

/// Receives the bytes done and the bytes in all. Downloads, if any, come first; there may be several.
pub type LoadProgress = Box<dyn FnMut(LoadPhase, u64, u64) + Send>;

/// A progress that several threads may report to.
pub(super) fn shared(progress: LoadProgress) -> impl Fn(LoadPhase, u64, u64) + Clone + Send + Sync {
    let progress = Arc::new(Mutex::new(progress));
    move |phase, done, total| {
        // A report that panicked leaves nothing inconsistent.
        let mut progress = progress.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        (*progress)(phase, done, total);
    }
}

impl Runtime {
    /// Loads the model of `config` and starts the actors.
    pub fn start(config: &Config, progress: LoadProgress) -> Result<Self, StartError> {
        Self::launch(config, None, progress)
    }

    /// [`Runtime::start`] that adds every step's work to `profile`. Fails on a GPU.
    pub fn start_profiled(config: &Config, profile: Profile, progress: LoadProgress) -> Result<Self, StartError> {
        Self::launch(config, Some(profile), progress)
    }

    fn launch(config: &Config, profile: Option<Profile>, progress: LoadProgress) -> Result<Self, StartError> {
        let report = shared(progress);
        let report_load = report.clone();
        let downloaded = move |done, total| report(LoadPhase::Download, done, total);
        let files = ModelFiles::find(&config.model.source(), Arc::new(downloaded))?;
        let spec = ModelSpec::load(&files)?;
        let (vocab_size, embed_size, eos_token_ids) = (spec.vocab_size, spec.embed_size, spec.eos_token_ids.clone());
        let mut aliases = config.server.served_model_name.clone().unwrap_or_else(|| vec![files.name()]);
        let served_name = aliases.remove(0);

        // A large tokenizer takes as long to read as some gigabytes of weights, so both are read at once.
        let (options, model_files, stopped) = (config.load_options(), files.clone(), Arc::new(AtomicBool::new(false)));
        let is_stopped = stopped.clone();
        let load = move || {
            let mut report = |done, total| {
                if is_stopped.load(Ordering::Relaxed) {
                    return Err(StartError::new("the start was given up"));
                }
                report_load(LoadPhase::Load, done, total);
                Ok(())
            };
            loader::load(&options, &model_files, spec, profile, &mut report)
        };
        let loading = ModelExecutor::start_loading(load)?;
        let text = match Text::load(config, &files, vocab_size) {
            Ok(text) => text,
            Err(error) => {
                stopped.store(true, Ordering::Relaxed);
                // Waits so that no thread still works when the error is returned. This error is the one that is
                // reported.
                drop(loading.finish());
                return Err(error);
            }
        };
        let Text { tokenizer, chat_template, chat_format, default_sampling, pooling } = text;
        let (executor, loaded) = loading.finish()?;
        let model = Arc::new(ModelInfo {
            served_name,
            aliases,
            created_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            max_model_len: loaded.max_model_len as u32,
            vocab_size: vocab_size as u32,
            tokenizer: Arc::new(tokenizer),
            chat_template,
            chat_format,
            eos_token_ids,
            embedding_size: embed_size as u32,
            pooling,
            default_sampling,
            kv_block_bytes: loaded.pools.layout.block_bytes(),
            max_prompt_bytes: config.intake.max_prompt_bytes(loaded.max_model_len),
            server: LiveServer::new(config.server.clone()),
        });
        let slots = slot_settings(config, &files, &loaded)?;
        let places = Places::default();
        let job_timeout = Duration::from_secs(config.intake.job_timeout_s);
        let workers = Workers::start(config.intake.tokenizer_threads, job_timeout)?;
        let wiring = Wiring {
            scheduler: scheduler_config(config, &loaded)?,
            limits: limits(config, &loaded),
            grammars: grammar_limits(config),
            workers: workers.clone(),
            eviction: eviction_policy(config),
            block_bytes: loaded.pools.layout.block_bytes(),
            on_failure: config.device.on_failure,
            step_timeout: Some(Duration::from_secs(config.device.step_timeout_s)).filter(|timeout| !timeout.is_zero()),
            model: model.clone(),
            places: places.clone(),
            recorder: config.recorder.clone(),
            executor,
        };
        let Started { system, intake, look, tune, swap_pool, recording, fail, flush, pause, scheduler, alive, thread } =
            wiring.start()?;
        let mut handle = RuntimeHandle::new(intake, look, model, workers, LivePhase::default());
        handle.slots = slots.map(|settings| Arc::new(SlotKeeper::new(settings, scheduler)));
        let (loaded, thread) = (Arc::new(loaded), Some(thread));
        let recorder = config.recorder.clone();
        Ok(Self {
            handle,
            loaded,
            places,
            tune,
            swap_pool,
            recording,
            fail,
            flush,
            pause,
            recorder,
            system,
            alive,
            thread,
        })
    }

    pub fn handle(&self) -> RuntimeHandle {
        self.handle.clone()
    }

    pub fn loaded(&self) -> &LoadedModel {
        &self.loaded
    }

    /// The handle that changes settings while the engine runs. `now` is what the engine was started with.
    pub fn live_settings(&self, now: Resolved) -> LiveSettings {
        let engine = SettingsUsers {
            tune: self.tune.clone(),
            swap_pool: self.swap_pool.clone(),
            fail: self.fail.clone(),
            flush: self.flush.clone(),
            pause: self.pause.clone(),
            server: self.handle.model.server.clone(),
            loaded: self.loaded.clone(),
            recordings: Recordings::new(self.recording.clone(), self.recorder.clone()),
        };
        LiveSettings::new(now, engine)
    }

    /// Completes when the engine has stopped by itself. The log has the reason: a device that hangs, a device failure
    /// that ends the process, or a bug that left no state to trust.
    pub async fn ended(&self) {
        // Nothing is ever sent: an error is the only answer.
        let _ = self.alive.clone().changed().await;
    }

    /// Refuses new requests and waits until the others have ended. False if `timeout` came first.
    pub async fn drain(&self, timeout: Duration) -> bool {
        self.handle.phase.advance(Phase::Draining);
        let deadline = Instant::now() + timeout;
        while self.places.num_taken() > 0 {
            if Instant::now() >= deadline {
                return false;
            }
            actix_rt::time::sleep(Duration::from_millis(10)).await;
        }
        true
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        self.system.stop();
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported where it happened.
            let _ = thread.join();
        }
    }
}

/// Everything the actors are made of.
pub(super) struct Wiring {
    pub(super) scheduler: SchedulerConfig,
    pub(super) limits: IntakeLimits,
    /// IntakeLimits of compiling a request's grammar.
    pub(super) grammars: GrammarLimits,
    pub(super) workers: Workers,
    /// The eviction policy of both pools.
    pub(super) eviction: EvictionPolicy,
    pub(super) block_bytes: usize,
    pub(super) on_failure: OnFailure,
    /// A step that takes longer than this has hung.
    pub(super) step_timeout: Option<Duration>,
    pub(super) model: Arc<ModelInfo>,
    pub(super) places: Places,
    pub(super) recorder: RecorderConfig,
    pub(super) executor: ModelExecutor,
}

/// The actors at work.
pub(super) struct Started {
    pub(super) system: System,
    pub(super) intake: Recipient<Submit>,
    pub(super) look: Recipient<Look>,
    pub(super) tune: Recipient<Tune>,
    pub(super) swap_pool: Recipient<AskSwapPool>,
    pub(super) recording: Recipient<TakeRecording>,
    pub(super) fail: Recipient<FailNextStep>,
    pub(super) flush: Recipient<FlushCaches>,
    pub(super) pause: Recipient<SetPaused>,
    pub(super) scheduler: Addr<SchedulerActor>,
    pub(super) alive: watch::Receiver<()>,
    pub(super) thread: JoinHandle<()>,
}

impl Wiring {
    /// Starts the actors, the last of the data path first. The scheduler and the pools share a thread, where a message
    /// costs less than a microsecond. The intake has another.
    pub(super) fn start(self) -> Result<Started, StartError> {
        let (alive, watch_alive) = watch::channel(());
        let (send, receive) = std::sync::mpsc::channel();
        let run = move || {
            let _alive = alive;
            let system = System::new();
            let SchedulerConfig { num_device_blocks, num_swap_blocks, block_size, prefix_caching, .. } = self.scheduler;
            let (intake, look, swap_pool, recording, fail, flush, pause, scheduler) = system.block_on(async move {
                let restart = self.executor.restart();
                let executor = self.executor.start();
                let fail = executor.clone().recipient();
                let discards = executor.clone().recipient();
                let swap_pool = SwapPool::new(num_swap_blocks, prefix_caching, self.eviction, discards).start();
                let allocator =
                    BlockAllocator::new(num_device_blocks, block_size, prefix_caching, self.eviction).start();
                let limits = recordings::limits(&self.recorder);
                let recorder = limits.map(|limits| Recorder::new(limits, &self.scheduler, self.eviction));
                let policy = Scheduler::new(self.scheduler);
                let settings = scheduler::SchedulerActorSettings {
                    block_size,
                    block_bytes: self.block_bytes,
                    on_failure: self.on_failure,
                    step_timeout: self.step_timeout,
                    restart,
                    recorder: self.recorder,
                };
                let workers = self.workers.clone();
                let scheduler =
                    SchedulerActor::new(policy, allocator, swap_pool.clone(), executor, workers, recorder, settings);
                let scheduler = scheduler.start();
                let (look, recording) = (scheduler.clone().recipient(), scheduler.clone().recipient());
                let (flush, pause) = (scheduler.clone().recipient(), scheduler.clone().recipient());
                let Self { model, limits, grammars, places, workers, .. } = self;
                let of_intake = scheduler.clone();
                let make_intake =
                    move |_: &mut _| RequestIntake::new(model, limits, places, workers, grammars, of_intake);
                let intake = RequestIntake::start_in_arbiter(&Arbiter::new().handle(), make_intake);
                (intake, look, swap_pool, recording, fail, flush, pause, scheduler)
            });
            let (tune, submit) = (intake.clone().recipient(), intake.recipient());
            let swap_pool = swap_pool.recipient();
            let started = (System::current(), submit, look, tune, swap_pool, recording, fail, flush, pause, scheduler);
            if send.send(started).is_err() {
                return; // the caller has gone
            }
            if let Err(error) = system.run() {
                tracing::error!("the engine stopped: {error}");
            }
        };
        let thread = std::thread::Builder::new().name("pagetide-engine".into()).spawn(run)?;
        let (system, intake, look, tune, swap_pool, recording, fail, flush, pause, scheduler) =
            receive.recv().map_err(|_| StartError::new("the engine's thread died at its start"))?;
        let alive = watch_alive;
        Ok(Started { system, intake, look, tune, swap_pool, recording, fail, flush, pause, scheduler, alive, thread })
    }
}

/// `None` where no slots are kept. Otherwise their folder is there.
fn slot_settings(
    config: &Config,
    files: &ModelFiles,
    loaded: &LoadedModel,
) -> Result<Option<SlotSettings>, StartError> {
    let folder = &config.server.slot_folder;
    if folder.is_empty() {
        return Ok(None);
    }
    slots::open_folder(Path::new(folder))
        .map_err(|error| StartError::new(format!("cannot use {folder} (server.slot_folder): {error}")))?;
    let layout = loaded.pools.layout;
    Ok(Some(SlotSettings {
        folder: folder.into(),
        format: KvFormat {
            identity: kv_identity(files, config.model.load_format, config.model.quantization, loaded)?,
            block_size: layout.block_size,
            block_bytes: layout.block_bytes(),
        },
        num_slots: config.scheduler.max_num_seqs as usize,
        max_tokens: loaded.max_model_len,
        num_blocks: loaded.pools.num_device_blocks,
        has_cache: config.cache.enable_prefix_caching,
    }))
}

fn grammar_limits(config: &Config) -> GrammarLimits {
    let cpu = Duration::from_secs_f64(config.intake.grammar_cpu_s);
    let config::IntakeConfig { grammar_memory_mib, grammar_work_per_token, .. } = config.intake;
    GrammarLimits { cpu, memory_bytes: grammar_memory_mib << 20, work_per_token: grammar_work_per_token }
}

fn limits(config: &Config, loaded: &LoadedModel) -> IntakeLimits {
    IntakeLimits {
        block_size: loaded.pools.layout.block_size,
        num_device_blocks: loaded.pools.num_device_blocks,
        non_preemptible_blocks: config.scheduler.non_preemptible_blocks(loaded.pools.num_device_blocks),
        max_num_seqs: config.scheduler.max_num_seqs as usize,
    }
}
