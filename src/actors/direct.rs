//! A model without the actors, for measuring what it computes: the caller plans its steps.

use crate::runtime::{LoadPhase, LoadProgress, shared};
use crate::text_files::Text;
use pagetide_base::error::StartError;
use pagetide_config::Config;
use pagetide_model::files::ModelFiles;
use pagetide_model::loader::{self, LoadedModel};
use pagetide_model::spec::ModelSpec;
use pagetide_model::step_runner::StepRunner;
use pagetide_text::tokenizer::Tokenizer;
use std::sync::Arc;

/// A model whose weights have not been read yet.
pub struct OpenedModel {
    files: ModelFiles,
    spec: ModelSpec,
    pub tokenizer: Tokenizer,
}

impl OpenedModel {
    /// Reads the model of `config` except its weights, which are downloaded too.
    pub fn open(config: &Config, progress: LoadProgress) -> Result<Self, StartError> {
        let report = shared(progress);
        let downloaded = move |done, total| report(LoadPhase::Download, done, total);
        let files = ModelFiles::find(&config.model.source(), Arc::new(downloaded))?;
        let spec = ModelSpec::load(&files)?;
        let tokenizer = Text::load(config, &files, spec.vocab_size)?.tokenizer;
        Ok(Self { files, spec, tokenizer })
    }

    /// The width of the model's logits.
    pub fn vocab_size(&self) -> usize {
        self.spec.vocab_size
    }

    /// Loads the weights onto the configured device, and allocates the KV pools.
    pub fn load(
        self,
        config: &Config,
        mut progress: LoadProgress,
    ) -> Result<(Box<dyn StepRunner>, LoadedModel), StartError> {
        let mut report = |done, total| {
            progress(LoadPhase::Load, done, total);
            Ok(())
        };
        loader::load(&config.load_options(), &self.files, self.spec, None, &mut report)
    }
}
