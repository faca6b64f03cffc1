//! Changes settings while the engine runs: those that [`pagetide_config::live`] lists, within the memory that was taken
//! at the start.

use crate::engine_config::configured_scheduler;
use crate::messages::{AskSwapPool, FailNextStep, FlushCaches, SetPaused, Tune};
use crate::recordings::Recordings;
use actix::Recipient;
use pagetide_api::live_server::LiveServer;
use pagetide_base::error::ApiError;
use pagetide_config::layers::{Origin, Problems, Resolved};
use pagetide_config::live::needs_restart;
use pagetide_config::settings::{SETTINGS, Setting};
use pagetide_config::value::Value;
use pagetide_config::{Config, ConsoleConfig};
use pagetide_engine::block_pool::PoolStats;
use pagetide_engine::scheduler::Tuning;
use pagetide_metrics as metrics;
use pagetide_model::loader::LoadedModel;
use pagetide_model::runner::PoolSizes;
use std::sync::{Arc, MutexGuard, PoisonError};
use tokio::sync::Mutex;

/// A handle; cloning is cheap. Changes are made one after the other, even from several clones.
#[derive(Clone)]
pub struct LiveSettings(Arc<LiveSettingsState>);

struct LiveSettingsState {
    now: Mutex<Resolved>,
    engine: SettingsUsers,
    listeners: std::sync::Mutex<Vec<Listener>>,
}

type Listener = Box<dyn Fn(&Config) + Send + Sync>;

/// The parts of the engine that use the settings.
pub struct SettingsUsers {
    pub tune: Recipient<Tune>,
    pub swap_pool: Recipient<AskSwapPool>,
    pub fail: Recipient<FailNextStep>,
    pub flush: Recipient<FlushCaches>,
    pub pause: Recipient<SetPaused>,
    pub server: LiveServer,
    /// Knows how much memory there is.
    pub loaded: Arc<LoadedModel>,
    pub recordings: Recordings,
}

/// A setting with a new value. Secrets are left out.
#[derive(Clone, Debug, PartialEq)]
pub struct SettingChange {
    pub setting: &'static str,
    pub from: Value,
    pub to: Value,
}

/// The result of reading the configuration again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reloaded {
    pub changed: Vec<SettingChange>,
    /// Settings that differ in the file and were not changed, each with the reason.
    pub refused: Vec<(&'static str, String)>,
}

impl LiveSettings {
    /// `now` is what `engine` was started with.
    pub fn new(now: Resolved, engine: SettingsUsers) -> Self {
        Self(Arc::new(LiveSettingsState { now: Mutex::new(now), engine, listeners: Default::default() }))
    }

    /// The recordings of the same engine.
    pub fn recordings(&self) -> &Recordings {
        &self.0.engine.recordings
    }

    /// The model in memory.
    pub fn loaded(&self) -> &LoadedModel {
        &self.0.engine.loaded
    }

    /// Calls `listener` with the configuration after each change.
    pub fn on_change(&self, listener: impl Fn(&Config) + Send + Sync + 'static) {
        self.listeners().push(Box::new(listener));
    }

    fn listeners(&self) -> MutexGuard<'_, Vec<Listener>> {
        self.0.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The configuration as it is now.
    pub async fn now(&self) -> Resolved {
        self.0.now.lock().await.clone()
    }

    /// The console's settings as they are now.
    pub async fn console(&self) -> ConsoleConfig {
        self.0.now.lock().await.config.console
    }

    /// The swap pool as it is now.
    pub async fn swap_pool(&self) -> Result<PoolStats, ApiError> {
        self.0.engine.swap_pool.send(AskSwapPool).await.map_err(|_| stopped())
    }

    /// Makes the executor's next step fail, as if the device had failed.
    pub async fn fail_next_step(&self) -> Result<(), ApiError> {
        self.0.engine.fail.send(FailNextStep).await.map_err(|_| stopped())
    }

    /// Drops the prefix caches of both pools. False where requests run or wait: then they are not empty.
    pub async fn flush_caches(&self) -> Result<bool, ApiError> {
        self.0.engine.flush.send(FlushCaches).await.map_err(|_| stopped())?
    }

    /// Pauses the engine, or lets it go on: see [`SetPaused`].
    pub async fn set_paused(&self, is_paused: bool) -> Result<(), ApiError> {
        self.0.engine.pause.send(SetPaused(is_paused)).await.map_err(|_| stopped())
    }

