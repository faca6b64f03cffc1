//! Checks a model's files as a start does, without taking memory for the model.

use crate::text_files::Text;
use pagetide_base::error::StartError;
use pagetide_config::Config;
use pagetide_model::files::ModelFiles;
use pagetide_model::loader::{self, LoadOutlook, LoadTarget};
use pagetide_model::spec::ModelSpec;

/// Reads the configured model's files as a start does, and fails if a start would. Files that are on the hub and not in
/// its cache are skipped, because a start would download them first.
pub fn check_model(config: &Config, target: LoadTarget) -> Result<LoadOutlook, StartError> {
    let Some(files) = ModelFiles::find_here(&config.model.source())? else { return Ok(LoadOutlook::default()) };
    let spec = ModelSpec::load(&files)?;
    Text::load(config, &files, spec.vocab_size)?;
    loader::check(&config.load_options(), &files, &spec, target)
}
