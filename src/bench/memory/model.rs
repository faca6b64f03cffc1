//! A model on its device without the engine around it. The caller makes the plans.

use pagetide_actors::runtime::LoadPhase;
use pagetide_base::error::StartError;
use pagetide_config::Config;
use pagetide_engine::plan::{StepOutput, StepPlan};
use pagetide_model::files::ModelFiles;
use pagetide_model::loader::{self, LoadedModel};
use pagetide_model::spec::ModelSpec;
use pagetide_model::step_runner::StepRunner;
use pagetide_terminal::progress;
use std::sync::{Arc, Mutex, PoisonError};

pub struct BenchModel {
    pub name: String,
    pub vocab_size: u32,
    pub loaded: LoadedModel,
    pub runner: Box<dyn StepRunner>,
}

/// What a benchmark has to know of a model before it is loaded.
#[derive(Clone, Debug)]
pub struct ModelFacts {
    pub name: String,
    pub vocab_size: u32,
    /// As configured, or the model's own.
    pub max_model_len: usize,
}

impl ModelFacts {
    pub fn read(config: &Config) -> Result<Self, StartError> {
        let (files, spec) = find(config)?;
        let own = spec.default_max_model_len();
        let max_model_len = config.model.max_model_len.map_or(own, |len| len as usize);
        Ok(Self { name: files.name(), vocab_size: spec.vocab_size as u32, max_model_len })
    }
}

/// For people.
pub fn subject(name: &str, loaded: &LoadedModel) -> String {
    let cache_dtype = loaded.pools.layout.dtype.name();
    format!("{name} on {}, {}, KV cache {cache_dtype}", loaded.device, loaded.dtype.name())
}

fn find(config: &Config) -> Result<(ModelFiles, ModelSpec), StartError> {
    let report = Mutex::new(progress::loading());
    let downloaded = move |done, total| {
        // Nothing is left in between by a report that panicked.
        (*report.lock().unwrap_or_else(PoisonError::into_inner))(LoadPhase::Download, done, total);
    };
    let files = ModelFiles::find(&config.model.source(), Arc::new(downloaded))?;
    let spec = ModelSpec::load(&files)?;
    Ok((files, spec))
}

impl BenchModel {
    pub fn load(config: &Config) -> Result<Self, StartError> {
        let (files, spec) = find(config)?;
        let vocab_size = spec.vocab_size as u32;
        let mut report = progress::loading();
        let mut loading = |done, total| {
            report(LoadPhase::Load, done, total);
            Ok(())
        };
        let (runner, loaded) = loader::load(&config.load_options(), &files, spec, None, &mut loading)?;
        Ok(Self { name: files.name(), vocab_size, loaded, runner })
    }

    /// One step, from its start to its end.
    pub fn execute(&mut self, plan: &StepPlan) -> StepOutput {
        self.runner.submit(plan);
        self.runner.finish()
    }

    /// Waits until all copies between the tiers have ended.
    pub fn await_copies(&mut self) {
        while self.runner.is_copying() {
            self.runner.take_copies();
            std::thread::yield_now();
        }
    }
}