    /// Changes all of these settings, or none if one may not change, needs too much memory, or contradicts another.
    /// Returns the settings that changed, and the state of the swap pool after that.
    pub async fn change(
        &self,
        changes: Vec<(&'static Setting, Value)>,
    ) -> Result<(Vec<SettingChange>, PoolStats), ApiError> {
        let live_settings = self.clone();
        // The caller may go away in the middle. A change that has begun is completed.
        let changing = actix_rt::spawn(async move { live_settings.change_to_end(changes).await });
        let done = changing.await.unwrap_or_else(|_| Err(stopped()));
        metrics::config_changed(done.is_ok());
        done
    }

    async fn change_to_end(
        &self,
        changes: Vec<(&'static Setting, Value)>,
    ) -> Result<(Vec<SettingChange>, PoolStats), ApiError> {
        let mut now = self.0.now.lock().await;
        for (setting, _) in &changes {
            if let Some(why) = needs_restart(setting) {
                return Err(ApiError::needs_restart(setting.key, format!("it changes with a restart only: {why}")));
            }
        }
        let changes = changes.into_iter().map(|(setting, value)| (setting, value, Origin::Admin)).collect();
        let next = now.with(changes).map_err(|Problems(problems)| {
            ApiError::invalid_settings(problems.into_iter().map(|problem| (problem.key, problem.message)).collect())
        })?;
        if let Some((key, why)) = self.too_large(&next.config).into_iter().next() {
            return Err(ApiError::needs_restart(key, why));
        }
        self.apply(&mut now, next).await
    }

    /// Applies the settings that differ in `read` and may change. The others keep their values. Nothing changes if the
    /// result would be inconsistent.
    pub async fn reload(&self, read: &Resolved) -> Result<Reloaded, String> {
        let done = self.try_reload(read).await;
        metrics::config_changed(done.is_ok());
        done
    }

    async fn try_reload(&self, read: &Resolved) -> Result<Reloaded, String> {
        let mut now = self.0.now.lock().await;
        let too_large = self.too_large(&read.config);
        let (mut changes, mut refused) = (Vec::new(), Vec::new());
        for setting in SETTINGS {
            let value = (setting.load)(&read.config);
            let is_other = value != (setting.load)(&now.config);
            let size = too_large.iter().find(|(key, _)| *key == setting.key).map(|(_, why)| why.clone());
            match size.or(needs_restart(setting).map(str::to_owned)).filter(|_| is_other) {
                Some(why) => refused.push((setting.key, why)),
                None => changes.push((setting, value, read.origin(setting.key).clone())),
            }
        }
        let next = now.with(changes).map_err(|problems| problems.to_string())?;
        let (changed, _) = self.apply(&mut now, next).await.map_err(|error| error.to_string())?;
        Ok(Reloaded { changed, refused })
    }

    /// Settings that need more memory than was taken at the start, each with how much there is.
    fn too_large(&self, config: &Config) -> Vec<(&'static str, String)> {
        let LoadedModel { is_gpu, max_num_batched_tokens, max_num_seqs, pools, .. } = *self.0.engine.loaded;
        let buffers = |wanted: usize, most: usize, what: &str| {
            let message = format!(
                "{wanted} {what} are more than the {most} of a step that buffers were made for at the start: \
                 more need a restart"
            );
            (wanted > most).then_some(message)
        };
        let seqs = buffers(config.scheduler.max_num_seqs as usize, max_num_seqs, "sequences");
        let tokens = buffers(config.scheduler.batched_tokens(is_gpu) as usize, max_num_batched_tokens, "tokens");
        let block_bytes = pools.layout.block_bytes();
        let swap = config.swap.space_gib.filter(|_| swap_blocks(config, &pools) > pools.max_swap_blocks).map(|space_gib| {
            let most = (pools.max_swap_blocks * block_bytes) as f64 / f64::from(1 << 30);
            format!(
                "{space_gib} GiB is more than the {most:.2} GiB that were set aside at the start (swap.max_space_gib): more \
                 needs a restart"
            )
        });
        let all =
            [("scheduler.max_num_seqs", seqs), ("scheduler.max_num_batched_tokens", tokens), ("swap.space_gib", swap)];
        all.into_iter().filter_map(|(key, why)| Some((key, why?))).collect()
    }

    async fn apply(&self, now: &mut Resolved, next: Resolved) -> Result<(Vec<SettingChange>, PoolStats), ApiError> {
        let SettingsUsers { tune, server, loaded, .. } = &self.0.engine;
        let num_swap_blocks = swap_blocks(&next.config, &loaded.pools);
        let num_device_blocks = loaded.pools.num_device_blocks;
        let scheduler = configured_scheduler(&next.config, num_device_blocks, num_swap_blocks, loaded.is_gpu);
        let stats = tune.send(Tune(Tuning::from(&scheduler))).await.map_err(|_| stopped())??;
        server.set(next.config.server.clone());
        self.listeners().iter().for_each(|listener| listener(&next.config));
        let changed: Vec<SettingChange> = SETTINGS.iter().filter_map(|setting| change(setting, now, &next)).collect();
        for SettingChange { setting, from, to } in &changed {
            tracing::info!("{setting} was {from} and is {to} now ({})", next.origin(setting));
        }
        *now = next;
        Ok((changed, stats))
    }
}

fn change(setting: &Setting, before: &Resolved, after: &Resolved) -> Option<SettingChange> {
    let is_other = (setting.load)(&before.config) != (setting.load)(&after.config);
    is_other.then(|| SettingChange { setting: setting.key, from: before.shown(setting), to: after.shown(setting) })
}

fn stopped() -> ApiError {
    ApiError::engine("the engine has stopped")
}

/// Blocks of the swap pool by this configuration. With auto they are those of the start.
fn swap_blocks(config: &Config, pools: &PoolSizes) -> usize {
    let blocks = |bytes: usize| bytes / pools.layout.block_bytes();
    config.swap.space_bytes().map_or(pools.num_swap_blocks, blocks)
}
